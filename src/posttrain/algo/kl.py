"""Per-token estimators of KL(p || q) from samples of p, given x = log p - log q, and the KL loss.

Source: http://joschu.net/blog/kl-approx.html; what their gradients are when they are minimised as
a loss: arXiv:2506.09477 and arXiv:2510.01555.
Shapes: N tokens. The caller of an estimator clamps x (`ratios.log_ratio`); they clamp nothing.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.algo.ratios import log_ratio

Estimator = Literal["k1", "k2", "k3", "k3_weighted"]


def k1(log_ratio_N: Tensor) -> Tensor:
    """x: unbiased, of either sign, noisy."""
    return log_ratio_N


def k2(log_ratio_N: Tensor) -> Tensor:
    """x^2 / 2: biased, never negative."""
    return log_ratio_N.square() / 2


def k3(log_ratio_N: Tensor) -> Tensor:
    """exp(-x) - 1 + x: unbiased and never negative.

    expm1 keeps the digits of a small x, where exp(-x) - 1 + x would be rounding noise.
    """
    return torch.expm1(-log_ratio_N) + log_ratio_N


def kl_loss(
    policy_logprobs_N: Tensor,
    ref_logprobs_N: Tensor,
    estimator: Estimator,
    prox_logprobs_N: Tensor | None = None,
) -> Tensor:
    """The estimator per token [N], to be minimised: with the gradient of policy_logprobs.

    Expected gradient on samples of the policy:

        k1           0: only noise
        k2           KL(policy || ref)
        k3           KL(ref || policy), another objective
        k3_weighted  KL(policy || ref): policy / prox times k3, by default policy / sg(policy),
                     whose factor is 1 and brings in the gradient of the sampling

    Source of the last: arXiv:2512.02556 eq. 7; with `prox_logprobs_N` it holds on samples of prox
    too. Its gradient per token is (policy / prox) x, that of k2 where both are equal. What the
    sampler drew is weighed by the off-policy corrections besides. Beyond x = +-20 k2 and k3 have
    no gradient.
    """
    log_ratio_N = log_ratio(policy_logprobs_N, ref_logprobs_N)
    if estimator != "k3_weighted":
        return {"k1": k1, "k2": k2, "k3": k3}[estimator](log_ratio_N)
    drawn_N = policy_logprobs_N.detach() if prox_logprobs_N is None else prox_logprobs_N
    return log_ratio(policy_logprobs_N, drawn_N).exp() * k3(log_ratio_N)
