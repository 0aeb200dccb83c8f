"""Group-mean baseline, divided by the mean."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algo.groups import centred, is_zero_variance
from posttrain.errors import ConfigError


def max_rl(rewards_G: Tensor) -> Tensor:
    """A_i = (R_i - mean) / mean. Source: arXiv:2602.02710 (MaxRL).

    Weighs a task with pass rate p by 1/p. 0 for a mean of 0, equal rewards and a single member.
    Raises ConfigError for a negative reward: the mean then says nothing about the pass rate.
    """
    if bool((rewards_G < 0).any()):
        raise ConfigError(
            f"max_rl got a reward of {float(rewards_G.min()):g}: it divides by the mean, so "
            "rewards must not be negative; shift them, or use another estimator"
        )
    if is_zero_variance(rewards_G):
        return torch.zeros_like(rewards_G)
    return centred(rewards_G) / rewards_G.mean()
