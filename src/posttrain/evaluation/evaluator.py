"""Held-out evaluation: the same tasks and seeds each time, pinned to one policy version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from posttrain.evaluation.statistics import avg_at_k, compare_paired, mean_over_questions, pass_at_k
from posttrain.protocols import TaskSet
from posttrain.randomness import derive_seed, stream
from posttrain.rollout.episode import EpisodeRunner
from posttrain.types import Draw, Group, SamplingParams, Scored, Task, Trajectory


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Runs `samples_per_task` episodes of each of the first `num_tasks` tasks.

    Seeds depend on the run seed and the task alone, so that two evaluations are paired.
    """

    runner: EpisodeRunner
    tasks: TaskSet
    params: SamplingParams
    num_tasks: int
    samples_per_task: int
    run_seed: int
    members: Collection[str] = ()

    @property
    def size(self) -> int:
        """Tasks that are evaluated."""
        return min(self.num_tasks, len(self.tasks))

    def member(self, task: Task) -> str:
        """The member of a mixture that a task comes from; "" without a mixture."""
        name = task.task_id.partition("/")[0]
        return name if name in self.members else ""

    async def evaluate(
        self, policy_version: int, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> tuple[dict[str, Any], list[Group]]:
        """The report and the groups it is about. Raises nothing for a failing episode: invalid
        ones are counted and left out of every mean."""
        done = 0

        async def one(index: int) -> Group:
            nonlocal done
            task = self.tasks[index]
            seed = derive_seed(self.run_seed, "eval", index)
            draw = Draw(index, task.task_id, epoch=0, seed=seed, environment=self.member(task))
            group = await self.runner.group(task, draw, self.samples_per_task, self.params)
            done += 1
            progress(done, self.size)
            return group

        groups = list(await asyncio.gather(*(one(i) for i in range(self.size))))
        return report_of(policy_version, groups, self.params, self.samples_per_task), groups


def report_of(
    policy_version: int, groups: Sequence[Group], params: SamplingParams, samples_per_task: int
) -> dict[str, Any]:
    """JSON-able report. Intervals are 95 % and clustered by task; a rate over nothing is None."""
    trajectories = [t for group in groups for t in group]
    valid = [t for t in trajectories if isinstance(t.verdict, Scored)]
    correct = {g.draw.task_id: [float(_verdict(t).correct) for t in g.valid] for g in groups}
    correct = {task_id: row for task_id, row in correct.items() if row}
    rewards = [[_verdict(t).value for t in g.valid] for g in groups if g.valid]
    report: dict[str, Any] = {
        "policy_version": policy_version,
        "num_tasks": len(groups),
        "samples_per_task": samples_per_task,
        "sampling": asdict(params),
        "num_invalid": len(trajectories) - len(valid),
        "invalid_reasons": _reasons(trajectories),
        "correct": correct,
        "accuracy": None,
    }
    if not valid:
        return report
    report |= {
        "accuracy": _estimate(avg_at_k(list(correct.values()))),
        "reward": _estimate(avg_at_k(rewards)),
        "pass_at_k": _pass_at(list(correct.values()), samples_per_task),
        "response_len_mean": fmean(t.num_sampled_tokens for t in valid),
        "truncated_frac": fmean(t.truncated for t in valid),
        "unparsed_frac": fmean(not _verdict(t).parsed for t in valid),
    }
    if by_environment := _by_environment(groups):
        report["by_environment"] = by_environment
    return report


def compare_reports(
    before: Mapping[str, Any], after: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """Paired test over the tasks that both reports scored. Raises ValueError if there are none."""
    common = before["correct"].keys() & after["correct"].keys()
    result = compare_paired(
        {k: before["correct"][k] for k in common},
        {k: after["correct"][k] for k in common},
        stream(seed, "compare"),
    )
    return asdict(result)


def _by_environment(groups: Sequence[Group]) -> dict[str, Any]:
    """Accuracy of each member of a mixture."""
    correct: dict[str, list[list[float]]] = {}
    for group in groups:
        row = [float(_verdict(t).correct) for t in group.valid]
        if group.draw.environment and row:
            correct.setdefault(group.draw.environment, []).append(row)
    return {name: _estimate(avg_at_k(rows)) for name, rows in correct.items()}


def _verdict(trajectory: Trajectory) -> Scored:
    assert isinstance(trajectory.verdict, Scored)
    return trajectory.verdict


def _reasons(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    kinds = [t.verdict.kind.value for t in trajectories if not isinstance(t.verdict, Scored)]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def _estimate(estimate: Any) -> dict[str, Any]:
    return asdict(estimate)


def _pass_at(correct: Sequence[Sequence[float]], samples: int) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... up to the samples, over tasks that have that many valid ones."""
    ks = sorted({1, samples} | {int(k) for k in 2 ** np.arange(20) if k <= samples})
    values: dict[str, float] = {}
    for k in ks:
        rows = [pass_at_k(len(row), int(sum(row)), k) for row in correct if len(row) >= k]
        if rows:
            values[str(k)] = mean_over_questions(rows).mean
    return values
