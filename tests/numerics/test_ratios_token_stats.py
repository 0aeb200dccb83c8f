"""Statistics of ratios: metrics of known tokens, and sums that add up over micro-batches."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.algo.losses.ppo_clip import ppo_clip
from posttrain.algo.token_stats import TokenStats, policy_metrics, token_stats


def stats_of(policy, prox, sampler, advantages) -> TokenStats:
    columns = {
        "policy_logprobs_N": policy,
        "prox_logprobs_N": prox,
        "trainer_logprobs_N": prox,
        "sampler_logprobs_N": sampler,
        "advantages_N": advantages,
        "correction_N": torch.ones_like(advantages),
    }
    return token_stats(columns, ppo_clip(policy, prox, advantages, clip_low=0.2, clip_high=0.28))


def random_tokens(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    prox = -torch.rand(count, generator=generator, dtype=torch.float64) * 5
    policy = prox + 0.3 * torch.randn(count, generator=generator, dtype=torch.float64)
    sampler = prox + 0.1 * torch.randn(count, generator=generator, dtype=torch.float64)
    return [policy, prox, sampler, torch.randn(count, generator=generator, dtype=torch.float64)]


def test_metrics_of_known_tokens():
    prox = torch.zeros(4, dtype=torch.float64)
    sampler = -torch.tensor([0.5, 1.0, 1.5, 4.0], dtype=torch.float64).log()
    policy = torch.tensor([0.5, 1.0, 1.5, 1.1], dtype=torch.float64).log()
    advantages = torch.tensor([-1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    metrics = policy_metrics(stats_of(policy, prox, sampler, advantages))
    gaps = [math.log(w) for w in (0.5, 1.0, 1.5, 4.0)]
    expected = {
        "policy/ratio_mean": 4.1 / 4,
        "policy/ratio_max": 1.5,
        "policy/clip_low_frac": 0.25,
        "policy/clip_high_frac": 0.25,
        "policy/kl_k1": -sum(math.log(r) for r in (0.5, 1.0, 1.5, 1.1)) / 4,
        "policy/kl_k3": sum(r - 1 - math.log(r) for r in (0.5, 1.0, 1.5, 1.1)) / 4,
        "mismatch/mean": sum(gaps) / 4,
        "mismatch/abs_mean": sum(map(abs, gaps)) / 4,
        "mismatch/abs_max": math.log(4.0),
        "mismatch/k3": sum(math.exp(g) - 1 - g for g in gaps) / 4,
        "mismatch/weight_mean": 1.75,
        "mismatch/weight_max": 4.0,
        "mismatch/ess_frac": 0.6282051282,
        "advantage/mean": 0.25,
        "advantage/positive_frac": 0.5,
        "advantage/nonzero_frac": 0.75,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-9), name


def test_merged_statistics_are_those_of_all_tokens_together():
    tokens = random_tokens(50)
    whole = policy_metrics(stats_of(*tokens))
    merged = TokenStats(0)
    for start, end in ((0, 1), (1, 1), (1, 30), (30, 50)):
        merged = merged.merge(stats_of(*(t[start:end] for t in tokens)))
    assert merged.num_tokens == 50
    assert policy_metrics(merged) == pytest.approx(whole, abs=1e-12)


def test_on_policy_statistics_are_exact():
    logprobs = torch.tensor([-0.3, -7.7, -0.01])
    metrics = policy_metrics(stats_of(logprobs, logprobs, logprobs, torch.ones(3)))
    for name in ("policy/ratio_mean", "policy/ratio_max", "mismatch/weight_mean"):
        assert metrics[name] == 1.0
    for name in ("policy/kl_k1", "policy/kl_k3", "mismatch/k3", "mismatch/abs_max"):
        assert metrics[name] == 0.0
    assert metrics["mismatch/ess_frac"] == 1.0


def test_statistics_hold_no_graph():
    tokens = random_tokens(3)
    tokens[0].requires_grad_(True)
    stats = stats_of(*tokens)
    assert not any(t.requires_grad for t in [*stats.sums.values(), *stats.maxima.values()])
