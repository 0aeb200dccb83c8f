"""control-plane: trajectories a second through everything but a model.

The real loop, EpisodeRunner, Recorder with a real tokenizer and chat template, RolloutProducer,
Journal, build_batch and pack; a sampler that answers from a table, an environment that grades by
the first character, and a learner that only builds micro-batches.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from posttrain import loop
from posttrain.algo.builder import build_algorithm
from posttrain.benchmarks.options import (
    add_work_dir,
    argument_parser,
    finish,
    parse,
    positive,
    scratch,
)
from posttrain.benchmarks.report import Report, this_machine
from posttrain.config import RlooConfig
from posttrain.data.curriculum import UniformCurriculum
from posttrain.data.packing import pack
from posttrain.data.tasks import TaskList, make_task, user_prompt
from posttrain.envs.single_turn import SingleTurnEnv
from posttrain.evaluation.evaluator import Evaluator
from posttrain.evaluation.schedule import EvaluationSchedule
from posttrain.journal import Journal, RunHeader
from posttrain.randomness import stream
from posttrain.rollout.episode import EpisodeLimits, EpisodeRunner
from posttrain.rollout.producer import RolloutProducer
from posttrain.rollout.recorder import Renderer
from posttrain.telemetry.observer import SilentObserver
from posttrain.training.checkpoints import CheckpointStore
from posttrain.training.models import resolve_model
from posttrain.types import (
    Completion,
    Draw,
    FinishReason,
    Group,
    Int32,
    SamplingParams,
    Scored,
    StepResult,
    Task,
    TrainBatch,
)

GROUP_SIZE = 8
MICROBATCH_ROWS = 2048
NUM_TASKS = 1000
NUM_ANSWERS = 64
MARKS = (0.25, 0.5, 0.75, 1.0)
MAX_GROWTH_FRAC = 0.05
"""Memory counts as flat when it grows by no more than this from the first mark to the last."""


class ScriptedSampler:
    """Answers from a table chosen by the seed, as the version that is loaded."""

    def __init__(self, tokenizer: Any, eos: int, completion_tokens: int) -> None:
        rng = stream(0, "bench answers")
        letters = "abcdefghijklmnopqrstuvwxyz"
        texts = [
            "".join(letters[i] for i in rng.integers(0, 26, completion_tokens - 1))
            for _ in range(NUM_ANSWERS)
        ]
        self._answers = [
            ([*tokenizer.encode(t, add_special_tokens=False), eos], rng.random(10_000), t)
            for t in texts
        ]
        self._version = 0

    async def generate(self, token_ids: Int32, params: SamplingParams, seed: int) -> Completion:
        await asyncio.sleep(0)  # siblings interleave, as with an engine
        ids, logprobs, text = self._answers[seed % NUM_ANSWERS]
        count = len(ids)
        versions = [self._version] * count
        return Completion.build(ids, -logprobs[:count], versions, FinishReason.EOS, text)

    async def load_weights(self, version: int) -> None:
        self._version = version

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def abort(self) -> None: ...

    def stats(self) -> Mapping[str, float]:
        return {}


class PackingLearner:
    """Builds the micro-batches of a batch and counts their rows."""

    def __init__(self) -> None:
        self.policy_version = 0
        self.num_rows = 0
        self.memory: dict[str, float] = {}

    def step(self, batch: TrainBatch) -> StepResult:
        self.num_rows += sum(m.num_rows for m in pack(batch.samples, MICROBATCH_ROWS))
        self.policy_version = batch.step
        return StepResult(batch.step, batch.step, f"{batch.step:064x}", {})

    def weights_hash(self) -> str:
        return f"{self.policy_version:064x}"

    def save(self, folder: Path) -> None:
        (folder / "nothing").write_text("")

    def restore(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class ScriptedSpec:
    """Tasks in memory; half of the answers are right."""

    name: str = "scripted"

    def train_tasks(self) -> TaskList:
        question = "which letter comes next after this one: "
        return TaskList(
            make_task(f"t{i}", user_prompt(None, f"{question}{i}"), {}, grader="bench")
            for i in range(NUM_TASKS)
        )

    def eval_tasks(self) -> TaskList:
        return self.train_tasks()

    def make(self, task: Task) -> SingleTurnEnv:
        return SingleTurnEnv(task, _grade)

    def reward(self) -> None:
        return None


def _grade(task: Task, text: str) -> Scored:
    return Scored(1.0 if text[:1] < "n" else 0.0)


class TimedJournal(Journal):
    """The journal, with the seconds spent in each kind of record."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started

    def record_draw(self, draw: Draw) -> None:
        with self._timed("draws"):
            super().record_draw(draw)

    def record_group(self, group: Group) -> None:
        with self._timed("groups"):
            super().record_group(group)

    def begin_step(self, batch: TrainBatch, fingerprint: str) -> None:
        with self._timed("begin"):
            super().begin_step(batch, fingerprint)

    def finish_step(self, result: StepResult) -> None:
        with self._timed("finish"):
            super().finish_step(result)


class Watch(SilentObserver):
    """Adds up the loop's own clock and notes time and memory at the marks."""

    def __init__(self, num_steps: int) -> None:
        self._due = [max(1, round(mark * num_steps)) for mark in MARKS]
        self.seconds: dict[str, float] = defaultdict(float)
        self.reached: list[tuple[float, int]] = []
        self.started = time.perf_counter()

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        for name in ("time/rollout_s", "time/learner_s", "time/other_s", "time/step_s"):
            self.seconds[name] += metrics[name]
        while len(self.reached) < len(self._due) and step >= self._due[len(self.reached)]:
            self.reached.append((time.perf_counter() - self.started, resident_bytes()))


def resident_bytes() -> int:
    """Resident memory of this process now; where the system does not say, its peak so far."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def build_parts(
    args: argparse.Namespace, tokenizer: Any, num_steps: int, journal: TimedJournal, watch: Watch
) -> loop.Parts:
    """The loop's parts as `posttrain.run` joins them, around the scripted ones."""
    tokens = args.completion_tokens
    eos = int(tokenizer.eos_token_id)
    spec = ScriptedSpec()
    tasks = spec.train_tasks()
    sampler = ScriptedSampler(tokenizer, eos, tokens)
    limits = EpisodeLimits(
        max_turns=1,
        max_context=4096,
        max_prompt=4096 - tokens,
        cut_prompt_to=None,
        timeout_s=300.0,
        max_attempts=2,
    )
    runner = EpisodeRunner(spec, None, sampler, Renderer(tokenizer, (eos,)), limits)
    params = SamplingParams(max_tokens=tokens)
    rollouts = RolloutProducer(
        runner,
        UniformCurriculum(tasks, seed=0),
        journal,
        params,
        groups_per_step=args.groups_per_step,
        group_size=GROUP_SIZE,
        max_policy_lag=0,
        num_steps=num_steps,
    )
    return loop.Parts(
        num_steps=num_steps,
        max_invalid_frac=0.5,
        max_skipped_steps=3,
        learner=PackingLearner(),
        sampler=sampler,
        algorithm=build_algorithm(RlooConfig()),
        rollouts=rollouts,
        evaluator=Evaluator(
            runner=runner, tasks=tasks, params=params, num_tasks=1, samples_per_task=1, run_seed=0
        ),
        schedule=EvaluationSchedule(num_steps, every=0, before=False, after=False),
        journal=journal,
        checkpoints=CheckpointStore(journal.run_dir, journal, every=num_steps, keep=1),
        observer=watch,
    )


def steps_of(args: argparse.Namespace) -> int:
    """Whole steps that come nearest to the trajectories asked for, at least one a mark."""
    return max(len(MARKS), args.trajectories // (args.groups_per_step * GROUP_SIZE))


def one_run(folder: Path, tokenizer: Any, args: argparse.Namespace) -> tuple[Watch, TimedJournal]:
    """One whole run of the loop in a fresh journal."""
    num_steps = steps_of(args)
    header = RunHeader({}, "bench", {}, seed=0, threads=1, created_at="2026-01-01T00:00:00Z")
    with TimedJournal.create(folder, header) as journal:
        watch = Watch(num_steps)
        parts = build_parts(args, tokenizer, num_steps, journal, watch)
        watch.started = time.perf_counter()
        asyncio.run(loop.run(parts))
        ledger = journal.ledger()
    expected = num_steps * args.groups_per_step
    assert ledger.drawn == expected and ledger.open == 0, ledger
    return watch, journal


def shares(watch: Watch, journal: TimedJournal) -> dict[str, float]:
    """Seconds by phase. The runner's is what rollouts take beside the journal."""
    j = journal.seconds
    return {
        "runner, recorder, environment": watch.seconds["time/rollout_s"] - j["draws"] - j["groups"],
        "journal: draws": j["draws"],
        "journal: groups": j["groups"],
        "journal: steps": j["begin"] + j["finish"],
        "batch, fingerprint": watch.seconds["time/other_s"] - j["begin"] - j["finish"],
        "packing": watch.seconds["time/learner_s"],
    }


def add_results(report: Report, runs: list[tuple[Watch, TimedJournal]], trajectories: int) -> None:
    """Rates, shares by phase, and memory at the marks."""
    report.add("rate", "trajectories/s", [trajectories / w.reached[-1][0] for w, _ in runs])
    quarter = trajectories / len(MARKS)
    for i, mark in enumerate(MARKS):
        spent = [w.reached[i][0] - (w.reached[i - 1][0] if i else 0.0) for w, _ in runs]
        report.add(f"rate to {mark:.0%}", "trajectories/s", [quarter / s for s in spent])
    by_phase = [shares(*run) for run in runs]
    for name in by_phase[0]:
        walls = [w.reached[-1][0] for w, _ in runs]
        parts = zip(by_phase, walls, strict=True)
        report.add(f"share: {name}", "%", [100 * p[name] / wall for p, wall in parts])
    for i, mark in enumerate(MARKS):
        report.add(f"memory at {mark:.0%}", "MB", [w.reached[i][1] / 1e6 for w, _ in runs])
    # The last run alone: the first one also warms the allocator and the caches up.
    first, last = runs[-1][0].reached[0][1], runs[-1][0].reached[-1][1]
    growth = (last - first) / first
    verdict = "flat" if growth <= MAX_GROWTH_FRAC else "NOT FLAT"
    report.notes.append(
        f"memory from the first mark to the last: {(last - first) / 1e6:+.1f} MB "
        f"({growth:+.1%}), {verdict}"
    )


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    parser = argument_parser("control-plane", __doc__)
    parser.add_argument("--trajectories", type=positive, default=20_000, help="of each run")
    parser.add_argument("--groups-per-step", type=positive, default=8)
    parser.add_argument("--completion-tokens", type=positive, default=16)
    parser.add_argument("--tokenizer", default="tiny-char", help="model whose tokenizer is used")
    add_work_dir(parser)
    args = parse(parser, arguments)
    torch.set_num_threads(1)
    trajectories = steps_of(args) * args.groups_per_step * GROUP_SIZE
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(args.tokenizer))
    report = Report(
        name="control-plane",
        measures_what="trajectories a second through loop, runner, recorder, journal, packing",
        against="its own limit, on one core",
        floor="2,000/s on one core, memory flat over 1,000,000",
        aim="10,000/s",
        machine=this_machine(threads=1),
        settings={
            "trajectories": trajectories,
            "groups a step": args.groups_per_step,
            "group size": GROUP_SIZE,
            "completion tokens": args.completion_tokens,
            "tokenizer": args.tokenizer,
        },
    )
    runs = []
    for _ in range(args.repeats):
        with scratch(args.work_dir) as folder:
            runs.append(one_run(folder / "run", tokenizer, args))
    add_results(report, runs, trajectories)
    finish(report, args)
