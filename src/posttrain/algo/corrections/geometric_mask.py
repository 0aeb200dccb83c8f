"""A mask of sequences by the geometric mean of their ratios."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.segments import segment_mean


def geometric_mask(
    log_mismatch_N: Tensor, sequence_index_N: Tensor, *, low: float, high: float
) -> Tensor:
    """1 where low <= (product of w)^(1/length) <= high, else 0, for each token of the sequence.

    The same drift of each token gives the same verdict at every length. Source: `seq_mean_k1`
    rejection of verl's rollout_corr_helper.py; verl docs/algo/rollout_corr_math.md section 3.3.3.
    """
    mean_S = segment_mean(log_mismatch_N, sequence_index_N).exp()
    return ((mean_S >= low) & (mean_S <= high)).to(log_mismatch_N)[sequence_index_N]
