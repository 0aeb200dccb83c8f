"""Log-ratios between policies on the tokens that were sampled, and what they say in numbers.

Shapes: N loss tokens. Three policies: the sampler's (behaviour), prox (the trainer's
recomputation at the start of the step) and the current one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algo import kl

MAX_LOG_RATIO = 20.0  # exp(20) is about 5e8; beyond it only overflow is left


def log_ratio(policy_logprobs_N: Tensor, prox_logprobs_N: Tensor) -> Tensor:
    """policy - prox, clamped to +-20 so that exp stays finite. Keeps the gradient inside."""
    return (policy_logprobs_N - prox_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def log_mismatch(prox_logprobs_N: Tensor, sampler_logprobs_N: Tensor) -> Tensor:
    """prox - sampler, clamped to +-20: w = exp of it is trainer over sampler, never inverted."""
    difference_N = prox_logprobs_N.detach() - sampler_logprobs_N.detach()
    return difference_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def mismatch_k3(log_mismatch_N: Tensor) -> Tensor:
    """Per token w - 1 - log w, whose mean under the sampler estimates KL(sampler || prox)."""
    return kl.k3(-log_mismatch_N)


def ess_frac(weight_sum: Tensor, weight_square_sum: Tensor, count: int) -> Tensor:
    """Kish's effective sample size over the count (>= 1): (sum w)^2 / (count * sum w^2).

    Takes sums, because they add up over micro-batches and ranks.
    """
    # All weights can be 0 (every ratio underflowed): then no sample is effective.
    smallest = torch.finfo(weight_square_sum.dtype).tiny
    return weight_sum.square() / (count * weight_square_sum).clamp_min(smallest)
