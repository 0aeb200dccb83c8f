"""A group comes back from its bytes exactly."""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.errors import JournalCorruptError, JournalError, SchemaVersionError
from posttrain.journal import decode_group, encode_group
from posttrain.types import (
    MAX_REWARD,
    SCHEMA_VERSION,
    AudioPart,
    Completion,
    Draw,
    FinishReason,
    Group,
    ImagePart,
    Invalid,
    InvalidKind,
    Message,
    Observation,
    RewardTerm,
    Scored,
    StopReason,
    TextPart,
    TokenKind,
    TokenSequence,
    ToolResultPart,
    Trajectory,
    Turn,
)

# Model output may hold anything, lone surrogates and NUL included.
texts = st.text(st.characters(exclude_categories=()), max_size=8)
sizes = st.integers(0, 4)
seeds = st.integers(0, 2**63 - 1)
any_float = st.floats(allow_nan=True, allow_infinity=True)
hashes = st.binary(min_size=32, max_size=32).map(bytes.hex)
leaves = st.one_of(
    st.builds(TextPart, texts),
    st.builds(ImagePart, hashes, texts, sizes, sizes),
    st.builds(AudioPart, hashes, texts, any_float),
)
tool_results = st.builds(
    ToolResultPart, texts, texts, st.lists(leaves, max_size=2).map(tuple), st.booleans()
)
messages = st.builds(
    Message, texts, st.lists(st.one_of(leaves, tool_results), max_size=3).map(tuple)
)
observations = st.builds(Observation, st.lists(messages, max_size=2).map(tuple))
verdicts = st.one_of(
    st.builds(
        Scored,
        st.floats(-MAX_REWARD, MAX_REWARD),
        st.lists(st.builds(RewardTerm, texts, any_float, any_float), max_size=2).map(tuple),
        texts,
        st.booleans(),
        st.booleans(),
    ),
    st.builds(Invalid, st.sampled_from(InvalidKind), texts, st.booleans()),
)


def bits(data: st.DataObject, dtype: type, length: int) -> Any:
    """Any bit pattern: every NaN, both zeros."""
    width = np.dtype(dtype).itemsize * length
    return np.frombuffer(data.draw(st.binary(min_size=width, max_size=width)), dtype).copy()


def draw_turn(data: st.DataObject) -> tuple[Turn, TokenSequence]:
    num_prompt, length = data.draw(sizes), data.draw(sizes)
    prompt, ids = bits(data, np.int32, num_prompt), bits(data, np.int32, length)
    logprobs = bits(data, np.float32, length)
    versions = bits(data, np.int32, length) & 0x7FFFFFFF
    completion = Completion(
        ids, logprobs, versions, data.draw(st.sampled_from(FinishReason)), data.draw(texts)
    )
    sequence = TokenSequence(
        np.concatenate([prompt, ids]),
        np.array([2] * num_prompt + [0] * length, np.int8),
        np.concatenate([bits(data, np.float32, num_prompt), logprobs]),
        np.concatenate([np.full(num_prompt, -1, np.int32), versions]),
    )
    reward = data.draw(st.floats(-MAX_REWARD, MAX_REWARD))
    return Turn(prompt, completion, data.draw(st.none() | observations), reward), sequence


def draw_demonstration(data: st.DataObject) -> TokenSequence:
    """Given tokens: no turn sampled them and no policy version did."""
    length = data.draw(sizes)
    ids, kinds = bits(data, np.int32, length), np.full(length, TokenKind.DEMONSTRATION, np.int8)
    return TokenSequence(ids, kinds, bits(data, np.float32, length), np.full(length, -1, np.int32))


def draw_group(data: st.DataObject) -> Group:
    draw = Draw(
        data.draw(seeds), data.draw(texts), data.draw(sizes), data.draw(seeds), data.draw(texts)
    )
    members = []
    for index in range(data.draw(sizes)):
        pairs = [draw_turn(data) for _ in range(data.draw(st.integers(0, 3)))]
        members.append(
            Trajectory(
                draw.draw_id,
                index,
                data.draw(seeds),
                tuple(turn for turn, _ in pairs),
                (*(sequence for _, sequence in pairs), draw_demonstration(data)),
                data.draw(verdicts),
                data.draw(st.sampled_from(StopReason)),
                data.draw(st.integers(1, 5)),
                data.draw(texts),
                data.draw(texts),
            )
        )
    return Group(draw, tuple(members))


def assert_same(left: Any, right: Any, where: str = "group") -> None:
    """Equal in type, in every field, and floats bit for bit (a NaN of a scalar by being one)."""
    assert type(left) is type(right), where
    if dataclasses.is_dataclass(left):
        for field in dataclasses.fields(left):
            name = field.name
            assert_same(getattr(left, name), getattr(right, name), f"{where}.{name}")
    elif isinstance(left, tuple):
        assert len(left) == len(right), where
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same(a, b, f"{where}[{index}]")
    elif isinstance(left, np.ndarray):
        assert (left.dtype, left.shape, left.tobytes()) == (
            right.dtype,
            right.shape,
            right.tobytes(),
        ), where
    elif isinstance(left, float) and not math.isnan(left):
        assert struct.pack("<d", left) == struct.pack("<d", right), where
    elif isinstance(left, float):
        assert math.isnan(right), where
    else:
        assert left == right, where


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_a_group_comes_back_bit_for_bit(data: st.DataObject) -> None:
    group = draw_group(data)
    assert_same(decode_group(encode_group(group)), group)


def test_a_decoded_group_can_be_written_to(make_group, make_draw) -> None:
    """Tensors made from read-only arrays warn; a group of the journal must not differ in that."""
    group = decode_group(encode_group(make_group(make_draw(0))))
    for trajectory in group:
        for sequence in trajectory.sequences:
            assert sequence.token_ids.flags.writeable
            assert sequence.kinds.flags.writeable


def test_the_same_group_has_the_same_bytes(make_group, make_draw) -> None:
    first, second = (encode_group(make_group(make_draw(5))) for _ in range(2))
    assert first == second


def test_numpy_scalars_are_recorded_as_plain_numbers() -> None:
    draw = Draw(np.int64(4), "t", np.int32(0), np.int64(9))  # type: ignore[arg-type]
    term = RewardTerm("exact", np.float32(0.5))  # type: ignore[arg-type]
    verdict = Scored(np.float64(0.5), (term,))
    group = Group(draw, (Trajectory(4, 0, 1, (), (), verdict, StopReason.FAILED),))
    assert_same(decode_group(encode_group(group)).draw, Draw(4, "t", 0, 9))
    decoded = decode_group(encode_group(group)).trajectories[0].verdict
    assert_same(decoded, Scored(0.5, (RewardTerm("exact", 0.5),)))


def test_a_field_without_a_json_form_is_named(make_draw) -> None:
    verdict = Scored(0.0, (), object())  # type: ignore[arg-type]
    group = Group(make_draw(7), (Trajectory(7, 0, 1, (), (), verdict, StopReason.FAILED),))
    with pytest.raises(JournalError, match="draw 7 cannot be recorded"):
        encode_group(group)


def test_bytes_of_another_schema_say_so(make_group, make_draw) -> None:
    payload = encode_group(make_group(make_draw(0)))
    mark = f'"schema_version":{SCHEMA_VERSION}'.encode()
    newer = payload.replace(mark, mark[:-1] + b"9")
    with pytest.raises(SchemaVersionError, match="schema version 9"):
        decode_group(newer)


@pytest.mark.parametrize("change", ["short", "long", "empty", "no_json"])
def test_bytes_that_are_no_group_are_refused(make_group, make_draw, change) -> None:
    payload = encode_group(make_group(make_draw(0)))
    changed = {
        "short": payload[:-1],
        "long": payload + b"\0",
        "empty": b"",
        "no_json": payload[:4] + b"x" + payload[5:],
    }[change]
    with pytest.raises(JournalCorruptError, match="cannot be decoded"):
        decode_group(changed)
