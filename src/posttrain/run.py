"""One training run: a directory, a journal, the loop, a summary. Starting and resuming alike."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
import signal
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import posttrain
from posttrain import loop
from posttrain.build import (
    Rollable,
    Trainable,
    build_evaluator,
    build_rollable,
    build_spec,
    build_trainable,
    set_threads,
    train_params,
)
from posttrain.config import Recipe
from posttrain.data.curriculum import UniformCurriculum
from posttrain.errors import JournalError, ModelError, RunDirectoryError, StorageError
from posttrain.evaluation.evaluator import compare_reports
from posttrain.evaluation.schedule import EvaluationSchedule
from posttrain.journal import Journal, RunHeader, StepRecord
from posttrain.recipe_files import differences, to_toml
from posttrain.rollout.producer import RolloutProducer
from posttrain.telemetry.files import MetricsFile, write_json, write_text
from posttrain.telemetry.observer import ContainedObserver, Observer
from posttrain.training.checkpoints import CheckpointStore

logger = logging.getLogger("posttrain")

CHANGEABLE_ON_RESUME = frozenset(
    {"threads", "description", "expect", "checkpoint.every", "checkpoint.keep"}
)
_PACKAGES = ("torch", "transformers", "safetensors", "numpy", "pydantic", "math-verify")


async def train(
    recipe: Recipe, base_dir: Path, run_dir: Path, *, resume: bool, observer: Observer
) -> dict[str, Any]:
    """Run a recipe to its end, or go on with it. Returns the summary, also in summary.json.

    Raises UserError before anything is written, other PosttrainErrors from inside the run, and
    CancelledError after Ctrl-C; in every case the journal holds all that was finished.
    """
    started = time.monotonic()
    fresh = not _holds_journal(run_dir)
    if not fresh and not resume:
        raise RunDirectoryError(
            f"run directory {run_dir} already holds a run; add --resume to go on with it, or "
            "choose another --run-dir"
        )
    if not fresh:
        _check_same_recipe(run_dir, recipe)
    observer = ContainedObserver(observer)
    threads = set_threads(recipe)
    spec = build_spec(recipe, base_dir)
    trainable = build_trainable(recipe, observer)
    rollable = await build_rollable(recipe, spec, trainable.policy)
    try:
        await asyncio.sleep(0)  # Ctrl-C during the loading is heard before anything is written
        with _open_journal(run_dir, recipe, threads, fresh) as journal:
            write_text(run_dir / "recipe.resolved.toml", to_toml(recipe))
            session = _Session(recipe, run_dir, journal, trainable, rollable, observer)
            return await session.run(started)
    finally:
        await rollable.close()


class _Session:
    """What one process does of a run."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        journal: Journal,
        trainable: Trainable,
        rollable: Rollable,
        observer: Observer,
    ) -> None:
        self._recipe = recipe
        self._run_dir = run_dir
        self._journal = journal
        self._trainable = trainable
        self._rollable = rollable
        self._observer = observer
        self._metrics = MetricsFile(run_dir / "metrics.jsonl")
        checkpoint = recipe.checkpoint
        self._checkpoints = CheckpointStore(
            run_dir, journal, every=checkpoint.every, keep=checkpoint.keep
        )

    async def run(self, started: float) -> dict[str, Any]:
        """Redo what the journal holds, train the rest, write the summary however it ends."""
        self._check_initial_weights()
        reason = "failed"
        try:
            with _interruptible():
                await self._restore()
                await self._train()
            reason = "finished"
        except asyncio.CancelledError:
            reason = "interrupted"
            raise
        finally:
            summary = self._write_summary(reason, time.monotonic() - started)
        return summary

    async def _train(self) -> None:
        await self._rollable.sampler.load_weights(self._trainable.learner.policy_version)
        self._metrics.rewrite(
            (s.step, s.metrics, s.skipped) for s in self._journal.steps() if s.finished
        )
        parts = self._parts()
        try:
            await loop.run(parts)
        finally:
            await parts.rollouts.close()

    def _write_summary(self, reason: str, wall_s: float) -> dict[str, Any]:
        try:
            summary = self._summary(reason, wall_s)
            write_json(self._run_dir / "summary.json", summary)
        except (StorageError, JournalError) as error:
            if reason == "finished":
                raise
            logger.warning("%s", error)  # what ended the run is the error to show
            return {}
        return summary

    async def _restore(self) -> None:
        """Newest checkpoint, then the journalled steps after it."""
        learner, journal = self._trainable.learner, self._journal
        self._checkpoints.clean()
        begun = len(journal.steps())
        restored = self._checkpoints.restore_newest(learner)
        if begun > restored:
            self._observer.message(
                f"resuming: checkpoint of step {restored}, redoing steps {restored + 1} to {begun} "
                "from the journal"
            )
        elif begun:
            self._observer.message(f"resuming: checkpoint of step {restored}")
        for step in range(restored + 1, begun + 1):
            loop.redo(journal, learner, self._trainable.algorithm, up_to=step)
            self._observer.progress("redo", step - restored, begun - restored)
            await asyncio.sleep(0)  # Ctrl-C is heard between two redone steps
        if begun > restored:
            self._checkpoints.after_step(learner, self._recipe.num_steps)

    def _check_initial_weights(self) -> None:
        """The model folder must be the one the run began with: redo starts from it."""
        current = self._trainable.learner.weights_hash()
        recorded = self._journal.events("initial_weights")
        if not recorded:
            self._journal.record_event("initial_weights", {"weights_hash": current})
        elif recorded[0].payload["weights_hash"] != current:
            raise ModelError(
                f"model {self._recipe.model.path}: its weights are not those that run "
                f"{self._run_dir} began with; restore the folder or start a new run directory"
            )

    def _parts(self) -> loop.Parts:
        recipe, journal = self._recipe, self._journal
        curriculum = UniformCurriculum(self._rollable.train_tasks, recipe.seed)
        open_draws = [
            (draw, journal.group(draw.draw_id) if has_group else None)
            for draw, has_group in journal.open_draws()
        ]
        consumed = len(journal.steps()) * recipe.rollout.groups_per_step
        rollouts = RolloutProducer(
            self._rollable.runner,
            curriculum,
            journal,
            train_params(recipe),
            groups_per_step=recipe.rollout.groups_per_step,
            group_size=recipe.rollout.group_size,
            max_policy_lag=recipe.max_policy_lag,
            num_steps=recipe.num_steps,
            next_draw_id=journal.next_draw_id(),
            num_lost=journal.next_draw_id() - len(open_draws) - consumed,
            open_draws=open_draws,
        )
        return loop.Parts(
            num_steps=recipe.num_steps,
            max_invalid_frac=recipe.rollout.max_invalid_frac,
            max_skipped_steps=recipe.optim.max_skipped_steps,
            learner=self._trainable.learner,
            sampler=self._rollable.sampler,
            algorithm=self._trainable.algorithm,
            rollouts=rollouts,
            evaluator=build_evaluator(recipe, self._rollable),
            schedule=EvaluationSchedule(
                recipe.num_steps, recipe.eval.every, recipe.eval.before, recipe.eval.after
            ),
            journal=journal,
            checkpoints=self._checkpoints,
            observer=_Recording(self._observer, self._metrics, journal),
        )

    def _summary(self, reason: str, wall_s: float) -> dict[str, Any]:
        steps = [s for s in self._journal.steps() if s.finished]
        ledger = asdict(self._journal.ledger())
        return {
            "name": self._recipe.name,
            "exit_reason": reason,
            "steps": len(steps),
            "num_steps": self._recipe.num_steps,
            "skipped_steps": sum(1 for s in steps if s.skipped),
            "weights_hash": steps[-1].weights_hash if steps else None,
            "wall_s": wall_s,
            "training_s": sum(s.metrics.get("time/step_s", 0.0) for s in steps),
            "draws": ledger,
            "invalid": _invalid_kinds(steps),
            "evaluation": evaluation_summary(self._journal, self._recipe.seed),
        }


class _Recording:
    """Copies each step from the journal into metrics.jsonl, then tells the observer."""

    def __init__(self, observer: Observer, metrics: MetricsFile, journal: Journal) -> None:
        self._observer = observer
        self._metrics = metrics
        self._journal = journal
        self.message = observer.message
        self.progress = observer.progress
        self.evaluation = observer.evaluation

    def step(self, step: int, num_steps: int, metrics: Any) -> None:
        (record,) = self._journal.steps(after=step - 1, limit=1)
        self._metrics.append(step, record.metrics, record.skipped)
        self._observer.step(step, num_steps, metrics)


def _invalid_kinds(steps: Iterable[StepRecord]) -> dict[str, int]:
    """Trajectories without a reward over the run, by reason."""
    prefix, kinds = "trajectories/invalid/", Counter[str]()
    for step in steps:
        for name, count in step.metrics.items():
            if name.startswith(prefix):
                kinds[name.removeprefix(prefix)] += int(count)
    return dict(sorted(kinds.items()))


def evaluation_summary(journal: Journal, seed: int) -> dict[str, Any] | None:
    """First against last evaluation, paired by task; None when there was none."""
    records = sorted(journal.evaluations(), key=lambda e: e.policy_version)
    if not records:
        return None
    before, after = records[0].report, records[-1].report
    summary: dict[str, Any] = {"before": _without_tasks(before)}
    if len(records) > 1:
        summary["after"] = _without_tasks(after)
        if before["correct"].keys() & after["correct"].keys():
            summary["comparison"] = compare_reports(before, after, seed)
    return summary


def _without_tasks(report: Any) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key != "correct"}


def _holds_journal(run_dir: Path) -> bool:
    return (run_dir / "journal.sqlite").exists()


def _check_same_recipe(run_dir: Path, recipe: Recipe) -> None:
    with Journal.open(run_dir, readonly=True) as journal:
        recorded = json.loads(json.dumps(dict(journal.header.recipe)))
    changed = differences(recorded, recipe.model_dump(mode="json"))
    changed = {k: v for k, v in changed.items() if k not in CHANGEABLE_ON_RESUME}
    if changed:
        listed = "; ".join(f"{k} was {old!r}, now {new!r}" for k, (old, new) in changed.items())
        raise RunDirectoryError(
            f"run directory {run_dir} belongs to another recipe: {listed}. Resume with the same "
            "settings, or choose another --run-dir"
        )


def _open_journal(run_dir: Path, recipe: Recipe, threads: int, fresh: bool) -> Journal:
    if not fresh:
        return _reopen(run_dir, threads)
    header = RunHeader(
        recipe=recipe.model_dump(mode="json"),
        code_version=posttrain.__version__,
        packages=_packages(),
        seed=recipe.seed,
        threads=threads,
        created_at=datetime.now(UTC).isoformat(),
    )
    try:
        return Journal.create(run_dir, header)
    except StorageError as error:  # nothing has begun: the folder is the user's to change
        raise RunDirectoryError(f"run directory {run_dir} cannot be used: {error}") from error


def _packages() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"posttrain": posttrain.__version__, **versions}


def _reopen(run_dir: Path, threads: int) -> Journal:
    journal = Journal.open(run_dir)
    recorded = journal.header.threads
    if recorded != threads:
        journal.close()
        raise RunDirectoryError(
            f"run {run_dir} was computed with {recorded} threads, now {threads}: sums would "
            f"round differently and the redo would not match; set threads={recorded}"
        )
    changed = differences(journal.header.packages, _packages())
    if changed:
        listed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
        logger.warning("packages changed since the run began, redone steps may differ: %s", listed)
    return journal


class _interruptible:
    """Ctrl-C and SIGTERM cancel the loop at its next wait; a second Ctrl-C ends the process.

    Nothing is cut in the middle of a write: the loop only waits between them.
    """

    def __enter__(self) -> None:
        task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        assert task is not None

        def stop() -> None:
            self._remove()
            task.cancel()

        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.add_signal_handler(number, stop)
        except (ValueError, RuntimeError, NotImplementedError):
            pass  # not the main thread, or no signals here: the caller's handlers stay

    def _remove(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)

    def __exit__(self, *_: object) -> None:
        self._remove()
