"""Values measured in standard deviations: of one group, and of all tokens of a batch over ranks.

Shapes: N values of any kind. "unbiased" divides by N-1, "population" by N.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.algo.groups import ZERO_VARIANCE_STD, above_lowest, centred

Variance = Literal["unbiased", "population"]

WHITEN_EPS = 1e-8  # added to the variance, as verl does
ROUNDING = 1e-7  # of float64 in sqrt(E[x^2] - mean^2), relative to the mean


def spread(values_N: Tensor, variance: Variance = "unbiased") -> Tensor:
    """Standard deviation, a scalar; 0 for fewer than two values."""
    if len(values_N) < 2:
        return values_N.new_zeros(())
    return above_lowest(values_N).std(correction=int(variance == "unbiased"))


def normalised(values_N: Tensor, variance: Variance = "unbiased", eps: float = 1e-6) -> Tensor:
    """(x - mean) / (std + eps), [N]. A std below 1e-6 is float noise: exactly 0 everywhere.

    Example:
        >>> normalised(torch.tensor([1.0, 0.0]), "population", eps=1.0).tolist()
        [0.3333333432674408, -0.3333333432674408]
    """
    std = spread(values_N, variance)
    if bool(std < ZERO_VARIANCE_STD):
        return torch.zeros_like(values_N)
    return centred(values_N) / (std + eps)


def moment_sums(values_N: Tensor) -> Tensor:
    """Sum, sum of squares and count, [3] float64. These add up over ranks; means and standard
    deviations do not."""
    values_N = values_N.detach().double()
    return torch.stack(
        [values_N.sum(), values_N.square().sum(), values_N.new_tensor(len(values_N))]
    )


def moments(sums_3: Tensor, variance: Variance) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (scalars, float64) of what the sums were taken over.

    The std is 0 where it can't be told from the rounding of the sums, and for fewer than two.
    """
    total, square_total, count = sums_3
    mean = total / count.clamp_min(1)
    degrees = (count - int(variance == "unbiased")).clamp_min(1)
    std = ((square_total - total * mean) / degrees).clamp_min(0).sqrt()
    return mean, torch.where(std < ROUNDING * mean.abs(), 0.0, std)


def whiten(values_N: Tensor, variance: Variance, sums_3: Tensor | None = None) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8), [N], over all values of the batch.

    `sums_3` is `moment_sums` added up over the ranks that share the batch; by default the values
    are all there is. A std below 1e-6 (one value, equal values) gives exactly 0.
    """
    mean, std = moments(moment_sums(values_N) if sums_3 is None else sums_3, variance)
    if bool(std < ZERO_VARIANCE_STD):
        return torch.zeros_like(values_N)
    whitened_N = (values_N.detach().double() - mean) * (std.square() + WHITEN_EPS).rsqrt()
    return whitened_N.to(values_N.dtype)
