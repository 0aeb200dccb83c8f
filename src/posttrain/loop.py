"""THE loop. Everything else is behind a protocol.

    run()   consumes groups; produces policy versions; waits for `rollouts.take`
    redo()  consumes journalled steps; produces the same policy versions without generating

Order is what makes a crash harmless: groups are journalled before they can be taken, the batch
before the optimizer moves, the weights' hash after it. Whatever happens between two of these
lines, `redo` and then `run` go on from the last one that was written.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from posttrain.algo.algorithm import Algorithm
from posttrain.data.samples import build_batch, fingerprint
from posttrain.errors import ReplayMismatchError
from posttrain.evaluation.schedule import EvaluationSchedule
from posttrain.journal import Journal
from posttrain.memory import peak_bytes, resident_bytes
from posttrain.protocols import GroupEvaluator, GroupSource, Learner, Sampler
from posttrain.rollout.health import refuse_sick_batch
from posttrain.telemetry.observer import Observer
from posttrain.telemetry.spans import span
from posttrain.training.checkpoints import CheckpointStore
from posttrain.training.health import refuse_sick_learner
from posttrain.types import StepResult


@dataclass
class Parts:
    """What the loop joins."""

    num_steps: int
    max_invalid_frac: float
    max_skipped_steps: int
    learner: Learner
    sampler: Sampler
    algorithm: Algorithm
    rollouts: GroupSource
    evaluator: GroupEvaluator
    schedule: EvaluationSchedule
    journal: Journal
    checkpoints: CheckpointStore
    observer: Observer


async def run(p: Parts) -> None:
    """Train until `num_steps`. With `max_policy_lag = 0` rollouts and training alternate."""
    with _heap_at_rest():
        await _run(p)


async def _run(p: Parts) -> None:
    evaluated = {e.policy_version for e in p.journal.evaluations()}
    await evaluate_if_due(p, evaluated)
    clock = _Clock()
    while p.learner.policy_version < p.num_steps:
        step = p.learner.policy_version + 1
        with span("rollout", step=step):
            groups = await p.rollouts.take(p.learner.policy_version)
        clock.lap("time/rollout_s")
        with span("batch", step=step):
            batch = build_batch(step, groups, p.algorithm, p.learner.memory)
            refuse_sick_batch(groups, batch, p.journal, p.max_invalid_frac)
            batch_hash = fingerprint(batch)
        with span("journal: begin step", step=step):
            p.journal.begin_step(batch, batch_hash)
        clock.lap("time/other_s")
        with span("learner", step=step, samples=len(batch.samples)):
            result = p.learner.step(batch)
        clock.lap("time/learner_s")
        with span("weights", version=result.policy_version):
            await p.sampler.load_weights(result.policy_version)
        metrics = {**batch.metrics, **result.metrics, **p.sampler.stats(), **clock.take()}
        metrics["memory/resident_bytes"] = float(resident_bytes())
        metrics["memory/peak_bytes"] = float(peak_bytes())
        with span("journal: finish step", step=step):
            p.journal.finish_step(replace(result, metrics=metrics))
        with span("checkpoint", step=step):
            p.checkpoints.after_step(p.learner, p.num_steps)
        p.observer.step(result.step, p.num_steps, metrics)
        refuse_sick_learner(result, p.max_skipped_steps)
        clock.lap("time/other_s")  # belongs to the next step's record: this one is written
        await evaluate_if_due(p, evaluated)
        clock.skip()


@contextmanager
def _heap_at_rest() -> Iterator[None]:
    """What is there when the loop begins, models and libraries, lives as long as the run: half a
    million objects that the collector would look at again and again, a sixth of a second each time,
    in the middle of a step."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def evaluate_if_due(p: Parts, evaluated: set[int]) -> None:
    """Evaluate the current version if the schedule asks for it and `evaluated` lacks it."""
    version = p.learner.policy_version
    if not p.schedule.due(version, evaluated):
        return
    with span("evaluation", version=version):
        report, groups = await p.evaluator.evaluate(
            version, lambda done, total: p.observer.progress("evaluation", done, total)
        )
    with span("journal: evaluation", version=version):
        for group in groups:
            p.journal.record_eval_group(version, group)
        p.journal.record_evaluation(version, report)
    evaluated.add(version)
    p.sampler.stats()  # evaluation is not part of the next step's throughput
    p.observer.evaluation(version, report)


def redo(
    journal: Journal,
    learner: Learner,
    algorithm: Algorithm,
    on_step: Callable[[StepResult], None] = lambda _: None,
    up_to: int | None = None,
) -> int:
    """Train the journalled steps that the learner has not seen, to step `up_to` or to the end.

    Returns how many. A journal that is open for writing gets each result; one that is open for
    reading is compared with.

    Raises ReplayMismatchError when a batch or the weights after it differ from the record.
    """
    count = 0
    done = learner.policy_version
    limit = None if up_to is None else max(0, up_to - done)
    for record in journal.steps(after=done, limit=limit):
        groups = [journal.group(draw_id) for draw_id in record.draw_ids]
        batch = build_batch(record.step, groups, algorithm, learner.memory)
        if fingerprint(batch) != record.fingerprint:
            raise ReplayMismatchError(
                f"step {record.step}: its groups give another batch than the one recorded "
                f"({fingerprint(batch)[:12]} against {record.fingerprint[:12]}); the code or the "
                "algorithm settings changed since"
            )
        result = learner.step(batch)
        if not journal.readonly:
            metrics: Mapping[str, float] = {**batch.metrics, **result.metrics}
            journal.finish_step(replace(result, metrics=metrics))
        elif record.finished and record.weights_hash != result.weights_hash:
            raise ReplayMismatchError(
                f"step {record.step}: weights {result.weights_hash[:12]} differ from the recorded "
                f"{(record.weights_hash or '')[:12]}"
            )
        on_step(result)
        count += 1
    return count


class _Clock:
    """Where the seconds between two records of a step went."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Count the seconds since the last lap under `name`."""
        now = time.perf_counter()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def skip(self) -> None:
        """Count them nowhere."""
        self._last = time.perf_counter()

    def take(self) -> dict[str, float]:
        """The laps and their sum, and begin anew."""
        self.lap("time/other_s")
        laps, self._laps = self._laps, {}
        return {**laps, "time/step_s": sum(laps.values())}
