"""Advantages of tokens: hand values in both precisions, and what must not change them."""

from __future__ import annotations

import pytest
import torch

from posttrain.algo.advantages.gae import gae, gae_targets
from posttrain.algo.advantages.implicit_process import implicit_process
from posttrain.algo.advantages.optimal_token_baseline import optimal_token_baseline
from posttrain.algo.advantages.rae import rae, rae_step
from posttrain.algo.advantages.reinforce_pp import reinforce_pp
from posttrain.algo.advantages.reinforce_pp_baseline import reinforce_pp_baseline
from posttrain.algo.advantages.turn_ppo import turn_ppo, turn_ppo_targets
from posttrain.algo.advantages.vtrace import vtrace, vtrace_targets
from posttrain.algo.advantages.whitening import moment_sums, moments, whiten
from posttrain.algo.segments import discounted_to_go

PLAIN = {"length_alpha": None, "whitening": "none"}


def one(values, dtype):
    """A row of tokens of one trajectory and its index."""
    return torch.tensor(values, dtype=dtype), torch.zeros(len(values), dtype=torch.int64)


def action_tokens(row, mask, dtype):
    """What the flat layout holds of a padded row: the tokens that the policy sampled."""
    return torch.tensor([x for x, m in zip(row, mask, strict=True) if m], dtype=dtype)


def spread_out(values_N, mask):
    """Back to the padded row, None where there's no token."""
    values = iter(values_N.tolist())
    return [next(values) if m else None for m in mask]


# Returns and REINFORCE++


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("returns_multiturn_gap", "correct_on_action_tokens"),
        ("returns_multiturn_gap_discount", "action_steps_only"),
    ],
)
def test_a_return_passes_over_observations_and_discounts_action_tokens_only(
    name, key, vector, dtype
):
    case = vector(name)
    mask = case["inputs"]["mask"]
    rewards_N = action_tokens(case["inputs"]["token_rewards"], mask, dtype)
    index_N = torch.zeros(len(rewards_N), dtype=torch.int64)
    returns_N = discounted_to_go(rewards_N, index_N, case["inputs"]["gamma"])
    result = spread_out(returns_N, mask)
    assert result == case["expected"][key]
    assert result != case["expected"].get("buggy_reset")


def test_reinforce_pp_with_kl_in_the_reward_gives_its_hand_value(vector, dtype, matches):
    case = vector("adv_reinforcepp_kl_in_reward")
    given, expected = case["inputs"], case["expected"]
    rows = []
    for outcome, mask, kl in zip(
        given["outcome_rewards"], given["mask"], given["k1_kl"], strict=True
    ):
        rewards_T = -given["beta"] * action_tokens(kl, mask, dtype)
        rewards_T[-1] += outcome
        rows.append(rewards_T)
    rewards_N = torch.cat(rows)
    index_N = torch.tensor([0, 0, 0, 1, 1])
    masks = [m for mask in given["mask"] for m in mask]

    def flat(rows):
        return action_tokens([x for row in rows for x in row], masks, torch.float64).tolist()

    returns_N = discounted_to_go(rewards_N, index_N, given["gamma"])
    matches(returns_N, flat(expected["returns"]), case["tolerance"])
    matches(returns_N.mean(), expected["mean"], case["tolerance"])
    advantages_N = reinforce_pp(rewards_N, index_N, gamma=given["gamma"], variance="population")
    matches(advantages_N, flat(expected["adv_pop"]), case["tolerance"])


@pytest.mark.parametrize(("variance", "key"), [("population", "pop"), ("unbiased", "unbiased")])
def test_the_group_baseline_is_whitened_over_tokens(variance, key, vector, dtype, matches):
    case = vector("adv_reinforcepp_baseline")
    given, expected = case["inputs"], case["expected"]
    lengths = torch.tensor(given["lengths"])
    index_N = torch.arange(4).repeat_interleave(lengths)
    rewards_N = torch.zeros(len(index_N), dtype=dtype)
    rewards_N[lengths.cumsum(0) - 1] = torch.tensor(given["rewards"], dtype=dtype)
    group_N = torch.tensor(given["group_ids"])[index_N]
    advantages_N = reinforce_pp_baseline(rewards_N, index_N, group_N, variance=variance)
    wanted = [expected[f"adv_{'pos' if r else 'neg'}_{key}"] for r in given["rewards"]]
    matches(advantages_N, [wanted[i] for i in index_N.tolist()], case["tolerance"])
    centred = torch.tensor(given["rewards"], dtype=dtype)[index_N] - 0.5
    mean, std = moments(moment_sums(centred), variance)
    matches(mean, expected["token_mean"], case["tolerance"])
    matches(std.square(), expected[f"var_{key}"], case["tolerance"])


def test_each_trajectory_has_one_vote_in_its_groups_mean_however_long_it_is(dtype):
    index_N = torch.tensor([0, 1, 1, 1, 1, 2, 3])
    group_N = torch.tensor([0, 0, 0, 0, 0, 1, 1])
    rewards_N = torch.tensor([1.0, 0, 0, 0, 0, 1.0, 0.0], dtype=dtype)
    advantages_N = reinforce_pp_baseline(rewards_N, index_N, group_N, variance="population")
    # Both groups are one right and one wrong: the same advantages in both.
    assert advantages_N[0] == advantages_N[5] and advantages_N[1] == advantages_N[6]
    gap = advantages_N[0] - advantages_N[1]
    centred_N = torch.tensor([0.5, -0.5, -0.5, -0.5, -0.5, 0.5, -0.5], dtype=dtype)
    assert torch.allclose(gap, 1 / centred_N.std(correction=0), atol=1e-5)


# Whitening


def test_statistics_of_ranks_are_added_up_as_sums_never_averaged(vector, dtype, matches):
    case = vector("dist_whiten")
    ranks = [torch.tensor(case["inputs"][f"rank{r}"], dtype=dtype) for r in range(2)]
    expected = case["expected"]
    sums_3 = sum(moment_sums(values) for values in ranks)
    mean, std = moments(sums_3, case["inputs"]["var"])
    matches(mean, expected["mean"], case["tolerance"])
    matches(std, expected["std"], case["tolerance"])
    together = torch.cat([whiten(values, "population", sums_3) for values in ranks])
    matches(together, expected["whitened"], case["tolerance"])
    assert torch.allclose(together, whiten(torch.cat(ranks), "population"))
    wrong = torch.stack([values.mean() for values in ranks]).mean()
    matches(wrong, expected["wrong_mean_of_rank_means"], case["tolerance"])
    assert abs(float(wrong - mean)) > 0.5


def test_equal_values_whiten_to_exactly_zero_whatever_their_size(dtype):
    for value in (0.1, -3.0, 1 / 3 * 1e5, 1e-9):
        for size in (0, 1, 7):
            values_N = torch.full((size,), value, dtype=dtype)
            for variance in ("unbiased", "population"):
                assert whiten(values_N, variance).tolist() == [0.0] * size


def test_whitened_values_have_mean_0_and_std_1_and_do_not_feel_a_shift(dtype):
    torch.manual_seed(0)
    values_N = torch.randn(100, dtype=dtype)
    for variance, correction in (("unbiased", 1), ("population", 0)):
        whitened_N = whiten(values_N, variance)
        assert float(whitened_N.mean()) == pytest.approx(0.0, abs=1e-6)
        assert float(whitened_N.std(correction=correction)) == pytest.approx(1.0, abs=1e-5)
        assert torch.allclose(whiten(values_N + 10.0, variance), whitened_N, atol=1e-4)


# Generalised advantages


@pytest.mark.parametrize(
    "name",
    [
        "gae_basic",
        "gae_gamma_lambda",
        "gae_lambda1",
        "gae_masked_observation",
        "gae_truncated_bootstrap",
    ],
)
def test_gae_gives_its_hand_value_and_carries_over_observations(name, vector, dtype, matches):
    case = vector(name)
    given, expected = case["inputs"], case["expected"]
    rewards_N, values_N = (
        action_tokens(given[key], given["mask"], dtype) for key in ("rewards", "values")
    )
    index_N = torch.zeros(len(rewards_N), dtype=torch.int64)
    bootstrap_S = torch.tensor([given.get("bootstrap", 0.0)], dtype=dtype)
    columns = (rewards_N, values_N, index_N, bootstrap_S)
    advantages_N = gae(*columns, gamma=given["gamma"], lam=given["lam"], **PLAIN)
    targets_N = gae_targets(*columns, gamma=given["gamma"], lam_critic=given["lam"])

    def kept(row):
        return action_tokens(row, given["mask"], torch.float64).tolist()

    matches(advantages_N, kept(expected["adv"]), case["tolerance"])
    matches(targets_N, kept(expected["returns"]), case["tolerance"])


def test_the_critic_has_its_own_lambda(vector, dtype, matches):
    case = vector("vapo_decoupled_gae")
    given, expected = case["inputs"], case["expected"]
    rewards_N, index_N = one(given["rewards"], dtype)
    columns = (rewards_N, one(given["values"], dtype)[0], index_N, torch.zeros(1, dtype=dtype))
    advantages_N = gae(*columns, gamma=given["gamma"], lam=given["lam_policy"], **PLAIN)
    targets_N = gae_targets(*columns, gamma=given["gamma"], lam_critic=given["lam_critic"])
    matches(advantages_N, expected["policy_adv"], case["tolerance"])
    matches(targets_N, expected["critic_targets"], case["tolerance"])


def test_lambda_follows_the_length_of_each_trajectory(dtype):
    torch.manual_seed(0)
    lengths = torch.tensor([10, 100, 40])
    index_N = torch.arange(3).repeat_interleave(lengths)
    rewards_N, values_N = torch.randn(2, 150, dtype=dtype)
    bootstrap_S = torch.zeros(3, dtype=dtype)
    columns = (rewards_N, values_N, index_N, bootstrap_S)
    adaptive_N = gae(*columns, gamma=1.0, lam=0.95, length_alpha=0.05, whitening="none")
    for s, lam in enumerate([0.0, 0.8, 0.5]):
        fixed_N = gae(*columns, gamma=1.0, lam=lam, **PLAIN)
        assert torch.allclose(adaptive_N[index_N == s], fixed_N[index_N == s], atol=1e-5)


def test_neighbours_in_the_layout_do_not_leak_into_a_trajectory(dtype):
    torch.manual_seed(0)
    index_N = torch.tensor([0, 0, 0, 1, 2, 2])
    rewards_N, values_N = torch.randn(2, 6, dtype=dtype)
    bootstrap_S = torch.tensor([0.5, 0.0, -1.0], dtype=dtype)
    settings = {"gamma": 0.9, "lam": 0.8, **PLAIN}
    together_N = gae(rewards_N, values_N, index_N, bootstrap_S, **settings)
    for s in range(3):
        own = index_N == s
        alone_N = gae(
            rewards_N[own], values_N[own], index_N[own] * 0, bootstrap_S[s : s + 1], **settings
        )
        assert torch.equal(together_N[own], alone_N)


def test_whitening_leaves_the_critics_targets_alone_and_follows_them(dtype):
    rewards_N, index_N = one([0.0, 0.0, 5.0], dtype)
    values_N = torch.tensor([1.0, 2.0, 3.0], dtype=dtype)
    columns = (rewards_N, values_N, index_N, torch.zeros(1, dtype=dtype))
    whitened_N = gae(*columns, gamma=1.0, lam=1.0, length_alpha=None, whitening="population")
    assert gae_targets(*columns, gamma=1.0, lam_critic=1.0).tolist() == [5.0, 5.0, 5.0]
    assert float(whitened_N.mean()) == pytest.approx(0.0, abs=1e-6)


def test_a_constant_critic_at_lambda_1_is_reinforce_with_a_global_baseline(dtype):
    torch.manual_seed(0)
    index_N = torch.tensor([0, 0, 1, 1, 1])
    rewards_N = torch.randn(5, dtype=dtype)
    values_N, bootstrap_S = torch.full((5,), 0.7, dtype=dtype), torch.zeros(2, dtype=dtype)
    settings = {"gamma": 1.0, "lam": 1.0, "length_alpha": None, "whitening": "unbiased"}
    with_critic_N = gae(rewards_N, values_N, index_N, bootstrap_S, **settings)
    without_N = reinforce_pp(rewards_N, index_N, gamma=1.0, variance="unbiased")
    assert torch.allclose(with_critic_N, without_N, atol=1e-5)


def test_a_turn_gets_one_advantage_for_all_its_tokens(vector, dtype, matches):
    case = vector("adv_turn_ppo")
    given, expected = case["inputs"], case["expected"]
    turn_N = torch.tensor([0, 0, 0, 1, 3, 3])  # turn 2 had no token
    index_N = torch.zeros(6, dtype=torch.int64)
    rewards_N = torch.zeros(6, dtype=dtype)
    rewards_N[[2, 3, 5]] = torch.tensor(given["turn_rewards"], dtype=dtype)
    values_N = torch.full((6,), 99.0, dtype=dtype)  # of no use within a turn
    values_N[[0, 3, 4]] = torch.tensor(given["turn_values"], dtype=dtype)
    columns = (rewards_N, values_N, turn_N, index_N, torch.zeros(1, dtype=dtype))
    advantages_N = turn_ppo(*columns, gamma=given["gamma"], lam=given["lam"], whitening="none")
    targets_N = turn_ppo_targets(*columns, gamma=given["gamma"], lam_critic=given["lam"])
    of_token = [0, 0, 0, 1, 2, 2]
    matches(advantages_N, [expected["turn_adv"][h] for h in of_token], case["tolerance"])
    matches(targets_N, [expected["turn_returns"][h] for h in of_token], case["tolerance"])


def test_turns_of_one_token_are_tokens(dtype):
    torch.manual_seed(0)
    index_N = torch.tensor([0, 0, 0, 1, 1])
    rewards_N, values_N = torch.randn(2, 5, dtype=dtype)
    bootstrap_S = torch.tensor([0.0, 0.4], dtype=dtype)
    settings = {"gamma": 0.9, "lam": 0.7, "whitening": "none"}
    turn_N = torch.tensor([0, 1, 2, 2, 3])  # neighbours of the same number in two trajectories
    turns_N = turn_ppo(rewards_N, values_N, turn_N, index_N, bootstrap_S, **settings)
    tokens_N = gae(rewards_N, values_N, index_N, bootstrap_S, length_alpha=None, **settings)
    assert torch.allclose(turns_N, tokens_N, atol=1e-6)


# V-trace


def test_vtrace_gives_its_hand_value(vector, dtype, matches):
    case = vector("offpolicy_vtrace")
    given, expected = case["inputs"], case["expected"]
    rewards_N, index_N = one(given["rewards"], dtype)
    values_N, rho_N = one(given["values"], dtype)[0], one(given["rho"], dtype)[0]
    columns = (rewards_N, values_N, rho_N.log(), index_N, torch.zeros(1, dtype=dtype))
    settings = {key: given[key] for key in ("gamma", "rho_bar", "c_bar")}
    matches(vtrace_targets(*columns, **settings), expected["vs"], case["tolerance"])
    advantages_N = vtrace(*columns, whitening="none", **settings)
    matches(advantages_N, expected["pg_adv"], case["tolerance"])


def test_on_policy_vtrace_targets_are_those_of_gae_at_lambda_1(dtype):
    torch.manual_seed(0)
    index_N = torch.tensor([0, 0, 0, 1, 1])
    rewards_N, values_N = torch.randn(2, 5, dtype=dtype)
    bootstrap_S = torch.tensor([0.3, 0.0], dtype=dtype)
    targets_N = vtrace_targets(
        rewards_N,
        values_N,
        torch.zeros(5, dtype=dtype),
        index_N,
        bootstrap_S,
        gamma=0.9,
        rho_bar=1.0,
        c_bar=1.0,
    )
    same_N = gae_targets(rewards_N, values_N, index_N, bootstrap_S, gamma=0.9, lam_critic=1.0)
    assert torch.allclose(targets_N, same_N, atol=1e-6)


def test_a_token_the_learner_would_never_choose_learns_nothing(dtype):
    rewards_N, index_N = one([0.0, 1.0], dtype)
    log_mismatch_N = torch.tensor([-20.0, 20.0], dtype=dtype)
    columns = (rewards_N, rewards_N * 0, log_mismatch_N, index_N, torch.zeros(1, dtype=dtype))
    settings = {"gamma": 1.0, "rho_bar": 1.0, "c_bar": 1.0}
    assert float(vtrace(*columns, whitening="none", **settings)[0]) < 1e-8
    assert float(vtrace(*columns, whitening="none", **settings)[1]) == 1.0


# Optimal token baseline


def test_the_optimal_token_baseline_is_its_formula_position_by_position(dtype):
    torch.manual_seed(0)
    lengths, groups = [3, 2, 3, 1, 2], [0, 0, 0, 1, 1]
    index_N = torch.arange(5).repeat_interleave(torch.tensor(lengths))
    group_N = torch.tensor(groups)[index_N]
    probs_NV = torch.randn(11, 4, dtype=dtype).softmax(-1)
    tokens_N = torch.randint(4, (11,))
    chosen_N = probs_NV.gather(1, tokens_N[:, None])[:, 0]
    rewards_N = torch.randn(11, dtype=dtype)
    result_N = optimal_token_baseline(
        rewards_N, chosen_N.log(), probs_NV.square().sum(-1), index_N, group_N
    )
    # The squared length of the score of the logits, onehot - probs, is the energy.
    one_hot_NV = torch.nn.functional.one_hot(tokens_N, 4)
    energy_N = (one_hot_NV - probs_NV).square().sum(-1)
    rows = {s: (index_N == s).nonzero()[:, 0] for s in range(5)}
    to_go = {s: [rewards_N[own[t:]].sum() for t in range(len(own))] for s, own in rows.items()}
    weight = {s: [energy_N[own[: t + 1]].sum() for t in range(len(own))] for s, own in rows.items()}
    for s, own in rows.items():
        for t, n in enumerate(own):
            peers = [j for j in rows if groups[j] == groups[s] and lengths[j] > t]
            baseline = sum(to_go[j][t] * weight[j][t] for j in peers)
            baseline = baseline / sum(weight[j][t] for j in peers)
            assert float(result_N[n]) == pytest.approx(float(to_go[s][t] - baseline), abs=1e-5)


def test_a_token_that_no_sibling_reached_and_a_single_member_get_exactly_zero(dtype):
    index_N, group_N = torch.tensor([0, 0, 0, 1, 2]), torch.tensor([0, 0, 0, 0, 1])
    rewards_N = torch.tensor([0.0, 0.0, 0.7, 0.0, 0.3], dtype=dtype)
    logprobs_N = torch.tensor([-0.5, -0.6, -0.7, -0.4, -0.3], dtype=dtype)
    squares_N = torch.full((5,), 0.4, dtype=dtype)
    result_N = optimal_token_baseline(rewards_N, logprobs_N, squares_N, index_N, group_N)
    assert result_N[[1, 2, 4]].tolist() == [0.0, 0.0, 0.0]
    assert float(result_N[0]) > 0 > float(result_N[3])


def test_a_policy_without_any_doubt_is_compared_with_the_plain_mean(dtype):
    index_N, group_N = torch.tensor([0, 1]), torch.zeros(2, dtype=torch.int64)
    rewards_N, certain_N = torch.tensor([1.0, 0.0], dtype=dtype), torch.ones(2, dtype=dtype)
    result_N = optimal_token_baseline(rewards_N, certain_N * 0, certain_N, index_N, group_N)
    assert result_N.tolist() == [0.5, -0.5]


# A role's moving average


def test_rae_subtracts_the_baseline_before_it_moves(vector, dtype, matches):
    case = vector("rae_ema_baseline")
    given, expected = case["inputs"], case["expected"]
    rewards_G = torch.tensor(given["rewards"], dtype=dtype)
    advantages_G, after = rae_step(rewards_G, 0.0, given["decay"])
    matches(advantages_G, expected["adv"], case["tolerance"])
    assert after == pytest.approx(expected["baselines_after"][-1], abs=1e-6)
    assert torch.equal(rae(rewards_G, 0.0, decay=given["decay"]), advantages_G)
    for i, baseline in enumerate(expected["baselines_after"]):
        assert rae_step(rewards_G[: i + 1], 0.0, given["decay"])[1] == pytest.approx(baseline)
    # The order of SPIRAL's listing would shrink the first advantage to .95.
    assert float(advantages_G[0]) != pytest.approx(given["decay"])


def test_a_baseline_carried_from_group_to_group_is_that_of_all_rewards_in_a_row(dtype):
    rewards = torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=dtype)
    whole, after = rae_step(rewards, 0.2, 0.9)
    first, between = rae_step(rewards[:3], 0.2, 0.9)
    second, after_both = rae_step(rewards[3:], between, 0.9)
    assert torch.allclose(torch.cat([first, second]), whole)
    assert after_both == pytest.approx(after)


# Implicit process rewards


def test_implicit_rewards_add_up_to_the_sequences_log_ratio_and_keep_their_gradient(dtype):
    reward_logprobs_N = torch.tensor([-0.5, -1.0], dtype=dtype, requires_grad=True)
    ref_logprobs_N = torch.tensor([-0.7, -0.6], dtype=dtype)
    rewards_N = implicit_process(reward_logprobs_N, ref_logprobs_N, beta=0.05)
    rewards_N.sum().backward()
    assert float(rewards_N.sum().detach()) == pytest.approx(0.05 * (-1.5 + 1.3), abs=1e-6)
    assert torch.allclose(reward_logprobs_N.grad, torch.full((2,), 0.05, dtype=dtype))
    same_N = reward_logprobs_N.detach()
    assert implicit_process(same_N, same_N, beta=0.05).tolist() == [0.0, 0.0]


# All of them


def every_token_estimator(rewards_N, index_N, values_N, log_mismatch_N, whitening):
    """Each over the same columns; groups of two trajectories, turns of one trajectory."""
    bootstrap_S = rewards_N.new_zeros(4)
    group_N = index_N // 2
    variance = "unbiased"
    trace = {"gamma": 0.9, "rho_bar": 1.0, "c_bar": 1.0}
    columns = (rewards_N, values_N, index_N, bootstrap_S)
    off_policy = (rewards_N, values_N, log_mismatch_N, index_N, bootstrap_S)
    by_turn = (rewards_N, values_N, index_N, index_N, bootstrap_S)
    squares_N = torch.full_like(rewards_N, 0.3)
    return {
        "reinforce_pp": reinforce_pp(rewards_N, index_N, gamma=1.0, variance=variance),
        "reinforce_pp_baseline": reinforce_pp_baseline(
            rewards_N, index_N, group_N, variance=variance
        ),
        "gae": gae(*columns, gamma=0.9, lam=0.9, length_alpha=0.05, whitening=whitening),
        "gae_targets": gae_targets(*columns, gamma=0.9, lam_critic=0.9),
        "turn_ppo": turn_ppo(*by_turn, gamma=0.9, lam=0.9, whitening=whitening),
        "turn_ppo_targets": turn_ppo_targets(*by_turn, gamma=0.9, lam_critic=0.9),
        "vtrace": vtrace(*off_policy, whitening=whitening, **trace),
        "vtrace_targets": vtrace_targets(*off_policy, **trace),
        "optimal_token_baseline": optimal_token_baseline(
            rewards_N, -values_N.abs(), squares_N, index_N, group_N
        ),
    }


@pytest.mark.parametrize("index", [[], [0], [0, 0, 1, 3, 3, 3]], ids=["none", "one", "gap"])
@pytest.mark.parametrize("whitening", ["unbiased", "population", "none"])
def test_no_token_estimator_gives_nan_changes_its_input_or_its_dtype(index, whitening, dtype):
    torch.manual_seed(0)
    index_N = torch.tensor(index, dtype=torch.int64)
    columns = [torch.randn(len(index), dtype=dtype) for _ in range(3)]
    before = [c.clone() for c in columns]
    rewards_N, values_N, log_mismatch_N = columns
    results = every_token_estimator(rewards_N, index_N, values_N, log_mismatch_N, whitening)
    for name, result_N in results.items():
        assert result_N.dtype == dtype, name
        assert len(result_N) == len(index) and bool(result_N.isfinite().all()), name
        assert not result_N.requires_grad
    assert all(torch.equal(c, b) for c, b in zip(columns, before, strict=True))


def test_rewards_and_values_of_zero_give_exactly_zero(dtype):
    index_N = torch.tensor([0, 0, 1, 2, 3])
    zeros_N = torch.zeros(5, dtype=dtype)
    for whitening in ("unbiased", "none"):
        results = every_token_estimator(zeros_N, index_N, zeros_N, zeros_N, whitening)
        assert all(result_N.tolist() == [0.0] * 5 for result_N in results.values())
