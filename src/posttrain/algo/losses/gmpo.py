"""Geometric mean of ratios that are clipped token by token."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.losses.terms import LossTerms
from posttrain.algo.ratios import log_ratio
from posttrain.algo.segments import segment_mean


def gmpo(
    policy_logprobs_N: Tensor,
    prox_logprobs_N: Tensor,
    advantages_N: Tensor,
    sequence_index_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> LossTerms:
    """-A exp(mean of the bounded log-ratios of the sequence), at each of its tokens.

    Source: arXiv:2507.20673 eq. 4. The bounds are on policy - prox, one-sided as in PPO: at most
    clip_high for A > 0, at least -clip_low for A < 0. A token beyond its bound has no gradient; the
    others of its sequence keep theirs. The mean over tokens is the sequence's loss, so the
    aggregation must be seq_mean_token_mean. On-policy the gradient of a sequence is that of
    -(mean A) * mean(policy_logprobs).
    """
    log_ratio_N = log_ratio(policy_logprobs_N, prox_logprobs_N)
    is_high_N = (advantages_N > 0) & (log_ratio_N > clip_high)
    is_low_N = (advantages_N < 0) & (log_ratio_N < -clip_low)
    bounded_N = log_ratio_N.masked_fill(is_high_N, clip_high).masked_fill(is_low_N, -clip_low)
    ratio_S = segment_mean(bounded_N, sequence_index_N).exp()
    return LossTerms(-advantages_N * ratio_S[sequence_index_N], is_low_N, is_high_N)
