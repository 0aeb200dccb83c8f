"""Equality with the gold answer, for short answers that need no mathematics."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from posttrain.rewards.conversation import answer_text
from posttrain.types import Invalid, InvalidKind, RewardTerm, Scored, Task, Turn, Verdict


class ExactReward:
    """1 when the last turn's text equals the hidden `answer_column`, else 0.

    Both are normalised in the same way: Unicode NFC, runs of white space become one space, none at
    the ends. Case and punctuation count. The whole text must be the answer; nothing is searched.
    `parsed` is False for an empty text.
    """

    def __init__(self, answer_column: str = "answer") -> None:
        self._answer_column = answer_column

    async def score(self, task: Task, turns: Sequence[Turn]) -> Verdict:
        """Grade the last turn. A task without a usable answer is `Invalid`."""
        if not turns:
            return Invalid(InvalidKind.ABORTED, "the episode has no turn to grade")
        fields = task.hidden.reveal()
        column = fields.get(self._answer_column)
        gold = normalise("" if column is None else str(column))
        if not gold:
            return Invalid(
                InvalidKind.REWARD_ERROR,
                f"task {task.task_id!r}: hidden column {self._answer_column!r} is empty or "
                f"missing; its columns are {', '.join(fields) or 'none'}",
            )
        answer = normalise(answer_text(turns))
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
