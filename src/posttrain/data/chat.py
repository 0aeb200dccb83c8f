"""A prompt column: a string, or a list of chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.data.rows import RowError
from posttrain.data.tasks import user_prompt
from posttrain.types import Message

_ROLES = ("system", "user", "assistant", "tool")


def read_prompt(
    value: Any, system: str | None, examples: Sequence[tuple[str, str]] = ()
) -> tuple[Message, ...]:
    """The messages of a prompt column; `system` goes first unless the messages bring their own.

    Raises RowError for anything that gives the policy nothing to answer, and for messages where
    `examples` are to come before the question: there is no telling where it begins.

    Example:
        >>> [m.role for m in read_prompt([{"role": "user", "content": "hi"}], "Be brief.")]
        ['system', 'user']
    """
    if value is None:
        raise RowError("prompt is null")
    if isinstance(value, str):
        return user_prompt(system, checked_text(value), examples)
    if examples:
        raise RowError("prompt is a list of messages", "env.examples go before text prompts only")
    if not isinstance(value, list | tuple):
        raise RowError("prompt is neither text nor messages", f"it is a {type(value).__name__}")
    if not value:
        raise RowError("prompt has no message")
    messages = tuple(_message(item) for item in value)
    if messages[-1].role not in ("user", "tool"):
        raise RowError("last message is not from the user", f"its role is {messages[-1].role!r}")
    checked_text(messages[-1].plain_text())
    if system is None or any(message.role == "system" for message in messages):
        return messages
    return (Message.text("system", system), *messages)


def _message(item: Any) -> Message:
    if not isinstance(item, Mapping) or "role" not in item or "content" not in item:
        raise RowError("a message needs role and content")
    unknown = [key for key, v in item.items() if key not in ("role", "content") and v is not None]
    if unknown:
        raise RowError("a message holds more than role and content", ", ".join(unknown))
    if item["role"] not in _ROLES:
        raise RowError("a message has an unknown role", repr(item["role"]))
    if not isinstance(item["content"], str):
        kind = type(item["content"]).__name__
        raise RowError("a message's content is not text", f"it is a {kind}")
    _encodable(item["content"])
    return Message.text(item["role"], item["content"])


def checked_text(text: str, what: str = "prompt") -> str:
    """`text`. Raises RowError when it is blank or cannot be encoded."""
    if not text.strip():
        raise RowError(f"{what} is empty", repr(text[:20]))
    return _encodable(text, what)


def _encodable(text: str, what: str = "prompt") -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(f"{what} is not valid Unicode", f"at character {error.start}") from error
    return text
