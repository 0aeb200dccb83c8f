"""Distillation: the advantage of sampled tokens, and divergences of whole distributions.

Shapes: N positions, V vocabulary. Student and teacher read the same token ids, with the same
temperature on both (`logprobs.scaled_logits` before the divergences); the teacher never gets a
gradient. Rows don't touch each other: call the divergences on chunks of rows to bound memory, of
which they take a few times the logits. A logit of -inf is an impossible token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from posttrain.algo.ratios import log_ratio


def opd_advantages(
    prox_logprobs_N: Tensor, teacher_logprobs_N: Tensor, *, coef: float = 1.0
) -> Tensor:
    """coef * (teacher - student) of each sampled token, clamped to +-20, without gradient, [N].

    On-policy distillation (https://thinkingmachines.ai/blog/on-policy-distillation): discount 0,
    no baseline needed. The policy gradient is that of the sum over tokens of KL(student || teacher)
    given the prefix; its negative mean is the k1 estimate of that KL.
    """
    return coef * log_ratio(teacher_logprobs_N, prox_logprobs_N).detach()


def opd_value_baseline(student_logits_NV: Tensor, teacher_logits_NV: Tensor) -> Tensor:
    """-KL(student || teacher) of each position: the expected `opd_advantages` there, [N].

    Subtracting it changes no expected gradient and takes the variance between positions away
    (arXiv:2605.07865). Without gradient.
    """
    with torch.no_grad():
        return -reverse_kl(student_logits_NV, teacher_logits_NV)


def reverse_kl(student_logits_NV: Tensor, teacher_logits_NV: Tensor) -> Tensor:
    """KL(student || teacher), mode-seeking, [N]. Differentiable in the student."""
    return _kl(_logprobs(student_logits_NV), _logprobs(teacher_logits_NV.detach()))


def forward_kl(student_logits_NV: Tensor, teacher_logits_NV: Tensor) -> Tensor:
    """KL(teacher || student), mass-covering: that of a soft-label cross-entropy, [N]."""
    return _kl(_logprobs(teacher_logits_NV.detach()), _logprobs(student_logits_NV))


def jsd(student_logits_NV: Tensor, teacher_logits_NV: Tensor, *, beta: float) -> Tensor:
    """beta KL(teacher || M) + (1 - beta) KL(student || M), M = beta teacher + (1 - beta) student.

    Source: arXiv:2306.13649 eq. 1, [N]; symmetric at beta = 1/2, at most log 2. Over beta it goes
    to `forward_kl` as beta goes to 0, over 1 - beta to `reverse_kl` as beta goes to 1; both ends
    themselves are 0. Raises ValueError outside 0 < beta < 1.
    """
    if not 0 < beta < 1:
        raise ValueError(
            f"jsd beta is {beta}: its ends are 0 everywhere; use forward_kl for 0, reverse_kl for 1"
        )
    student_NV, teacher_NV = _logprobs(student_logits_NV), _logprobs(teacher_logits_NV.detach())
    mixture_NV = torch.logaddexp(teacher_NV + math.log(beta), student_NV + math.log1p(-beta))
    return beta * _kl(teacher_NV, mixture_NV) + (1 - beta) * _kl(student_NV, mixture_NV)


def _kl(logprobs_NV: Tensor, other_logprobs_NV: Tensor) -> Tensor:
    # kl_div has its arguments the other way round: kl_div(log q, log p) = p (log p - log q).
    return kl_div(other_logprobs_NV, logprobs_NV, reduction="none", log_target=True).sum(dim=-1)


def _logprobs(logits_NV: Tensor) -> Tensor:
    """log softmax in at least float32. Impossible tokens get a huge finite value, so 0 times it is
    0; half of the range leaves room to subtract."""
    wide_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    return wide_NV.log_softmax(dim=-1).clamp_min(torch.finfo(wide_NV.dtype).min / 2)
