"""Policy gradient with a quadratic leash to the policy at the start of the step."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.losses.terms import LossTerms


def kimi(
    policy_logprobs_N: Tensor,
    prox_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    tau: float,
) -> LossTerms:
    """-A policy_logprobs + tau (policy - prox)^2, token by token.

    Source: arXiv:2501.12599 section 2.3. Up to a constant it is (A - 2 tau x)^2 / (4 tau) with
    x = policy - prox; the paper's x is the sum over a whole sequence. The square isn't clamped, or
    it would let go where the drift is largest. On-policy it has no gradient.
    """
    drift_N = policy_logprobs_N - prox_logprobs_N
    return LossTerms(-advantages_N * policy_logprobs_N + tau * drift_N.square())
