"""Group-mean baseline, scaled up for the groups that teach nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from posttrain.algo.groups import centred, is_zero_variance


def gpg(
    rewards_G: Tensor,
    batch_rewards: Sequence[Tensor],
    *,
    scale: Literal["paper", "verl"] = "paper",
    f_norm: float = 1.0,
) -> Tensor:
    """A_i = alpha (R_i - mean) / f_norm. Source: arXiv:2504.02546 (GPG).

    alpha is B / (B - M), with M the members of zero-variance groups among all B of the batch
    ("paper"), or B / #(R != 0) as verl's compute_gpg_outcome_advantage has it ("verl"), which
    leaves out wrong answers and counts all-correct groups. Equal rewards or one member give 0.
    """
    if scale == "verl":
        num_counted = sum(int(rewards.count_nonzero()) for rewards in batch_rewards)
    else:
        num_counted = sum(len(rs) for rs in batch_rewards if not is_zero_variance(rs))
    alpha = sum(len(rewards) for rewards in batch_rewards) / max(num_counted, 1)
    return alpha * centred(rewards_G) / f_norm
