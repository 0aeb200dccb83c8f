"""Coefficients that follow a measurement: pure functions from one step's to the next."""

from __future__ import annotations

MAX_KL_ERROR = 0.2  # of (KL / target - 1): one noisy step moves the coefficient little


def adapted_kl_coef(
    coef: float, observed_kl: float, num_sequences: int, *, target: float, horizon: int
) -> float:
    """coef * (1 + clip(KL / target - 1, +-.2) * num_sequences / horizon).

    Source: arXiv:1909.08593 section 2.2. KL and target are in the same unit, `horizon` counts
    sequences. A step of more than `horizon` sequences counts as one of `horizon`: coef stays above
    0, where the formula alone would end up paying for KL.

    Example:
        >>> round(adapted_kl_coef(0.2, 12.0, 256, target=6.0, horizon=10_000), 6)
        0.201024
    """
    error = min(max(observed_kl / target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
    return coef * (1 + error * min(num_sequences / horizon, 1.0))


def entropy_coef(mean_entropy: float, *, coef: float, target: float | None) -> float:
    """The coefficient in force: `coef` while the mean entropy is at most `target`, else 0.

    Source: arXiv:2505.22312 (Skywork-OR1), the indicator of its adaptive entropy control. Without
    a target it is always `coef`.

    Example:
        >>> [entropy_coef(h, coef=0.01, target=0.2) for h in (0.1, 0.3)]
        [0.01, 0.0]
    """
    return coef if target is None or mean_entropy <= target else 0.0
