"""Attention over shared sequences and over a decoding cache, through transformers' interface.

The model sees one flat row of T tokens, so every linear layer works on real tokens only; this
module restores the sequences for attention. Keys are padded to a multiple of `KEY_BLOCK`, per
sequence, which makes a query's result a function of its own sequence alone: on a CPU in bf16 the
cached decode and the packed forward give the same bits (docs/numerics.md).

Tensor suffixes: T packed tokens, N sequences of a bucket, H query heads, K key-value heads,
R = H // K, Q queries, S keys, D head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from posttrain.errors import ModelError
from posttrain.kernels.attention import Scores, TreeIndex, tree_attention
from posttrain.kernels.library import MAX_HEAD_SIZE, available

KEY_BLOCK = 64
SMALL_PRODUCT = 16**3
"""Up to this many multiplications ATen leaves oneDNN for a bf16 kernel that adds in another order
(mkldnn_gemm_min_size in aten/src/ATen/native/mkldnn/Matmul.cpp). It counts the whole batch, so a
tiny model's lone sequence would round differently from one with neighbours."""
EXACT = "posttrain_exact"
FUSED = "posttrain_sdpa"


def query_bucket(length: int) -> int:
    """Queries are padded to a power of two, from 4 on: few shapes, little waste."""
    return max(4, 1 << (length - 1).bit_length())


def bucket_of(length: int) -> int:
    """`length` rounded up to a whole number of key blocks."""
    return -(-length // KEY_BLOCK) * KEY_BLOCK


class Layout(Protocol):
    """Says which tokens of the flat row attend to which keys."""

    def attend(
        self,
        layer: int,
        query_TKRD: torch.Tensor,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor,
        core: Core,
    ) -> torch.Tensor:
        """Output [T, K, R, D] for queries [T, K, R, D], keys and values [T, K, D]."""
        ...


@dataclass(frozen=True)
class Core:
    """The attention arithmetic of one layer: scaling, window, soft cap, exact or fused."""

    scaling: float
    window: int | None
    softcap: float | None
    fused: bool

    def native(self, *tensors: torch.Tensor) -> bool:
        """Whether the kernels compute this, for queries, keys and values of one head size."""
        sizes = {tensor.shape[-1] for tensor in tensors}
        fits = len(sizes) == 1 and max(sizes) <= MAX_HEAD_SIZE
        return not self.fused and fits and available(*tensors)

    @property
    def scores(self) -> Scores:
        """For the kernels."""
        return Scores(self.scaling, self.softcap, self.window)

    def __call__(
        self,
        query_NKRQD: torch.Tensor,
        key_NKSD: torch.Tensor,
        value_NKSD: torch.Tensor,
        query_position_NQ: torch.Tensor,
    ) -> torch.Tensor:
        """Causal attention: the query at position p sees keys 0..p. Returns [N, K, R, Q, D]."""
        n, k, r, q, d = query_NKRQD.shape
        product = query_NKRQD.numel() * key_NKSD.shape[2]
        if product <= SMALL_PRODUCT and query_NKRQD.dtype == torch.bfloat16:
            spare = SMALL_PRODUCT // (product // q) + 1 - q
            query_NKRQD = F.pad(query_NKRQD, (0, 0, 0, spare))
            query_position_NQ = F.pad(query_position_NQ, (0, spare))
            return self(query_NKRQD, key_NKSD, value_NKSD, query_position_NQ)[..., :q, :]
        positions_S = torch.arange(key_NKSD.shape[2], device=query_NKRQD.device)
        seen_NQS = positions_S <= query_position_NQ[..., None]
        if self.window is not None:
            seen_NQS &= positions_S > query_position_NQ[..., None] - self.window
        if self.fused and self.softcap is None:
            out = F.scaled_dot_product_attention(
                query_NKRQD.reshape(n, k * r, q, d),
                key_NKSD,
                value_NKSD,
                attn_mask=seen_NQS[:, None],
                scale=self.scaling,
                enable_gqa=r > 1,
            )
            return out.reshape(n, k, r, q, d)
        scores = query_NKRQD.reshape(n, k, r * q, d) @ key_NKSD.transpose(-1, -2)
        scores = scores.view(n, k, r, q, -1).float() * self.scaling
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~seen_NQS[:, None, None], float("-inf"))
        weights = torch.softmax(scores, dim=-1).to(value_NKSD.dtype)
        return (weights.view(n, k, r * q, -1) @ value_NKSD).view(n, k, r, q, d)


class TreeLayout:
    """Sequences as paths through shared rows (`data.prefix_tree`), in the first rows given.

    A sequence attends with the queries of the rows it owns to the keys of its whole path. Rows that
    no path reaches (row padding) get zeros.
    """

    def __init__(
        self,
        paths: Sequence[np.ndarray],
        first_owned: Sequence[int],
        num_rows: int,
    ) -> None:
        self._paths, self._first_owned, self._num_rows = paths, first_owned, num_rows

    @cached_property
    def _index(self) -> TreeIndex:
        return TreeIndex(self._paths, self._first_owned)

    @cached_property
    def _padded(self) -> tuple[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], torch.Tensor]:
        """Buckets of padded query rows, key rows and query positions; where a row's output is."""
        paths, first_owned, num_rows = self._paths, self._first_owned, self._num_rows
        buckets: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        members: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, (path, first) in enumerate(zip(paths, first_owned, strict=True)):
            if first < len(path):
                members[query_bucket(len(path) - first), bucket_of(len(path))].append(i)
        pad_row = num_rows  # one zero row is appended behind the rows
        restore = np.full(num_rows, -1, np.int64)
        offset = 0
        for (num_queries, num_keys), chosen in sorted(members.items()):
            queries = np.full((len(chosen), num_queries), pad_row, np.int64)
            keys = np.full((len(chosen), num_keys), pad_row, np.int64)
            positions = np.zeros((len(chosen), num_queries), np.int64)
            for i, member in enumerate(chosen):
                path, first = paths[member], first_owned[member]
                owned = path[first:]
                queries[i, : len(owned)] = owned
                keys[i, : len(path)] = path
                positions[i, : len(owned)] = np.arange(first, len(path))
                restore[owned] = offset + i * num_queries + np.arange(len(owned))
            buckets.append(
                (torch.from_numpy(queries), torch.from_numpy(keys), torch.from_numpy(positions))
            )
            offset += queries.size
        restore[restore < 0] = offset  # reads the zero row appended behind the outputs
        return buckets, torch.from_numpy(restore)

    def attend(
        self,
        layer: int,
        query_TKRD: torch.Tensor,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor,
        core: Core,
    ) -> torch.Tensor:
        if core.native(query_TKRD, key_TKD, value_TKD):
            flat = query_TKRD.flatten(1, 2)
            out = tree_attention(flat, key_TKD, value_TKD, self._index, core.scores)
            return out.view_as(query_TKRD)
        buckets, restore = self._padded
        query, key, value = (_with_zero_row(t) for t in (query_TKRD, key_TKD, value_TKD))
        outputs = []
        for queries, keys, positions in buckets:
            out = core(
                _rows(query, queries).permute(0, 2, 3, 1, 4),
                _rows(key, keys).transpose(1, 2),
                _rows(value, keys).transpose(1, 2),
                positions,
            )
            outputs.append(out.permute(0, 3, 1, 2, 4).reshape(-1, *query_TKRD.shape[1:]))
        return _rows(_with_zero_row(torch.cat(outputs)), restore)


def _rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """tensor[index] along the first dimension, with a backward pass that adds rows in order."""
    chosen = tensor.index_select(0, index.reshape(-1))
    return chosen.view(*index.shape, *tensor.shape[1:])


def _with_zero_row(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])])


def _attention(fused: bool) -> Any:
    def forward(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        layout: Layout | None = None,
        s_aux: torch.Tensor | None = None,
        **_unused: Any,
    ) -> tuple[torch.Tensor, None]:
        if layout is None:
            raise ModelError("packed attention was called without a layout; use Policy.hidden")
        if s_aux is not None:
            raise ModelError(f"{type(module).__name__} uses attention sinks, not supported yet")
        heads, rows, head_dim = query.shape[1:]
        kv_heads = key.shape[1]
        core = Core(scaling or head_dim**-0.5, sliding_window, softcap, fused)
        out = layout.attend(
            module.layer_idx,
            query[0].transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, head_dim),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            core,
        )
        return out.reshape(1, rows, heads, -1), None

    return forward


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def register() -> None:
    """Make both implementations known to transformers. Calling it again changes nothing."""
    for name, fused in ((EXACT, False), (FUSED, True)):
        AttentionInterface.register(name, _attention(fused))
        AttentionMaskInterface.register(name, _no_mask)
