"""Quantiles of Student's t for whole degrees of freedom, without scipy."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

_LARGE = 200  # above it the expansion around the normal quantile is right to 1e-7


def t_central_mass(t: float, degrees: int) -> float:
    """P(|T| <= t), exact finite series. Source: Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(degrees))
    cosine_square = math.cos(angle) ** 2
    odd = degrees % 2 == 1
    total, term = 0.0, 1.0
    for i in range((degrees - 1) // 2 if odd else degrees // 2):
        total += term
        term *= cosine_square * ((2 * i + 2) / (2 * i + 3) if odd else (2 * i + 1) / (2 * i + 2))
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)
    return math.sin(angle) * total


@lru_cache(maxsize=256)
def t_quantile(probability: float, degrees: int) -> float:
    """t with P(T <= t) = probability, for 0.5 <= probability < 1 and degrees >= 1.

    Example:
        >>> round(t_quantile(0.975, 3), 4)
        3.1824
    """
    if not 0.5 <= probability < 1 or degrees < 1:
        raise ValueError(
            f"t quantile of {probability} with {degrees} degrees of freedom: need a probability "
            "in [0.5, 1) and at least 1 degree"
        )
    if degrees > _LARGE:
        return _expanded(NormalDist().inv_cdf(probability), degrees)
    mass, low, high = 2 * probability - 1, 0.0, 1.0
    while t_central_mass(high, degrees) < mass:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        if t_central_mass(middle, degrees) < mass:
            low = middle
        else:
            high = middle
    return high


def _expanded(z: float, degrees: int) -> float:
    """Around the normal quantile in powers of 1/degrees: Abramowitz and Stegun 26.7.5."""
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3
