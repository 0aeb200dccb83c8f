"""Entropy: value, gradient, extremes, and independence of the chunking."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.algo.entropy import entropy


def test_value_and_gradient(vector, dtype, matches):
    case = vector("entropy_gradient")
    logits = torch.tensor([case["inputs"]["pi"]], dtype=dtype).log().requires_grad_(True)
    value = entropy(logits)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    matches(value, [case["expected"]["H"]], case["tolerance"])
    matches(gradient, [case["expected"]["grad_logits"]], case["tolerance"])


def test_rows_do_not_touch_each_other_so_chunks_give_the_same():
    """Report h03: flattened chunks give the value of the naive formula."""
    logits = 3 * torch.randn(37, 101, generator=torch.Generator().manual_seed(0))
    whole = entropy(logits)
    assert torch.equal(torch.cat([entropy(chunk) for chunk in logits.split(5)]), whole)
    logp = logits.double().log_softmax(-1)
    assert torch.allclose(whole.double(), -(logp.exp() * logp).sum(-1), atol=1e-5)


def test_extremes_are_finite_and_exact():
    logits = torch.tensor(
        [[0.0, 0.0, 0.0, 0.0], [1e4, 0.0, 0.0, 0.0], [0.0, 0.0, -math.inf, -1e30]]
    )
    logits = logits.requires_grad_(True)
    value = entropy(logits)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert torch.allclose(value, torch.tensor([math.log(4), 0.0, math.log(2)]), atol=1e-6)
    assert gradient.isfinite().all()


def test_a_common_offset_of_the_logits_costs_no_digits():
    logits = torch.tensor([[0.25, 0.5, -1.0]])
    assert torch.equal(entropy(logits + 4096.0), entropy(logits))


def test_half_precision_logits_are_widened_first():
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    value = entropy(logits)
    assert value.dtype == torch.float32
    assert torch.equal(value, entropy(logits.float()))


def test_temperature_divides_the_logits():
    logits = torch.tensor([[2.0, 0.0, 1.0]], dtype=torch.float64)
    assert torch.equal(entropy(logits, temperature=0.5), entropy(2 * logits))


def test_the_gradient_is_that_of_finite_differences():
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert torch.autograd.gradcheck(entropy, (logits.requires_grad_(True),))


def test_a_natural_gradient_step_changes_entropy_by_minus_the_covariance(vector):
    case = vector("entropy_change_covariance")
    logits = torch.tensor([case["inputs"]["logits"]], dtype=torch.float64)
    values = torch.tensor([case["inputs"]["Q"]], dtype=torch.float64)
    eta, pi, logp = case["inputs"]["eta"], logits.softmax(-1), logits.log_softmax(-1)
    advantages = values - (pi * values).sum()
    before = float(entropy(logits))
    assert before == pytest.approx(case["expected"]["H_before"], abs=1e-9)
    change = (float(entropy(logits + eta * advantages)) - before) / eta
    assert change == pytest.approx(case["expected"]["dH_over_eta"], abs=1e-6)
    minus_covariance = -float((pi * (logp - (pi * logp).sum()) * advantages).sum())
    assert minus_covariance == pytest.approx(case["expected"]["minus_cov"], abs=1e-9)
    assert change == pytest.approx(minus_covariance, rel=case["tolerance"])
