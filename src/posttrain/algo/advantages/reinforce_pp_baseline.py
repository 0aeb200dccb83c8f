"""Group-mean baseline, whitened over all tokens of the batch."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.advantages.whitening import Variance, whiten
from posttrain.algo.segments import is_last_of_segment, segment_mean, segment_sum


def reinforce_pp_baseline(
    rewards_N: Tensor, trajectory_index_N: Tensor, group_index_N: Tensor, *, variance: Variance
) -> Tensor:
    """A = whiten(R_i - mean of its group), every token of a trajectory alike, [N].

    Source: arXiv:2501.03262 (REINFORCE++-baseline), there with a k2 loss to the reference. R_i is
    the sum of `rewards_N` over the trajectory. Tokens are whitened, so long trajectories count
    more and the mean that is subtracted isn't 0: a group of equal rewards gets that shift. A
    single member is centred to 0.
    """
    outcome_N = segment_sum(rewards_N, trajectory_index_N)[trajectory_index_N]
    once_N = is_last_of_segment(trajectory_index_N)  # each trajectory has one vote in the mean
    mean_P = segment_mean(outcome_N[once_N], group_index_N[once_N])
    return whiten(outcome_N - mean_P[group_index_N], variance)
