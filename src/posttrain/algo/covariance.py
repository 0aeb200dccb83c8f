"""What each token contributes to the covariance of log-prob and advantage.

For a natural-gradient step of size eta the entropy changes by about -eta Cov(log pi, A): a few
tokens with a large contribution make it collapse. Source: arXiv:2505.22617 section 3.2, eq. 9-11.
Shapes: N loss tokens of the whole step, without gradient: the means are over all of them, so a
selection by covariance is made once a step and never within a micro-batch.
"""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.filters import top_fraction


def covariance(prox_logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """(log pi - mean) * (A - mean) of each token, [N]; its mean is the covariance."""
    if not len(advantages_N):
        return advantages_N
    return (prox_logprobs_N - prox_logprobs_N.mean()) * (advantages_N - advantages_N.mean())


def kl_cov(prox_logprobs_N: Tensor, advantages_N: Tensor, *, frac: float) -> Tensor:
    """Bool [N]: the `frac` of the tokens with the largest covariance, at least one, with its ties.

    KL-Cov puts a KL penalty on these tokens only. Source: arXiv:2505.22617 eq. 11.
    """
    return top_fraction(covariance(prox_logprobs_N, advantages_N), frac)
