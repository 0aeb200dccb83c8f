"""Advantages: hand values in both precisions, and what must not change them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algo.advantages import (
    enough_survivors,
    grpo,
    grpo_batch,
    is_zero_variance,
    leave_one_out,
)

REWARD_LISTS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0]), min_size=2, max_size=9)


def by_group(vector, dtype):
    """The vector's rewards cut into groups by id."""
    ids, rewards = vector["inputs"]["group_ids"], vector["inputs"]["rewards"]
    return [
        torch.tensor([r for r, i in zip(rewards, ids, strict=True) if i == g], dtype=dtype)
        for g in sorted(set(ids))
    ]


@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        ("adv_grpo_std_unbiased", grpo),
        ("adv_dr_grpo", lambda r: grpo(r, std="none")),
        ("adv_rloo", leave_one_out),
        ("adv_rloo_nonbinary", leave_one_out),
    ],
)
def test_each_estimator_gives_its_hand_value(name, estimator, vector, dtype, matches):
    case = vector(name)
    result = torch.cat([estimator(rewards_G) for rewards_G in by_group(case, dtype)])
    assert result.dtype == dtype
    matches(result, case["expected"], case["tolerance"])


def test_the_std_is_the_unbiased_one(vector):
    biased = torch.tensor(vector("adv_grpo_std_biased")["expected"], dtype=torch.float64)
    ours = torch.cat([grpo(r) for r in by_group(vector("adv_grpo_std_biased"), torch.float64)])
    assert not torch.allclose(ours, biased, atol=1e-2)
    scale = (3 / 4) ** 0.5
    assert torch.allclose(ours, biased * scale, atol=1e-5)


@pytest.mark.parametrize(
    "estimator",
    [leave_one_out, grpo, lambda r: grpo(r, std="none"), lambda r: grpo_batch([r])[0]],
)
def test_a_singleton_gets_zero_and_not_its_raw_reward(estimator, vector, dtype, matches):
    case = vector("adv_singleton_group")
    rewards_G = torch.tensor(case["inputs"]["rewards"], dtype=dtype)
    matches(estimator(rewards_G), [case["expected"]["recommended"]], case["tolerance"])


def test_the_mean_size_of_an_advantage_is_what_a_binomial_gives(vector, matches):
    case = vector("expected_abs_advantage")
    size, means = case["inputs"]["G"], []
    for p in case["inputs"]["p"]:
        mean = 0.0
        for outcome in itertools.product([0.0, 1.0], repeat=size):
            chance = p ** sum(outcome) * (1 - p) ** (size - sum(outcome))
            rewards_G = torch.tensor(outcome, dtype=torch.float64)
            mean += chance * float(grpo(rewards_G, std="none").abs().mean())
        means.append(mean)
    matches(torch.tensor(means, dtype=torch.float64), case["expected"], case["tolerance"])


def test_batch_std_is_over_the_raw_rewards_of_all_groups():
    # As TRL scale_rewards="batch": the flat group and the gap between the groups both count.
    groups = [torch.tensor([1.0, 0.0], dtype=torch.float64), torch.full((2,), 3.0).double()]
    std = torch.tensor([1.0, 0.0, 3.0, 3.0], dtype=torch.float64).std()
    mixed_G, flat_G = grpo_batch(groups)
    assert torch.allclose(mixed_G, torch.tensor([0.5, -0.5]).double() / (std + 1e-6), atol=1e-12)
    assert flat_G.tolist() == [0.0, 0.0]
    assert grpo_batch([]) == []


def test_float_noise_is_not_blown_up_to_an_advantage():
    noise_G = torch.tensor([0.3, 0.3 + 1e-7, 0.3 - 1e-7], dtype=torch.float64)
    assert grpo(noise_G, eps=1e-9).tolist() == [0.0, 0.0, 0.0]
    assert grpo_batch([noise_G], eps=1e-9)[0].tolist() == [0.0, 0.0, 0.0]
    assert is_zero_variance(noise_G)
    assert not is_zero_variance(torch.tensor([0.3, 0.3001], dtype=torch.float64))


def test_equal_rewards_give_exactly_zero_where_a_plain_mean_would_not(dtype):
    rewards_G = torch.full((3,), 0.1, dtype=dtype)
    for advantages_G in (leave_one_out(rewards_G), grpo(rewards_G, std="none")):
        assert advantages_G.tolist() == [0.0, 0.0, 0.0]


@settings(max_examples=50, deadline=None)
@given(REWARD_LISTS)
def test_rewards_shifted_by_ten_leave_advantages_identical(values):
    rewards_G = torch.tensor(values, dtype=torch.float64)
    for estimator in (leave_one_out, grpo, lambda r: grpo(r, std="none")):
        assert torch.equal(estimator(rewards_G), estimator(rewards_G + 10.0))
    assert torch.equal(grpo_batch([rewards_G])[0], grpo_batch([rewards_G + 10.0])[0])


@settings(max_examples=50, deadline=None)
@given(REWARD_LISTS)
def test_advantages_of_a_group_sum_to_zero_and_follow_their_member(values):
    rewards_G = torch.tensor(values, dtype=torch.float64)
    for estimator in (leave_one_out, grpo, lambda r: grpo(r, std="none")):
        advantages_G = estimator(rewards_G)
        assert abs(float(advantages_G.sum())) < 1e-9
        assert torch.allclose(estimator(rewards_G.flip(0)).flip(0), advantages_G, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(REWARD_LISTS)
def test_leave_one_out_is_the_mean_of_the_others_by_definition(values):
    expected = [
        value - sum(values[:i] + values[i + 1 :]) / (len(values) - 1)
        for i, value in enumerate(values)
    ]
    result = leave_one_out(torch.tensor(values, dtype=torch.float64))
    assert torch.allclose(result, torch.tensor(expected, dtype=torch.float64), atol=1e-12)


def test_leave_one_out_is_unbiased_and_the_group_mean_is_short_by_its_known_factor():
    # Exact expectation over all groups of G=3 Bernoulli actions; d log pi / d p = (a-p)/(p(1-p)).
    p, size = 0.3, 3
    gradients = {"loo": 0.0, "mean": 0.0}
    for outcome in itertools.product([0.0, 1.0], repeat=size):
        chance = p ** sum(outcome) * (1 - p) ** (size - sum(outcome))
        rewards_G = torch.tensor(outcome, dtype=torch.float64)
        score_G = (rewards_G - p) / (p * (1 - p))
        gradients["loo"] += chance * float((leave_one_out(rewards_G) * score_G).mean())
        gradients["mean"] += chance * float((grpo(rewards_G, std="none") * score_G).mean())
    assert gradients["loo"] == pytest.approx(1.0, abs=1e-12)
    assert gradients["mean"] == pytest.approx((size - 1) / size, abs=1e-12)


@pytest.mark.parametrize(
    ("survivors", "size", "enough"),
    [(2, 2, True), (1, 2, False), (4, 8, True), (3, 8, False), (3, 5, True), (2, 5, False)],
)
def test_a_baseline_needs_two_survivors_and_half_the_group(survivors, size, enough):
    assert enough_survivors(survivors, size) is enough
