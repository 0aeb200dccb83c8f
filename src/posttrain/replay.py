"""Policies out of a journal: redo it, verify it, or train its rollouts under other settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.build import Trainable, build_trainable, other_kernels, set_threads
from posttrain.config import Recipe
from posttrain.data.samples import build_batch
from posttrain.errors import ConfigError, JournalCorruptError, ModelError, RunDirectoryError
from posttrain.journal import Journal, verify_segments
from posttrain.loop import redo
from posttrain.recipe_files import models_in, resolve
from posttrain.telemetry.observer import Observer
from posttrain.training.checkpoints import CheckpointStore
from posttrain.types import StepResult

REPLAYABLE = ("algo.", "optim.", "learner.", "num_steps=")


def recorded_recipe(journal: Journal, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe that a run was made with, with overrides on top.

    A run records every key of its algorithm, those that were left at their defaults too. When
    `overrides` name another one, it takes over what was set, of the keys it has.
    """
    recipe = deepcopy(dict(journal.header.recipe))
    if any(override.startswith("algo.type=") for override in overrides):
        recipe["algo"] = _what_was_set(recipe["algo"])
    return resolve(recipe, [f"threads={journal.header.threads}", *overrides], "of the run")


def _what_was_set(algo: dict[str, Any]) -> dict[str, Any]:
    """The recorded keys of an algorithm that differ from their defaults, and its type."""
    for model in models_in(Recipe.model_fields["algo"].annotation):
        if model.model_fields["type"].default == algo["type"]:
            required = {n: algo[n] for n, f in model.model_fields.items() if f.is_required()}
            defaults = model.model_validate(required).model_dump(mode="json")
            changed = {k: v for k, v in algo.items() if v != defaults.get(k)}
            return {"type": algo["type"], **required, **changed}
    return algo


def rebuild(run_dir: Path, step: int | None, observer: Observer) -> tuple[Trainable, Recipe]:
    """The policy of a run after `step`, the newest by default: a checkpoint, and redone steps.

    Raises RunDirectoryError when the run has no such step.
    """
    with Journal.open(run_dir, readonly=True) as journal:
        newest = journal.last_finished_step()
        step = newest if step is None else step
        if not 0 <= step <= newest:
            raise RunDirectoryError(
                f"run {run_dir} has finished steps 0 to {newest}; step {step} is not among them"
            )
        recipe = recorded_recipe(journal)
        trainable = _initial(journal, recipe, observer)
        store = CheckpointStore(run_dir, journal, every=1, keep=1)
        store.restore_newest(trainable.learner, at_most=step)
        redo(journal, trainable.learner, trainable.algorithm, up_to=step)
    return trainable, recipe


def verify(
    run_dir: Path, observer: Observer, on_step: Callable[[StepResult], None] = lambda _: None
) -> dict[str, Any]:
    """Check every byte of the segments and what the database says of them, then train every step
    again from the initial model. Metrics and reports in the database have no checksum.

    Raises JournalCorruptError naming file and offset, or ReplayMismatchError naming the step.
    """
    problems = verify_segments(run_dir)
    if problems:
        shown = "\n  ".join(str(p) for p in problems[:10])
        raise JournalCorruptError(
            f"journal of {run_dir}: {len(problems)} problem{'s' if len(problems) > 1 else ''}:\n"
            f"  {shown}\nRestore the file from a copy; the groups named cannot be replayed"
        )
    with Journal.open(run_dir, readonly=True) as journal:
        ledger = journal.ledger()
        recipe = recorded_recipe(journal)
        trainable = _initial(journal, recipe, observer)
        last = journal.last_finished_step()
        redo(journal, trainable.learner, trainable.algorithm, on_step, up_to=last)
        return {
            "verified": True,
            "steps": last,
            "weights_hash": trainable.learner.weights_hash(),
            "draws": {
                "drawn": ledger.drawn,
                "trained": ledger.trained,
                "dropped": dict(ledger.dropped),
                "open": ledger.open,
            },
        }


@dataclass(frozen=True)
class WhatIf:
    """Recorded groups trained under other settings: recorded and new metrics of each step."""

    trainable: Trainable
    steps: list[dict[str, Any]]


def what_if(
    run_dir: Path,
    overrides: Sequence[str],
    observer: Observer,
    on_step: Callable[[StepResult], None] = lambda _: None,
) -> WhatIf:
    """Train a run's recorded groups again with other `algo.*`, `optim.*` or `learner.*` settings.

    The rollouts stay those of the recorded policy: from the second step on the data is off-policy
    to the new one, as mismatch/* in the result says. Raises ConfigError for other settings.
    """
    wrong = [o for o in overrides if not o.startswith(REPLAYABLE)]
    if wrong:
        raise ConfigError(
            f"replay cannot change {', '.join(wrong)}: the rollouts are those that were recorded. "
            "Use algo.KEY, optim.KEY, learner.KEY or num_steps, or train a new run"
        )
    with Journal.open(run_dir, readonly=True) as journal:
        recipe = recorded_recipe(journal, overrides)
        trainable = _initial(journal, recipe, observer)
        rows = []
        for record in journal.steps():
            if not record.finished:
                continue
            groups = [journal.group(draw_id) for draw_id in record.draw_ids]
            batch = build_batch(record.step, groups, trainable.algorithm, trainable.learner.memory)
            result = trainable.learner.step(batch)
            on_step(result)
            rows.append(
                {
                    "step": record.step,
                    "recorded": dict(record.metrics),
                    "replayed": {**batch.metrics, **result.metrics},
                    "weights_hash": result.weights_hash,
                    "same_weights": result.weights_hash == record.weights_hash,
                }
            )
    return WhatIf(trainable, rows)


def _initial(journal: Journal, recipe: Recipe, observer: Observer) -> Trainable:
    set_threads(recipe)
    if problem := other_kernels(journal.header.packages, recipe):
        raise RunDirectoryError(f"this run cannot be replayed here: {problem}")
    trainable = build_trainable(recipe, observer)
    recorded = journal.events("initial_weights")
    if recorded and recorded[0].payload["weights_hash"] != trainable.learner.policy_hash():
        raise ModelError(
            f"model {recipe.model.path}: its weights are not those that the run began with; "
            "restore the folder"
        )
    return trainable
