"""Turn rewards compared turn by turn, beside the outcome."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.algo.advantages.whitening import Variance, normalised


def mt_grpo(
    rewards_G: Tensor,
    turn_rewards: Sequence[Tensor],
    *,
    lam: float,
    std_estimator: Variance,
    std_eps: float,
) -> list[Tensor]:
    """A_k = A^T_k + lam A^O while turns have rewards, then A^O; one tensor [K] a member.

    Source: arXiv:2505.11821 v1 (MT-GRPO). A^O is the outcome normalised over the group, A^T_k the
    k-th turn's reward normalised over the members that have a k-th turn. The last turn with
    rewards is the last in which any member's reward is not 0. Equal rewards give 0.
    """
    outcome_G = normalised(rewards_G, std_estimator, std_eps)
    rewarded = [k for rewards_K in turn_rewards for k, r in enumerate(rewards_K.tolist()) if r]
    last_rewarded = max(rewarded, default=-1)
    advantages: list[list[Tensor]] = [[] for _ in turn_rewards]
    for k in range(max(map(len, turn_rewards))):
        members = [i for i, rewards_K in enumerate(turn_rewards) if len(rewards_K) > k]
        rewards_k = torch.stack([turn_rewards[i][k] for i in members])
        of_turn_k = normalised(rewards_k, std_estimator, std_eps)
        scale = lam if k <= last_rewarded else 1.0
        for i, of_turn in zip(members, of_turn_k, strict=True):
            advantages[i].append(of_turn + scale * outcome_G[i])
    return [torch.stack(values) if values else rewards_G.new_zeros(0) for values in advantages]
