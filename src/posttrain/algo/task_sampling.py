"""Which tasks to draw: weights from what is known about each, and the statistics behind them.

Shapes: K tasks or categories. Functions of the present state only: whoever samples owns the state
and the randomness, updates it with every scored group (kept in the loss or not), and evaluates
uniformly, because non-uniform draws train the weighted objective.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# --- from weights to probabilities --------------------------------------------------------------


def probabilities(weights_K: Tensor, *, uniform_frac: float = 0.0) -> Tensor:
    """Weights >= 0 over their sum, with `uniform_frac` of the mass spread evenly, [K].

    The floor (5-10 %) keeps tasks alive that look hopeless. Uniform where all weights are 0.
    """
    uniform_K = torch.full_like(weights_K, 1 / max(1, len(weights_K)))
    total = weights_K.sum()
    if not bool(total > 0):
        return uniform_K
    return torch.lerp(weights_K / total, uniform_K, uniform_frac)


def boltzmann(values_K: Tensor, *, temperature: float) -> Tensor:
    """softmax(values / temperature), [K]. Source: arXiv:2505.14970 eq. 5."""
    return (values_K / temperature).softmax(dim=0)


# --- weights from pass rates --------------------------------------------------------------------


def learnability(pass_rates_K: Tensor) -> Tensor:
    """p (1 - p): largest at 1/2, 0 for what always or never succeeds. arXiv:2502.12272.

    It starves tasks of low p, which uniform sampling would have raised.
    """
    return pass_rates_K * (1 - pass_rates_K)


def failure_rate(pass_rates_K: Tensor) -> Tensor:
    """1 - p: the harder, the more often. arXiv:2501.12599 section 2.3.4 (Kimi k1.5)."""
    return 1 - pass_rates_K


def expected_abs_advantage(pass_rates_K: Tensor, *, group_size: int) -> Tensor:
    """E|R - group mean| = 2 p (1 - p) (G - 1) / G of 0/1 rewards, exact, [K]."""
    return 2 * learnability(pass_rates_K) * (group_size - 1) / group_size


# --- bandits over tasks or categories -----------------------------------------------------------


def ucb1(means_K: Tensor, counts_K: Tensor, *, exploration: float = math.sqrt(2)) -> Tensor:
    """mean + exploration * sqrt(log(sum of counts) / count), [K]; inf for what was never drawn.

    Source: Auer et al. 2002, doi:10.1023/A:1013689704352. A policy that learns makes means stale:
    give it discounted or windowed counts.
    """
    log_total = counts_K.sum().clamp_min(1).log()
    bonus_K = exploration * (log_total / counts_K.clamp_min(1e-30)).sqrt()
    return torch.where(counts_K > 0, means_K + bonus_K, torch.inf)


def sec_update(values_K: Tensor, mean_abs_advantages_K: Tensor, *, alpha: float) -> Tensor:
    """alpha r + (1 - alpha) Q for the categories that were drawn, [K]. arXiv:2505.14970 eq. 4.

    The reward r is the mean |A| of the category, of advantages without std division: with it |A|
    is about the same everywhere.
    """
    return torch.lerp(values_K, mean_abs_advantages_K, alpha)


def plr(
    scores_K: Tensor, steps_unseen_K: Tensor, *, temperature: float = 0.1, stale_frac: float = 0.1
) -> Tensor:
    """(1 - rho) P_rank + rho P_stale: P_rank ~ rank^(-1/temperature), P_stale ~ steps unseen, [K].

    Source: arXiv:2010.03934 eq. 1-3 (temperature is its beta, stale_frac its rho). Rank 1 is the
    highest score; equal scores share a rank, or the first of many new tasks would get nearly all.
    """
    _, inverse_K, counts = (-scores_K).unique(return_inverse=True, return_counts=True)
    rank_K = 1 + (counts.cumsum(0) - counts)[inverse_K]
    ranked_K = probabilities(rank_K.to(scores_K.dtype) ** (-1 / temperature))
    return torch.lerp(ranked_K, probabilities(steps_unseen_K.to(scores_K.dtype)), stale_frac)


# --- pass rates that drift ----------------------------------------------------------------------


def beta_update(
    alpha_K: Tensor,
    beta_K: Tensor,
    num_successes_K: Tensor,
    num_failures_K: Tensor,
    *,
    decay: float = 1.0,
    prior: tuple[float, float] = (1.0, 1.0),
) -> tuple[Tensor, Tensor]:
    """Parameters of each pass rate's Beta posterior after new outcomes; old evidence times `decay`.

    The prior does not decay: a task that nobody draws goes back to it, never to Beta(0, 0). With
    decay 1 this is the conjugate update.
    """
    return (
        prior[0] + decay * (alpha_K - prior[0]) + num_successes_K,
        prior[1] + decay * (beta_K - prior[1]) + num_failures_K,
    )


def beta_mean(alpha_K: Tensor, beta_K: Tensor) -> Tensor:
    """Expected pass rate, [K]."""
    return alpha_K / (alpha_K + beta_K)


def beta_variance(alpha_K: Tensor, beta_K: Tensor) -> Tensor:
    """Variance of the pass rate, [K]: how little is known."""
    mean_K = beta_mean(alpha_K, beta_K)
    return mean_K * (1 - mean_K) / (alpha_K + beta_K + 1)
