"""Where a batch is cut into micro-batches so that little is computed twice.

What a cut costs are the rows that both sides need: cutting between siblings computes their prompt
twice, cutting between groups only what all groups share. Found exactly, by dynamic programming
over the cuts (docs/decisions/0012-batch-plan.md says what is minimised and what was measured).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from posttrain.data.prefix_tree import PrefixTree

ROWS_PER_PASS = 64
"""What one more micro-batch costs beside its rows, in rows: every weight is read again, and every
gradient added up."""
IMBALANCE = 1 / 64
"""What a micro-batch of `max_rows` costs beside its rows, as a share of them. Half as many rows
cost a quarter, so where the rest is equal, cuts are even: no crumb at the end, a lower peak."""


@dataclass(frozen=True, slots=True)
class Part:
    """One micro-batch of a plan: numbers of its sequences, in order, and how many of its rows an
    earlier micro-batch computes too.

    Example:
        >>> Part((0, 2), num_repeated_rows=5).members
        (0, 2)
    """

    members: tuple[int, ...]
    num_repeated_rows: int


def plan(
    tree: PrefixTree,
    draws: Sequence[int],
    max_rows: int,
    *,
    whole_groups: bool = False,
    any_order: bool = False,
) -> list[Part]:
    """Parts of at most `max_rows` rows each, with the least work.

    `tree` holds all sequences, `draws` the draw of each. The work of a part is its rows, plus
    `ROWS_PER_PASS`, plus rows^2 / `max_rows` * `IMBALANCE`. With `whole_groups` neighbours of one
    draw are never cut apart. With `any_order` draws that begin alike are put side by side where
    that is less work; within a draw the order stays. What does not fit alone is a part of its own.

    Example:
        >>> from posttrain.data.prefix_tree import build_prefix_tree
        >>> ids = [[1, 2, 3, 4], [7, 8, 9, 4], [1, 2, 3, 5], [7, 8, 9, 5]]
        >>> tree = build_prefix_tree([np.array(i) for i in ids])
        >>> [part.members for part in plan(tree, range(4), max_rows=6, any_order=True)]
        [(0, 2), (1, 3)]
    """
    units = _units(draws, whole_groups)
    work, cuts = _cuts(tree, units, max_rows)
    if any_order:
        together = _side_by_side(tree, draws, units)
        other_work, other_cuts = _cuts(tree, together, max_rows)
        if other_work < work:
            units, cuts = together, other_cuts
    seen = np.zeros(tree.num_rows, np.bool_)
    parts = []
    for start, stop in cuts:
        members = tuple(member for unit in units[start:stop] for member in unit)
        rows = np.unique(np.concatenate([tree.paths[i] for i in members]))
        parts.append(Part(members, int(seen[rows].sum())))
        seen[rows] = True
    return parts


def _units(draws: Sequence[int], whole_groups: bool) -> list[range]:
    """Ranges of sequences that are never cut apart."""
    if not whole_groups:
        return [range(i, i + 1) for i in range(len(draws))]
    starts = [i for i, draw in enumerate(draws) if i == 0 or draw != draws[i - 1]]
    return [range(*ends) for ends in pairwise([*starts, len(draws)])]


def _side_by_side(tree: PrefixTree, draws: Sequence[int], units: Sequence[range]) -> list[range]:
    """Units in the order in which a walk through the tree meets the first of their draw. Rows are
    numbered by first appearance, so where nothing is shared the order stays."""
    place: dict[int, bytes] = {}
    for unit in units:
        path = tree.paths[unit.start]
        place.setdefault(draws[unit.start], path.astype(">i8").tobytes())
    return sorted(units, key=lambda unit: place[draws[unit.start]])


def _cuts(
    tree: PrefixTree, units: Sequence[range], max_rows: int
) -> tuple[float, list[tuple[int, int]]]:
    """The least work, and the ranges of units that need no more, each a part.

    rows[k] is the number of rows that units k up to the present one need together. A unit adds
    those of its rows that no unit from k on has used before, so for each row the last unit that
    used it is kept; along a path it only gets older.
    """
    num = len(units)
    rows = np.zeros(num, np.int64)
    last_used = np.full(tree.num_rows, -1, np.int64)
    cost = np.zeros(num + 1)
    first_of = np.zeros(num + 1, np.int64)
    oldest = 0
    for u, unit in enumerate(units):
        for member in unit:
            path = tree.paths[member]
            users, counts = _runs(last_used[path])
            rows[oldest : u + 1] += len(path)
            for user, count in zip(users, counts, strict=True):
                rows[oldest : user + 1] -= count
            last_used[path] = u
        while oldest < u and rows[oldest] > max_rows:
            oldest += 1
        sizes = rows[oldest : u + 1].astype(np.float64)
        work = cost[oldest : u + 1] + ROWS_PER_PASS + sizes * (1 + IMBALANCE * sizes / max_rows)
        best = len(work) - 1 - int(work[::-1].argmin())
        cost[u + 1], first_of[u + 1] = work[best], oldest + best
    ranges, stop = [], num
    while stop:
        ranges.append((int(first_of[stop]), stop))
        stop = ranges[-1][0]
    return float(cost[num]), ranges[::-1]


def _runs(values: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Values that repeat side by side, and how often each."""
    starts = np.append(0, np.flatnonzero(values[1:] != values[:-1]) + 1)
    return values[starts].tolist(), np.diff(np.append(starts, len(values))).tolist()
