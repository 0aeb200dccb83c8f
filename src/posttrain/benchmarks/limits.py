"""limits: what this machine can do, and how far from it our steps and rollouts are.

Measured in one run: bytes a second from memory, operations a second of large products and of the
model's own shapes, and then our side of grpo-short, grpo-long-prompt and rollout. The bound of each
counts what no program for the same model can leave out (posttrain/benchmarks/work.py), at the best
rates seen before and after. Products of the model's own shapes say how much of the distance the
shapes explain: a decoding step multiplies few rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from posttrain.benchmarks import work
from posttrain.benchmarks.grpo import LONG_PROMPT, SHORT, WARM_UP
from posttrain.benchmarks.machine_limits import (
    REPEATS,
    add_bound,
    both,
    measure_limits,
    product_rate,
)
from posttrain.benchmarks.options import (
    add_model,
    add_threads,
    add_work_dir,
    argument_parser,
    finish,
    parse,
    positive,
    progress,
    scratch,
)
from posttrain.benchmarks.our_steps import OurSteps, StepSizes, add_steps
from posttrain.benchmarks.prompts import random_prompts
from posttrain.benchmarks.report import Measure, Report, this_machine
from posttrain.benchmarks.rollout import Embedded
from posttrain.benchmarks.work import Work
from posttrain.training.models import resolve_model
from posttrain.training.policy import load_policy

WORKS = ("grpo-short", "grpo-long-prompt", "rollout")
STEPS = {"grpo-short": SHORT, "grpo-long-prompt": LONG_PROMPT}
REQUESTS, NEW_TOKENS, PROMPT_TOKENS = 64, 64, 44
"""Of rollout."""


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line's."""
    parser = argument_parser("limits", __doc__)
    add_model(parser)
    parser.add_argument(
        "--works", nargs="+", choices=WORKS, default=list(WORKS), help="default: all three"
    )
    parser.add_argument(
        "--shrink", type=positive, default=1, help="divide every size by this, to try it out"
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=4096, help="of a micro-batch (default %(default)s)"
    )
    add_threads(parser)
    add_work_dir(parser)
    return parse(parser, arguments)


def add_shapes(report: Report, folder: Path, dtype: str) -> None:
    """Rates of products in the model's own shapes: a decoding step, a micro-batch, the head."""
    size = work.ModelSize.of_folder(folder, dtype)
    hidden, inner, vocab = size.hidden, size.intermediate, size.head_weights // size.hidden
    shapes = {
        "32 rows, up": (32, hidden, inner),
        "64 rows, up": (64, hidden, inner),
        "64 rows, head": (64, hidden, vocab),
        "1024 rows, up": (1024, hidden, inner),
        "1024 rows, down": (1024, inner, hidden),
        "1024 rows, head": (1024, hidden, vocab),
    }
    for name, sizes in shapes.items():
        label = f"{dtype}: {name}"
        report.measures.append(product_rate(label, getattr(torch, dtype), sizes, REPEATS))


def measured_step(
    report: Report, name: str, args: argparse.Namespace, folder: Path, work_dir: Path
) -> tuple[Measure, dict[str, Work]]:
    """Seconds of our steps of one size, and their work."""
    sizes = shrunk(STEPS[name], args.shrink)
    count = WARM_UP + args.repeats
    ours = OurSteps(sizes, folder, args.dtype, args.max_tokens, args.threads, count)
    ours.prepare(work_dir)
    steps = ours.run()
    return add_steps(report, name, sizes, steps[WARM_UP:]), ours.least_work()


def shrunk(sizes: StepSizes, by: int) -> StepSizes:
    """Smaller sizes, for trying out."""
    return StepSizes(
        prompts=max(1, sizes.prompts // by),
        group_size=max(2, sizes.group_size // by),
        prompt_tokens=max(4, sizes.prompt_tokens // by),
        new_tokens=max(2, sizes.new_tokens // by),
    )


def measured_rollout(
    report: Report, args: argparse.Namespace, folder: Path
) -> tuple[Measure, dict[str, Work]]:
    """Seconds of our rounds of `rollout`, and their work."""
    policy = load_policy(folder, dtype=args.dtype)
    new_tokens, requests = max(2, NEW_TOKENS // args.shrink), max(1, REQUESTS // args.shrink)
    prompts = random_prompts(requests, max(4, PROMPT_TOKENS // args.shrink), policy.vocab_size)
    engine = Embedded(policy, requests, max(map(len, prompts)) + new_tokens)
    tokens = requests * new_tokens
    rounds = [tokens / engine.rate(prompts, new_tokens) for _ in range(args.repeats + 1)]
    size = work.ModelSize.of(policy.model)
    parts = {
        "prefill": work.prefill(size, prompts),
        "decode": work.decode(size, prompts, new_tokens),
    }
    return report.add("rollout", "s", rounds[1:]), parts


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    args = options(arguments)
    torch.set_num_threads(args.threads)
    report = Report(
        name="limits",
        measures_what="seconds of our work over what memory and arithmetic allow",
        against="the bound of this machine, measured in the same run",
        floor="none; it says what is left to win",
        aim="1x",
        machine=this_machine(args.threads),
        settings={"model": args.model, "dtype": args.dtype, "sizes divided by": args.shrink},
    )
    folder = resolve_model(args.model, progress=progress)
    before = measure_limits(REPEATS)
    done: dict[str, tuple[Measure, dict[str, Work]]] = {}
    with scratch(args.work_dir) as work_dir:
        for name in args.works:
            progress(name)
            if name in STEPS:
                done[name] = measured_step(report, name, args, folder, work_dir)
            else:
                done[name] = measured_rollout(report, args, folder)
    limits = both(before, measure_limits(REPEATS))
    for name, (seconds, parts) in done.items():
        add_bound(report, f"{name}: bound", parts, limits.best(args.dtype), seconds)
    report.measures += [limits.read, limits.copy, *limits.peaks.values()]
    add_shapes(report, folder, args.dtype)
    finish(report, args)
