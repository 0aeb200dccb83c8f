"""REINFORCE with a capped weight for what the sampler's policy was."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.losses.cispo import cispo
from posttrain.algo.losses.terms import LossTerms


def is_reinforce(
    policy_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    cap: float,
) -> LossTerms:
    """-sg(min(w, cap)) A policy_logprobs, w = policy / sampler of each token.

    CISPO anchored on the sampler: w covers mismatch, staleness and the updates of this step at
    once, so no other behaviour weight may be applied. Without the cap the gradient is unbiased for
    one token; the stop-gradient keeps A policy_logprobs grad(w), which is wrong, out of it.
    """
    return cispo(policy_logprobs_N, sampler_logprobs_N, advantages_N, cap=cap)
