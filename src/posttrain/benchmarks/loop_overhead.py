"""loop-overhead: the share of a run's wall time in neither generation, environment nor learner.

A real run of a recipe, watched from outside: the wall time between two steps is what an observer
sees, so it includes the metrics file and the observer's own work. What the loop's clock calls
`time/rollout_s` holds generation and environment, but also the recorder, the journal of groups and
the event loop; the strict share counts everything except the engine and the optimizer step, so the
truth lies between the two.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.benchmarks.options import (
    add_work_dir,
    argument_parser,
    finish,
    parse,
    positive,
    scratch,
)
from posttrain.benchmarks.report import Report, this_machine
from posttrain.config import Recipe, default_threads
from posttrain.recipe_files import load_recipe
from posttrain.run import train
from posttrain.telemetry.observer import SilentObserver


@dataclass(frozen=True)
class Step:
    """One step of a run: wall seconds since the former one, and the loop's metrics of it."""

    number: int
    wall_s: float
    metrics: Mapping[str, float]
    checkpoint: bool

    @property
    def other_s(self) -> float:
        """In neither rollout nor learner."""
        m = self.metrics
        return self.wall_s - m["time/rollout_s"] - m["time/learner_s"]

    @property
    def hash_s(self) -> float:
        """In the learner's call, but after its step: the hash of the weights."""
        m = self.metrics
        return m["time/learner_s"] - m["learner/step_s"]

    @property
    def beside_engine_s(self) -> float:
        """In rollouts, but not in the engine: environment, recorder, journal, event loop."""
        m = self.metrics
        return m["time/rollout_s"] - m["sampler/busy_s"]

    @property
    def strict_s(self) -> float:
        """Everything except the engine and the optimizer step."""
        m = self.metrics
        return self.wall_s - m["sampler/busy_s"] - m["learner/step_s"]


class Watch(SilentObserver):
    """Notes when each step came."""

    def __init__(self, checkpoint_every: int) -> None:
        self._every = checkpoint_every
        self._last: float | None = None
        self.steps: list[Step] = []

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        now = time.perf_counter()
        if self._last is not None:  # the first one also pays for whatever is made on first use
            saved = step % self._every == 0 or step == num_steps
            self.steps.append(Step(step, now - self._last, dict(metrics), saved))
        self._last = now


def watched_run(recipe: Recipe, base_dir: Path, folder: Path) -> list[Step]:
    """All steps of one run but the first."""
    watch = Watch(recipe.checkpoint.every)
    asyncio.run(train(recipe, base_dir, folder, resume=False, observer=watch))
    return watch.steps


def load(args: argparse.Namespace) -> tuple[Recipe, Path]:
    """The recipe without evaluation, with the options on top."""
    overrides = ["eval.before=false", "eval.after=false", *args.override]
    if args.steps is not None:
        overrides.append(f"num_steps={args.steps}")
    if args.checkpoint_every is not None:
        overrides.append(f"checkpoint.every={args.checkpoint_every}")
    return load_recipe(args.recipe, overrides)


def add_results(report: Report, steps: Sequence[Step], checkpoint_every: int) -> None:
    """Shares of plain steps, cost of a checkpoint, share at the recipe's pace of checkpoints."""
    plain = [s for s in steps if not s.checkpoint]
    saving = [s for s in steps if s.checkpoint]

    def share(name: str, chosen: Sequence[Step], part: Callable[[Step], float]) -> None:
        report.add(name, "%", [100 * part(s) / s.wall_s for s in chosen])

    wall = report.add("plain steps: wall", "s", [s.wall_s for s in plain])
    other = report.add("plain steps: neither rollout nor learner", "s", [s.other_s for s in plain])
    share("plain steps: share in neither", plain, lambda s: s.other_s)
    share("  weights hash, in the learner's call", plain, lambda s: s.hash_s)
    share("  rollout beside the engine", plain, lambda s: s.beside_engine_s)
    share("  strict: all but engine and optimizer step", plain, lambda s: s.strict_s)
    if not saving:
        report.notes.append("no step wrote a checkpoint: lower --checkpoint-every")
        return
    share("checkpoint steps: share in neither", saving, lambda s: s.other_s)
    extra = report.add("checkpoint", "s", [s.other_s - other.median for s in saving])
    per_step = [x / checkpoint_every for x in extra.values]
    amortised = [100 * (other.median + x) / (wall.median + x) for x in per_step]
    report.add(f"share with a checkpoint every {checkpoint_every} steps", "%", amortised)


def settings_of(recipe: Recipe, args: argparse.Namespace) -> dict[str, Any]:
    """What the report says of the run."""
    return {
        "recipe": recipe.name,
        "model": recipe.model.path,
        "steps": recipe.num_steps,
        "runs": args.repeats,
        "trajectories a step": recipe.rollout.groups_per_step * recipe.rollout.group_size,
        "checkpoint every": recipe.checkpoint.every,
    }


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    parser = argument_parser("loop-overhead", __doc__)
    parser.set_defaults(repeats=1)
    parser.add_argument("--recipe", default="reverse", help="shipped name or TOML file")
    parser.add_argument("--steps", type=positive, help="default: the recipe's")
    parser.add_argument("--checkpoint-every", type=positive, help="default: the recipe's")
    parser.add_argument("override", nargs="*", help="settings on top, for instance threads=1")
    add_work_dir(parser)
    args = parse(parser, arguments)
    recipe, base_dir = load(args)
    report = Report(
        name="loop-overhead",
        measures_what="share of wall time in neither rollout nor learner, step by step",
        against="the run itself",
        floor="3 %",
        aim="1 %",
        machine=this_machine(recipe.threads or default_threads()),
        settings=settings_of(recipe, args),
    )
    steps: list[Step] = []
    for _ in range(args.repeats):
        with scratch(args.work_dir) as folder:
            steps += watched_run(recipe, base_dir, folder / "run")
    add_results(report, steps, recipe.checkpoint.every)
    finish(report, args)
