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


class GrowingTree:
    """A prefix tree under construction, which can say what a sequence would add."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] = {}
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._paths: list[NDArray[np.int64]] = []
        self._first_owned: list[int] = []

    @property
    def num_rows(self) -> int:
        return len(self._token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self._paths)

    def new_rows(self, token_ids: NDArray[np.integer]) -> int:
        """Rows that adding the sequence would create."""
        return len(token_ids) - len(self._shared(token_ids.tolist()))

    def add(self, token_ids: NDArray[np.integer]) -> None:
        """Lay out one sequence [L]."""
        ids = token_ids.tolist()
        path = self._shared(ids)
        self._first_owned.append(len(path))
        parent = path[-1] if path else -1
        for depth in range(len(path), len(ids)):
            row = len(self._token_ids)
            self._children[parent, ids[depth]] = row
            self._token_ids.append(ids[depth])
            self._positions.append(depth)
            path.append(row)
            parent = row
        self._paths.append(np.asarray(path, np.int64))

    def freeze(self) -> PrefixTree:
        return PrefixTree(
            np.asarray(self._token_ids, np.int64),
            np.asarray(self._positions, np.int64),
            tuple(self._paths),
            tuple(self._first_owned),
        )

    def _shared(self, ids: Sequence[int]) -> list[int]:
        """Rows of the longest prefix that is already there."""
        path: list[int] = []
        row = -1
        for token in ids:
            child = self._children.get((row, token))
            if child is None:
                break
            path.append(child)
            row = child
        return path


def build_prefix_tree(sequences: Sequence[NDArray[np.integer]]) -> PrefixTree:
    """The tree of all sequences, in order."""
    tree = GrowingTree()
    for ids in sequences:
        tree.add(ids)
    return tree.freeze()
