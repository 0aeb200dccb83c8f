"""Off-policy advantages and critic targets, with truncated importance weights."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.advantages.gae import Whitening
from posttrain.algo.advantages.whitening import whiten
from posttrain.algo.segments import discounted_to_go, next_in_segment


def vtrace_targets(
    rewards_N: Tensor,
    values_N: Tensor,
    log_mismatch_N: Tensor,
    trajectory_index_N: Tensor,
    bootstrap_S: Tensor,
    *,
    gamma: float,
    rho_bar: float,
    c_bar: float,
) -> Tensor:
    """v_t = V_t + delta_t + gamma c_t (v_{t+1} - V_{t+1}), [N]; what the critic is fitted to.

    delta_t = rho_t (r_t + gamma V_{t+1} - V_t), rho = min(w, rho_bar), c = min(w, c_bar), w = prox
    over sampler. Source: arXiv:1802.01561 eq. 1. With w = 1 they are gae_targets at lambda 1.
    """
    weights_N = log_mismatch_N.exp()
    next_values_N = next_in_segment(values_N, trajectory_index_N, bootstrap_S)
    delta_N = weights_N.clamp(max=rho_bar) * (rewards_N + gamma * next_values_N - values_N)
    decay_N = gamma * weights_N.clamp(max=c_bar)
    return values_N + discounted_to_go(delta_N, trajectory_index_N, decay_N)


def vtrace(
    rewards_N: Tensor,
    values_N: Tensor,
    log_mismatch_N: Tensor,
    trajectory_index_N: Tensor,
    bootstrap_S: Tensor,
    *,
    gamma: float,
    rho_bar: float,
    c_bar: float,
    whitening: Whitening,
) -> Tensor:
    """A_t = rho_t (r_t + gamma v_{t+1} - V_t), [N], then whitened over the batch.

    Source: arXiv:1802.01561 section 4.2. A holds the weight prox / sampler already: no other
    correction may multiply by it. `rewards_N` as for reinforce_pp, `bootstrap_S` as for gae.
    """
    targets_N = vtrace_targets(
        rewards_N,
        values_N,
        log_mismatch_N,
        trajectory_index_N,
        bootstrap_S,
        gamma=gamma,
        rho_bar=rho_bar,
        c_bar=c_bar,
    )
    next_targets_N = next_in_segment(targets_N, trajectory_index_N, bootstrap_S)
    rho_N = log_mismatch_N.exp().clamp(max=rho_bar)
    advantages_N = rho_N * (rewards_N + gamma * next_targets_N - values_N)
    return advantages_N if whitening == "none" else whiten(advantages_N, whitening)
