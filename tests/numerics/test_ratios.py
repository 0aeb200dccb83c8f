"""Log-ratios: direction, what truncated sampling does to them, prox without a forward pass."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.algo.logprobs import token_logprobs
from posttrain.algo.ratios import (
    chi2,
    ess_frac,
    log_mismatch,
    log_ratio,
    mismatch_k3,
    prox_loglinear,
    sequence_weight,
)


def test_effective_sample_size(vector, dtype, matches):
    case = vector("offpolicy_ess")
    weights = torch.tensor(case["inputs"]["w"], dtype=dtype)
    found = ess_frac(weights.sum(), weights.square().sum(), len(weights))
    matches(found, case["expected"]["ess_frac"], case["tolerance"])
    matches(found * len(weights), case["expected"]["ess"], case["tolerance"])
    assert float(ess_frac(torch.zeros(()), torch.zeros(()), 3)) == 0.0


def test_the_mismatch_weight_is_trainer_over_sampler():
    prox, sampler = torch.tensor([math.log(0.8)]), torch.tensor([math.log(0.4)])
    assert float(log_mismatch(prox, sampler).exp()) == pytest.approx(2.0, rel=1e-6)


def test_the_expected_weight_under_the_sampler_is_one_and_k3_is_the_kl():
    sampler = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    prox = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    gap = log_mismatch(prox.log(), sampler.log())
    assert float((sampler * gap.exp()).sum()) == pytest.approx(1.0, abs=1e-12)
    exact = float((sampler * (sampler / prox).log()).sum())
    assert float((sampler * mismatch_k3(gap)).sum()) == pytest.approx(exact, abs=1e-12)


def test_chi2_is_the_second_moment_less_one(vector, dtype, matches):
    case = vector("offpolicy_ess")
    weights = torch.tensor(case["inputs"]["w"], dtype=dtype)
    found = chi2(weights.square().sum(), len(weights))
    matches(found, case["expected"]["chi2"], case["tolerance"])
    assert float(chi2(torch.tensor(3.0), 3)) == 0.0  # on-policy


def test_truncated_sampling_makes_a_spurious_ratio_of_the_kept_mass(vector, dtype, matches):
    """Report a10: why top_p is refused while training over the full vocabulary."""
    case = vector("logprob_top_p_mass")
    logits = torch.tensor([case["inputs"]["p"]], dtype=dtype).log()
    kept = torch.tensor([case["inputs"]["top_p_keep"]], dtype=dtype).bool()
    action = torch.tensor([case["inputs"]["action"]])
    sampler = token_logprobs(logits.masked_fill(~kept, -math.inf), action)
    matches(sampler.exp(), [case["expected"]["processed_p"]], case["tolerance"])
    matches((logits.exp() * kept).sum(), case["expected"]["surviving_mass"], case["tolerance"])
    spurious = log_mismatch(token_logprobs(logits, action), sampler).exp()
    wrong = case["expected"]["spurious_ratio_if_trainer_uses_full_vocab"]
    matches(spurious, [wrong], case["tolerance"])
    replayed = token_logprobs(logits.masked_fill(~kept, -math.inf), action)
    assert log_mismatch(replayed, sampler).exp().tolist() == [1.0]


def test_prox_is_interpolated_between_sampler_and_policy(vector, dtype, matches):
    case = vector("offpolicy_prox_loglinear")
    inputs = case["inputs"]
    sampler = torch.tensor([inputs["logp_behav"]], dtype=dtype)
    policy = torch.tensor([inputs["logp_theta"]], dtype=dtype, requires_grad=True)
    versions = torch.tensor([inputs["v_behav"]])
    found = prox_loglinear(sampler, policy, versions, inputs["v_prox"], inputs["v_theta"])
    matches(found, [case["expected"]["logp_prox"]], case["tolerance"])
    alpha = (found - sampler) / (policy.detach() - sampler)
    matches(alpha, [case["expected"]["alpha"]], case["tolerance"])
    assert not found.requires_grad


def test_prox_of_each_token_follows_its_own_version(dtype):
    sampler, policy = torch.full((5,), -2.0, dtype=dtype), torch.full((5,), -1.0, dtype=dtype)
    # Of the policy's version, of prox's, older, much older, and from the future of prox.
    versions = torch.tensor([7, 6, 5, 3, 8])
    found = prox_loglinear(sampler, policy, versions, 6, 7)
    assert found.tolist() == pytest.approx([-2.0, -2.0, -1.5, -1.25, -2.0])
    assert len(prox_loglinear(sampler[:0], policy[:0], versions[:0], 6, 7)) == 0


def test_ratios_are_clamped_and_keep_the_gradient_inside():
    policy = torch.tensor([-1.0, -100.0, 0.0], dtype=torch.float64, requires_grad=True)
    prox = torch.tensor([-1.5, 0.0, -100.0], dtype=torch.float64)
    ratios = log_ratio(policy, prox)
    assert ratios.tolist() == [0.5, -20.0, 20.0]
    (gradient,) = torch.autograd.grad(ratios.sum(), policy)
    assert gradient.tolist() == [1.0, 0.0, 0.0]
    assert torch.autograd.gradcheck(lambda p: log_ratio(p, prox[:1]), (policy[:1],))


def test_the_weight_of_a_sequence_is_the_product_of_its_tokens(dtype):
    gaps = torch.tensor([0.8, 2.0, 0.9, 1.0, 3.0], dtype=dtype).log()
    index = torch.tensor([0, 0, 0, 1, 3])
    found = sequence_weight(gaps, index)
    assert found.tolist() == pytest.approx([1.44, 1.0, 1.0, 3.0], rel=1e-6)
    assert found[1:3].tolist() == [1.0, 1.0], "no drift and no tokens are exactly 1"
