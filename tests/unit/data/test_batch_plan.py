"""The cut of a batch into micro-batches: within the budget, and no other cut is less work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.batch_plan import IMBALANCE, ROWS_PER_PASS, Part, plan
from posttrain.data.prefix_tree import build_prefix_tree

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)


def arrays(ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
    return [np.array(s, np.int32) for s in ids]


def planned(
    ids: Sequence[Sequence[int]], draws: Sequence[int], budget: int, **how: bool
) -> list[Part]:
    return plan(build_prefix_tree(arrays(ids)), draws, budget, **how)


def rows_of(ids: Sequence[Sequence[int]]) -> int:
    """Distinct prefixes, counted one by one."""
    return len({tuple(s[: n + 1]) for s in ids for n in range(len(s))})


def work_of(sizes: Sequence[int], budget: int) -> float:
    return sum(ROWS_PER_PASS + s * (1 + IMBALANCE * s / budget) for s in sizes)


def all_cuts(units: Sequence[Sequence[list[int]]]) -> Iterator[list[list[list[int]]]]:
    """Every way to cut the units into ranges; each range's sequences."""
    for bits in range(1 << (len(units) - 1)):
        parts = [list(units[0])]
        for i, unit in enumerate(units[1:]):
            if bits >> i & 1:
                parts.append([])
            parts[-1] += unit
        yield parts


@given(ids=sequences, budget=st.integers(1, 40), draw_of=st.integers(1, 3), whole=st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_other_cut_within_the_budget_is_less_work(
    ids: list[list[int]], budget: int, draw_of: int, whole: bool
) -> None:
    draws = [i // draw_of for i in range(len(ids))]
    units = [[s for s, d in zip(ids, draws, strict=True) if d == draw] for draw in set(draws)]
    units = units if whole else [[s] for s in ids]
    parts = planned(ids, draws, budget, whole_groups=whole)
    allowed = [
        [rows_of(part) for part in cut]
        for cut in all_cuts(units)
        if all(rows_of(part) <= budget or part in units for part in cut)
    ]
    sizes = [rows_of([ids[i] for i in p.members]) for p in parts]
    assert sizes in allowed
    assert work_of(sizes, budget) <= min(work_of(s, budget) for s in allowed) + 1e-9


@given(ids=sequences, budget=st.integers(1, 40), any_order=st.booleans())
@settings(max_examples=80, deadline=None)
def test_what_is_computed_again_is_counted_and_no_sequence_is_lost(
    ids: list[list[int]], budget: int, any_order: bool
) -> None:
    parts = planned(ids, list(range(len(ids))), budget, any_order=any_order)
    members = [i for p in parts for i in p.members]
    assert (sorted(members) if any_order else members) == list(range(len(ids)))
    computed = sum(rows_of([ids[i] for i in p.members]) for p in parts)
    assert computed - sum(p.num_repeated_rows for p in parts) == rows_of(ids)


def test_a_cut_goes_between_groups_and_not_through_one() -> None:
    """Greedily, the second micro-batch would begin in the middle of the second group and compute
    its prompt of 50 tokens again."""
    prompts = [[9, g] + [100 + g] * 48 for g in range(4)]
    ids = [[*prompts[g], 7, i] for g in range(4) for i in range(8)]
    parts = planned(ids, [i // 8 for i in range(32)], 100)
    assert [p.members for p in parts] == [tuple(range(8 * g, 8 * g + 8)) for g in range(4)]
    assert [p.num_repeated_rows for p in parts] == [0, 1, 1, 1], "the first token of all"


def test_the_last_part_is_not_a_crumb() -> None:
    ids = [[i] * 10 for i in range(1, 6)]
    assert [len(p.members) for p in planned(ids, range(5), 40)] in ([3, 2], [2, 3])


def test_a_second_pass_is_not_made_to_save_less_than_it_costs() -> None:
    """Two halves are better balanced than one whole, and still more work."""
    ids = [[i] * 10 for i in range(1, 5)]
    assert [p.members for p in planned(ids, range(4), 40)] == [(0, 1, 2, 3)]


def test_environments_of_a_mixture_are_put_side_by_side_where_order_is_free() -> None:
    """Members are drawn in turns. Kept so, each micro-batch computes all three system messages."""
    systems = [[e] * 50 for e in (1, 2, 3)]
    ids = [[*systems[draw % 3], 10 + draw, i] for draw in range(12) for i in range(4)]
    draws = [i // 4 for i in range(len(ids))]
    kept, moved = (planned(ids, draws, 80, any_order=free) for free in (False, True))
    assert sum(p.num_repeated_rows for p in kept) > 300
    assert sum(p.num_repeated_rows for p in moved) == 0
    for part in moved:
        assert len({draws[i] % 3 for i in part.members}) == 1
        assert list(part.members) == sorted(part.members), "siblings, and draws alike, in order"


def test_an_order_that_saves_nothing_stays() -> None:
    ids = [[9, draw % 2, draw, i] for draw in range(4) for i in range(3)]
    parts = planned(ids, [i // 3 for i in range(12)], 100, any_order=True)
    assert [p.members for p in parts] == [tuple(range(12))]
