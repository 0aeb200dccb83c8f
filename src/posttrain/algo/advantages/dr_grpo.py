"""Group-mean baseline, divided by nothing."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.groups import centred


def dr_grpo(rewards_G: Tensor) -> Tensor:
    """A_i = R_i - mean. Source: arXiv:2503.20783 section 3.2, with fixed-length aggregation.

    It is rloo times (G-1)/G. A single member gets 0.
    """
    return centred(rewards_G)
