"""Flow matching as a decision process: stochastic denoising steps and their log-probs.

x_sigma = (1 - sigma) x_0 + sigma * noise; the velocity v estimates noise - x_0; sigma falls from 1
to 0. Shapes: x_BD of B samples and D dimensions (images flattened); sigma and sigma_next a number
or [B, 1], 0 <= sigma_next < sigma <= 1 (another order raises ValueError). Keep x in float32: half
precision loses differences of the size of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class FlowStep:
    """The Gaussian that x_next is drawn from: mean_BD, and std broadcastable to it.

    Example:
        >>> step = FlowStep(torch.tensor([[1.0, 2.0]]), torch.tensor(0.5))
        >>> step.at(torch.tensor([[1.0, -1.0]])).tolist()
        [[1.5, 1.5]]
    """

    mean_BD: Tensor
    std: Tensor

    def at(self, noise_BD: Tensor) -> Tensor:
        """x_next for standard normal noise."""
        return self.mean_BD + self.std * noise_BD

    def logprobs(self, x_next_BD: Tensor) -> Tensor:
        """log density of each dimension, [B, D]."""
        error_BD = (x_next_BD - self.mean_BD) / self.std
        return -error_BD.square() / 2 - self.std.log() - math.log(2 * math.pi) / 2


def flow_grpo_step(
    x_BD: Tensor,
    velocity_BD: Tensor,
    sigma: Tensor | float,
    sigma_next: Tensor | float,
    *,
    noise_level: float = 0.7,
) -> FlowStep:
    """mean = x (1 + g^2/(2 sigma) dt) + v (1 + g^2 (1 - sigma)/(2 sigma)) dt, std = g sqrt(-dt).

    g = noise_level sqrt(sigma / (1 - sigma)), dt = sigma_next - sigma < 0. Source: arXiv:2505.05470
    eq. 9-12. At sigma = 1, where g is infinite, its 1 - sigma is that of the second grid point,
    which is sigma_next. noise_level 0 is the ODE, which has no log-prob; sqrt(2) forgets x.
    """
    sigma, sigma_next = _noise_levels(sigma, sigma_next, x_BD)
    dt = sigma_next - sigma
    distance_to_noise = 1 - torch.where(sigma == 1, sigma_next, sigma)
    diffusion = noise_level * (sigma / distance_to_noise).sqrt()
    drift = diffusion.square() / (2 * sigma)
    mean_BD = x_BD * (1 + drift * dt) + velocity_BD * (1 + drift * (1 - sigma)) * dt
    return FlowStep(mean_BD, diffusion * (-dt).sqrt())


def dance_grpo_step(
    x_BD: Tensor,
    velocity_BD: Tensor,
    sigma: Tensor | float,
    sigma_next: Tensor | float,
    *,
    eta: float = 0.3,
) -> FlowStep:
    """mean = x + v dt - eta^2/2 score dt, std = eta sqrt(-dt), dt = sigma_next - sigma < 0.

    score = -(x - (1 - sigma) x_0) / sigma^2 with x_0 = x - sigma v. Source: arXiv:2505.07818 eq.
    7-8. The noise is the same at every sigma.
    """
    sigma, sigma_next = _noise_levels(sigma, sigma_next, x_BD)
    dt = sigma_next - sigma
    score_BD = flow_score(x_BD, velocity_BD, sigma)
    mean_BD = x_BD + velocity_BD * dt - eta**2 / 2 * score_BD * dt
    return FlowStep(mean_BD, eta * (-dt).sqrt())


def flow_score(x_BD: Tensor, velocity_BD: Tensor, sigma: Tensor | float) -> Tensor:
    """Gradient of the log density of x: -(x - (1 - sigma) x_0) / sigma^2, x_0 = x - sigma v."""
    start_BD = x_BD - sigma * velocity_BD
    return -(x_BD - (1 - sigma) * start_BD) / sigma**2


def step_logprob(
    step: FlowStep, x_next_BD: Tensor, *, reduction: Literal["mean", "sum"] = "mean"
) -> Tensor:
    """log-prob of x_next, [B]: "sum" over dimensions is the density, "mean" its D-th part.

    Both repositories of the papers take the mean, so that a ratio is the geometric mean over
    dimensions and clip ranges are about 1e-4; with "sum" such a range is meaningless.
    """
    logprobs_BD = step.logprobs(x_next_BD)
    return logprobs_BD.mean(dim=-1) if reduction == "mean" else logprobs_BD.sum(dim=-1)


def step_kl(step: FlowStep, ref_mean_BD: Tensor) -> Tensor:
    """KL(policy's step || reference's step) = |mean - ref mean|^2 / (2 std^2), summed over D, [B].

    flow_grpo's code takes the mean over D and leaves -dt out of std^2: 20 times less in the
    vector, so its coefficients (.01 to .04) don't carry over.
    """
    return ((step.mean_BD - ref_mean_BD) / step.std).square().sum(dim=-1) / 2


def log_ratio_parts(
    mean_BD: Tensor, sampler_mean_BD: Tensor, noise_BD: Tensor, std: Tensor
) -> tuple[Tensor, Tensor]:
    """log ratio of each dimension = d noise / std - d^2 / (2 std^2), d = mean - sampler mean.

    Returns both parts, [B, D] each: noise of mean 0, and a bias that is never positive and shifts
    ratios to the left, so that the upper clip seldom acts (arXiv:2510.22319).
    """
    shift_BD = (mean_BD - sampler_mean_BD) / std
    return shift_BD * noise_BD, -shift_BD.square() / 2


def _noise_levels(
    sigma: Tensor | float, sigma_next: Tensor | float, x_BD: Tensor
) -> tuple[Tensor, Tensor]:
    sigma = torch.as_tensor(sigma, dtype=x_BD.dtype, device=x_BD.device)
    sigma_next = torch.as_tensor(sigma_next, dtype=x_BD.dtype, device=x_BD.device)
    if not bool(((sigma_next >= 0) & (sigma_next < sigma) & (sigma <= 1)).all()):
        raise ValueError(
            f"a denoising step goes from sigma {sigma} to {sigma_next}; need "
            "0 <= sigma_next < sigma <= 1, noise at 1"
        )
    return sigma, sigma_next
