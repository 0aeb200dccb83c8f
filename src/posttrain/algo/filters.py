"""Which groups and which tokens stay."""

from __future__ import annotations

import torch
from torch import Tensor


def dynamic_sampling_keep(correct_G: Tensor) -> bool:
    """Whether 0 < correct members < G: only such a group teaches something about the outcome.

    Asks the outcome and not the reward, which a length term makes unequal in every group.
    Source: arXiv:2503.14476 eq. 11.

    Example:
        >>> dynamic_sampling_keep(torch.tensor([True, False, False]))
        True
    """
    return 0 < int(correct_G.sum()) < len(correct_G)


def keep_probability(pass_rate_P: Tensor, group_size: int) -> Tensor:
    """1 - p^G - (1-p)^G, [P]: the chance that `dynamic_sampling_keep` keeps a group of each task.

    1 over it is how many groups are drawn for one that stays.
    """
    return 1 - pass_rate_P**group_size - (1 - pass_rate_P) ** group_size


def top_fraction(values_N: Tensor, frac: float) -> Tensor:
    """Bool [N]: the largest `frac` of the values, at least one; ties with the smallest stay in.

    A threshold and not a count, so the answer does not depend on the order of the tokens.

    Example:
        >>> top_fraction(torch.tensor([3.0, 1.0, 3.0, 2.0]), 0.25).tolist()
        [True, False, True, False]
    """
    if not len(values_N):
        return torch.zeros_like(values_N, dtype=torch.bool)
    count = max(1, round(frac * len(values_N)))
    return values_N >= values_N.topk(count).values[-1]
