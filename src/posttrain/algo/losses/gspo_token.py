"""GSPO whose gradient stays at each token, for advantages that differ within a sequence."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.losses.surrogate import clipped_surrogate
from posttrain.algo.losses.terms import LossTerms
from posttrain.algo.ratios import log_ratio
from posttrain.algo.segments import segment_mean


def gspo_token(
    policy_logprobs_N: Tensor,
    prox_logprobs_N: Tensor,
    advantages_N: Tensor,
    sequence_index_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> LossTerms:
    """max(-A s_t, -A clip(s_t)), s_t = sg(s) exp(policy - sg(policy)), s of the whole sequence.

    Source: arXiv:2507.18071 eq. 13-14. s_t has the value of GSPO's s and a gradient at its own
    token only. With one advantage a sequence, value and gradient of the sequence's mean are GSPO's.
    """
    log_ratio_N = log_ratio(policy_logprobs_N, prox_logprobs_N).detach()
    ratio_S = segment_mean(log_ratio_N, sequence_index_N).exp()
    is_one_N = (policy_logprobs_N - policy_logprobs_N.detach()).exp()  # 1, with a gradient
    ratio_N = ratio_S[sequence_index_N] * is_one_N
    return clipped_surrogate(ratio_N, advantages_N, clip_low, clip_high)
