"""One training run: a directory, a journal, the loop, a summary. Starting and resuming alike."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import logging
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import posttrain
from posttrain import loop
from posttrain.build import (
    KERNELS,
    Rollable,
    Trainable,
    build_evaluator,
    build_producer,
    build_rollable,
    build_spec,
    build_trainable,
    other_kernels,
    set_threads,
)
from posttrain.config import Recipe
from posttrain.data.tasks import TaskList
from posttrain.errors import JournalError, ModelError, RunDirectoryError, StorageError
from posttrain.evaluation.schedule import EvaluationSchedule
from posttrain.interrupt import interruptible
from posttrain.journal import Journal, RunHeader
from posttrain.kernels.library import kind
from posttrain.recipe_files import differences, to_toml
from posttrain.summary import summarise
from posttrain.telemetry.files import MetricsFile, write_json, write_text
from posttrain.telemetry.observer import ContainedObserver, Observer
from posttrain.training.checkpoints import CheckpointStore

logger = logging.getLogger("posttrain")

CHANGEABLE_ON_RESUME = frozenset(
    {"threads", "description", "expect", "checkpoint.every", "checkpoint.keep"}
)
_PACKAGES = ("torch", "transformers", "safetensors", "numpy", "pydantic", "math-verify", "peft")


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
    rollable = await build_rollable(recipe, spec, trainable.policy, base_dir)
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
        self._check_training_rows()
        reason = "failed"
        try:
            with interruptible():
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
            summary = summarise(self._recipe, self._journal, reason, wall_s)
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
        current = self._trainable.learner.policy_hash()
        recorded = self._journal.events("initial_weights")
        if not recorded:
            self._journal.record_event("initial_weights", {"weights_hash": current})
        elif recorded[0].payload["weights_hash"] != current:
            raise ModelError(
                f"model {self._recipe.model.path}: its weights are not those that run "
                f"{self._run_dir} began with; restore the folder or start a new run directory"
            )

    def _check_training_rows(self) -> None:
        """Given rows must be those that the run began with: later draws take them by number."""
        tasks = self._rollable.train_tasks
        if self._recipe.data is None or not isinstance(tasks, TaskList):
            return
        current = tasks.fingerprint()
        recorded = self._journal.events("training_rows")
        if not recorded:
            self._journal.record_event("training_rows", {"sha256": current})
        elif recorded[0].payload["sha256"] != current:
            raise RunDirectoryError(
                f"run directory {self._run_dir}: the training rows are not those that the run "
                "began with; restore the file or start a new run directory"
            )

    def _parts(self) -> loop.Parts:
        recipe, journal = self._recipe, self._journal
        return loop.Parts(
            num_steps=recipe.num_steps,
            max_invalid_frac=recipe.rollout.max_invalid_frac,
            max_skipped_steps=recipe.optim.max_skipped_steps,
            learner=self._trainable.learner,
            sampler=self._rollable.sampler,
            algorithm=self._trainable.algorithm,
            rollouts=build_producer(recipe, self._rollable, self._trainable.algorithm, journal),
            evaluator=build_evaluator(recipe, self._rollable, self._trainable.learner),
            schedule=EvaluationSchedule(
                recipe.num_steps, recipe.eval.every, recipe.eval.before, recipe.eval.after
            ),
            journal=journal,
            checkpoints=self._checkpoints,
            observer=_Recording(self._observer, self._metrics, journal),
        )


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
        return _reopen(run_dir, recipe, threads)
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
    installed = {name for name in _PACKAGES if importlib.util.find_spec(name.replace("-", "_"))}
    versions = {name: importlib.metadata.version(name) for name in sorted(installed)}
    return {"posttrain": posttrain.__version__, KERNELS: kind(), **versions}


def _reopen(run_dir: Path, recipe: Recipe, threads: int) -> Journal:
    journal = Journal.open(run_dir)
    if problem := other_kernels(journal.header.packages, recipe):
        journal.close()
        raise RunDirectoryError(f"run {run_dir}: {problem}")
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
