"""Policy losses: hand values, the on-policy identity, gradients against finite differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from posttrain.algo.losses import LossTerms, ppo_clip
from posttrain.algo.ratios import MAX_LOG_RATIO, log_ratio


def value_and_gradient(loss, policy, prox, advantages, low=0.2, high=0.28):
    leaf = policy.clone().requires_grad_(True)
    terms = loss(leaf, prox, advantages, low, high)
    (gradient,) = torch.autograd.grad(terms.per_token_N.sum(), leaf)
    return terms, gradient


def check_vector(loss: Callable[..., LossTerms], case, dtype, matches) -> None:
    inputs = case["inputs"]
    low = inputs.get("eps_low", inputs.get("eps"))
    high = inputs.get("eps_high", inputs.get("eps"))
    policy = torch.tensor(inputs["ratio"], dtype=torch.float64).log().to(dtype)
    prox = torch.full_like(policy, inputs["logp_old"])
    for sign, advantage in inputs["advantages"].items():
        advantages = torch.full_like(policy, advantage)
        terms, gradient = value_and_gradient(loss, policy, prox, advantages, low, high)
        expected = case["expected"][sign]
        matches(terms.per_token_N, expected["loss"], case["tolerance"])
        matches(gradient, expected["grad_wrt_logp"], case["tolerance"])


@pytest.mark.parametrize("name", ["loss_ppo_clip", "loss_clip_higher"])
def test_ppo_clip_gives_its_hand_values_and_gradients(name, vector, dtype, matches):
    check_vector(ppo_clip, vector(name), dtype, matches)


def flipped_sign(policy, prox, advantages, low, high):
    return ppo_clip(policy, prox, -advantages, low, high)


def inverted_ratio(policy, prox, advantages, low, high):
    return ppo_clip(-policy, -prox, advantages, low, high)


def smaller_branch(policy, prox, advantages, low, high):
    ratio = (policy - prox).exp()
    loss = torch.minimum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    return LossTerms(loss, loss > 0, loss > 0)


def one_bound_for_both(policy, prox, advantages, low, high):
    return ppo_clip(policy, prox, advantages, low, low)


@pytest.mark.parametrize(
    "mutant", [flipped_sign, inverted_ratio, smaller_branch, one_bound_for_both]
)
def test_a_mutated_loss_fails_the_hand_values(mutant, vector, matches):
    with pytest.raises(AssertionError):
        check_vector(mutant, vector("loss_clip_higher"), torch.float64, matches)


def test_on_policy_the_ratio_is_exactly_one_and_the_gradient_is_plain_policy_gradient(dtype):
    policy = torch.tensor([-0.1, -3.7, -11.0, -0.0], dtype=dtype)
    advantages = torch.tensor([0.7, -1.3, 0.2, -0.9], dtype=dtype)
    assert torch.equal(log_ratio(policy, policy.clone()).exp(), torch.ones_like(policy))
    terms, gradient = value_and_gradient(ppo_clip, policy, policy.clone(), advantages)
    assert torch.equal(terms.per_token_N, -advantages)
    assert torch.equal(gradient, -advantages)
    assert not terms.clipped_low_N.any() and not terms.clipped_high_N.any()


def test_a_zero_advantage_gives_zero_gradient_however_far_the_policy_moved(dtype):
    policy = torch.tensor([-0.1, -9.0, -30.0, -1.0], dtype=dtype)
    prox = torch.tensor([-9.0, -0.1, -0.1, -1.0], dtype=dtype)
    terms, gradient = value_and_gradient(ppo_clip, policy, prox, torch.zeros_like(policy))
    assert not gradient.any() and not terms.per_token_N.any()
    assert not terms.clipped_low_N.any() and not terms.clipped_high_N.any()


def test_clipped_tokens_are_those_without_gradient():
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(200, generator=generator, dtype=torch.float64)
    prox = policy + 0.4 * torch.randn(200, generator=generator, dtype=torch.float64)
    advantages = torch.randn(200, generator=generator, dtype=torch.float64)
    terms, gradient = value_and_gradient(ppo_clip, policy, prox, advantages)
    assert torch.equal(terms.clipped_low_N | terms.clipped_high_N, gradient == 0)
    assert not (terms.clipped_low_N & terms.clipped_high_N).any()
    ratio = (policy - prox).exp()
    assert torch.equal(terms.clipped_high_N, (ratio > 1.28) & (advantages > 0))
    assert torch.equal(terms.clipped_low_N, (ratio < 0.8) & (advantages < 0))


def test_autograd_agrees_with_finite_differences():
    generator = torch.Generator().manual_seed(1)
    policy = torch.randn(64, generator=generator, dtype=torch.float64)
    prox = policy + 0.4 * torch.randn(64, generator=generator, dtype=torch.float64)
    advantages = torch.randn(64, generator=generator, dtype=torch.float64)
    _, gradient = value_and_gradient(ppo_clip, policy, prox, advantages)
    h = 1e-6
    ahead = ppo_clip(policy + h, prox, advantages, 0.2, 0.28).per_token_N
    behind = ppo_clip(policy - h, prox, advantages, 0.2, 0.28).per_token_N
    assert torch.allclose((ahead - behind) / (2 * h), gradient, atol=1e-7)


def test_an_extreme_log_ratio_stays_finite(dtype):
    policy = torch.tensor([0.0, -5000.0], dtype=dtype)
    prox = torch.tensor([-5000.0, 0.0], dtype=dtype)
    terms, gradient = value_and_gradient(ppo_clip, policy, prox, -torch.ones_like(policy))
    assert terms.per_token_N.isfinite().all() and gradient.isfinite().all()
    assert log_ratio(policy, prox).tolist() == [MAX_LOG_RATIO, -MAX_LOG_RATIO]


def test_a_nan_on_a_loss_token_is_not_hidden():
    policy = torch.tensor([float("nan"), -1.0])
    terms = ppo_clip(policy, torch.full((2,), -1.0), torch.ones(2), 0.2, 0.28)
    assert terms.per_token_N.isnan().tolist() == [True, False]


def test_no_gradient_reaches_prox_or_advantages():
    leaves = [torch.full((2,), -1.0, requires_grad=True) for _ in range(3)]
    ppo_clip(*leaves, 0.2, 0.28).per_token_N.sum().backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is None and leaves[2].grad is None
