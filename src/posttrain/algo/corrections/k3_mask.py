"""A mask of sequences by their divergence from the sampler."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.ratios import mismatch_k3
from posttrain.algo.segments import segment_mean


def k3_mask(log_mismatch_N: Tensor, sequence_index_N: Tensor, *, max_k3: float) -> Tensor:
    """1 where the mean of w - 1 - log w over the sequence is at most max_k3, else 0.

    Never negative: unlike in a geometric mean, drifts of either sign do not cancel. Source:
    `seq_mean_k3` rejection of verl's rollout_corr_helper.py.
    """
    k3_S = segment_mean(mismatch_k3(log_mismatch_N), sequence_index_N)
    return (k3_S <= max_k3).to(log_mismatch_N)[sequence_index_N]
