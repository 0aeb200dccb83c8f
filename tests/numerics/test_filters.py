"""Which groups and which tokens stay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.algo.filters import dynamic_sampling_keep, keep_probability, top_fraction
from posttrain.algo.shaping.kimi_length import kimi_length


@pytest.mark.parametrize(
    ("correct", "kept"),
    [
        ([], False),
        ([True], False),
        ([False] * 4, False),
        ([True] * 4, False),
        ([True, False], True),
    ],
)
def test_a_group_stays_when_some_but_not_all_are_correct(correct, kept):
    assert dynamic_sampling_keep(torch.tensor(correct, dtype=torch.bool)) is kept


def test_the_outcome_decides_and_not_the_shaped_reward():
    """A length term makes every std non-zero; the group still teaches nothing."""
    correct, lengths = torch.ones(3, dtype=torch.bool), torch.tensor([10.0, 20.0, 30.0])
    rewards = 1 + kimi_length(lengths, correct, coef=0.25)
    assert float(rewards.std()) > 0.1 and not dynamic_sampling_keep(correct)


def test_probability_that_a_group_stays(vector, dtype, matches):
    case = vector("dynamic_sampling_keep_prob")
    found = keep_probability(torch.tensor(case["inputs"]["p"], dtype=dtype), case["inputs"]["G"])
    matches(found, case["expected"], case["tolerance"])


def test_the_probability_counts_the_groups_that_are_kept():
    p, size = 0.3, 3
    total = 0.0
    for code in range(2**size):
        correct = torch.tensor([bool(code >> i & 1) for i in range(size)])
        chance = p ** int(correct.sum()) * (1 - p) ** int((~correct).sum())
        total += chance * dynamic_sampling_keep(correct)
    assert total == pytest.approx(float(keep_probability(torch.tensor(p), size)), abs=1e-6)
    assert keep_probability(torch.tensor([0.0, 1.0]), 8).tolist() == [0.0, 0.0]
    assert keep_probability(torch.tensor([0.3]), 1).tolist() == pytest.approx([0.0], abs=1e-7)


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=30), st.floats(0.01, 1))
def test_the_top_fraction_holds_the_largest_and_all_their_equals(values, frac):
    tensor = torch.tensor(values, dtype=torch.float64)
    kept = top_fraction(tensor, frac)
    assert int(kept.sum()) >= max(1, round(frac * len(values)))
    if not kept.all():
        assert float(tensor[kept].min()) > float(tensor[~kept].max())
    smallest = tensor[kept].min()
    assert int((tensor > smallest).sum()) < max(1, round(frac * len(values)))


def test_the_top_fraction_of_nothing_is_nothing():
    assert top_fraction(torch.zeros(0), 0.2).tolist() == []
