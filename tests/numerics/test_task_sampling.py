"""Which tasks are drawn, and the statistics that decide it."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from posttrain.algo.task_sampling import (
    beta_mean,
    beta_update,
    beta_variance,
    boltzmann,
    expected_abs_advantage,
    failure_rate,
    learnability,
    plr,
    probabilities,
    sec_update,
    ucb1,
)

# --- vectors ------------------------------------------------------------------------------------


def test_weights_from_pass_rates(vector, matches, dtype):
    case = vector("learnability")
    p_K = torch.tensor(case["inputs"]["p"], dtype=dtype)
    matches(learnability(p_K), case["expected"]["p1mp"])
    matches(probabilities(learnability(p_K)), case["expected"]["probs"])
    matches(failure_rate(p_K), case["expected"]["kimi_1_minus_s"])


def test_upper_confidence_bounds(vector, matches, dtype):
    case = vector("ucb1")
    means_K = torch.tensor(case["inputs"]["means"], dtype=dtype)
    counts_K = torch.tensor(case["inputs"]["counts"], dtype=dtype)
    matches(ucb1(means_K, counts_K), case["expected"])


def test_values_of_categories_and_how_they_are_drawn(vector, matches, dtype):
    case = vector("sec_bandit")
    inputs = case["inputs"]
    value_K, seen = torch.zeros(1, dtype=dtype), []
    for reward in inputs["arm_rewards_mean_abs_adv"]:
        value_K = sec_update(value_K, torch.tensor([reward], dtype=dtype), alpha=inputs["alpha"])
        seen.append(value_K.item())
    matches(torch.tensor(seen, dtype=dtype), case["expected"]["Q"])
    values_K = torch.tensor(inputs["Q_for_softmax"], dtype=dtype)
    matches(boltzmann(values_K, temperature=inputs["tau"]), case["expected"]["probs"])


def test_prioritised_level_replay(vector, matches, dtype):
    case = vector("plr")
    inputs, expected = case["inputs"], case["expected"]
    scores_K = torch.tensor(inputs["scores"], dtype=dtype)
    steps_unseen_K = torch.tensor(inputs["staleness_steps"])
    parts = {"P_score": 0.0, "P_stale": 1.0, "P": inputs["rho"]}
    for name, rho in parts.items():
        drawn_K = plr(scores_K, steps_unseen_K, temperature=inputs["beta"], stale_frac=rho)
        matches(drawn_K, expected[name])


def test_posterior_of_a_pass_rate(vector, matches, dtype):
    case = vector("beta_posterior_passrate")
    prior = case["inputs"]["prior"]
    alpha_K, beta_K = (torch.tensor([float(x)], dtype=dtype) for x in prior)
    alpha_K, beta_K = beta_update(
        alpha_K, beta_K, torch.tensor([3]), torch.tensor([5]), prior=tuple(prior)
    )
    expected = case["expected"]
    matches(alpha_K, [expected["alpha"]])
    matches(beta_K, [expected["beta"]])
    matches(beta_mean(alpha_K, beta_K), [expected["mean"]])
    matches(beta_variance(alpha_K, beta_K), [expected["var"]])


def test_expected_size_of_an_advantage(vector, matches, dtype):
    case = vector("expected_abs_advantage")
    p_K = torch.tensor(case["inputs"]["p"], dtype=dtype)
    matches(expected_abs_advantage(p_K, group_size=case["inputs"]["G"]), case["expected"])


# --- rules --------------------------------------------------------------------------------------


def test_the_expected_size_is_exact_over_all_groups():
    p, size, total = 0.3, 4, 0.0
    for group in product((0.0, 1.0), repeat=size):
        chance = math.prod(p if reward else 1 - p for reward in group)
        mean = sum(group) / size
        total += chance * sum(abs(reward - mean) for reward in group) / size
    exact = expected_abs_advantage(torch.tensor([p]).double(), group_size=size)
    assert exact.item() == pytest.approx(total)


def test_a_floor_keeps_every_task_alive():
    drawn_K = probabilities(torch.tensor([0.0, 0.0, 0.25]).double(), uniform_frac=0.1)
    assert drawn_K.tolist() == pytest.approx([0.1 / 3, 0.1 / 3, 0.9 + 0.1 / 3])


def test_no_weight_at_all_is_uniform(dtype):
    """Every task solved or none solved: nothing to prefer."""
    assert probabilities(torch.zeros(4, dtype=dtype)).tolist() == [0.25] * 4
    assert probabilities(torch.zeros(0, dtype=dtype)).tolist() == []


def test_what_was_never_drawn_is_drawn_first(dtype):
    means_K, counts_K = torch.tensor([0.9, 0.0], dtype=dtype), torch.tensor([5, 0])
    assert ucb1(means_K, counts_K).tolist()[1] == math.inf
    assert ucb1(means_K, torch.zeros(2)).tolist() == [math.inf] * 2


def test_equal_scores_share_a_rank():
    """At the start all scores are equal; by position the first task would get 9 draws of 10."""
    drawn_K = plr(torch.zeros(4).double(), torch.zeros(4), temperature=0.1, stale_frac=0.1)
    assert drawn_K.tolist() == pytest.approx([0.25] * 4)
    tied_K = plr(torch.tensor([0.5, 0.9, 0.5]).double(), torch.ones(3), stale_frac=0.0)
    assert tied_K[0] == tied_K[2] < tied_K[1]


def test_a_steep_temperature_does_not_overflow(dtype):
    drawn_K = plr(torch.arange(2000.0).to(dtype), torch.arange(2000), temperature=0.02)
    assert bool(drawn_K.isfinite().all()) and drawn_K.sum().item() == pytest.approx(1, abs=1e-4)


def test_old_evidence_fades_to_the_prior_and_no_further(dtype):
    alpha_K, beta_K = torch.tensor([9.0], dtype=dtype), torch.tensor([2.0], dtype=dtype)
    nothing = torch.zeros(1, dtype=dtype)
    once = beta_update(alpha_K, beta_K, nothing, nothing, decay=0.9)
    assert [once[0].item(), once[1].item()] == pytest.approx([8.2, 1.9])
    for _ in range(400):
        alpha_K, beta_K = beta_update(alpha_K, beta_K, nothing, nothing, decay=0.9)
    assert [alpha_K.item(), beta_K.item()] == pytest.approx([1.0, 1.0], abs=1e-5)


def test_learnability_draws_the_tasks_that_can_teach():
    """3 impossible, 3 trivial, 4 learnable tasks: at least .65 of the draws, uniform .40."""
    generator = torch.Generator().manual_seed(0)
    pass_rates_K = torch.tensor([0.0] * 3 + [1.0] * 3 + [0.3, 0.5, 0.5, 0.7]).double()
    alpha_K, beta_K = torch.ones(10).double(), torch.ones(10).double()
    useful, num_draws = 0, 0
    for _ in range(60):
        weights_K = learnability(beta_mean(alpha_K, beta_K))
        tasks = probabilities(weights_K, uniform_frac=0.05).multinomial(
            4, replacement=True, generator=generator
        )
        drawn_K = 8 * tasks.bincount(minlength=10).double()
        passed_K = torch.binomial(drawn_K, pass_rates_K, generator=generator)
        alpha_K, beta_K = beta_update(alpha_K, beta_K, passed_K, drawn_K - passed_K, decay=0.98)
        useful, num_draws = useful + int((tasks >= 6).sum()), num_draws + 4
    assert useful / num_draws >= 0.65
