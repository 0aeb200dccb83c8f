"""A mask that bounds the second moment of the log-ratios of a step."""

from __future__ import annotations

import torch
from torch import Tensor


def m2po(log_mismatch_N: Tensor, *, tau: float) -> Tensor:
    """0 for the tokens with the largest (log w)^2, as many as it takes until the mean is <= tau.

    Equal squares leave together, so the answer does not depend on the order of the tokens. Source:
    arXiv:2510.01161 (M2PO). Chosen over the whole step: AReaL chose within each micro-batch
    (AReaL #1730).
    """
    square_N = log_mismatch_N.square()
    ascending_N = square_N.sort().values
    counts_N = torch.arange(1, len(square_N) + 1, device=square_N.device)
    dropped_N = ascending_N[ascending_N.cumsum(0) / counts_N > tau]
    if not len(dropped_N):
        return torch.ones_like(square_N)
    return (square_N < dropped_N[0]).to(square_N)
