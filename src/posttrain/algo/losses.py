"""Policy losses per token, in the flat layout: one entry per loss token and no others.

Shapes: N loss tokens, gathered by the caller. A masked position never enters, so nothing that it
holds (NaN included) can reach a loss or a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algo.ratios import log_ratio


@dataclass(frozen=True, slots=True)
class LossTerms:
    """per_token_N: loss with gradient; clipped_low_N, clipped_high_N: bool, where the clipped
    branch is the strictly larger one and the gradient is 0.

    Example:
        >>> terms = ppo_clip(torch.tensor([0.0, 1.0]), torch.zeros(2), torch.ones(2), 0.2, 0.28)
        >>> terms.clipped_high_N.tolist()
        [False, True]
    """

    per_token_N: Tensor
    clipped_low_N: Tensor
    clipped_high_N: Tensor


def ppo_clip(
    policy_logprobs_N: Tensor,
    prox_logprobs_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
) -> LossTerms:
    """max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)), to be minimised.

    Sources: arXiv:1707.06347 eq. 7; unequal bounds, arXiv:2503.14476 eq. 10. The advantage and
    the prox log-probs carry no gradient. On-policy the ratio is exactly 1: the value is -A, and
    the gradient is that of -A * policy_logprobs.
    """
    advantages_N = advantages_N.detach()
    ratio_N = log_ratio(policy_logprobs_N, prox_logprobs_N.detach()).exp()
    unclipped_N = -advantages_N * ratio_N
    clipped_N = -advantages_N * ratio_N.clamp(1 - clip_low, 1 + clip_high)
    clip_is_active_N = clipped_N.detach() > unclipped_N.detach()
    return LossTerms(
        per_token_N=torch.maximum(unclipped_N, clipped_N),
        clipped_low_N=clip_is_active_N & (advantages_N < 0),
        clipped_high_N=clip_is_active_N & (advantages_N > 0),
    )
