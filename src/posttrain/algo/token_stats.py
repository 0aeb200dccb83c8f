"""What a loss saw, as sums that add up over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from posttrain.algo import kl
from posttrain.algo.losses.terms import LossTerms
from posttrain.algo.ratios import ess_frac, log_mismatch, log_ratio, mismatch_k3

# Metric -> key of the sum whose mean per token it is.
_MEANS = {
    "policy/ratio_mean": "ratio",
    "policy/clip_low_frac": "clipped_low",
    "policy/clip_high_frac": "clipped_high",
    "policy/kl_k1": "kl_k1",
    "policy/kl_k3": "kl_k3",
    "reference/kl_k1": "ref_k1",
    "reference/kl_k3": "ref_k3",
    "mismatch/mean": "mismatch",
    "mismatch/abs_mean": "mismatch_abs",
    "mismatch/k3": "mismatch_k3",
    "mismatch/weight_mean": "weight",
    "correction/mean": "correction",
    "correction/rejected_frac": "rejected",
    "distill/reverse_kl": "teacher_gap",
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
    """num_tokens (or pairs) that were seen, float64 scalar sums and maxima by name, no gradient.

    Tensors stay on their device: nothing waits for them until they are asked for. Over ranks, add
    num_tokens and sums and take the maximum of maxima.

    Example:
        >>> TokenStats(2, {"loss": torch.tensor(3.0)}).mean("loss")
        1.5
    """

    num_tokens: int
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)

    def merge(self, other: TokenStats) -> TokenStats:
        """Both together. A sum that only one of them has is taken as 0 in the other."""
        sums = dict(self.sums)
        for key, value in other.sums.items():
            sums[key] = sums[key] + value if key in sums else value
        maxima = dict(self.maxima)
        for key, value in other.maxima.items():
            maxima[key] = torch.maximum(maxima[key], value) if key in maxima else value
        return TokenStats(self.num_tokens + other.num_tokens, sums, maxima)

    def mean(self, key: str) -> float:
        """Sum over count; 0 where nothing was seen."""
        return float(self.sums[key]) / self.num_tokens if self.num_tokens else 0.0


def summed(count: int, **per_item: Tensor) -> TokenStats:
    """Stats of one tensor of `count` items each."""
    return TokenStats(
        count, {key: values.detach().sum(dtype=torch.float64) for key, values in per_item.items()}
    )


@torch.no_grad()
def token_stats(columns: Mapping[str, Tensor], terms: LossTerms) -> TokenStats:
    """Sums and maxima of a policy loss over the N loss tokens of one micro-batch."""
    policy_N, prox_N = columns["policy_logprobs_N"], columns["prox_logprobs_N"]
    if len(policy_N) == 0:
        return TokenStats(0)
    drift_N = log_ratio(policy_N, prox_N).double()
    gap_N = log_mismatch(columns["trainer_logprobs_N"], columns["sampler_logprobs_N"]).double()
    advantages_N, correction_N = columns["advantages_N"], columns["correction_N"]
    ratio_N, weight_N = drift_N.exp(), gap_N.exp()
    per_token = {
        "ratio": ratio_N,
        "kl_k1": kl.k1(-drift_N),
        "kl_k3": kl.k3(-drift_N),
        "mismatch": gap_N,
        "mismatch_abs": gap_N.abs(),
        "mismatch_k3": mismatch_k3(gap_N),
        "weight": weight_N,
        "weight_square": weight_N.square(),
        "correction": correction_N,
        "rejected": correction_N == 0,
        "advantage": advantages_N,
        "advantage_positive": advantages_N > 0,
        "advantage_nonzero": advantages_N != 0,
    }
    if "entropy_N" in columns:
        per_token["entropy"] = columns["entropy_N"]
    if terms.clipped_low_N is not None:
        per_token["clipped_low"] = terms.clipped_low_N
    if terms.clipped_high_N is not None:
        per_token["clipped_high"] = terms.clipped_high_N
    if "ref_logprobs_N" in columns:
        away_N = log_ratio(policy_N, columns["ref_logprobs_N"]).double()
        per_token |= {"ref_k1": kl.k1(away_N), "ref_k3": kl.k3(away_N)}
    if "teacher_logprobs_N" in columns:
        per_token["teacher_gap"] = log_ratio(policy_N, columns["teacher_logprobs_N"]).double()
    return TokenStats(
        len(policy_N),
        {key: values_N.sum(dtype=torch.float64) for key, values_N in per_token.items()},
        {key: per_token[key].max() for key in _MAXIMA.values()},
    )


def policy_metrics(stats: TokenStats) -> dict[str, float]:
    """Means and maxima per token by metric name; empty when there was no token.

    policy/kl_* estimate KL(prox || policy), reference/kl_* KL(policy || reference), mismatch/k3
    KL(sampler || prox); the mismatch weight is exp(prox - sampler).
    """
    if stats.num_tokens == 0:
        return {}
    values = {name: stats.mean(key) for name, key in _MEANS.items() if key in stats.sums}
    values |= {name: float(stats.maxima[key]) for name, key in _MAXIMA.items()}
    ess = ess_frac(stats.sums["weight"], stats.sums["weight_square"], stats.num_tokens)
    values["mismatch/ess_frac"] = float(ess)
    return values
