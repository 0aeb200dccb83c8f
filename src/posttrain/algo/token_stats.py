"""What one micro-batch's tokens looked like, as sums that add up over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algo import kl
from posttrain.algo.losses import LossTerms
from posttrain.algo.ratios import ess_frac, log_mismatch, log_ratio, mismatch_k3

# Metric -> key of the sum whose mean per token it is.
_MEANS = {
    "policy/ratio_mean": "ratio",
    "policy/clip_low_frac": "clipped_low",
    "policy/clip_high_frac": "clipped_high",
    "policy/kl_k1": "kl_k1",
    "policy/kl_k3": "kl_k3",
    "mismatch/mean": "mismatch",
    "mismatch/abs_mean": "mismatch_abs",
    "mismatch/k3": "mismatch_k3",
    "mismatch/weight_mean": "weight",
    "advantage/mean": "advantage",
    "advantage/positive_frac": "advantage_positive",
    "advantage/nonzero_frac": "advantage_nonzero",
}
_MAXIMA = {
    "policy/ratio_max": "ratio",
    "mismatch/abs_max": "mismatch_abs",
    "mismatch/weight_max": "weight",
}


@dataclass(frozen=True, slots=True)
class TokenStats:
    """num_tokens that were seen, float64 scalar sums and maxima by name, without gradient.

    Tensors stay on their device: nothing waits for them until `metrics` is asked. Over ranks,
    add num_tokens and sums and take the maximum of maxima.

    Example:
        >>> TokenStats(0, {}, {}).metrics()
        {}
    """

    num_tokens: int
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]

    def merge(self, other: TokenStats) -> TokenStats:
        """Both together."""
        if self.num_tokens == 0:
            return other
        if other.num_tokens == 0:
            return self
        return TokenStats(
            self.num_tokens + other.num_tokens,
            {key: value + other.sums[key] for key, value in self.sums.items()},
            {key: torch.maximum(v, other.maxima[key]) for key, v in self.maxima.items()},
        )

    def metrics(self) -> dict[str, float]:
        """Means and maxima per token by metric name; empty when there was no token.

        policy/kl_* estimate KL(prox || policy), mismatch/k3 KL(sampler || prox); the mismatch
        weight is exp(prox - sampler).
        """
        if self.num_tokens == 0:
            return {}
        values = {name: float(self.sums[key]) / self.num_tokens for name, key in _MEANS.items()}
        values |= {name: float(self.maxima[key]) for name, key in _MAXIMA.items()}
        ess = ess_frac(self.sums["weight"], self.sums["weight_square"], self.num_tokens)
        values["mismatch/ess_frac"] = float(ess)
        return values


@torch.no_grad()
def token_stats(
    policy_logprobs_N: Tensor,
    prox_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    advantages_N: Tensor,
    terms: LossTerms,
) -> TokenStats:
    """Sums and maxima over the N loss tokens of one micro-batch."""
    if len(policy_logprobs_N) == 0:
        return TokenStats(0, {}, {})
    drift_N = log_ratio(policy_logprobs_N, prox_logprobs_N).double()
    gap_N = log_mismatch(prox_logprobs_N, sampler_logprobs_N).double()
    ratio_N, weight_N = drift_N.exp(), gap_N.exp()
    per_token: dict[str, Tensor] = {
        "ratio": ratio_N,
        "clipped_low": terms.clipped_low_N,
        "clipped_high": terms.clipped_high_N,
        "kl_k1": kl.k1(-drift_N),
        "kl_k3": kl.k3(-drift_N),
        "mismatch": gap_N,
        "mismatch_abs": gap_N.abs(),
        "mismatch_k3": mismatch_k3(gap_N),
        "weight": weight_N,
        "weight_square": weight_N.square(),
        "advantage": advantages_N,
        "advantage_positive": advantages_N > 0,
        "advantage_nonzero": advantages_N != 0,
    }
    return TokenStats(
        len(policy_logprobs_N),
        {key: values_N.sum(dtype=torch.float64) for key, values_N in per_token.items()},
        {key: per_token[key].max() for key in _MAXIMA.values()},
    )
