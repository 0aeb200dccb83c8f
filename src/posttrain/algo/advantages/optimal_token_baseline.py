"""A baseline for each position: of least variance, weighted by how uncertain the path was."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algo.segments import discounted_to_go, num_segments, segment_sum

SMALLEST_WEIGHT = 1e-12  # where no token was uncertain the weights are equal: the plain mean


def optimal_token_baseline(
    rewards_N: Tensor,
    prox_logprobs_N: Tensor,
    sum_pi_squared_N: Tensor,
    trajectory_index_N: Tensor,
    group_index_N: Tensor,
) -> Tensor:
    """A_t = G_t - B_t, B_t = sum_i G_it W_it / sum_i W_it over the group's t-th tokens, [N].

    W_t is the running sum of 1 - 2 pi_t + sum_v pi(v)^2, the squared score of a token's logits;
    G_t the undiscounted return to go. Source: verl 0.9.1, compute_optimal_token_baseline_advantage
    (verl then sets B to 0 where only the longest trajectory is left). Such a token has nothing to
    be compared with and gets exactly 0 here; so does a single member.
    """
    to_go_N = discounted_to_go(rewards_N, trajectory_index_N, 1.0)
    energy_N = 1 - 2 * prox_logprobs_N.exp() + sum_pi_squared_N
    weights_N = _running_sum(energy_N, trajectory_index_N).clamp_min(SMALLEST_WEIGHT)
    position_N = _running_sum(torch.ones_like(weights_N), trajectory_index_N).long()
    cell_N = group_index_N * num_segments(position_N) + position_N
    weight_N = segment_sum(weights_N, cell_N)[cell_N]
    # G W - G W is exactly 0 for a token on its own; G - (G W) / W need not be.
    return (to_go_N * weight_N - segment_sum(weights_N * to_go_N, cell_N)[cell_N]) / weight_N


def _running_sum(values_N: Tensor, index_N: Tensor) -> Tensor:
    """Sum over the segment up to and with the token: a scan of the layout read backwards."""
    backwards_N = num_segments(index_N) - 1 - index_N.flip(0)
    return discounted_to_go(values_N.flip(0), backwards_N, 1.0).flip(0)
