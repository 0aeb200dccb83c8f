"""grpo-short, grpo-long-prompt: whole GRPO steps against TRL's GRPOTrainer.

Ours is a whole run as `posttrain train` makes it: episodes, graders in their processes, journal,
batch, learner, new weights for the sampler, their hash, metrics. TRL runs in an environment of its
own with what is fastest for it on a CPU (docs/performance.md). Both train on the same texts,
sample exactly as many tokens, and work alternately in one run. The first steps of each
are thrown away. The bound is what the products of matrices, the weights and keys that are read, and
the optimizer's state take at this machine's measured peak and bandwidth.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from posttrain.benchmarks.machine_limits import REPEATS, add_bound, both, measure_limits
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
from posttrain.benchmarks.peer import Peer, environment, script
from posttrain.benchmarks.report import Report, this_machine
from posttrain.errors import BenchmarkError, ConfigError
from posttrain.training.models import resolve_model

TRL: Mapping[str, tuple[str, ...]] = {
    "trl-bf16": ("--dtype", "bfloat16"),
    "trl-autocast": ("--dtype", "autocast"),
    "trl-fp32": ("--dtype", "float32"),
    "trl-bf16-continuous": ("--dtype", "bfloat16", "--continuous"),
}
"""What TRL may be run with: weights in bf16, fp32 weights under bf16 autocast, fp32; and its
continuous batching."""

WARM_UP = 2
"""First steps make caches, kernels and the optimizer's state."""


SHORT = StepSizes(prompts=4, group_size=8, prompt_tokens=44, new_tokens=32)
LONG_PROMPT = StepSizes(prompts=2, group_size=8, prompt_tokens=1000, new_tokens=64)


def short(arguments: Sequence[str]) -> None:
    """The command line of grpo-short."""
    _benchmark("grpo-short", SHORT, 32, ("4x TRL", "6x TRL"), arguments)


def long_prompt(arguments: Sequence[str]) -> None:
    """The command line of grpo-long-prompt."""
    _benchmark("grpo-long-prompt", LONG_PROMPT, 4, ("12x TRL", "20x TRL"), arguments)


def _options(
    name: str, sizes: StepSizes, batch: int, arguments: Sequence[str]
) -> tuple[argparse.Namespace, StepSizes]:
    parser = argument_parser(name, __doc__)
    add_model(parser)
    parser.add_argument("--prompts", type=positive, default=sizes.prompts, help="of a step")
    parser.add_argument("--group-size", type=positive, default=sizes.group_size)
    parser.add_argument("--prompt-tokens", type=positive, default=sizes.prompt_tokens)
    parser.add_argument("--new-tokens", type=positive, default=sizes.new_tokens)
    parser.add_argument(
        "--max-tokens", type=positive, default=4096, help="of a micro-batch of ours"
    )
    parser.add_argument(
        "--peers", nargs="+", choices=tuple(TRL), default=["trl-bf16"], help="default: trl-bf16"
    )
    parser.add_argument(
        "--trl-batch", type=positive, default=batch, help="sequences of a backward pass of TRL's"
    )
    parser.add_argument("--alone", action="store_true", help="against the bound only")
    add_threads(parser)
    add_work_dir(parser)
    args = parse(parser, arguments)
    given = StepSizes(args.prompts, args.group_size, args.prompt_tokens, args.new_tokens)
    if not args.alone and given.num_sequences % args.trl_batch:
        raise ConfigError(
            f"--trl-batch {args.trl_batch} does not divide the {given.num_sequences} sequences of "
            "a step; change one of them"
        )
    return args, given


def _benchmark(
    name: str, sizes: StepSizes, batch: int, goal: tuple[str, str], arguments: Sequence[str]
) -> None:
    args, sizes = _options(name, sizes, batch, arguments)
    torch.set_num_threads(args.threads)
    names = [] if args.alone else args.peers
    report = Report(
        name=name,
        measures_what="seconds of a whole GRPO step: rollout, grading, journal, learner, weights",
        against=", ".join([*names, "the bound of this machine"]),
        floor=goal[0],
        aim=goal[1],
        machine=this_machine(args.threads),
        settings={
            "model": args.model,
            "dtype": args.dtype,
            "prompts": sizes.prompts,
            "group size": sizes.group_size,
            "prompt tokens": sizes.prompt_tokens,
            "new tokens": sizes.new_tokens,
            "micro-batch tokens": args.max_tokens,
            "TRL's batch": args.trl_batch,
        },
    )
    folder = resolve_model(args.model, progress=progress)
    with scratch(args.work_dir) as work_dir, ExitStack() as stack:
        num_steps = WARM_UP + args.repeats
        ours = OurSteps(sizes, folder, args.dtype, args.max_tokens, args.threads, num_steps)
        ours.prepare(work_dir)
        before = measure_limits(REPEATS)
        peers = [stack.enter_context(_trl(peer, args, ours, work_dir)) for peer in names]
        theirs: dict[str, list[float]] = {peer.name: [] for peer in peers}

        def between(step: int) -> None:
            for peer in peers:
                theirs[peer.name].append(_step_s(peer, sizes))
            progress(f"step {step - WARM_UP} of {args.repeats}" if step > WARM_UP else "warm-up")

        steps = ours.run(between)
        mine = add_steps(report, "ours", sizes, steps[WARM_UP:])
        for peer, values in theirs.items():
            measured = report.add(peer, "s", values[WARM_UP:])
            report.add_ratio(f"{peer} over ours", measured, mine)
        limits = both(before, measure_limits(REPEATS))
        add_bound(report, "bound", ours.least_work(), limits.best(args.dtype), mine)
        report.measures += [limits.read, limits.copy, limits.peaks[args.dtype]]
    finish(report, args)


def _trl(name: str, args: argparse.Namespace, ours: OurSteps, work_dir: Path) -> Peer:
    """TRL with the settings that `name` stands for, on the same texts."""
    sizes, prompts = ours.sizes, work_dir / "texts.jsonl"
    prompts.write_text("".join(json.dumps(t) + "\n" for t in ours.texts), encoding="utf-8")
    command = [
        *(str(environment("trl")), str(script("trl_steps.py"))),
        *("--model", str(ours.folder), "--prompts", str(prompts)),
        *("--prompts-per-step", str(sizes.prompts), "--group-size", str(sizes.group_size)),
        *("--new-tokens", str(sizes.new_tokens), "--batch", str(args.trl_batch)),
        *("--max-tokens", str(sizes.prompt_tokens + sizes.new_tokens)),
        *("--threads", str(args.threads), *TRL[name]),
    ]
    return Peer(name, command, work_dir, {"OMP_NUM_THREADS": str(args.threads)})


def _step_s(peer: Peer, sizes: StepSizes) -> float:
    """Seconds of one step. Raises BenchmarkError when it was not the same work."""
    answer = peer.ask()
    if answer["tokens"] != sizes.num_sequences * sizes.new_tokens:
        raise BenchmarkError(
            f"peer {peer.name} sampled {answer['tokens']} tokens in a step, ours "
            f"{sizes.num_sequences * sizes.new_tokens}: there is no comparison; look why its "
            "sequences ended early"
        )
    return float(answer["seconds"])
