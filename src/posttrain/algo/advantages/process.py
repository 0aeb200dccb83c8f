"""Step rewards normalised over all steps of the group, then summed over the future."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.algo.advantages.turns import by_member, return_to_go, with_outcome
from posttrain.algo.advantages.whitening import Variance, normalised


def process(
    rewards_G: Tensor, turn_rewards: Sequence[Tensor], *, std_estimator: Variance, std_eps: float
) -> list[Tensor]:
    """A_k = sum_{s >= k} (r_s - mean) / (std + eps), one tensor [K] a member; turns are the steps.

    Source: arXiv:2402.03300 section 4.1.3 (GRPO with process supervision). Mean and std are over
    all steps of the group. The outcome arrives at the last turn. Equal rewards give 0.
    """
    rewards = with_outcome(rewards_G, turn_rewards)
    normalised_M = normalised(torch.cat(rewards), std_estimator, std_eps)
    return [return_to_go(r_K, 1.0) for r_K in by_member(normalised_M, rewards)]
