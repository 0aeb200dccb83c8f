"""Tokens of vLLM on a CPU, one batch for each request: a peer of `posttrain bench rollout`.

It runs in an environment of its own (setup.sh vllm). A log-prob comes with every token, no sequence
ends early, and what one batch left in the prefix cache is dropped before the next.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from posttrain.benchmarks.channel import Channel

SPIN_S = 1.5
"""Its worker reads its queue in a tight loop for a second after its last use, which would take a
core from whoever is measured next."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True, help="of prompt and completion")
    parser.add_argument("--compiled", action="store_true")
    return parser.parse_args()


def served(llm: LLM, request: dict[str, Any]) -> dict[str, Any]:
    """Seconds of one batch, and how many of its tokens have a log-prob."""
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in request["prompts"]]
    count = request["new_tokens"]
    params = SamplingParams(
        temperature=1.0,
        top_p=1.0,
        max_tokens=count,
        min_tokens=count,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
    )
    llm.reset_prefix_cache()
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    time.sleep(SPIN_S)
    return {"seconds": seconds, "tokens": sum(len(o.outputs[0].logprobs or ()) for o in outputs)}


def main() -> None:
    args = parse()
    channel = Channel()
    llm = LLM(
        model=args.model,
        dtype=args.dtype,
        max_model_len=args.max_tokens,
        max_num_seqs=args.requests,
        enforce_eager=not args.compiled,
        logprobs_mode="processed_logprobs",
    )
    channel.answer({"ready": True})
    for request in channel.requests():
        channel.answer(served(llm, request))


if __name__ == "__main__":
    main()
