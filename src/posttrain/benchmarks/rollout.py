"""rollout: the embedded engine against other engines, same weights, prompts and threads.

All sample at temperature 1 from the whole vocabulary, ignore the end of sequence, and give a
log-prob for each token. The engine runs as in a training run: exact attention and deterministic
algorithms. The others are processes of their own: Hugging Face `generate`, transformers' continuous
batching, and vLLM for CPUs in an environment of its own. The bound is what weights, keys and
products take at this machine's measured bandwidth and peak.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from posttrain.benchmarks import work
from posttrain.benchmarks.machine_limits import REPEATS, add_bound, both, measure_limits
from posttrain.benchmarks.options import (
    add_model,
    add_threads,
    argument_parser,
    finish,
    parse,
    positive,
    progress,
    scratch,
)
from posttrain.benchmarks.peer import Peer, environment, script
from posttrain.benchmarks.prompts import random_prompts
from posttrain.benchmarks.report import Report, this_machine
from posttrain.errors import BenchmarkError
from posttrain.randomness import derive_seed
from posttrain.sampling.embedded import EmbeddedSampler
from posttrain.training.models import resolve_model
from posttrain.training.policy import Policy, load_policy
from posttrain.types import Completion, Int32, SamplingParams

PEERS = ("generate", "continuous", "vllm", "vllm-compiled")

VLLM_KV_GIB = 1


class Embedded:
    """The engine of a training run. Every call is made under new weights: nothing is cached."""

    name = "embedded engine"

    def __init__(self, policy: Policy, num_requests: int, max_tokens: int) -> None:
        kv_tokens = num_requests * (max_tokens + 64)
        self._sampler = EmbeddedSampler(policy, max_batch=num_requests, kv_tokens=kv_tokens)
        self._round = 0

    def rate(self, prompts: Sequence[Int32], new_tokens: int) -> float:
        """Sampled tokens a second, all prompts at once."""
        self._round += 1
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        deterministic = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            started = time.perf_counter()
            completions = asyncio.run(self._gather(prompts, params))
            seconds = time.perf_counter() - started
        finally:
            torch.use_deterministic_algorithms(deterministic)
        count = sum(len(c.sampler_logprobs) for c in completions)
        return _checked(self.name, count, len(prompts) * new_tokens) / seconds

    async def _gather(self, prompts: Sequence[Int32], params: SamplingParams) -> list[Completion]:
        await self._sampler.load_weights(self._round)
        seeds = [derive_seed(0, "bench", self._round, i) for i in range(len(prompts))]
        calls = (self._sampler.generate(p, params, s) for p, s in zip(prompts, seeds, strict=True))
        return await asyncio.gather(*calls)


def peer_rate(peer: Peer, prompts: Sequence[Int32], new_tokens: int) -> float:
    """Sampled tokens a second of a peer, by its own clock."""
    answer = peer.ask(prompts=[p.tolist() for p in prompts], new_tokens=new_tokens)
    return _checked(peer.name, answer["tokens"], len(prompts) * new_tokens) / answer["seconds"]


def _checked(name: str, count: int, expected: int) -> int:
    if count != expected:
        raise BenchmarkError(
            f"{name} gave {count} tokens with a log-prob, {expected} were asked for: there is no "
            "comparison; look why its sequences ended early"
        )
    return count


def start(name: str, args: argparse.Namespace, folder: Path, work_dir: Path) -> Peer:
    """The process behind one of `PEERS`."""
    options = ["--model", str(folder), "--dtype", args.dtype]
    if name in ("generate", "continuous"):
        module = "posttrain.benchmarks.hugging_face"
        command = [sys.executable, "-m", module, "--engine", name, "--threads", str(args.threads)]
        return Peer(name, [*command, *options], work_dir)
    command = [str(environment("vllm")), str(script("vllm_tokens.py")), *options]
    command += ["--requests", str(args.requests), "--max-tokens", str(max_tokens(args))]
    if name == "vllm-compiled":
        command.append("--compiled")
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}" if args.threads > 1 else "0",
    }
    return Peer(name, command, work_dir, settings)


def max_tokens(args: argparse.Namespace) -> int:
    """Of a prompt and its completion."""
    return args.prompt_tokens * 5 // 4 + args.new_tokens + 1


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line's."""
    parser = argument_parser("rollout", __doc__)
    add_model(parser)
    parser.add_argument("--requests", type=positive, default=64)
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument("--prompt-tokens", type=positive, default=44, help="mean length")
    parser.add_argument(
        "--siblings", type=positive, default=1, help="requests that share a prompt (default 1)"
    )
    parser.add_argument(
        "--peers", nargs="+", choices=PEERS, default=list(PEERS[:3]), help="default: the first 3"
    )
    parser.add_argument("--alone", action="store_true", help="against the bound only")
    add_threads(parser)
    return parse(parser, arguments)


def report_for(args: argparse.Namespace, names: Sequence[str]) -> Report:
    """Without measures yet."""
    return Report(
        name="rollout",
        measures_what="sampled tokens a second, log-probs on, end of sequence ignored",
        against=", ".join([*names, "the bound of this machine"]),
        floor="1.8x Hugging Face generate, 1x vLLM eager",
        aim="3x, 1.3x vLLM compiled",
        machine=this_machine(args.threads),
        settings={
            "model": args.model,
            "dtype": args.dtype,
            "requests": args.requests,
            "new tokens": args.new_tokens,
            "prompt tokens": args.prompt_tokens,
            "siblings": args.siblings,
        },
    )


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    args = options(arguments)
    torch.set_num_threads(args.threads)
    names = [] if args.alone else args.peers
    report = report_for(args, names)
    folder = resolve_model(args.model, progress=progress)
    policy = load_policy(folder, dtype=args.dtype)
    different = -(-args.requests // args.siblings)
    prompts = random_prompts(different, args.prompt_tokens, policy.vocab_size)
    prompts = [prompts[i // args.siblings] for i in range(args.requests)]
    ours = Embedded(policy, args.requests, max_tokens(args))
    before = measure_limits(REPEATS)
    rates: dict[str, list[float]] = {name: [] for name in (ours.name, *names)}
    with scratch(None) as work_dir, ExitStack() as stack:
        peers: list[Any] = [
            stack.enter_context(start(name, args, folder, work_dir)) for name in names
        ]
        for repeat in range(args.repeats + 1):  # the first makes caches and kernels
            rates[ours.name].append(ours.rate(prompts, args.new_tokens))
            for peer in peers:
                rates[peer.name].append(peer_rate(peer, prompts, args.new_tokens))
            progress(f"round {repeat} of {args.repeats}" if repeat else "warm")
    mine = report.add(ours.name, "tok/s", rates[ours.name][1:])
    for name in names:
        theirs = report.add(name, "tok/s", rates[name][1:])
        report.add_ratio(f"{ours.name} over {name}", mine, theirs)
    tokens = args.requests * args.new_tokens
    seconds = report.add("  a round of ours", "s", [tokens / rate for rate in mine.values])
    size = work.ModelSize.of(policy.model)
    parts = {
        "prefill": work.prefill(size, prompts),
        "decode": work.decode(size, prompts, args.new_tokens),
    }
    limits = both(before, measure_limits(REPEATS))
    add_bound(report, "bound", parts, limits.best(args.dtype), seconds)
    report.measures += [limits.read, limits.copy, limits.peaks[args.dtype]]
    finish(report, args)
