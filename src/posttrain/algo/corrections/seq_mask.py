"""A mask of sequences by the product of their ratios."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.ratios import sequence_weight


def seq_mask(
    log_mismatch_N: Tensor, sequence_index_N: Tensor, *, low: float, high: float
) -> Tensor:
    """1 where low <= product of w over the sequence <= high, else 0, for each of its tokens.

    Source: `seq_sum_k1` rejection of verl's rollout_corr_helper.py.
    """
    weight_S = sequence_weight(log_mismatch_N, sequence_index_N)
    return ((weight_S >= low) & (weight_S <= high)).to(log_mismatch_N)[sequence_index_N]
