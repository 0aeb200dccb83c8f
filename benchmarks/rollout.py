"""rollout: the embedded engine against Hugging Face `generate`, same weights, prompts and threads.

Both sample at temperature 1 from the whole vocabulary, ignore the end of sequence, and give a
log-prob for each token. `generate` gets its best plain CPU setting: one left-padded batch, KV
cache, fused attention, and log-probs from its own scores, one step at a time. The engine runs as in
a training run: exact attention and deterministic algorithms. vLLM on the same CPU is not measured
yet.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from _harness import (
    Report,
    add_threads,
    argument_parser,
    finish,
    positive,
    progress,
    this_machine,
)
from transformers import AutoModelForCausalLM, GenerationConfig

from posttrain.randomness import derive_seed, stream
from posttrain.sampling.embedded import EmbeddedSampler
from posttrain.training.models import resolve_model
from posttrain.training.policy import Policy, load_policy
from posttrain.types import Int32, SamplingParams

FIRST_PLAIN_ID = 20
"""Special tokens of the models used here lie below; prompts are ordinary tokens."""


def random_prompts(count: int, mean_tokens: int, vocab_size: int) -> list[Int32]:
    """Prompts [P] of ordinary ids, lengths within a quarter of the mean so that padding is real."""
    rng = stream(0, "bench prompts")
    lengths = rng.integers(max(1, mean_tokens * 3 // 4), mean_tokens * 5 // 4 + 1, count)
    return [rng.integers(FIRST_PLAIN_ID, vocab_size, n).astype(np.int32) for n in lengths]


class Embedded:
    """The engine of a training run."""

    def __init__(self, policy: Policy, num_requests: int) -> None:
        self._sampler = EmbeddedSampler(policy, max_batch=num_requests)
        self._round = 0

    def generate(self, prompts: Sequence[Int32], new_tokens: int) -> int:
        """All prompts at once; returns how many tokens have a log-prob."""
        self._round += 1
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        torch.use_deterministic_algorithms(True)
        try:
            completions = asyncio.run(self._gather(prompts, params))
        finally:
            torch.use_deterministic_algorithms(False)
        return sum(len(c.sampler_logprobs) for c in completions)

    async def _gather(self, prompts: Sequence[Int32], params: SamplingParams) -> list[Any]:
        seeds = [derive_seed(0, "bench", self._round, i) for i in range(len(prompts))]
        calls = (self._sampler.generate(p, params, s) for p, s in zip(prompts, seeds, strict=True))
        return await asyncio.gather(*calls)


class HuggingFace:
    """`generate` of transformers on a model of its own."""

    def __init__(self, policy: Policy) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            policy.folder, dtype=policy.dtype, attn_implementation="sdpa"
        ).eval()
        self._model.generation_config.eos_token_id = None  # else it stops at EOS

    def generate(self, prompts: Sequence[Int32], new_tokens: int) -> int:
        """All prompts as one batch; returns how many tokens have a log-prob."""
        width = max(len(p) for p in prompts)
        padded = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(padded)
        for row, prompt in enumerate(prompts):
            padded[row, width - len(prompt) :] = torch.from_numpy(prompt)
            mask[row, width - len(prompt) :] = 1
        config = GenerationConfig(
            max_new_tokens=new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
            use_cache=True,
            output_scores=True,
            return_dict_in_generate=True,
        )
        with torch.no_grad():
            out = self._model.generate(padded, attention_mask=mask, generation_config=config)
            chosen = out.sequences[:, width:]
            logprobs = [
                scores.gather(1, ids[:, None])[:, 0] - scores.logsumexp(-1)
                for scores, ids in zip(out.scores, chosen.unbind(1), strict=True)
            ]
        return torch.stack(logprobs).numel()


def rate(generate: Callable[[], int], expected: int) -> float:
    """Sampled tokens a second of one call."""
    started = time.perf_counter()
    count = generate()
    seconds = time.perf_counter() - started
    assert count == expected, f"{count} tokens were sampled, {expected} were asked for"
    return count / seconds


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="known name or a folder")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--requests", type=positive, default=64)
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument("--prompt-tokens", type=positive, default=44, help="mean length")
    parser.add_argument(
        "--siblings", type=positive, default=1, help="requests that share a prompt (default 1)"
    )
    add_threads(parser)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    report = Report(
        name="rollout",
        measures_what="sampled tokens a second, log-probs on, end of sequence ignored",
        against="Hugging Face generate; vLLM on a CPU is left to a later issue",
        floor="1.8x Hugging Face (1x vLLM eager)",
        aim="3x (1.3x vLLM compiled)",
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
    policy = load_policy(resolve_model(args.model, progress=progress), dtype=args.dtype)
    different = -(-args.requests // args.siblings)
    prompts = random_prompts(different, args.prompt_tokens, policy.vocab_size)
    prompts = [prompts[i // args.siblings] for i in range(args.requests)]
    ours, theirs = Embedded(policy, args.requests), HuggingFace(policy)
    expected = args.requests * args.new_tokens
    for engine in (ours, theirs):
        engine.generate(prompts, min(2, args.new_tokens))  # first use makes caches and kernels
    ours_rate, theirs_rate = [], []
    for _ in range(args.repeats):
        ours_rate.append(rate(lambda: ours.generate(prompts, args.new_tokens), expected))
        theirs_rate.append(rate(lambda: theirs.generate(prompts, args.new_tokens), expected))
    a = report.add("embedded engine", "tok/s", ours_rate)
    b = report.add("Hugging Face generate", "tok/s", theirs_rate)
    report.add_ratio("embedded over Hugging Face", a, b)
    finish(report, args)


if __name__ == "__main__":
    main()
