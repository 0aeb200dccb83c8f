import pytest

from posttrain.data.chat import read_prompt
from posttrain.data.rows import RowError

USER = {"role": "user", "content": "2+2?"}


def test_messages_keep_their_roles_and_order() -> None:
    value = [USER, {"role": "assistant", "content": ""}, {"role": "user", "content": "well?"}]
    messages = read_prompt(value, "Be brief.")
    assert [(m.role, m.plain_text()) for m in messages] == [
        ("system", "Be brief."),
        ("user", "2+2?"),
        ("assistant", ""),
        ("user", "well?"),
    ]


def test_a_row_with_its_own_system_message_keeps_it() -> None:
    own = [{"role": "system", "content": "own"}, USER]
    assert [m.plain_text() for m in read_prompt(own, "ours")] == ["own", "2+2?"]


def test_a_tool_message_field_that_is_null_is_absent() -> None:
    """Parquet and datasets fill fields that only some messages have with null."""
    assert len(read_prompt([{**USER, "name": None}], None)) == 1


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "prompt is null"),
        ("", "prompt is empty"),
        (" \n\t", "prompt is empty"),
        ([], "prompt has no message"),
        (7, "prompt is neither text nor messages"),
        ([{"role": "user", "content": "  "}], "prompt is empty"),
        ([{"role": "user"}], "a message needs role and content"),
        (["hi"], "a message needs role and content"),
        ([{"role": "human", "content": "hi"}], "a message has an unknown role"),
        ([{"role": "user", "content": None}], "a message's content is not text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "a message's content is not text"),
        ([{**USER, "tool_calls": [1]}], "a message holds more than role and content"),
        ([USER, {"role": "assistant", "content": "4"}], "last message is not from the user"),
        ("\ud800", "prompt is not valid Unicode"),
    ],
)
def test_a_prompt_that_asks_nothing_is_refused(value, reason: str) -> None:
    """l11"""
    with pytest.raises(RowError) as caught:
        read_prompt(value, None)
    assert caught.value.reason == reason
