"""Sequences that begin alike, laid out once.

A causal model's state at a token depends on the tokens before it alone. So sequences are merged
into a prefix tree: one row per distinct prefix, and each sequence is a path of rows. Siblings share
their prompt, groups share their system message, branches share their history; forward and backward
of a shared row happen once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """token_ids [T] int64 and position_ids [T] int64 of the rows; paths: for each sequence its
    rows [L] int64; first_owned: how many of a path's rows an earlier sequence brought (the rest
    are contiguous).

    Example:
        >>> t = build_prefix_tree([np.array([5, 6, 7]), np.array([5, 6, 8, 9])])
        >>> t.token_ids.tolist(), t.position_ids.tolist()
        ([5, 6, 7, 8, 9], [0, 1, 2, 2, 3])
        >>> t.paths[1].tolist(), t.first_owned
        ([0, 1, 3, 4], (0, 2))
    """

    token_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    paths: tuple[NDArray[np.int64], ...]
    first_owned: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class _Run:
    """Contiguous rows that one sequence brought: their tokens, from row `start` on. Sequences that
    leave it in the middle are found by the row they leave at, so it is never split."""

    start: int
    token_ids: NDArray[np.int64]


class GrowingTree:
    """A prefix tree under construction.

    Looking a sequence up compares whole runs of tokens; its cost in Python is the number of
    branches on its way, not its length.
    """

    def __init__(self) -> None:
        self._branches: dict[tuple[int, int], _Run] = {}  # (row before, first token) -> run
        self._num_rows = 0
        self._runs: list[_Run] = []
        self._positions: list[NDArray[np.int64]] = []
        self._paths: list[NDArray[np.int64]] = []
        self._first_owned: list[int] = []

    @property
    def num_rows(self) -> int:
        return self._num_rows

    def add(self, token_ids: NDArray[np.integer]) -> None:
        """Lay out one sequence [L]."""
        ids = np.asarray(token_ids, np.int64)
        shared = self._shared(ids)
        path = np.empty(len(ids), np.int64)
        depth = 0
        for start, stop in shared:
            path[depth : depth + stop - start] = np.arange(start, stop)
            depth += stop - start
        if depth < len(ids):
            run = _Run(self._num_rows, ids[depth:])
            before = shared[-1][1] - 1 if shared else -1
            self._branches[before, int(ids[depth])] = run
            self._runs.append(run)
            self._positions.append(np.arange(depth, len(ids)))
            self._num_rows += len(ids) - depth
            path[depth:] = np.arange(run.start, self._num_rows)
        self._paths.append(path)
        self._first_owned.append(depth)

    def freeze(self) -> PrefixTree:
        nothing = np.empty(0, np.int64)
        return PrefixTree(
            np.concatenate([nothing, *(run.token_ids for run in self._runs)]),
            np.concatenate([nothing, *self._positions]),
            tuple(self._paths),
            tuple(self._first_owned),
        )

    def _shared(self, ids: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Rows of the longest prefix that is already there, as ranges [start, stop)."""
        found: list[tuple[int, int]] = []
        row, depth = -1, 0
        while depth < len(ids):
            run = self._branches.get((row, int(ids[depth])))
            if run is None:
                break
            count = min(len(run.token_ids), len(ids) - depth)
            differs = run.token_ids[:count] != ids[depth : depth + count]
            first = int(differs.argmax())
            if differs[first]:
                count = first
            found.append((run.start, run.start + count))
            row, depth = run.start + count - 1, depth + count
        return found


def build_prefix_tree(sequences: Sequence[NDArray[np.integer]]) -> PrefixTree:
    """The tree of all sequences, in order."""
    tree = GrowingTree()
    for ids in sequences:
        tree.add(ids)
    return tree.freeze()
