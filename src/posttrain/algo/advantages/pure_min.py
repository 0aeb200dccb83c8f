"""A trajectory is worth its worst step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.algo.advantages.rloo import rloo
from posttrain.algo.advantages.turns import return_to_go, with_outcome


def min_form(rewards_K: Tensor, temperature: float) -> Tensor:
    """softmax(-r / T)_k r_k, [K], whose sum tends to min r as T falls. arXiv:2504.15275 (PURE)."""
    return (-rewards_K / temperature).softmax(0) * rewards_K


def pure_min(
    rewards_G: Tensor, turn_rewards: Sequence[Tensor], *, temperature: float
) -> list[Tensor]:
    """A_k = G_k - mean of the other members' G_0, one tensor [K] a member; turns are the steps.

    Source: arXiv:2504.15275 (PURE). G_k sums the min-form rewards from turn k on and the outcome.
    The blame for the worst step so falls on the turns up to it. A single member gets 0.
    """
    steps = [min_form(rewards_K, temperature) for rewards_K in turn_rewards]
    returns = [return_to_go(r_K, 1.0) for r_K in with_outcome(rewards_G, steps)]
    if len(returns) < 2:
        return [torch.zeros_like(returns_K) for returns_K in returns]
    whole_G = torch.stack([returns_K[:1].sum() for returns_K in returns])
    baseline_G = whole_G - rloo(whole_G)
    return [r_K - baseline for r_K, baseline in zip(returns, baseline_G, strict=True)]
