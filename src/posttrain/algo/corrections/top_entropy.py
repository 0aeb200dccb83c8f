"""A mask of tokens at which the policy was sure."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.filters import top_fraction


def top_entropy(entropy_N: Tensor, *, frac: float) -> Tensor:
    """1 for the `frac` of the step's tokens with the highest entropy, else 0; ties stay in.

    Source: arXiv:2506.01939: learning from the forks alone.
    """
    return top_fraction(entropy_N, frac).to(entropy_N)
