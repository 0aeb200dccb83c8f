"""KL to a reference as part of the reward."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.segments import discounted_to_go, num_segments, segment_sum


def kl_to_go(penalty_N: Tensor, trajectory_index_N: Tensor, group_index_N: Tensor) -> Tensor:
    """sum_{s >= t} penalty_s, less the mean of the whole sums of the group's other sequences, [N].

    With penalty = coef * (policy - reference) of each sampled token, subtracting it from the
    advantage gives the full gradient of coef * KL(policy || reference), later tokens included
    (arXiv:2510.01555). The siblings' mean is independent of the sequence and leaves it unbiased;
    for one token it is leave-one-out on R - penalty exactly. A sequence alone has no baseline.
    """
    if not len(penalty_N):
        return penalty_N
    totals_S = segment_sum(penalty_N, trajectory_index_N)
    group_S = trajectory_index_N.new_zeros(num_segments(trajectory_index_N))
    group_S[trajectory_index_N] = group_index_N
    sums_S = segment_sum(totals_S, group_S)[group_S]
    siblings_S = segment_sum(totals_S.new_ones(len(totals_S)), group_S)[group_S] - 1
    baseline_S = (sums_S - totals_S) / siblings_S.clamp_min(1)
    to_go_N = discounted_to_go(penalty_N, trajectory_index_N, 1.0)
    return to_go_N - baseline_S[trajectory_index_N]
