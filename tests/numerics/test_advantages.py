"""Advantages of whole groups: hand values in both precisions, and what must not change them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algo.advantages.dr_grpo import dr_grpo
from posttrain.algo.advantages.gdpo import gdpo
from posttrain.algo.advantages.gpg import gpg
from posttrain.algo.advantages.grpo import grpo
from posttrain.algo.advantages.max_rl import max_rl
from posttrain.algo.advantages.opo import opo
from posttrain.algo.advantages.pass_at_k import pass_at_k
from posttrain.algo.advantages.reinforce import reinforce
from posttrain.algo.advantages.remax import remax
from posttrain.algo.advantages.rloo import rloo
from posttrain.algo.groups import enough_survivors, is_zero_variance
from posttrain.errors import ConfigError

REWARD_LISTS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0]), min_size=2, max_size=9)
LENGTHS = torch.arange(1.0, 10.0, dtype=torch.float64)

# Every estimator whose baseline is the group's own rewards, as a function of them.
OF_GROUP = {
    "rloo": rloo,
    "grpo": grpo,
    "grpo_population": lambda r: grpo(r, std_estimator="population"),
    "grpo_none": lambda r: grpo(r, std="none"),
    "grpo_batch": lambda r: grpo(r, [r], std="batch"),
    "dr_grpo": dr_grpo,
    "opo": lambda r: opo(r, LENGTHS[: len(r)].to(r.dtype)),
    "gpg": lambda r: gpg(r, [r]),
    "pass_at_k": pass_at_k,
    "gdpo": lambda r: gdpo(r[:, None], [r[:, None]], torch.ones(1, dtype=r.dtype)),
}
SHIFT_FREE = [name for name in OF_GROUP if name != "gdpo"]  # to the last digit
CENTRED = ["rloo", "grpo", "grpo_population", "grpo_none", "grpo_batch", "dr_grpo", "gpg", "gdpo"]
each = pytest.mark.parametrize("name", OF_GROUP)


def by_group(vector, dtype):
    """The vector's rewards cut into groups by id."""
    ids, rewards = vector["inputs"]["group_ids"], vector["inputs"]["rewards"]
    return [
        torch.tensor([r for r, i in zip(rewards, ids, strict=True) if i == g], dtype=dtype)
        for g in sorted(set(ids))
    ]


def of_groups(groups):
    """A gradient-free expectation helper: all 0/1 outcomes of a size, with their chances."""
    size, p = groups
    for outcome in itertools.product([0.0, 1.0], repeat=size):
        chance = p ** sum(outcome) * (1 - p) ** (size - sum(outcome))
        yield chance, torch.tensor(outcome, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        ("adv_grpo_std_unbiased", grpo),
        ("adv_grpo_std_biased", lambda r: grpo(r, std_estimator="population")),
        ("adv_dr_grpo", dr_grpo),
        ("adv_dr_grpo", lambda r: grpo(r, std="none")),
        ("adv_rloo", rloo),
        ("adv_rloo_nonbinary", rloo),
        ("adv_maxrl", max_rl),
    ],
)
def test_each_estimator_gives_its_hand_value(name, estimator, vector, dtype, matches):
    case = vector(name)
    result = torch.cat([estimator(rewards_G) for rewards_G in by_group(case, dtype)])
    assert result.dtype == dtype
    matches(result, case["expected"], case["tolerance"])


def test_the_std_is_the_unbiased_one_unless_the_recipe_says_otherwise(vector):
    biased = torch.tensor(vector("adv_grpo_std_biased")["expected"], dtype=torch.float64)
    ours = torch.cat([grpo(r) for r in by_group(vector("adv_grpo_std_biased"), torch.float64)])
    assert not torch.allclose(ours, biased, atol=1e-2)
    assert torch.allclose(ours, biased * (3 / 4) ** 0.5, atol=1e-5)


def test_opo_weighs_the_baseline_by_length(vector, dtype, matches):
    case = vector("adv_opo")
    rewards_G = torch.tensor(case["inputs"]["rewards"], dtype=dtype)
    lengths_G = torch.tensor(case["inputs"]["lengths"], dtype=dtype)
    advantages_G = opo(rewards_G, lengths_G)
    matches(advantages_G, case["expected"]["adv"], case["tolerance"])
    matches(rewards_G[0] - advantages_G[0], case["expected"]["baseline"], case["tolerance"])
    assert opo(rewards_G, torch.zeros_like(lengths_G)).isfinite().all()


def test_remax_subtracts_the_greedy_reward(vector, dtype, matches):
    case = vector("adv_remax")
    rewards = torch.tensor(case["inputs"]["rewards"], dtype=dtype)
    greedy = torch.tensor(case["inputs"]["greedy_rewards"], dtype=dtype)
    each_alone = [remax(rewards[i : i + 1], greedy[i]) for i in range(2)]
    matches(torch.cat(each_alone), case["expected"], case["tolerance"])


def test_gpg_scales_up_for_flat_groups_in_both_published_ways(vector, dtype, matches):
    case = vector("adv_gpg_verl")
    groups = by_group(case, dtype)
    f_norm = case["inputs"]["f_norm"]
    verl = torch.cat([gpg(r, groups, scale="verl", f_norm=f_norm) for r in groups])
    matches(verl, case["expected"], case["tolerance"])
    # verl counts the 2 rewards that are not 0 of 8 (alpha 4), the paper the 4 of the mixed group.
    paper = torch.cat([gpg(r, groups, scale="paper", f_norm=f_norm) for r in groups])
    matches(paper, [1.0, -1.0, -1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    # With an all-correct group the paper still counts 4 of 8 members, verl now 6.
    groups[1] = torch.ones_like(groups[1])
    matches(gpg(groups[0], groups, scale="paper"), [1.0, -1.0, -1.0, 1.0])
    matches(gpg(groups[0], groups, scale="verl", f_norm=2.0), [1 / 3, -1 / 3, -1 / 3, 1 / 3])
    short = [groups[0], groups[1][:2]]
    matches(gpg(groups[0], short, scale="paper"), [0.75, -0.75, -0.75, 0.75])
    flat = [groups[1]]
    assert gpg(groups[1], flat, scale="paper").tolist() == [0.0] * 4


def test_max_rl_refuses_a_negative_reward_and_weighs_rare_successes_up(dtype, matches):
    with pytest.raises(ConfigError, match="max_rl got a reward of -1: .* must not be negative"):
        max_rl(torch.tensor([1.0, -1.0], dtype=dtype))
    matches(max_rl(torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=dtype)), [3.0, -1.0, -1.0, -1.0])


def test_pass_at_k_pays_the_best_alone_and_nobody_in_a_tie(dtype):
    rewards_G = torch.tensor([0.25, 1.0, 0.0, 0.5], dtype=dtype)
    assert pass_at_k(rewards_G).tolist() == [0.0, 0.5, 0.0, 0.0]
    assert pass_at_k(torch.tensor([1.0, 0.0, 1.0], dtype=dtype)).tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("estimator", "objective"),
    [
        (rloo, lambda p, n: 1.0),
        (dr_grpo, lambda p, n: (n - 1) / n),
        # d/dp of E[max] = 1 - (1-p)^n, of which each member's mean score carries 1/n.
        (pass_at_k, lambda p, n: (1 - p) ** (n - 1)),
    ],
    ids=["rloo", "dr_grpo", "pass_at_k"],
)
def test_the_expected_gradient_is_that_of_the_objective(estimator, objective):
    # Exact expectation over all groups of 3 Bernoulli actions; d log pi / d p = (a-p)/(p(1-p)).
    p, size, gradient = 0.3, 3, 0.0
    for chance, rewards_G in of_groups((size, p)):
        score_G = (rewards_G - p) / (p * (1 - p))
        gradient += chance * float((estimator(rewards_G) * score_G).mean())
    assert gradient == pytest.approx(objective(p, size), abs=1e-12)


@pytest.mark.parametrize("name", [*OF_GROUP, "max_rl"])
def test_a_singleton_gets_zero_and_not_its_raw_reward(name, vector, dtype, matches):
    case = vector("adv_singleton_group")
    rewards_G = torch.tensor(case["inputs"]["rewards"], dtype=dtype)
    result = ({**OF_GROUP, "max_rl": max_rl})[name](rewards_G)
    matches(result, [case["expected"]["recommended"]], case["tolerance"])
    assert result.tolist() == [0.0] != [case["expected"]["verl_grpo_rloo_opo_rfpp_baseline"]]


@pytest.mark.parametrize("name", [*OF_GROUP, "max_rl"])
def test_equal_rewards_give_exactly_zero_where_a_plain_mean_would_not(name, dtype):
    for value in (0.1, 1.0, 0.0):
        rewards_G = torch.full((3,), value, dtype=dtype)
        assert ({**OF_GROUP, "max_rl": max_rl})[name](rewards_G).tolist() == [0.0, 0.0, 0.0]


def test_reinforce_keeps_the_sign_and_remax_tells_equal_members_from_the_greedy_one(dtype):
    rewards_G = torch.tensor([1.0, -1.0], dtype=dtype)
    assert reinforce(rewards_G).tolist() == [1.0, -1.0]
    assert remax(torch.ones(2, dtype=dtype), 0.5).tolist() == [0.5, 0.5]


def test_no_estimator_fails_on_a_group_without_members(dtype):
    empty_G = torch.zeros(0, dtype=dtype)
    alone = (rloo, dr_grpo, grpo, max_rl, pass_at_k, reinforce)
    assert [len(estimator(empty_G)) for estimator in alone] == [0] * 6
    assert len(opo(empty_G, empty_G)) == len(remax(empty_G, 1.0)) == len(gpg(empty_G, [])) == 0


def test_the_mean_size_of_an_advantage_is_what_a_binomial_gives(vector, matches):
    case = vector("expected_abs_advantage")
    size, means = case["inputs"]["G"], []
    for p in case["inputs"]["p"]:
        cases = of_groups((size, p))
        means.append(sum(chance * float(dr_grpo(r_G).abs().mean()) for chance, r_G in cases))
    matches(torch.tensor(means, dtype=torch.float64), case["expected"], case["tolerance"])


def test_batch_std_is_over_the_raw_rewards_of_all_groups():
    # As TRL scale_rewards="batch": the flat group and the gap between the groups both count.
    groups = [torch.tensor([1.0, 0.0], dtype=torch.float64), torch.full((2,), 3.0).double()]
    std = torch.tensor([1.0, 0.0, 3.0, 3.0], dtype=torch.float64).std()
    mixed_G, flat_G = (grpo(rewards_G, groups, std="batch") for rewards_G in groups)
    assert torch.allclose(mixed_G, torch.tensor([0.5, -0.5]).double() / (std + 1e-6), atol=1e-12)
    assert flat_G.tolist() == [0.0, 0.0]


def test_float_noise_is_not_blown_up_to_an_advantage():
    noise_G = torch.tensor([0.3, 0.3 + 1e-7, 0.3 - 1e-7], dtype=torch.float64)
    assert grpo(noise_G, std_eps=1e-9).tolist() == [0.0, 0.0, 0.0]
    assert grpo(noise_G, [noise_G], std="batch", std_eps=1e-9).tolist() == [0.0, 0.0, 0.0]
    assert OF_GROUP["gdpo"](noise_G).tolist() == [0.0, 0.0, 0.0]
    assert is_zero_variance(noise_G)
    assert not is_zero_variance(torch.tensor([0.3, 0.3001], dtype=torch.float64))


@settings(max_examples=50, deadline=None)
@given(REWARD_LISTS)
def test_rewards_shifted_by_ten_leave_advantages_identical(values):
    rewards_G = torch.tensor(values, dtype=torch.float64)
    for name in SHIFT_FREE:
        assert torch.equal(OF_GROUP[name](rewards_G), OF_GROUP[name](rewards_G + 10.0)), name
    assert torch.allclose(OF_GROUP["gdpo"](rewards_G), OF_GROUP["gdpo"](rewards_G + 10.0))
    assert torch.equal(reinforce(rewards_G) + 10.0, reinforce(rewards_G + 10.0))


@settings(max_examples=50, deadline=None)
@given(REWARD_LISTS)
def test_advantages_of_a_group_sum_to_zero_and_follow_their_member(values):
    rewards_G = torch.tensor(values, dtype=torch.float64)
    for name in CENTRED:
        advantages_G = OF_GROUP[name](rewards_G)
        assert abs(float(advantages_G.sum())) < 1e-9
        assert torch.allclose(OF_GROUP[name](rewards_G.flip(0)).flip(0), advantages_G, atol=1e-12)
    lengths_G = LENGTHS[: len(values)]
    assert abs(float((lengths_G * opo(rewards_G, lengths_G)).sum())) < 1e-9


@settings(max_examples=50, deadline=None)
@given(REWARD_LISTS)
def test_leave_one_out_is_the_mean_of_the_others_by_definition(values):
    expected = [
        value - sum(values[:i] + values[i + 1 :]) / (len(values) - 1)
        for i, value in enumerate(values)
    ]
    result = rloo(torch.tensor(values, dtype=torch.float64))
    assert torch.allclose(result, torch.tensor(expected, dtype=torch.float64), atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(REWARD_LISTS)
def test_opo_with_equal_lengths_is_the_group_mean(values):
    rewards_G = torch.tensor(values, dtype=torch.float64)
    equal = opo(rewards_G, torch.full_like(rewards_G, 7.0))
    assert torch.allclose(equal, dr_grpo(rewards_G), atol=1e-12)


# Several rewards


def test_a_loud_reward_does_not_drown_a_quiet_one_in_gdpo_as_it_does_in_a_plain_sum(dtype):
    # Accuracy 0/1 beside a length score in the hundreds; both are to count alike.
    terms_GR = torch.tensor([[1.0, 100.0], [0.0, 300.0], [1.0, 300.0], [0.0, 100.0]], dtype=dtype)
    weights_R = torch.ones(2, dtype=dtype)
    summed = grpo(terms_GR.sum(1))
    decoupled = gdpo(terms_GR, [terms_GR], weights_R)
    assert float((summed[2] - summed[1]).abs()) < 0.01  # right or wrong makes no difference
    assert float(decoupled[2] - decoupled[1]) > 1.0
    assert torch.allclose(decoupled[[0, 1]], torch.zeros(2, dtype=dtype), atol=1e-5)


def test_gdpo_is_the_formula_member_by_member(dtype):
    torch.manual_seed(0)
    weights_R = torch.tensor([1.0, -0.5, 2.0], dtype=dtype)
    groups = [torch.randn(size, 3, dtype=dtype) for size in (4, 2, 5)]
    summed = [
        sum(weights_R[r] * grpo(terms[:, r], std_eps=1e-6) for r in range(3)) for terms in groups
    ]
    batch = torch.cat(summed)
    for terms, expected in zip(groups, summed, strict=True):
        result = gdpo(terms, groups, weights_R, std_eps=1e-6)
        wanted = (expected - batch.mean()) / (batch.std() + 1e-6)
        assert torch.allclose(result, wanted, atol=1e-5 if dtype == torch.float32 else 1e-10)


def test_a_term_that_is_worth_the_same_to_all_adds_nothing(dtype):
    terms_GR = torch.tensor([[1.0, 0.3], [0.0, 0.3], [0.0, 0.3]], dtype=dtype)
    one = terms_GR[:, :1]
    with_constant = gdpo(terms_GR, [terms_GR], torch.ones(2, dtype=dtype))
    assert torch.equal(with_constant, gdpo(one, [one], torch.ones(1, dtype=dtype)))


# Groups


@pytest.mark.parametrize(
    ("survivors", "size", "enough"),
    [
        (2, 2, True),
        (1, 2, False),
        (4, 8, True),
        (3, 8, False),
        (3, 5, True),
        (2, 5, False),
        (1, 1, True),
        (0, 1, False),
    ],
)
def test_a_baseline_needs_two_survivors_and_half_the_group(survivors, size, enough):
    assert enough_survivors(survivors, size) is enough


@pytest.mark.parametrize(("gap", "flat"), [(0.0, True), (1e-6, True), (2e-6, False)])
def test_a_group_is_flat_below_a_std_of_a_millionth(gap, flat):
    rewards_G = torch.tensor([0.0, gap], dtype=torch.float64)  # its std is gap / sqrt(2)
    assert is_zero_variance(rewards_G) is flat
    assert is_zero_variance(rewards_G[:1])
