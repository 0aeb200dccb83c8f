"""Held-out given rows: does the model prefer, score or say what it should?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from posttrain.evaluation.statistics import avg_at_k
from posttrain.protocols import TaskSet
from posttrain.rollout.given import given_group
from posttrain.rollout.recorder import Renderer
from posttrain.types import Draw, Group


@dataclass(frozen=True, slots=True)
class GivenEvaluator:
    """Judges the first `num_tasks` held-out rows without generating.

    `judge` gives draw id -> right or wrong, and what the losses measure on the rows: a pair is
    right when its chosen side has the larger margin or score, a demonstration when every token of
    it has a probability above one half.
    """

    renderer: Renderer
    tasks: TaskSet
    num_tasks: int
    max_tokens: int
    judge: Callable[[Sequence[Group]], tuple[Mapping[int, bool], Mapping[str, float]]]

    @property
    def size(self) -> int:
        """Rows that are evaluated."""
        return min(self.num_tasks, len(self.tasks))

    async def evaluate(
        self, policy_version: int, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> tuple[dict[str, Any], list[Group]]:
        """The report, and no groups: rows are not recorded again for being looked at."""
        groups = []
        for index in range(self.size):
            task = self.tasks[index]
            draw = Draw(index, task.task_id, epoch=0, seed=0)
            groups.append(given_group(self.renderer, task, draw, self.max_tokens))
        right, measured = self.judge(groups)
        progress(self.size, self.size)
        correct = {g.draw.task_id: [float(right[g.draw.draw_id])] for g in groups}
        report = {
            "policy_version": policy_version,
            "num_tasks": len(groups),
            "samples_per_task": 1,
            "num_invalid": 0,
            "invalid_reasons": {},
            "correct": correct,
            "accuracy": asdict(avg_at_k(list(correct.values()))),
            "measured": dict(measured),
        }
        return report, []
