"""Operations and bytes that a piece of work takes at least, from its sizes alone.

Counted are the products of matrices and attention, the weights that a pass reads, keys and values,
and the optimizer's state: what no program for the same model can leave out. A multiplication and
its addition are two operations. What is shared (prompts of siblings) is counted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.data.prefix_tree import build_prefix_tree
from posttrain.types import Int32


@dataclass(frozen=True, slots=True)
class Limits:
    """What a machine can do: operations a second of matrix products, bytes a second."""

    peak_flops: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Work:
    """`passes` are pairs of operations and bytes that must happen one after the other."""

    passes: tuple[tuple[float, float], ...]

    @property
    def flops(self) -> float:
        return sum(flops for flops, _ in self.passes)

    @property
    def bytes(self) -> float:
        return sum(moved for _, moved in self.passes)

    def __add__(self, other: Work) -> Work:
        return Work(self.passes + other.passes)

    def least_s(self, limits: Limits) -> float:
        """Seconds below which it cannot be done: each pass waits for arithmetic or for memory.

        Example:
            >>> Work(((10.0, 1.0), (2.0, 8.0))).least_s(Limits(peak_flops=2.0, bandwidth=4.0))
            7.0
        """
        return sum(max(f / limits.peak_flops, b / limits.bandwidth) for f, b in self.passes)


NOTHING = Work(())


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A dense decoder: numbers of weights in matrix products, and what a key takes."""

    num_layers: int
    hidden: int
    intermediate: int
    layer_weights: int  # of all layers
    head_weights: int
    num_parameters: int
    attention_width: int  # query heads x head size
    kv_width: int  # key heads x head size
    itemsize: int

    @staticmethod
    def of_folder(folder: Path, dtype: str) -> ModelSize:
        """From a Hugging Face folder, whose weights are not read."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        model.tie_weights()
        return ModelSize.of(model.to(getattr(torch, dtype)))

    @staticmethod
    def of(model: Any) -> ModelSize:
        """From a transformers causal language model."""
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head = model.get_output_embeddings().weight
        embeddings = {id(head), id(model.get_input_embeddings().weight)}
        layers = [p for p in model.parameters() if p.dim() == 2 and id(p) not in embeddings]
        return ModelSize(
            num_layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layer_weights=sum(p.numel() for p in layers),
            head_weights=head.numel(),
            num_parameters=sum(p.numel() for p in model.parameters()),
            attention_width=heads * head_size,
            kv_width=kv_heads * head_size,
            itemsize=head.element_size(),
        )

    def forward_flops(self, rows: float, pairs: float, head_rows: float) -> float:
        """Of `rows` tokens that look at `pairs` keys altogether, with logits for some of them."""
        attention = 4 * self.num_layers * self.attention_width * pairs
        return 2 * (self.layer_weights * rows + self.head_weights * head_rows) + attention

    @property
    def weight_bytes(self) -> int:
        return (self.layer_weights + self.head_weights) * self.itemsize

    @property
    def kv_bytes(self) -> int:
        """Of one token's key and value in all layers."""
        return 2 * self.num_layers * self.kv_width * self.itemsize


def prefill(size: ModelSize, prompts: Sequence[Int32], num_cached: int = 0) -> Work:
    """Prompts in one pass, what they share once; of each, the first `num_cached` tokens are there
    already."""
    tree = build_prefix_tree([np.asarray(p, np.int64) for p in prompts])
    new = tree.position_ids >= num_cached
    pairs = float((tree.position_ids[new] + 1).sum())
    different = len({p.tobytes() for p in prompts})
    flops = size.forward_flops(float(new.sum()), pairs, different)
    return Work(((flops, size.weight_bytes + size.kv_bytes * float(tree.num_rows)),))


def decode(size: ModelSize, prompts: Sequence[Int32], new_tokens: int) -> Work:
    """The passes after the prefill, which gives the first token: one token for every prompt."""
    shared = build_prefix_tree([np.asarray(p, np.int64) for p in prompts]).num_rows
    lengths, count = float(sum(map(len, prompts))), len(prompts)
    passes = []
    for done in range(1, new_tokens):
        flops = size.forward_flops(count, lengths + count * done, count)
        keys = shared + count * done
        passes.append((flops, size.weight_bytes + size.kv_bytes * float(keys)))
    return Work(tuple(passes))


def rollout(size: ModelSize, prompts: Sequence[Int32], new_tokens: int) -> Work:
    """Prefill and decoding of all prompts together."""
    return prefill(size, prompts) + decode(size, prompts, new_tokens)


def learner(size: ModelSize, sequences: Sequence[Int32], num_loss_tokens: int) -> Work:
    """Forward and backward over sequences, whose last tokens are labels only, and AdamW on fp32
    masters. A backward pass takes twice the operations of its forward pass."""
    tree = build_prefix_tree([np.asarray(s[:-1], np.int64) for s in sequences])
    pairs = float((tree.position_ids + 1).sum())
    forward = size.forward_flops(tree.num_rows, pairs, num_loss_tokens)
    # Read: gradient, master, two moments. Written: master, two moments, and the rounded copy.
    rounded = size.itemsize if size.itemsize < 4 else 0
    optimizer = (size.itemsize + 3 * 4 + 3 * 4 + rounded) * size.num_parameters
    return Work(((3 * forward, 3 * size.weight_bytes), (0.0, float(optimizer))))


def grpo_step(
    size: ModelSize, prompts: Sequence[Int32], group_size: int, new_tokens: int
) -> tuple[Work, Work]:
    """Rollout and learner of one step; which tokens are sampled does not change the counts."""
    siblings = [p for p in prompts for _ in range(group_size)]
    answers = (np.full(new_tokens, -1 - i, np.int32) for i in range(len(siblings)))
    sequences = [np.concatenate([p, a]) for p, a in zip(siblings, answers, strict=True)]
    return (
        rollout(size, siblings, new_tokens),
        learner(size, sequences, len(siblings) * new_tokens),
    )
