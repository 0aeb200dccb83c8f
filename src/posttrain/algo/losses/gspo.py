"""Clipped surrogate with one ratio a sequence, the geometric mean of its tokens' ratios."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.losses.surrogate import clipped_surrogate
from posttrain.algo.losses.terms import LossTerms
from posttrain.algo.ratios import log_ratio
from posttrain.algo.segments import segment_mean


def gspo(
    policy_logprobs_N: Tensor,
    prox_logprobs_N: Tensor,
    advantages_N: Tensor,
    sequence_index_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> LossTerms:
    """max(-A s, -A clip(s)) at every token of a sequence, s = exp(mean of policy - prox over it).

    Source: arXiv:2507.18071 eq. 5-7. A sequence is clipped as a whole. The mean over its tokens is
    its loss, so the aggregation must be seq_mean_token_mean. On-policy s is exactly 1, and the
    gradient of a sequence is that of -(mean A) * mean(policy_logprobs).
    """
    log_ratio_N = log_ratio(policy_logprobs_N, prox_logprobs_N)
    ratio_S = segment_mean(log_ratio_N, sequence_index_N).exp()
    return clipped_surrogate(ratio_S[sequence_index_N], advantages_N, clip_low, clip_high)
