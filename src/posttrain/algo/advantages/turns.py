"""What estimators with credit for single turns share.

Shapes: G members of a group, K turns of a member, M turns of all members end to end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.algo.segments import discounted_to_go


def with_outcome(rewards_G: Tensor, turn_rewards: Sequence[Tensor]) -> list[Tensor]:
    """Rewards [K] of each member's turns, the outcome added to its last turn.

    Example:
        >>> with_outcome(torch.tensor([1.0]), [torch.tensor([0.5, 0.0])])
        [tensor([0.5000, 1.0000])]
    """
    return [
        torch.cat([rewards_K[:-1], rewards_K[-1:] + reward])
        for reward, rewards_K in zip(rewards_G, turn_rewards, strict=True)
    ]


def return_to_go(rewards_K: Tensor, gamma: float) -> Tensor:
    """sum_{s >= k} gamma^{s-k} r_s of one member's turns, [K]."""
    one_segment_K = torch.zeros(len(rewards_K), dtype=torch.int64, device=rewards_K.device)
    return discounted_to_go(rewards_K, one_segment_K, gamma)


def by_member(values_M: Tensor, turn_rewards: Sequence[Tensor]) -> list[Tensor]:
    """Values of all turns cut into one tensor [K] a member."""
    return list(values_M.split([len(rewards_K) for rewards_K in turn_rewards]))
