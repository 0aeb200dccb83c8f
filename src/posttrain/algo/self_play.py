"""Rewards of one who proposes tasks, from how often the solver gets them right.

Shapes: T proposed tasks; pass_rates_T in [0, 1] over the solver's attempts at each.
"""

from __future__ import annotations

import torch
from torch import Tensor


def azr_propose(pass_rates_T: Tensor) -> Tensor:
    """1 - p for a task that is sometimes solved, 0 for one that never or always is, [T].

    Source: arXiv:2505.03335 eq. 4 (Absolute Zero). An unsolvable task must not pay, or the
    proposer would learn to write noise.
    """
    return torch.where(pass_rates_T > 0, 1 - pass_rates_T, 0.0)


def r_zero_uncertainty(pass_rates_T: Tensor) -> Tensor:
    """1 - 2 |p - 1/2|: most for a task solved half of the time, [T].

    Source: arXiv:2508.05004 (R-Zero), before its penalty for repeated tasks; there p is the share
    of the solver's answers that agree with the majority.
    """
    return 1 - 2 * (pass_rates_T - 0.5).abs()
