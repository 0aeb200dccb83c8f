"""Group-mean baseline, divided by a standard deviation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from posttrain.algo.advantages.whitening import Variance, spread
from posttrain.algo.groups import ZERO_VARIANCE_STD, centred


def grpo(
    rewards_G: Tensor,
    batch_rewards: Sequence[Tensor] = (),
    *,
    std: Literal["group", "batch", "none"] = "group",
    std_estimator: Variance = "unbiased",
    std_eps: float = 1e-6,
) -> Tensor:
    """A_i = (R_i - mean) / (std + eps), or without the division.

    Sources: arXiv:2402.03300 section 4.1.2 ("group"); arXiv:2503.20783 section 3.2 ("none").
    "batch" divides by the std of the raw rewards of all groups, those without variance included,
    as TRL's `scale_rewards="batch"`: it holds the spread between tasks too. A std below 1e-6 is
    float noise and gives 0 everywhere; so does a single member.
    """
    centred_G = centred(rewards_G)
    if std == "none":
        return centred_G
    compared = torch.cat(list(batch_rewards)) if std == "batch" else rewards_G
    deviation = spread(compared, std_estimator)
    if bool(deviation < ZERO_VARIANCE_STD):
        return torch.zeros_like(centred_G)
    return centred_G / (deviation + std_eps)
