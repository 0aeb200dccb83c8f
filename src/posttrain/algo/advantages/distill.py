"""The teacher's log-prob over the student's, as the advantage of each token."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.distillation import opd_advantages


def distill(teacher_logprobs_N: Tensor, prox_logprobs_N: Tensor, *, coef: float) -> Tensor:
    """coef * (teacher - student) of each sampled token, [N].

    The gradient of the reverse KL of each next token given its prefix (discount 0). Source:
    https://thinkingmachines.ai/blog/on-policy-distillation.
    """
    return opd_advantages(prox_logprobs_N, teacher_logprobs_N, coef=coef)
