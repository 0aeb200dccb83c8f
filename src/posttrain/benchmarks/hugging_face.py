"""Tokens of transformers, one batch for each request: a peer of `posttrain bench rollout`.

It samples at temperature 1 from the whole vocabulary, no sequence ends early, and a log-prob comes
with each token. `generate` gets one left-padded batch with a KV cache, fused attention, and takes
log-probs from its scores without a second softmax over everything. Continuous batching pages its
cache, and its own log-probs are asked for.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from posttrain.benchmarks.channel import Channel

PAGE_TOKENS = 32


class Generate:
    """`generate` on one padded batch."""

    def __init__(self, folder: str, dtype: torch.dtype) -> None:
        self._model = load(folder, dtype)
        self._model.generation_config.eos_token_id = None  # else it stops at EOS

    def __call__(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
        """How many tokens have a log-prob."""
        width = max(len(p) for p in prompts)
        padded = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(padded)
        for row, prompt in enumerate(prompts):
            padded[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        config = GenerationConfig(
            **sampling(new_tokens),
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


class Continuous:
    """`generate_batch`, with a cache for exactly the requests of a batch."""

    def __init__(self, folder: str, dtype: torch.dtype) -> None:
        self._model = load(folder, dtype)

    def __call__(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
        """How many tokens have a log-prob."""
        pages = sum(-(-(len(p) + new_tokens) // PAGE_TOKENS) for p in prompts)
        outputs = self._model.generate_batch(
            [list(p) for p in prompts],
            generation_config=GenerationConfig(**sampling(new_tokens), eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=pages + len(prompts),
                max_batch_tokens=max(2048, len(prompts)),
                return_logprobs=True,
            ),
            progress_bar=False,
        )
        return sum(len(o.logprobs) for o in outputs.values())


def sampling(new_tokens: int) -> dict[str, Any]:
    """The whole distribution at temperature 1."""
    return {
        "max_new_tokens": new_tokens,
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "pad_token_id": 0,
    }


def load(folder: str, dtype: torch.dtype) -> Any:
    """The model as transformers runs it best on a CPU."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa"
    )
    return model.eval()


ENGINES = {"generate": Generate, "continuous": Continuous}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", choices=tuple(ENGINES), required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    channel = Channel()
    torch.set_num_threads(args.threads)
    engine = ENGINES[args.engine](args.model, getattr(torch, args.dtype))
    channel.answer({"ready": True})
    for request in channel.requests():
        started = time.perf_counter()
        count = engine(request["prompts"], request["new_tokens"])
        channel.answer({"seconds": time.perf_counter() - started, "tokens": count})


if __name__ == "__main__":
    main()
