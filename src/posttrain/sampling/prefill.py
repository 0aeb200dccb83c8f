"""Prompts that join the batch together: what they share is computed once, what is cached is not.

Rows are those of a prefix tree over all tokens of the sequences. A row is computed for the first
sequence that passes it and does not have it in the cache; full blocks that lie on one path are one
block for all, and tokens of a block that is not full are written once for each.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass

import numpy as np
import torch

from posttrain.data.prefix_tree import PrefixTree, build_prefix_tree
from posttrain.sampling.blocks import BlockStore
from posttrain.sampling.sequence import Sequence
from posttrain.training.paged import BLOCK, KVPool, PagedLayout
from posttrain.training.policy import Policy


@dataclass
class _Rows:
    """Rows [T] to compute, in an order in which nothing comes before what it reads; and M writes:
    the row and the slot of each."""

    token_ids: np.ndarray
    positions: np.ndarray
    sequences: np.ndarray
    write_rows: np.ndarray
    write_slots: np.ndarray


class Prefill:
    """The prompts of some sequences, computed in pieces."""

    def __init__(self, members: ListOf[Sequence], store: BlockStore) -> None:
        """Gives every member its blocks, some of them shared; the caller has seen to the room."""
        self.members = list(members)
        tree = build_prefix_tree([s.ids[: s.length] for s in self.members])
        self._assign_blocks(tree.paths, store)
        self._rows, computed = self._plan(tree)
        self._last = [int(computed[path[-1]]) for path in tree.paths]
        self._tables = tables_of(self.members)
        self._next = 0
        self._hidden: dict[int, torch.Tensor] = {}

    @property
    def num_rows(self) -> int:
        return len(self._rows.token_ids)

    @property
    def done(self) -> bool:
        return self._next == self.num_rows

    def step(self, policy: Policy, pool: KVPool, max_rows: int) -> int:
        """Compute at most `max_rows` more rows; returns how many."""
        rows, first = self._rows, self._next
        piece = slice(first, min(first + max_rows, self.num_rows))
        written = (rows.write_rows >= piece.start) & (rows.write_rows < piece.stop)
        layout = PagedLayout(
            pool,
            self._tables,
            rows.sequences[piece],
            rows.positions[piece],
            rows.write_slots[written],
            write_rows=rows.write_rows[written] - first,
        )
        hidden = policy.hidden(
            torch.from_numpy(rows.token_ids[piece]),
            torch.from_numpy(rows.positions[piece].astype(np.int64)),
            lambda _: layout,
        )
        for row in set(self._last):
            if piece.start <= row < piece.stop:
                self._hidden[row] = hidden[row - first].clone()
        self._next = piece.stop
        return piece.stop - piece.start

    def last_hidden(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Final states of the distinct last tokens, and which of them each member has."""
        distinct = {row: i for i, row in enumerate(dict.fromkeys(self._last))}
        owner = torch.tensor([distinct[row] for row in self._last])
        return torch.stack([self._hidden[row] for row in distinct]), owner

    def _assign_blocks(self, paths: ListOf[np.ndarray], store: BlockStore) -> None:
        """Blocks behind the cached ones, up to the end of each prompt."""
        block_at: dict[int, int] = {}
        for sequence, path in zip(self.members, paths, strict=True):
            for start in range(sequence.num_cached, sequence.length, BLOCK):
                full = start + BLOCK <= sequence.length
                node = int(path[start + BLOCK - 1]) if full else -1
                if full and node in block_at:
                    store.share([block_at[node]])
                    sequence.blocks.append(block_at[node])
                    continue
                block = store.allocate()
                assert block is not None, "admission counts blocks before it plans"
                sequence.blocks.append(block)
                if full:
                    block_at[node] = block

    def _plan(self, tree: PrefixTree) -> tuple[_Rows, np.ndarray]:
        """The rows, and the number of each tree row among them (-1: it is not computed)."""
        token_ids, paths = tree.token_ids, tree.paths
        owner = np.full(len(token_ids), -1, np.int32)
        position = np.zeros(len(token_ids), np.int32)
        writes: list[tuple[np.ndarray, np.ndarray]] = []
        written: set[int] = set()
        for n, (sequence, path) in enumerate(zip(self.members, paths, strict=True)):
            at = np.arange(sequence.num_cached, sequence.length)
            nodes = path[at]
            position[nodes] = at
            owner[nodes[owner[nodes] < 0]] = n
            blocks = np.asarray(sequence.blocks, np.int32)
            new = np.asarray([int(b) not in written for b in blocks[at // BLOCK]], np.bool_)
            writes.append((nodes[new], blocks[at[new] // BLOCK] * BLOCK + at[new] % BLOCK))
            written.update(blocks[sequence.num_cached // BLOCK :].tolist())
        chosen = np.flatnonzero(owner >= 0)
        computed = np.full(len(token_ids), -1, np.int64)
        computed[chosen] = np.arange(len(chosen))
        nodes, slots = (np.concatenate(part) for part in zip(*writes, strict=True))
        rows = _Rows(
            token_ids[chosen],
            position[chosen],
            owner[chosen],
            computed[nodes],
            slots.astype(np.int32),
        )
        return rows, computed


def tables_of(sequences: ListOf[Sequence]) -> np.ndarray:
    """Block tables [N, B] int32 of the sequences, 0 behind their ends."""
    width = max(len(s.blocks) for s in sequences)
    tables = np.zeros((len(sequences), width), np.int32)
    for row, sequence in zip(tables, sequences, strict=True):
        row[: len(sequence.blocks)] = sequence.blocks
    return tables
