"""Mathematical answers, graded in a worker process with a limit that nothing can outlast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.rewards.conversation import answer_text, prompt_text
from posttrain.rewards.worker import (
    WorkerError,
    WorkerPool,
    WorkerRaised,
    WorkerStartError,
    WorkerTimeout,
)
from posttrain.types import Invalid, InvalidKind, RewardTerm, Scored, Task, Turn, Verdict


class MathReward:
    """1 when the final answer of the last turn equals the hidden `answer_column`, else 0.

    Which part of the text is the final answer: `posttrain.rewards.answers`. What counts as equal,
    and how decimals round: `posttrain.rewards.math_compare`. No single final answer: 0 with
    `parsed` False. The terms are "correct" and, with weight 0, "boxed": whether the answer came in
    exactly one `\\boxed{}`; format and correctness are different things (verl-project/verl#2150).

    **An answer that makes the grader hang, crash or raise.** The policy writes the answer, so it
    must not gain by this; but a broken grader must not cost it either. After such a failure the
    gold is graded against itself in a newly started worker. If that works, the answer was the
    cause: `Scored` 0 with evidence "timeout: ...", "crash: ..." or "error: ...". If not: `Invalid`.
    A gold answer that cannot be read is `Invalid` too.
    """

    def __init__(
        self,
        answer_column: str = "answer",
        *,
        timeout_s: float = 10.0,
        num_workers: int = 1,
        memory_limit_mb: int | None = 4096,
    ) -> None:
        self._answer_column = answer_column
        self._pool = WorkerPool(
            "posttrain.rewards.math_compare:grade",
            num_workers,
            timeout_s=timeout_s,
            memory_limit_mb=memory_limit_mb,
        )

    async def score(self, task: Task, turns: Sequence[Turn]) -> Verdict:
        """Grade the last turn. Never raises for bad output."""
        if not turns:
            return Invalid(InvalidKind.ABORTED, "the episode has no turn to grade")
        fields = task.hidden.reveal()
        gold = fields.get(self._answer_column)
        if gold is None or not str(gold).strip():
            return Invalid(
                InvalidKind.REWARD_ERROR,
                f"task {task.task_id!r}: hidden column {self._answer_column!r} is empty or "
                f"missing; its columns are {', '.join(fields) or 'none'}",
            )
        arguments = {"text": answer_text(turns), "gold": str(gold), "prompt": prompt_text(task)}
        try:
            return _scored(await self._pool.call(None, arguments))
        except WorkerStartError as error:
            return Invalid(InvalidKind.GRADER_CRASH, str(error), retryable=True)
        except WorkerError as error:
            return await self._after_failure(error, task, str(gold))

    async def _after_failure(self, error: WorkerError, task: Task, gold: str) -> Verdict:
        """Find out whether the answer or the grader is to blame; see the class."""
        kind, label = _classify(error)
        try:
            works = await self._pool.call("control", {"gold": gold}, fresh=True)
        except WorkerError as control_error:
            retryable = not isinstance(control_error, WorkerRaised)
            return Invalid(
                kind,
                f"task {task.task_id!r}: {error}; the gold answer alone fails too: {control_error}",
                retryable,
            )
        if not works:
            return Invalid(
                InvalidKind.REWARD_ERROR,
                f"task {task.task_id!r}: {error}; the gold answer does not equal itself",
            )
        return _scored(
            {"correct": False, "parsed": False, "boxed": False, "evidence": f"{label}: {error}"}
        )

    async def close(self) -> None:
        """Kill the workers."""
        await self._pool.close()


def _classify(error: WorkerError) -> tuple[InvalidKind, str]:
    if isinstance(error, WorkerTimeout):
        return InvalidKind.REWARD_TIMEOUT, "timeout"
    if isinstance(error, WorkerRaised):
        return InvalidKind.REWARD_ERROR, "error"
    return InvalidKind.GRADER_CRASH, "crash"


def _scored(grade: Mapping[str, Any]) -> Scored:
    value = float(grade["correct"])
    terms = (RewardTerm("correct", value), RewardTerm("boxed", float(grade["boxed"]), 0.0))
    return Scored(value, terms, grade["evidence"], parsed=grade["parsed"])
