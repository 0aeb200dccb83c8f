"""GRPO steps of TRL, one for each request: a peer of `posttrain bench grpo-short` and of its kind.

It runs in an environment of its own (setup.sh trl). What does not belong to a step is off: there is
no reference model (beta 0), no second iteration, no recomputation of layers, no log, no checkpoint,
no evaluation. No sequence ends early.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from posttrain.benchmarks.channel import Channel

MAX_STEPS = 10_000

PAGE_TOKENS = 32


class Reward:
    """Something that differs between siblings and costs nothing, and what it saw."""

    __name__ = "crc"

    def __init__(self) -> None:
        self.num_tokens = 0

    def __call__(self, completions: list[str], completion_ids: list[list[int]], **_: Any) -> Any:
        self.num_tokens += sum(map(len, completion_ids))
        return [zlib.crc32(c.encode()) / 2**32 for c in completions]


class OnRequest(TrainerCallback):
    """Waits for a request before each step, and answers with the step's seconds."""

    def __init__(self, channel: Channel, reward: Reward) -> None:
        self._channel, self._reward = channel, reward
        self._started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self._channel.answer({"ready": True})
        if self._channel.request() is None:
            raise EndOfRequests
        self._reward.num_tokens = 0
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = time.perf_counter() - self._started
        self._channel.answer({"seconds": seconds, "tokens": self._reward.num_tokens})


class EndOfRequests(Exception):
    """The only way out of a trainer that has steps left."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="one JSON string a line")
    parser.add_argument("--prompts-per-step", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "autocast"), required=True)
    parser.add_argument("--max-tokens", type=int, required=True, help="of prompt and completion")
    parser.add_argument("--batch", type=int, required=True, help="sequences of a backward pass")
    parser.add_argument("--continuous", action="store_true", help="generate in continuous batches")
    return parser.parse_args()


def config_of(args: argparse.Namespace) -> GRPOConfig:
    sequences = args.prompts_per_step * args.group_size
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=args.dtype == "autocast",
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=sequences // args.batch,
        generation_batch_size=sequences,
        num_generations=args.group_size,
        max_completion_length=args.new_tokens,
        generation_kwargs={"min_new_tokens": args.new_tokens},
        use_transformers_continuous_batching=args.continuous,
        # Room for exactly the sequences of a step: left to itself it takes most of the memory.
        transformers_continuous_batching_config={
            "page_size": PAGE_TOKENS,
            "num_blocks": sequences * (1 + -(-args.max_tokens // PAGE_TOKENS)),
            "max_batch_tokens": max(2048, sequences),
        }
        if args.continuous
        else None,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        beta=0.0,
        num_iterations=1,
        learning_rate=1e-6,
        max_steps=MAX_STEPS,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )


def main() -> None:
    args = parse()
    channel = Channel()
    torch.set_num_threads(args.threads)
    lines = args.prompts.read_text(encoding="utf-8").splitlines()
    rows = [{"prompt": json.loads(line)} for line in lines]
    model = AutoModelForCausalLM.from_pretrained(
        args.model,
        dtype=torch.bfloat16 if args.dtype == "bfloat16" else torch.float32,
        attn_implementation="sdpa",
    )
    reward = Reward()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config_of(args),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[OnRequest(channel, reward)],
    )
    if args.continuous:  # it does not know of a least number of tokens
        trainer.generation_config.eos_token_id = -1
    try:
        trainer.train()
    except EndOfRequests:
        return


if __name__ == "__main__":
    main()
