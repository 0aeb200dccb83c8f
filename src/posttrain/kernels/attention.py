"""Causal attention over the paths of a prefix tree, and over a pool of blocks, in bf16.

Tensor suffixes: T packed tokens, H query heads, K key-value heads, D head size, N sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from posttrain.kernels.library import MAX_HEAD_SIZE, checked, functions, pointer

BLOCK = 16
"""Tokens of a block: LANES of vectors.h."""


@dataclass(frozen=True, slots=True)
class Scores:
    """How products of queries and keys become scores."""

    scaling: float
    softcap: float | None
    window: int | None

    def arguments(self, heads: int, kv_heads: int, d: int) -> tuple[Any, ...]:
        """As the C functions take them."""
        threads = torch.get_num_threads()
        softcap, window = self.softcap or 0.0, self.window or 0
        return self.scaling, softcap, window, heads, kv_heads, d, threads


class TreeIndex:
    """Paths of sequences through shared rows, as flat int32 tensors; made once a forward pass."""

    def __init__(self, paths: Sequence[np.ndarray], first_owned: Sequence[int]) -> None:
        lengths = [len(path) for path in paths]
        flat = np.concatenate(paths) if paths else np.zeros(0)
        self.path = torch.from_numpy(flat.astype(np.int32))
        positions = [np.arange(n, dtype=np.int32) for n in lengths]
        self.position = torch.from_numpy(np.concatenate(positions or [np.zeros(0, np.int32)]))
        self.starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        self.first_owned = torch.tensor(list(first_owned), dtype=torch.int32)
        self.longest = max(lengths, default=0)
        self.num_rows = int(flat.max()) + 1 if len(flat) else 0

    def arguments(self) -> tuple[Any, ...]:
        """As the C functions take them."""
        tensors = (self.path, self.position, self.starts, self.first_owned)
        addresses = (pointer(tensor, dtype=torch.int32) for tensor in tensors)
        return (*addresses, len(self.first_owned), self.longest)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        index: TreeIndex,
        scores: Scores,
    ) -> torch.Tensor:
        out, lse = _forward(query, key, value, index, scores)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.index, ctx.scores = index, scores
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        rows, heads, d = query.shape
        dquery = torch.zeros_like(query)
        dkey, dvalue = torch.empty_like(key), torch.empty_like(value)
        failed = functions().tree_attention_backward(
            pointer(query), pointer(key), pointer(value), pointer(out),
            pointer(grads[0].contiguous(), query.shape), pointer(lse, dtype=torch.float32),
            *ctx.index.arguments(), rows,
            pointer(dquery), pointer(dkey), pointer(dvalue),
            *ctx.scores.arguments(heads, key.shape[1], d),
        )  # fmt: skip
        checked(failed)
        return dquery, dkey, dvalue, None, None


def tree_attention(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    index: TreeIndex,
    scores: Scores,
) -> torch.Tensor:
    """Attention of each sequence's own rows to its whole path, [T, H, D]; rows that no sequence
    owns get zeros."""
    query, key, value = (t.contiguous() for t in (query_THD, key_TKD, value_TKD))
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        return _TreeAttention.apply(query, key, value, index, scores)  # type: ignore[no-any-return]
    return _forward(query, key, value, index, scores)[0]


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    index: TreeIndex,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, d = query.shape
    kv_shape = (rows, key.shape[1], d)
    if index.num_rows > rows or heads % key.shape[1] or d > MAX_HEAD_SIZE:
        raise ValueError(f"attention: paths of {index.num_rows} rows, queries {query.shape}")
    out, lse = torch.zeros_like(query), torch.zeros(rows, heads)
    failed = functions().tree_attention(
        pointer(query), pointer(key, kv_shape), pointer(value, kv_shape), *index.arguments(),
        pointer(out), pointer(lse, dtype=torch.float32),
        *scores.arguments(heads, key.shape[1], d),
    )  # fmt: skip
    checked(failed)
    return out, lse


def padded_head_size(d: int) -> int:
    """Numbers that a token's keys take in a block, for each head."""
    return -(-d // BLOCK) * BLOCK


def pool_write(
    key_MKD: torch.Tensor,
    value_MKD: torch.Tensor,
    slots_M: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Store M tokens at `slots_M` int32 (block * 16 + place) of keys and values
    [blocks, K, 16 * padded D]."""
    count, kv_heads, d = key_MKD.shape
    pool = (keys.shape[0], kv_heads, BLOCK * padded_head_size(d))
    functions().pool_write(
        pointer(key_MKD.contiguous()), pointer(value_MKD.contiguous(), key_MKD.shape),
        pointer(slots_M, [count], torch.int32), pointer(keys, pool), pointer(values, pool),
        count, kv_heads, d, padded_head_size(d), torch.get_num_threads(),
    )  # fmt: skip


def pool_attention(
    query_THD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables_NB: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    starts: torch.Tensor,
    scores: Scores,
) -> torch.Tensor:
    """Attention [T, H, D] of rows to the blocks of their sequences, all index tensors int32.

    Sequence n owns `rows[starts[n]:starts[n + 1]]`, each the query at the position of the same
    place in `positions`. Rows that no sequence owns get zeros.
    """
    query_THD = query_THD.contiguous()
    _, heads, d = query_THD.shape
    out = torch.zeros_like(query_THD)
    pool = (keys.shape[0], keys.shape[1], BLOCK * padded_head_size(d))
    index = (pointer(t, dtype=torch.int32) for t in (rows, positions, starts))
    failed = functions().pool_attention(
        pointer(query_THD), pointer(keys, pool), pointer(values, pool),
        pointer(tables_NB, [len(starts) - 1, tables_NB.shape[1]], torch.int32),
        tables_NB.shape[1], *index, len(starts) - 1, pointer(out),
        *scores.arguments(heads, keys.shape[1], d),
    )  # fmt: skip
    checked(failed)
    return out
