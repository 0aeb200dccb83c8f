"""scaling: cost of rollout and learner against one size at a time, beside the operations it takes.

Group size, prompt length, completion length and number of turns are varied, each with the others
held. Every point is a rollout by the embedded engine under new weights and a learner's step on what
it sampled. Beside the seconds stands the bound: the operations and bytes that the work takes at
least, at this machine's measured peak and bandwidth. Where both curves run in parallel the cost is
proportional to the work; where the measured one is flatter, something fixed dominates. --figure
writes the curves as an SVG.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from posttrain.algo.builder import build_algorithm
from posttrain.benchmarks import work
from posttrain.benchmarks.figure import Curve, Panel, write_svg
from posttrain.benchmarks.machine_limits import REPEATS, both, measure_limits
from posttrain.benchmarks.options import (
    add_model,
    add_threads,
    argument_parser,
    checkout,
    finish,
    parse,
    positive,
    progress,
)
from posttrain.benchmarks.prompts import exact_ids
from posttrain.benchmarks.report import Report, this_machine
from posttrain.config import (
    GrpoConfig,
    LearnerConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    ReverseConfig,
)
from posttrain.randomness import derive_seed
from posttrain.sampling.embedded import EmbeddedSampler
from posttrain.training.learner import InlineLearner
from posttrain.training.models import resolve_model
from posttrain.training.policy import Policy, load_policy
from posttrain.types import Completion, Int32, SamplingParams, TrainBatch, TrainSample

OBSERVATION_TOKENS = 8
"""What the environment says between two turns."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """One point. `completion_tokens` are sampled in each of the turns."""

    groups: int = 2
    group_size: int = 8
    prompt_tokens: int = 64
    completion_tokens: int = 32
    turns: int = 1

    @property
    def num_sequences(self) -> int:
        return self.groups * self.group_size

    @property
    def max_tokens(self) -> int:
        """Of a sequence at its end."""
        spoken = self.turns * self.completion_tokens
        return self.prompt_tokens + spoken + (self.turns - 1) * OBSERVATION_TOKENS


AXES: dict[str, tuple[str, tuple[int, ...]]] = {
    "group size": ("group_size", (1, 2, 4, 8, 16, 32)),
    "prompt tokens": ("prompt_tokens", (16, 64, 256, 1024)),
    "completion tokens": ("completion_tokens", (4, 16, 64, 256)),
    "turns": ("turns", (1, 2, 4, 8)),
}


@dataclass(frozen=True, slots=True)
class Point:
    """Medians of seconds at one size, and the bounds."""

    size: int
    rollout_s: tuple[float, ...]
    learner_s: tuple[float, ...]
    rollout_work: work.Work
    learner_work: work.Work


@dataclass(frozen=True, slots=True)
class Played:
    """Sequences of a rollout with a mask of what was sampled, and the prompts of each turn."""

    token_ids: list[Int32]
    sampled: list[np.ndarray]
    turn_prompts: list[list[Int32]]
    seconds: float


class Bench:
    """Engine and learner on one policy."""

    def __init__(self, policy: Policy, max_tokens: int) -> None:
        self._policy = policy
        recipe = Recipe(
            name="scaling",
            num_steps=1_000_000,
            model=ModelConfig(path=str(policy.folder)),
            env=ReverseConfig(),  # a recipe names one; nothing here plays it
            algo=GrpoConfig(),
            optim=OptimConfig(lr=1e-9),
            learner=LearnerConfig(max_tokens_per_microbatch=max_tokens),
        )
        self._learner = InlineLearner(policy, build_algorithm(recipe.algo), recipe)
        self._size = work.ModelSize.of(policy.model)
        self._round = 0

    def point(self, size: int, sizes: Sizes, repeats: int) -> Point:
        """Measure one point; the first round is thrown away."""
        rollouts, steps = [], []
        played = self.play(sizes)
        for _ in range(repeats + 1):
            played = self.play(sizes)
            rollouts.append(played.seconds)
            steps.append(self.train(played, sizes))
        num_loss_tokens = sum(int(mask.sum()) for mask in played.sampled)
        return Point(
            size,
            tuple(rollouts[1:]),
            tuple(steps[1:]),
            self._rollout_work(played, sizes),
            work.learner(self._size, played.token_ids, num_loss_tokens),
        )

    def play(self, sizes: Sizes) -> Played:
        """All sequences through all turns, under weights of a version of their own."""
        self._round += 1
        sampler = EmbeddedSampler(
            self._policy,
            max_batch=sizes.num_sequences,
            kv_tokens=sizes.num_sequences * (sizes.max_tokens + 64),
            version=self._round,
        )
        prompts = exact_ids(sizes.groups, sizes.prompt_tokens, self._policy.vocab_size, self._round)
        token_ids = [p for p in prompts for _ in range(sizes.group_size)]
        sampled = [np.zeros(len(p), bool) for p in token_ids]
        params = SamplingParams(max_tokens=sizes.completion_tokens, ignore_eos=True)
        turn_prompts: list[list[Int32]] = []
        seconds = 0.0
        for turn in range(sizes.turns):
            if turn:
                shown = exact_ids(
                    len(token_ids), OBSERVATION_TOKENS, self._policy.vocab_size, self._round, turn
                )
                token_ids, sampled = extended(token_ids, sampled, shown, False)
            turn_prompts.append(token_ids)
            started = time.perf_counter()
            completions = asyncio.run(self._turn(sampler, token_ids, params, turn))
            seconds += time.perf_counter() - started
            said = [np.asarray(c.token_ids, np.int32) for c in completions]
            token_ids, sampled = extended(token_ids, sampled, said, True)
        return Played(token_ids, sampled, turn_prompts, seconds)

    async def _turn(
        self, sampler: EmbeddedSampler, prompts: list[Int32], params: SamplingParams, turn: int
    ) -> list[Completion]:
        seeds = [derive_seed(0, "bench", self._round, turn, i) for i in range(len(prompts))]
        return await asyncio.gather(
            *(sampler.generate(p, params, s) for p, s in zip(prompts, seeds, strict=True))
        )

    def train(self, played: Played, sizes: Sizes) -> float:
        """Seconds of one optimizer step on what was sampled, the hash of the weights apart."""
        samples = tuple(
            _sample(ids, mask, number // sizes.group_size, number % sizes.group_size)
            for number, (ids, mask) in enumerate(zip(played.token_ids, played.sampled, strict=True))
        )
        step = self._learner.policy_version + 1
        batch = TrainBatch(step, samples, tuple({s.draw_id: 0 for s in samples}))
        result = self._learner.step(batch)
        assert result.skipped is None, result.skipped
        return result.metrics["learner/step_s"]

    def _rollout_work(self, played: Played, sizes: Sizes) -> work.Work:
        total = work.NOTHING
        for turn, prompts in enumerate(played.turn_prompts):
            cached = len(prompts[0]) - OBSERVATION_TOKENS - 1 if turn else 0  # of the former turn
            total += work.prefill(self._size, prompts, cached)
            total += work.decode(self._size, prompts, sizes.completion_tokens)
        return total


def extended(
    token_ids: list[Int32], sampled: list[np.ndarray], more: Sequence[Int32], trains: bool
) -> tuple[list[Int32], list[np.ndarray]]:
    """Sequences with `more` at their ends, and their masks."""
    ids = [np.concatenate([a, b]).astype(np.int32) for a, b in zip(token_ids, more, strict=True)]
    masks = [
        np.concatenate([mask, np.full(len(b), trains)])
        for mask, b in zip(sampled, more, strict=True)
    ]
    return ids, masks


def _sample(ids: Int32, mask: np.ndarray, draw_id: int, index: int) -> TrainSample:
    """A training row whose advantage is 1 or -1."""
    advantage = np.float32(1.0 if index % 2 else -1.0)
    return TrainSample(
        token_ids=ids,
        loss_mask=mask,
        sampler_logprobs=np.where(mask, np.float32(-1), np.float32(0)),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        turn_index=np.where(mask, 0, -1).astype(np.int32),
        streams={"policy": np.where(mask, advantage, np.float32(0))},
        draw_id=draw_id,
        sample_index=index,
    )


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line's."""
    parser = argument_parser("scaling", __doc__)
    add_model(parser)
    parser.add_argument(
        "--axes", nargs="+", choices=tuple(AXES), default=list(AXES), help="default: all"
    )
    parser.add_argument(
        "--largest", type=positive, default=1024, help="leave out larger values (default 1024)"
    )
    parser.add_argument("--max-tokens", type=positive, default=4096, help="of a micro-batch")
    parser.add_argument(
        "--figure", type=Path, help='write an SVG; "docs" is docs/figures/scaling.svg'
    )
    add_threads(parser)
    return parse(parser, arguments)


def measured(bench: Bench, args: argparse.Namespace) -> dict[str, list[Point]]:
    """All points, by axis."""
    points: dict[str, list[Point]] = {}
    for axis in args.axes:
        name, values = AXES[axis]
        points[axis] = []
        for value in (v for v in values if v <= args.largest):
            progress(f"{axis} {value}")
            sizes = replace(Sizes(), **{name: value})
            points[axis].append(bench.point(value, sizes, args.repeats))
    return points


def panels(points: dict[str, list[Point]], limits: work.Limits) -> list[Panel]:
    """One a size: medians of seconds as lines, bounds dashed."""
    made = []
    for axis, row in points.items():
        sizes = [float(p.size) for p in row]
        curves = [
            Curve("rollout", sizes, [float(np.median(p.rollout_s)) for p in row], 0, False),
            Curve("rollout, bound", sizes, [p.rollout_work.least_s(limits) for p in row], 0, True),
            Curve("learner", sizes, [float(np.median(p.learner_s)) for p in row], 1, False),
            Curve("learner, bound", sizes, [p.learner_work.least_s(limits) for p in row], 1, True),
        ]
        made.append(Panel(axis, "seconds", curves))
    return made


def add_points(report: Report, points: dict[str, list[Point]], best: work.Limits) -> None:
    """Seconds, bound, operations and the distance of every point."""
    for axis, row in points.items():
        for point in row:
            label = f"{axis} {point.size}"
            for part, seconds, least in (
                ("rollout", point.rollout_s, point.rollout_work),
                ("learner", point.learner_s, point.learner_work),
            ):
                ours = report.add(f"{label}: {part}", "s", seconds)
                bound = report.add(
                    f"{label}: {part}: bound", "s", [least.least_s(best)] * len(seconds)
                )
                report.add(
                    f"{label}: {part}: operations", "GFLOP", [least.flops / 1e9] * len(seconds)
                )
                report.add_ratio(f"{label}: {part} over its bound", ours, bound)


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    args = options(arguments)
    if args.figure == Path("docs"):
        args.figure = checkout() / "docs" / "figures" / "scaling.svg"
    torch.set_num_threads(args.threads)
    fixed = Sizes()
    report = Report(
        name="scaling",
        measures_what="seconds of rollout and learner against one size at a time",
        against="the operations and bytes that the work takes at least, at this machine's rates",
        floor="none; it shows what is not proportional",
        aim="curves in parallel",
        machine=this_machine(args.threads),
        settings={
            "model": args.model,
            "dtype": args.dtype,
            **{name.replace("_", " "): getattr(fixed, name) for name in Sizes.__slots__},
        },
    )
    policy = load_policy(resolve_model(args.model, progress=progress), dtype=args.dtype)
    before = measure_limits(REPEATS)
    points = measured(Bench(policy, args.max_tokens), args)
    limits = both(before, measure_limits(REPEATS))
    best = limits.best(args.dtype)
    add_points(report, points, best)
    report.measures += [limits.read, limits.copy, limits.peaks[args.dtype]]
    if args.figure:
        write_svg(args.figure, "Cost against size", panels(points, best), report.machine.key)
        progress(f"wrote {args.figure}")
    finish(report, args)
