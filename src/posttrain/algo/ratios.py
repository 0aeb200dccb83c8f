"""Log-ratios between policies on the tokens that were sampled, and what they say in numbers.

Shapes: N loss tokens, S sequences. Three policies: the sampler's (behaviour), prox (the trainer's
recomputation at the start of the step) and the current one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algo.segments import segment_sum

MAX_LOG_RATIO = 20.0  # exp(20) is about 5e8; beyond it only overflow is left


def log_ratio(policy_logprobs_N: Tensor, prox_logprobs_N: Tensor) -> Tensor:
    """policy - prox, clamped to +-20 so that exp stays finite. Keeps the gradient inside."""
    return (policy_logprobs_N - prox_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def log_mismatch(prox_logprobs_N: Tensor, sampler_logprobs_N: Tensor) -> Tensor:
    """prox - sampler, clamped to +-20: w = exp of it is trainer over sampler, never inverted."""
    difference_N = prox_logprobs_N.detach() - sampler_logprobs_N.detach()
    return difference_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_weight(log_mismatch_N: Tensor, sequence_index_N: Tensor) -> Tensor:
    """Product of w over each sequence, [S], summed in log space and clamped there to +-20.

    It is the weight of the whole sequence, so it grows with the length: a drift of .01 a token is
    1.1 over 10 tokens and 22026 over 1000. A sequence without drift, or without tokens, has 1.
    """
    # In float64: a float32 sum over 1000 tokens would put the product off by 1e-4.
    log_weight_S = segment_sum(log_mismatch_N.double(), sequence_index_N)
    return log_weight_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().to(log_mismatch_N)


def mismatch_k3(log_mismatch_N: Tensor) -> Tensor:
    """Per token w - 1 - log w, whose mean under the sampler estimates KL(sampler || prox).

    `kl.k3` of -log_mismatch: the sampler is the policy that the samples are from.
    """
    return torch.expm1(log_mismatch_N) - log_mismatch_N


def prox_loglinear(
    sampler_logprobs_N: Tensor,
    policy_logprobs_N: Tensor,
    version_sampler_N: Tensor,
    version_prox: int,
    version_policy: float,
) -> Tensor:
    """prox_logprobs without a forward pass: sampler + alpha (policy - sampler), no gradient.

    alpha = (version_prox - version_sampler) / (version_policy - version_sampler) in [0, 1], from
    the policy version each token was sampled with; 0 for a token of the current version, where the
    sampler is prox. `version_policy` is fractional between the updates of a step, so that at its
    start prox is the policy. Source: AReaL, docs/en/algorithms/prox_approx.md ("loglinear").
    """
    age_N = (version_policy - version_sampler_N).to(sampler_logprobs_N)
    alpha_N = ((version_prox - version_sampler_N) / age_N.clamp_min(1)).clamp(0, 1)
    difference_N = policy_logprobs_N.detach() - sampler_logprobs_N
    return sampler_logprobs_N + alpha_N * difference_N


def ess_frac(weight_sum: Tensor, weight_square_sum: Tensor, count: int) -> Tensor:
    """Kish's effective sample size over the count (>= 1): (sum w)^2 / (count * sum w^2).

    Takes sums, because they add up over micro-batches and ranks.
    """
    # All weights can be 0 (every ratio underflowed): then no sample is effective.
    smallest = torch.finfo(weight_square_sum.dtype).tiny
    return weight_sum.square() / (count * weight_square_sum).clamp_min(smallest)


def chi2(weight_square_sum: Tensor, count: int) -> Tensor:
    """E[w^2] - 1 over the count (>= 1): estimates chi^2(prox || sampler). Takes a sum as well."""
    return weight_square_sum / count - 1
