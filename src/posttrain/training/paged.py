"""Keys and values of running sequences in blocks of a pool, and attention over them.

A sequence's tokens lie in the blocks that its table lists, in order. Several tables may list one
block: what sequences share is kept once. One layout serves decoding (a query for each sequence) and
prefill (many).

Tensor suffixes as in `training.attention`; B blocks of a table.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from posttrain.kernels.attention import BLOCK, padded_head_size, pool_attention, pool_write
from posttrain.training.attention import Core, bucket_of, query_bucket

__all__ = ["BLOCK", "KVPool", "PagedLayout"]


class KVPool:
    """Static buffers of `num_blocks` blocks of 16 tokens in each layer, made at the first write.

    What was never written is zero: it is masked, but 0 times NaN is NaN. A slot is
    block * 16 + place in the block. Where the kernels run, keys and values lie in their order
    ([blocks, K, 16 * padded D]), else as they come ([blocks, 16, K, D]).
    """

    def __init__(self, num_layers: int, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._keys: list[torch.Tensor | None] = [None] * num_layers
        self._values: list[torch.Tensor | None] = [None] * num_layers
        self.native = False

    @property
    def bytes(self) -> int:
        """What the buffers take."""
        held = (t for t in (*self._keys, *self._values) if t is not None)
        return sum(t.numel() * t.element_size() for t in held)

    def write(
        self,
        layer: int,
        slots_M: torch.Tensor,
        key_MKD: torch.Tensor,
        value_MKD: torch.Tensor,
        native: bool = False,
    ) -> None:
        """Store M tokens, token m in slot `slots_M[m]` (int32); `native` says of the first write in
        which order."""
        if self._keys[layer] is None:
            self.native = native
            self._keys[layer] = self._empty(key_MKD)
            self._values[layer] = self._empty(value_MKD)
        keys, values = self.buffers(layer)
        if self.native:
            pool_write(key_MKD, value_MKD, slots_M, keys, values)
            return
        index = slots_M.long()
        keys.view(-1, *keys.shape[2:])[index] = key_MKD
        values.view(-1, *values.shape[2:])[index] = value_MKD

    def buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer that was written."""
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None and values is not None
        return keys, values

    def gather(
        self, layer: int, tables_NB: torch.Tensor, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [N, K, size, D] of the blocks listed, zeros behind them."""
        assert not self.native
        pieces = []
        for buffer in self.buffers(layer):
            tokens = buffer[tables_NB.long()].flatten(1, 2).transpose(1, 2)
            pieces.append(F.pad(tokens, (0, 0, 0, size - tokens.shape[2])))
        return pieces[0], pieces[1]

    def clear(self) -> None:
        """Zero everything: after a failure, what is left behind may not be numbers."""
        self._keys: list[torch.Tensor | None] = [None] * len(self._keys)
        self._values: list[torch.Tensor | None] = [None] * len(self._values)

    def _empty(self, like_MKD: torch.Tensor) -> torch.Tensor:
        kv_heads, d = like_MKD.shape[1:]
        if self.native:
            return _zeros((self.num_blocks, kv_heads, BLOCK * padded_head_size(d)), like_MKD)
        return _zeros((self.num_blocks, BLOCK, kv_heads, d), like_MKD)


def _zeros(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """The system gives a page when it is first written, so room costs nothing."""
    raw = np.zeros(int(np.prod(shape)) * like.element_size(), np.uint8)
    return torch.from_numpy(raw).view(like.dtype).view(shape)


class PagedLayout:
    """New rows of N sequences: written to their slots, then attending to all tokens of their own
    sequence up to themselves.

    `tables` [N, B]: blocks of each sequence. Row t of the pass is the token at `positions[t]` of
    sequence `sequences[t]`; rows of a sequence are in order. Row `write_rows[m]` goes to
    `slots[m]`, by default every row to the slot of its own number. Index arrays are int32,
    write_rows int64. Rows behind them (row padding) get zeros.
    """

    def __init__(
        self,
        pool: KVPool,
        tables: np.ndarray,
        sequences: np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray,
        write_rows: np.ndarray | None = None,
    ) -> None:
        self._write_rows = None if write_rows is None else torch.from_numpy(write_rows)
        self._pool = pool
        self._tables = torch.from_numpy(tables)
        self._slots = torch.from_numpy(slots)
        self._sequences, self._positions = sequences, positions
        order = np.argsort(sequences, kind="stable").astype(np.int32)
        counts = np.bincount(sequences, minlength=len(tables))
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self._rows = torch.from_numpy(order)
        self._row_positions = torch.from_numpy(positions[order])
        self._starts = torch.from_numpy(starts)

    def attend(
        self,
        layer: int,
        query_TKRD: torch.Tensor,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor,
        core: Core,
    ) -> torch.Tensor:
        chosen = slice(len(self._slots)) if self._write_rows is None else self._write_rows
        native = core.native(query_TKRD, key_TKD, value_TKD)
        self._pool.write(layer, self._slots, key_TKD[chosen], value_TKD[chosen], native)
        if native:
            keys, values = self._pool.buffers(layer)
            out = pool_attention(
                query_TKRD.flatten(1, 2), keys, values, self._tables, self._rows,
                self._row_positions, self._starts, core.scores,
            )  # fmt: skip
            return out.view_as(query_TKRD)
        output = torch.zeros_like(query_TKRD)
        for tables, size, rows, real, positions in self._padded:
            keys, values = self._pool.gather(layer, tables, size)
            out = core(query_TKRD[rows].permute(0, 2, 3, 1, 4), keys, values, positions)
            output[rows[real]] = out.permute(0, 3, 1, 2, 4)[real]
        return output

    @cached_property
    def _padded(self) -> list[tuple[torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Sequences of equal padded size: tables, number of keys, rows [n, Q] of the queries, which
        of them are real, and their positions. The keys of a sequence are padded by its own length,
        never by a neighbour's."""
        members: dict[tuple[int, int], list[int]] = defaultdict(list)
        bounds = self._starts.tolist()
        for n, (start, stop) in enumerate(pairwise(bounds)):
            if start < stop:
                last = int(self._row_positions[stop - 1])
                members[query_bucket(stop - start), bucket_of(last + 1)].append(n)
        padded = []
        for (num_queries, num_keys), chosen in sorted(members.items()):
            rows = torch.zeros(len(chosen), num_queries, dtype=torch.long)
            positions = torch.zeros(len(chosen), num_queries, dtype=torch.long)
            real = torch.zeros(len(chosen), num_queries, dtype=torch.bool)
            for i, n in enumerate(chosen):
                own = slice(bounds[n], bounds[n + 1])
                count = bounds[n + 1] - bounds[n]
                rows[i, :count], real[i, :count] = self._rows[own].long(), True
                positions[i, :count] = self._row_positions[own].long()
            tables = self._tables[chosen][:, : num_keys // BLOCK]
            padded.append((tables, num_keys, rows, real, positions))
        return padded
