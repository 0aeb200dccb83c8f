"""Truncated importance sampling of sequences."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.ratios import sequence_weight


def seq_tis(log_mismatch_N: Tensor, sequence_index_N: Tensor, *, cap: float) -> Tensor:
    """min(product of w over the sequence, cap), for each of its tokens.

    Unbiased below the cap, at a variance that grows with the length. Source:
    https://richardli.xyz/rl-collapse; verl's rollout_corr_helper.py.
    """
    return sequence_weight(log_mismatch_N, sequence_index_N).clamp(max=cap)[sequence_index_N]
