from collections import Counter
from math import factorial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.permutation import Permutation


@given(size=st.integers(0, 300), seed=st.integers(0, 2**63 - 1))
@settings(max_examples=60, deadline=None)
def test_every_index_comes_exactly_once(size: int, seed: int) -> None:
    order = Permutation(size, seed)
    assert sorted(order[i] for i in range(size)) == list(range(size))


def test_an_order_of_a_trillion_costs_no_memory_and_repeats_nothing() -> None:
    order = Permutation(10**12 + 7, seed=3)
    values = [order[i] for i in range(500)]
    assert len(set(values)) == 500
    assert all(0 <= value < len(order) for value in values)
    assert max(values) > 9 * 10**11  # spread over the range, not a run near its start


@pytest.mark.parametrize(("size", "chi2_max"), [(2, 11), (3, 21), (4, 50), (5, 174)])
def test_every_order_of_a_few_things_is_as_likely(size: int, chi2_max: float) -> None:
    """A bias here would show some tasks late in every epoch. Limits: p < 0.001."""
    expected = 20
    seeds = range(expected * factorial(size))
    seen = Counter(tuple(Permutation(size, seed)[i] for i in range(size)) for seed in seeds)
    assert len(seen) == factorial(size)
    assert sum((count - expected) ** 2 / expected for count in seen.values()) < chi2_max


def test_another_seed_is_another_order() -> None:
    orders = {tuple(Permutation(10, seed)[i] for i in range(10)) for seed in range(20)}
    assert len(orders) == 20


@pytest.mark.parametrize("index", [-1, 4])
def test_an_index_outside_is_an_error(index: int) -> None:
    with pytest.raises(IndexError, match=f"{index}"):
        Permutation(4, 0)[index]


def test_the_order_is_the_same_on_every_machine_and_in_every_release() -> None:
    """A resumed run and a held-out split depend on it: a change here is a breaking change."""
    order = Permutation(10, seed=1)
    assert [order[i] for i in range(10)] == [3, 8, 4, 5, 7, 1, 9, 6, 2, 0]
