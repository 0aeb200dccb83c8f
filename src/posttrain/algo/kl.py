"""Per-token estimators of KL(p || q) from samples of p, given x = log p - log q.

Source: http://joschu.net/blog/kl-approx.html; what their gradients are when they are minimised as
a loss: arXiv:2506.09477 and arXiv:2510.01555 (k1: nothing; k2: KL(p||q); k3: KL(q||p)).
Shapes: N tokens. The caller clamps x (`ratios.log_ratio`); the estimators clamp nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def k1(log_ratio_N: Tensor) -> Tensor:
    """x: unbiased, of either sign, noisy."""
    return log_ratio_N


def k2(log_ratio_N: Tensor) -> Tensor:
    """x^2 / 2: biased, never negative."""
    return log_ratio_N.square() / 2


def k3(log_ratio_N: Tensor) -> Tensor:
    """exp(-x) - 1 + x: unbiased and never negative.

    expm1 keeps the digits of a small x, where exp(-x) - 1 + x would be rounding noise.
    """
    return torch.expm1(-log_ratio_N) + log_ratio_N
