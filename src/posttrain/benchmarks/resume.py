"""resume: from starting the same command with --resume after a SIGKILL until training goes on.

A run is killed some steps after a checkpoint. Each measurement resumes a copy of what the kill left
behind, in a process of its own, up to its first new step. The time until that step begins is split
into start-up (interpreter, imports, model, environment), restore (checkpoint) and redo (journalled
steps trained again from their recorded batches, up to where the loop starts). The other way,
generating the same steps again, would have cost what their rollouts and learner took, by the
journal; it would need start-up and restore too.
"""

from __future__ import annotations

import argparse
import json
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.benchmarks.options import (
    add_work_dir,
    argument_parser,
    finish,
    parse,
    positive,
    progress,
    scratch,
)
from posttrain.benchmarks.report import Report, this_machine
from posttrain.config import Recipe, default_threads
from posttrain.errors import BenchmarkError
from posttrain.journal import Journal
from posttrain.recipe_files import load_recipe

RESTORED = "bench-restored"


@dataclass(frozen=True)
class Regeneration:
    """The steps after the newest checkpoint, and what they took when they were first made.

    A step that was begun but not finished when the process died has no times.
    """

    checkpoint: int
    num_steps: int
    num_timed: int
    rollout_s: float
    learner_s: float

    @property
    def total_s(self) -> float:
        return self.rollout_s + self.learner_s


@dataclass(frozen=True)
class Resume:
    """Seconds of one resume, up to the beginning of the first new step."""

    start_up_s: float
    restore_s: float
    redo_s: float

    @property
    def total_s(self) -> float:
        return self.start_up_s + self.restore_s + self.redo_s


@contextmanager
def training(
    args: argparse.Namespace, run_dir: Path, *options: str
) -> Iterator[Iterator[tuple[float, dict[str, Any]]]]:
    """A training process and its events with their times of arrival; it ends by SIGKILL."""
    command = [sys.executable, "-m", __spec__.name, args.recipe, *overrides(args)]
    process = subprocess.Popen(
        [*command, "--run-dir", str(run_dir), *options], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield ((time.perf_counter(), json.loads(line)) for line in process.stdout)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def overrides(args: argparse.Namespace) -> list[str]:
    """The run's settings: no evaluation, checkpoints as asked for."""
    fixed = ["eval.before=false", "eval.after=false"]
    return [*fixed, f"checkpoint.every={args.checkpoint_every}", *args.override]


def killed_run(args: argparse.Namespace, run_dir: Path) -> None:
    """Train from scratch and kill the process `--redo` steps after its first checkpoint."""
    last = args.checkpoint_every + args.redo
    with training(args, run_dir) as events:
        for _, event in events:
            if event["event"] == "step" and event["step"] >= last:
                return
    raise BenchmarkError(f"resume: the run ended before step {last}; lower --checkpoint-every")


def one_resume(args: argparse.Namespace, run_dir: Path) -> Resume:
    """Resume, wait for the first new step, and take the time apart."""
    started = time.perf_counter()
    restored = restore_s = begun = 0.0
    with training(args, run_dir, "--resume") as events:
        for now, event in events:
            if event["event"] == RESTORED:
                restored, restore_s = now, event["seconds"]
            elif event["event"] == "step":
                begun = now - event["time/step_s"]
                break
        else:
            raise BenchmarkError(
                f"resume: no step after the resume in {run_dir}; its output is above"
            )
    return Resume(
        start_up_s=restored - restore_s - started,
        restore_s=restore_s,
        redo_s=begun - restored,
    )


def regeneration(run_dir: Path) -> Regeneration:
    """What a resume redoes, and its times by the journal."""
    with Journal.open(run_dir, readonly=True) as journal:
        checkpoint = max((c.step for c in journal.checkpoints()), default=0)
        steps = journal.steps(after=checkpoint)
    timed = [s.metrics for s in steps if "time/rollout_s" in s.metrics]
    return Regeneration(
        checkpoint=checkpoint,
        num_steps=len(steps),
        num_timed=len(timed),
        rollout_s=sum(m["time/rollout_s"] for m in timed),
        learner_s=sum(m["time/learner_s"] for m in timed),
    )


def add_results(report: Report, resumes: list[Resume], cost: Regeneration) -> None:
    """The split, and the ratios to regenerating."""
    total = report.add("resume: total", "s", [r.total_s for r in resumes])
    report.add("  start-up", "s", [r.start_up_s for r in resumes])
    report.add("  restore", "s", [r.restore_s for r in resumes])
    redo = report.add("  redo", "s", [r.redo_s for r in resumes])
    count = len(resumes)
    again = report.add("regenerating: rollout + learner", "s", [cost.total_s] * count)
    learner = report.add("  of it learner", "s", [cost.learner_s] * count)
    report.add_ratio("regenerating over the whole resume", again, total)
    report.add_ratio("regenerating over redo", again, redo)
    report.add_ratio("redo over the learner alone", redo, learner)


def worker(arguments: list[str]) -> None:
    """`posttrain train ... --json`, which also says how long the restore took."""
    from posttrain.training.checkpoints import CheckpointStore

    restore_newest = CheckpointStore.restore_newest

    def timed(self: CheckpointStore, *args: Any, **kwargs: Any) -> int:
        started = time.perf_counter()
        step = restore_newest(self, *args, **kwargs)
        seconds = time.perf_counter() - started
        print(json.dumps({"event": RESTORED, "seconds": seconds}), flush=True)
        return step

    CheckpointStore.restore_newest = timed
    sys.argv = ["posttrain", "train", *arguments, "--json"]
    runpy.run_module("posttrain.cli", run_name="__main__")


def settings_of(recipe: Recipe, cost: Regeneration) -> dict[str, Any]:
    """What the report says of the run."""
    return {
        "recipe": recipe.name,
        "model": recipe.model.path,
        "trajectories a step": recipe.rollout.groups_per_step * recipe.rollout.group_size,
        "checkpoint at step": cost.checkpoint,
        "steps redone": cost.num_steps,
    }


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    parser = argument_parser("resume", __doc__)
    parser.add_argument("--recipe", default="reverse", help="shipped name or TOML file")
    parser.add_argument("--checkpoint-every", type=positive, default=20)
    parser.add_argument("--redo", type=positive, default=15, help="steps after the checkpoint")
    parser.add_argument("override", nargs="*", help="settings on top, for instance threads=1")
    add_work_dir(parser)
    args = parse(parser, arguments)
    if args.redo >= args.checkpoint_every:
        parser.error("--redo must be below --checkpoint-every, else there is a newer checkpoint")
    recipe, _ = load_recipe(args.recipe, overrides(args))
    machine = this_machine(recipe.threads or default_threads())
    with scratch(args.work_dir) as folder:
        killed = folder / "killed"
        killed_run(args, killed)
        cost = regeneration(killed)
        report = Report(
            name="resume",
            measures_what="seconds from the start of the process to the first new step",
            against="rollout and learner time of the same steps when they were first made",
            floor="2x faster than regenerating",
            aim="what the learner alone needs",
            machine=machine,
            settings=settings_of(recipe, cost),
        )
        resumes = []
        for i in range(args.repeats):
            copy = folder / f"copy-{i}"
            shutil.copytree(killed, copy)
            resumes.append(one_resume(args, copy))
            shutil.rmtree(copy)
            progress(f"resume {i + 1}/{args.repeats}: {resumes[-1].total_s:.2f} s")
    add_results(report, resumes, cost)
    if cost.num_timed < cost.num_steps:
        report.notes.append("the last redone step was unfinished: its own cost is not counted")
    report.notes.append("regenerating is one value, of the run before the kill, repeated")
    finish(report, args)


if __name__ == "__main__":
    worker(sys.argv[1:])
