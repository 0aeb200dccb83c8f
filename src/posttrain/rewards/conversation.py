"""What a reward may read of an episode, as plain JSON data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from posttrain.types import Message, Task, TextPart, ToolResultPart, Turn


def answer_text(turns: Sequence[Turn]) -> str:
    """The text that is graded: the last turn's completion. Raises IndexError without a turn."""
    return turns[-1].completion.text


def prompt_text(task: Task) -> str:
    """The question as text: all messages but the system's, joined by an empty line.

    Parts that are not text are left out.
    """
    asked = [m for m in task.prompt if m.role != "system"] or list(task.prompt)
    return "\n\n".join("".join(_texts(message)) for message in asked)


def chat_dicts(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Chat messages as `{"role", "content"}`.

    The content is a string when all parts are text, else a list of parts in which media are named
    by content hash.
    """
    return [{"role": m.role, "content": _content(m)} for m in messages]


def conversation(task: Task, turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The prompt, and for each turn the completion and what the environment answered."""
    rows = chat_dicts(task.prompt)
    for turn in turns:
        rows.append({"role": "assistant", "content": turn.completion.text})
        if turn.observation is not None:
            rows.extend(chat_dicts(turn.observation.messages))
    return rows


def _content(message: Message) -> str | list[dict[str, Any]]:
    leaves = list(_leaves(message))
    if all(isinstance(leaf, TextPart) for leaf in leaves):
        return "".join(_texts(message))
    return [
        {"type": "text", "text": leaf.text}
        if isinstance(leaf, TextPart)
        else {"type": leaf.media_type.split("/")[0], "sha256": leaf.sha256}
        for leaf in leaves
    ]


def _leaves(message: Message) -> Iterable[Any]:
    for part in message.parts:
        yield from part.parts if isinstance(part, ToolResultPart) else (part,)


def _texts(message: Message) -> Iterable[str]:
    return (leaf.text for leaf in _leaves(message) if isinstance(leaf, TextPart))
