"""A moving average of the rewards of a role as baseline."""

from __future__ import annotations

import torch
from torch import Tensor


def rae(rewards_G: Tensor, role_baseline: float, *, decay: float) -> Tensor:
    """A_i = R_i - b_role, b following each reward. Source: arXiv:2506.24119 (SPIRAL).

    `role_baseline` is the role's before this group; `rae_step` also gives the one after it. All
    members have the same role. Defined for a single member.
    """
    return rae_step(rewards_G, role_baseline, decay)[0]


def rae_step(rewards_G: Tensor, baseline: float, decay: float) -> tuple[Tensor, float]:
    """Advantages [G] and the baseline after them: A = R - b, then b <- decay b + (1 - decay) R.

    Rewards one after the other, in order. Subtracting first keeps a reward out of its own
    baseline, which would shrink A by the factor `decay`.

    Example:
        >>> rae_step(torch.tensor([1.0, 1.0]), 0.0, 0.5)
        (tensor([1.0000, 0.5000]), 0.75)
    """
    advantages = []
    for reward in rewards_G.tolist():
        advantages.append(reward - baseline)
        baseline = decay * baseline + (1 - decay) * reward
    return torch.tensor(advantages, dtype=rewards_G.dtype, device=rewards_G.device), baseline
