"""What a critic is trained by and judged by.

Shapes: N loss tokens, S trajectories. values_N is V of the state in which the token is chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values_N: Tensor, prox_values_N: Tensor, returns_N: Tensor, *, clip: float | None
) -> Tensor:
    """Half the larger of (V - R)^2 and (clip(V, V_prox +- clip) - R)^2, per token [N].

    Source: PPO as verl's compute_value_loss and OpenRLHF's ValueLoss have it. `prox_values_N` are
    the critic's at the start of the step, `returns_N` its targets; neither gets a gradient. The
    gradient is 0 where the clipped branch wins. Without `clip`: half the squared error. Sum over
    tokens and divide by the count of the whole step, as for any loss.
    """
    returns_N = returns_N.detach()
    error_N = (values_N - returns_N).square()
    if clip is not None:
        near_N = values_N.clamp(prox_values_N.detach() - clip, prox_values_N.detach() + clip)
        error_N = torch.maximum(error_N, (near_N - returns_N).square())
    return error_N / 2


def explained_variance(values_N: Tensor, returns_N: Tensor) -> Tensor:
    """1 - Var(R - V) / Var(R), a scalar: 1 for a perfect critic, 0 for a constant one.

    Below 0 the critic hurts. Returns without variance leave nothing to explain: 0, as for fewer
    than two tokens.
    """
    if len(returns_N) < 2:
        return returns_N.new_zeros(())
    variance = returns_N.var()
    smallest = torch.finfo(returns_N.dtype).eps * returns_N.square().mean()
    if bool(variance <= smallest):
        return torch.zeros_like(variance)
    return 1 - (returns_N - values_N).var() / variance


def length_adaptive_lambda(lengths_S: Tensor, alpha: float) -> Tensor:
    """1 - 1 / (alpha l), within 0 and 1, [S]. Source: VAPO, arXiv:2504.05118 eq. 8.

    0 up to l = 1 / alpha tokens: 20 for the published alpha of .05.

    Example:
        >>> length_adaptive_lambda(torch.tensor([10.0, 100.0]), 0.05)
        tensor([0.0000, 0.8000])
    """
    return (1 - 1 / (alpha * lengths_S)).clamp(0, 1)
