"""Distillation: the advantage of sampled tokens and divergences of distributions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algo import kl
from posttrain.algo.distillation import (
    forward_kl,
    jsd,
    opd_advantages,
    opd_value_baseline,
    reverse_kl,
)

LOGITS = st.lists(st.floats(-8, 8), min_size=5, max_size=5)


def draw_logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_advantage_is_teacher_over_student(vector, matches, dtype):
    case = vector("opd_token_advantage")
    student_N = torch.tensor(case["inputs"]["student_logp"], dtype=dtype, requires_grad=True)
    teacher_N = torch.tensor(case["inputs"]["teacher_logp"], dtype=dtype, requires_grad=True)
    advantages_N = opd_advantages(student_N, teacher_N, coef=case["inputs"]["coef"])
    matches(advantages_N, case["expected"]["adv"])
    matches(kl.k1(-advantages_N).mean(), case["expected"]["reverse_kl_estimate"])
    assert not advantages_N.requires_grad


def test_divergences_of_two_distributions(vector, matches, dtype):
    case = vector("distill_divergences")
    student_NV = torch.tensor([case["inputs"]["student"]], dtype=dtype).log()
    teacher_NV = torch.tensor([case["inputs"]["teacher"]], dtype=dtype).log()
    expected = case["expected"]
    matches(reverse_kl(student_NV, teacher_NV), [expected["reverse_kl"]])
    matches(forward_kl(student_NV, teacher_NV), [expected["forward_kl"]])
    matches(jsd(student_NV, teacher_NV, beta=0.5), [expected["jsd_half"]])
    matches(opd_value_baseline(student_NV, teacher_NV), [expected["opd_value_baseline"]])


def test_the_baseline_is_the_mean_of_the_advantage_and_keeps_the_gradient():
    """E[A] = -KL under the student, and E[(A + KL) grad log p] is the gradient of -KL, exactly."""
    student_NV = draw_logits(1, 12).requires_grad_()
    teacher_NV = draw_logits(1, 12, seed=1)
    logprobs_V = student_NV.log_softmax(-1)[0]
    advantages_V = opd_advantages(logprobs_V, teacher_NV.log_softmax(-1)[0])
    probs_V = logprobs_V.detach().exp()
    baseline_N = opd_value_baseline(student_NV, teacher_NV)
    assert (probs_V * advantages_V).sum().item() == pytest.approx(baseline_N.item())
    surrogate = -(probs_V * (advantages_V - baseline_N) * logprobs_V).sum()
    (sampled,) = torch.autograd.grad(surrogate, student_NV, retain_graph=True)
    (closed,) = torch.autograd.grad(reverse_kl(student_NV, teacher_NV).sum(), student_NV)
    assert torch.allclose(sampled, closed, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(LOGITS, LOGITS, st.floats(0.01, 0.99))
def test_divergences_are_never_negative_and_bounded_as_known(student, teacher, beta):
    student_NV = torch.tensor([student], dtype=torch.float64)
    teacher_NV = torch.tensor([teacher], dtype=torch.float64)
    assert reverse_kl(student_NV, teacher_NV).item() >= -1e-12
    assert reverse_kl(student_NV, teacher_NV).item() == pytest.approx(
        forward_kl(teacher_NV, student_NV).item()
    )
    mixed = jsd(student_NV, teacher_NV, beta=beta).item()
    assert -1e-12 <= mixed <= 0.6931471806
    assert mixed == pytest.approx(jsd(teacher_NV, student_NV, beta=1 - beta).item(), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_student_that_is_the_teacher_diverges_by_nothing(dtype):
    logits_NV = (10 * draw_logits(3, 7)).to(dtype)
    for divergence in (reverse_kl, forward_kl):
        assert divergence(logits_NV, logits_NV + 1).abs().max() < 2e-6
    assert jsd(logits_NV, logits_NV, beta=0.3).abs().max() < 1e-6


def test_jsd_goes_over_into_both_kls():
    student_NV, teacher_NV = draw_logits(4, 6), draw_logits(4, 6, seed=1)
    near_0 = jsd(student_NV, teacher_NV, beta=1e-6) / 1e-6
    near_1 = jsd(student_NV, teacher_NV, beta=1 - 1e-6) / 1e-6
    assert torch.allclose(near_0, forward_kl(student_NV, teacher_NV), atol=1e-4)
    assert torch.allclose(near_1, reverse_kl(student_NV, teacher_NV), atol=1e-4)


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.5, 2.0])
def test_jsd_refuses_the_ends_where_it_is_0_everywhere(beta):
    with pytest.raises(ValueError, match="use forward_kl for 0, reverse_kl for 1"):
        jsd(draw_logits(1, 3), draw_logits(1, 3), beta=beta)


def test_gradients_are_right_and_the_teacher_gets_none():
    student_NV, teacher_NV = draw_logits(2, 5).requires_grad_(), draw_logits(2, 5, seed=1)
    for divergence in (reverse_kl, forward_kl, lambda s, t: jsd(s, t, beta=0.3)):
        assert torch.autograd.gradcheck(lambda s, d=divergence: d(s, teacher_NV), (student_NV,))
        teacher = teacher_NV.clone().requires_grad_()
        assert torch.autograd.grad(
            divergence(student_NV, teacher).sum(), teacher, allow_unused=True
        ) == (None,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_impossible_tokens_add_nothing(dtype):
    """A vocabulary padded with -inf on both sides, as tied heads with spare rows have it."""
    student_NV, teacher_NV = draw_logits(2, 5).to(dtype), draw_logits(2, 5, seed=1).to(dtype)
    spare_NV = torch.full((2, 3), -torch.inf, dtype=dtype)
    for divergence in (reverse_kl, forward_kl, lambda s, t: jsd(s, t, beta=0.5)):
        padded_NV = torch.cat([student_NV, spare_NV], dim=1).requires_grad_()
        value_N = divergence(padded_NV, torch.cat([teacher_NV, spare_NV], dim=1))
        assert torch.allclose(value_N, divergence(student_NV, teacher_NV))
        (gradient_NV,) = torch.autograd.grad(value_N.sum(), padded_NV)
        assert bool(gradient_NV.isfinite().all())


def test_half_precision_logits_are_widened():
    student_NV, teacher_NV = draw_logits(2, 50).bfloat16(), draw_logits(2, 50, seed=1).bfloat16()
    value_N = reverse_kl(student_NV, teacher_NV)
    assert value_N.dtype == torch.float32
    assert torch.allclose(value_N.double(), reverse_kl(student_NV.double(), teacher_NV.double()))


def test_an_advantage_is_bounded_where_the_teacher_rules_a_token_out():
    advantages_N = opd_advantages(torch.tensor([-1.0, -1e4]), torch.tensor([-1e4, -1.0]))
    assert advantages_N.tolist() == [-20.0, 20.0]
    assert opd_advantages(torch.zeros(0), torch.zeros(0)).tolist() == []
