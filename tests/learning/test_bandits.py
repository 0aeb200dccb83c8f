"""Checks 1, 2, 7 a and 7 c: bandits reach what is known of them, through the real learner."""

from __future__ import annotations

import pytest
import torch
from checks.bandits import (
    BINARY_A,
    CORRECTIONS,
    GROUP_SIZE,
    KL_MODES,
    LOO,
    MEAN,
    RATIOS,
    VECTORS,
    exact_gradient,
    expected_gradient,
    kl_fixed_point,
    learn_bandit,
    numeric_gradient,
    off_policy_errors,
    off_policy_expectation,
    sampled_gradient,
    target,
    total_variation,
)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_bernoulli_bandit_finds_its_best_arm(seed: int) -> None:
    assert learn_bandit(seed)[0] is not None


@pytest.mark.parametrize("name", RATIOS)
def test_the_expected_gradient_is_the_exact_one_times_a_known_ratio(name: str) -> None:
    """1 with a baseline that is independent of the member, (G-1)/G with the group's own mean."""
    torch.testing.assert_close(
        expected_gradient(name), RATIOS[name][1] * exact_gradient(), atol=1e-6, rtol=0
    )


def test_max_rl_climbs_the_sum_of_pass_at_k_over_k() -> None:
    """arXiv:2602.02710. The group's own mean as baseline takes away the term k = G."""
    wanted_A = numeric_gradient(
        lambda pi_A: sum((1 - (1 - pi_A[0]) ** k) / k for k in range(1, GROUP_SIZE))
    )
    torch.testing.assert_close(expected_gradient("max_rl", BINARY_A), wanted_A, atol=1e-6, rtol=0)


def test_pass_at_k_climbs_the_expected_best_of_the_group() -> None:
    wanted_A = numeric_gradient(lambda pi_A: 1 - (1 - pi_A[0]) ** GROUP_SIZE) / GROUP_SIZE
    measured_A = expected_gradient("pass_at_k", BINARY_A)
    torch.testing.assert_close(measured_A, wanted_A, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["rloo", "dr_grpo"])
def test_the_mean_of_sampled_gradients_has_that_ratio_and_not_the_other(name: str) -> None:
    mean_A, error_A = sampled_gradient(name, 2000)
    ratio = RATIOS[name][1]
    other = MEAN if ratio == LOO else LOO
    assert bool(((mean_A - ratio * exact_gradient()).abs() < 3.5 * error_A).all())
    assert bool(((mean_A - other * exact_gradient()).abs() > 6 * error_A).any())


@pytest.mark.parametrize(
    ("mode", "seed"),
    [
        pytest.param(mode, seed, marks=[pytest.mark.slow] if seed or mode == "k3_weighted" else [])
        for mode in KL_MODES
        for seed in (0, 1)
    ],
)
def test_a_kl_mode_lands_on_its_own_fixed_point(mode: str, seed: int) -> None:
    """k3 as a loss minimises KL(ref || policy), so it ends elsewhere than the others."""
    reached_A, _ = kl_fixed_point(mode, seed)
    assert total_variation(reached_A, target(mode)) < 0.01
    assert total_variation(reached_A, target(mode, other=True)) > 0.01


@pytest.mark.slow
def test_a_group_mean_baseline_pulls_the_optimum_towards_the_reference() -> None:
    """It scales the reward's gradient by (G-1)/G and that of the KL loss not at all."""
    reached_A, _ = kl_fixed_point("k2", 0, estimator="dr_grpo")
    wanted = VECTORS["bandit_kl_fixed_points"]["expected"]["group_mean_baseline_G8_k2_loss"]
    assert total_variation(reached_A, torch.tensor(wanted, dtype=torch.float64)) < 0.01


@pytest.mark.parametrize(("target", "grows"), [(0.05, True), (0.5, False)])
def test_the_kl_controller_moves_its_coefficient_towards_the_target(
    target: float, grows: bool
) -> None:
    """With coefficient .5 the KL of the optimum is .27."""
    _, bandit = kl_fixed_point("reward", 0, num_steps=40, target=target, horizon=1000)
    coef = bandit.learner.memory["policy.kl_coef"]
    assert coef > 0.6 if grows else coef < 0.4


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_correction_has_the_bias_that_its_definition_gives(correction: str) -> None:
    """Vector is_gradient_bias by sampling: only the full weight has the on-policy gradient."""
    assert off_policy_errors(correction, 0)[0] < 3
    vector = {"none": "no_is", "tis": "tis_cap_2", "tis_full": "full_is", "icepop": "mis_0_5_to_2"}
    if correction in vector:
        wanted_A = torch.tensor(VECTORS["is_gradient_bias"]["expected"][vector[correction]])
        mean_A, _ = off_policy_expectation(correction)
        torch.testing.assert_close(mean_A, wanted_A.double(), atol=1e-6, rtol=0)


def test_the_mean_weight_of_what_the_sampler_drew_is_one() -> None:
    assert off_policy_errors("tis_full", 0)[1] < 3
