"""Equality with the gold answer, for short answers that need no mathematics."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from posttrain.rewards.conversation import answer_text
from posttrain.types import Invalid, InvalidKind, RewardTerm, Scored, Task, Turn, Verdict

_INTEGER = re.compile(r"([+\-\u2212]?)([0-9]+)")


class ExactReward:
    """1 when the last turn's text equals the hidden `answer_column`, else 0.

    Both are normalised in the same way: Unicode NFC, runs of white space become one space, none at
    the ends. Case and punctuation count. The whole text must be the answer; nothing is searched.

    With `integer` the whole stripped text must be one integer in ASCII digits, with an optional
    sign and an optional full stop after it, compared by value. "12 or 13", "12.0" and "1,234" are
    no integers: reward 0, `parsed` False. `parsed` is False for an empty text too.
    """

    def __init__(self, answer_column: str = "answer", *, integer: bool = False) -> None:
        self._answer_column = answer_column
        self._integer = integer

    async def score(self, task: Task, turns: Sequence[Turn]) -> Verdict:
        """Grade the last turn. A task without a usable answer is `Invalid`."""
        if not turns:
            return Invalid(InvalidKind.ABORTED, "the episode has no turn to grade")
        fields = task.hidden.reveal()
        column = fields.get(self._answer_column)
        read = read_integer if self._integer else normalise
        gold = read("" if column is None else str(column))
        if not gold:
            fact = "is no integer" if self._integer else "is empty or missing"
            return Invalid(
                InvalidKind.REWARD_ERROR,
                f"task {task.task_id!r}: hidden column {self._answer_column!r} {fact}; "
                f"its columns are {', '.join(fields) or 'none'}",
            )
        answer = read(answer_text(turns))
        value = float(answer == gold)
        shown = repr(answer[:80]) if answer else "no answer"
        verb = "is" if value else "is not"
        return Scored(
            value,
            (RewardTerm("exact", value),),
            f"{shown} {verb} the answer",
            parsed=bool(answer),
        )

    async def close(self) -> None:
        """Nothing is held."""


def normalise(text: str) -> str:
    """Unicode NFC, white space collapsed.

    Example:
        >>> normalise("  a \\n b ")
        'a b'
    """
    return " ".join(unicodedata.normalize("NFC", text).split())


def read_integer(text: str) -> str:
    """The integer that the whole text is, in canonical decimal digits, or an empty string.

    Text, because a policy may write more digits than `int` is willing to convert.

    Example:
        >>> read_integer(" +012. "), read_integer("12 or 13")
        ('12', '')
    """
    match = _INTEGER.fullmatch(text.strip().removesuffix(".").rstrip())
    if match is None:
        return ""
    sign, digits = match[1], match[2].lstrip("0") or "0"
    return f"-{digits}" if sign in ("-", "\u2212") and digits != "0" else digits
