"""Off-policy corrections: the exact gradient of each, what it keeps, and what it ignores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algo.columns import rule
from posttrain.algo.losses.ppo_clip import ppo_clip
from posttrain.algo.ratios import log_mismatch, sequence_weight
from posttrain.algo.segments import segment_mean
from posttrain.config import corrections as configs

WIDE = 1e6
# Bounds that are wide for weights, so that a rule on its own changes nothing, and some of each.
EVERY_RULE = [
    configs.TisConfig(),
    configs.TisConfig(cap=5.0, floor=0.5),
    configs.IcepopConfig(),
    configs.TokenMaskConfig(),
    configs.SeqTisConfig(),
    configs.SeqMisConfig(),
    configs.SeqMaskConfig(),
    configs.GeometricMaskConfig(low=0.99, high=1.01),
    configs.K3MaskConfig(),
    configs.OpsmConfig(delta=0.0),
    configs.M2poConfig(),
    configs.ClipCovConfig(frac=1.0, low=0.1),
    configs.TopEntropyConfig(),
]
NAMES = [f"{c.type}-{i}" for i, c in enumerate(EVERY_RULE)]


def weights(config: configs.CorrectionSection, columns: Mapping[str, Any]) -> torch.Tensor:
    return rule("corrections", config)(columns)


def step_of(
    lengths: list[int], seed: int = 0, spread: float = 0.2, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    """Columns of a step of random sequences."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)

    def normal() -> torch.Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)

    prox = -normal().abs() - 0.1
    return {
        "prox_logprobs_N": prox,
        "log_mismatch_N": log_mismatch(prox, prox - spread * normal()),
        "advantages_N": normal(),
        "entropy_N": normal().abs(),
        "sequence_index_N": torch.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)),
        "seed": 11,
    }


# --- the bias of each, exactly ------------------------------------------------------------------


def bandit_step(case: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A batch that is its own expectation: each action as often as the sampler draws it in five."""
    inputs = case["inputs"]
    actions = torch.repeat_interleave(torch.tensor([round(5 * p) for p in inputs["mu"]]))
    pi, mu, reward = (torch.tensor(inputs[k], dtype=dtype)[actions] for k in ("pi", "mu", "r"))
    return {
        "actions": actions,
        "prox_logprobs_N": pi.log(),
        "log_mismatch_N": log_mismatch(pi.log(), mu.log()),
        "advantages_N": reward - inputs["baseline"],
        "entropy_N": (actions == 1).to(dtype),
        "sequence_index_N": torch.arange(5),
        "seed": 0,
    }


def expected_gradient(case: dict[str, Any], dtype: torch.dtype, *chosen: Any) -> torch.Tensor:
    """Of the objective with respect to the logits, with the corrections' product as weight."""
    columns = bandit_step(case, dtype)
    weight = torch.ones(5, dtype=dtype)
    for config in chosen:
        weight = weight * weights(config, columns)
    logits = torch.tensor(case["inputs"]["pi"], dtype=dtype).log().requires_grad_(True)
    policy = logits.log_softmax(-1)[columns["actions"]]
    loss = -(weight * columns["advantages_N"] * policy).mean()
    return -torch.autograd.grad(loss, logits)[0]


FULL = configs.TisConfig(cap=WIDE)


@pytest.mark.parametrize(
    ("row", "chosen"),
    [
        ("no_is", []),
        ("no_is", [configs.TokenMaskConfig(low=0.0, high=WIDE)]),
        ("full_is", [FULL]),
        ("full_is", [configs.IcepopConfig(low=0.0, high=WIDE)]),
        ("full_is", [configs.SeqTisConfig(cap=WIDE)]),
        ("full_is", [configs.SeqMisConfig()]),  # its cap of 3 is above every weight here
        ("full_is", [FULL, configs.OpsmConfig()]),
        ("full_is", [FULL, configs.M2poConfig(tau=2.0)]),
        ("full_is", [FULL, configs.ClipCovConfig()]),
        ("full_is", [FULL, configs.TopEntropyConfig(frac=1.0)]),
        ("exact_on_policy", [FULL]),
        ("tis_cap_2", [configs.TisConfig()]),
        ("tis_cap_2", [configs.SeqTisConfig()]),
        ("mis_0_5_to_2", [configs.IcepopConfig(low=0.5, high=2.0)]),
        ("mis_0_5_to_2", [configs.SeqMisConfig(cap=2.0)]),  # A of the other action is 0
        ("mis_0_5_to_2", [FULL, configs.TokenMaskConfig(low=0.5, high=2.0)]),
        ("mis_0_5_to_2", [FULL, configs.SeqMaskConfig(low=0.5, high=2.0)]),
        ("mis_0_5_to_2", [FULL, configs.GeometricMaskConfig(low=0.5, high=2.0)]),
        # These drop the same two actions for reasons of their own.
        ("mis_0_5_to_2", [FULL, configs.K3MaskConfig(max_k3=0.2)]),
        ("mis_0_5_to_2", [FULL, configs.M2poConfig(tau=0.2)]),
        ("mis_0_5_to_2", [FULL, configs.ClipCovConfig(frac=1.0, low=0.1)]),
        ("mis_0_5_to_2", [FULL, configs.TopEntropyConfig()]),
    ],
)
def test_every_mode_has_the_expected_gradient_of_its_row(row, chosen, vector, dtype, matches):
    case = vector("is_gradient_bias")
    gradient = expected_gradient(case, dtype, *chosen)
    matches(gradient, case["expected"][row], case["tolerance"])


def test_a_mask_alone_keeps_the_samplers_frequencies(vector, dtype, matches):
    # mu A (1[action] - pi) of the one action that is kept: .2 * -.5 * ([0, 1, 0] - [.5, .3, .2]).
    gradient = expected_gradient(vector("is_gradient_bias"), dtype, configs.TokenMaskConfig())
    matches(gradient, [0.05, -0.07, 0.02])


def test_an_inverted_ratio_would_not_pass(vector):
    case = vector("is_gradient_bias")
    columns = bandit_step(case, torch.float64)
    inverted = {**columns, "log_mismatch_N": -columns["log_mismatch_N"]}
    assert weights(FULL, columns).tolist() == pytest.approx([2.5, 1.5, *[1 / 3] * 3])
    assert weights(FULL, inverted).tolist() == pytest.approx([0.4, 2 / 3, *[3.0] * 3])
    # E_mu[w] = 1 holds for the right direction only.
    assert float(weights(FULL, columns).mean()) == pytest.approx(1.0)
    assert float(weights(FULL, inverted).mean()) > 2.0


def test_opsm_drops_the_unlikely_only_where_the_advantage_is_negative(vector, dtype, matches):
    case = vector("offpolicy_opsm")
    sampler = torch.tensor(case["inputs"]["logp_rollout"], dtype=dtype).flatten()
    prox = torch.tensor(case["inputs"]["logp_theta"], dtype=dtype).flatten()
    index = torch.tensor([0, 0, 1, 1, 2, 2])
    columns = {
        "advantages_N": torch.tensor(case["inputs"]["A"], dtype=dtype)[index],
        "log_mismatch_N": log_mismatch(prox, sampler),
        "sequence_index_N": index,
    }
    drift = segment_mean(-columns["log_mismatch_N"], index)
    matches(drift, case["expected"]["seq_kl"], case["tolerance"])
    kept = weights(configs.OpsmConfig(delta=case["inputs"]["delta"]), columns)
    assert kept.tolist() == [float(case["expected"]["keep"][i]) for i in index.tolist()]


# --- products, means, bounds --------------------------------------------------------------------


def test_product_and_geometric_mean_are_different_verdicts(vector, dtype, matches):
    """Report a11: each mode gives exactly its own value."""
    case = vector("offpolicy_sequence_weights")
    columns = {
        "log_mismatch_N": torch.tensor(case["inputs"]["log_ratio"], dtype=dtype),
        "sequence_index_N": torch.zeros(3, dtype=torch.int64),
    }
    expected = case["expected"]
    product = weights(configs.SeqTisConfig(cap=WIDE), columns)
    matches(product, [expected["seq_product"]] * 3, case["tolerance"])
    in_band = {"low": 0.5, "high": 2.0}
    assert weights(configs.SeqMaskConfig(**in_band), columns).tolist() == [1.0] * 3
    assert weights(configs.GeometricMaskConfig(low=0.99, high=1.01), columns).tolist() == [0.0] * 3
    geometric = expected["geo_mean"]
    for high, kept in ((geometric + 1e-4, 1.0), (geometric - 1e-4, 0.0)):
        config = configs.GeometricMaskConfig(low=0.0, high=high)
        assert weights(config, columns).tolist() == [kept] * 3
    for max_k3, kept in ((1.0001, 1.0), (0.9999, 0.0)):
        config = configs.K3MaskConfig(max_k3=max_k3 * expected["seq_k3_mean"])
        assert weights(config, columns).tolist() == [kept] * 3
    assert float(weights(FULL, columns).max()) == pytest.approx(expected["max_ratio"], rel=1e-6)


def test_a_product_grows_with_length_and_a_geometric_mean_does_not(vector, dtype, matches):
    """Report a11: .01 a token is 2.718 over 100 tokens as a product, 1.01005 as a mean."""
    case = vector("offpolicy_length_trap")
    lengths = torch.tensor(case["inputs"]["lengths"])
    index = torch.repeat_interleave(lengths)
    drift = torch.full((len(index),), case["inputs"]["per_token_log_ratio"], dtype=dtype)
    matches(sequence_weight(drift, index), case["expected"]["product"], case["tolerance"])
    matches(segment_mean(drift, index).exp(), [case["expected"]["geo"]] * 3, case["tolerance"])
    columns = {"log_mismatch_N": drift, "sequence_index_N": index}
    kept = weights(configs.SeqMisConfig(cap=3.0), columns)
    assert (kept > 0).tolist() == (index < 2).tolist(), "the longest is rejected for its length"
    for high, verdict in ((1.011, 1.0), (1.009, 0.0)):
        mask = weights(configs.GeometricMaskConfig(low=0.9, high=high), columns)
        assert mask.tolist() == [verdict] * len(index)


def test_a_huge_product_is_clamped_and_not_infinite(dtype):
    columns = {
        "log_mismatch_N": torch.tensor([20.0, 20.0, -20.0, -20.0], dtype=dtype),
        "sequence_index_N": torch.tensor([0, 0, 1, 1]),
    }
    found = weights(configs.SeqTisConfig(cap=1e30), columns)
    assert found.isfinite().all()
    assert found.tolist() == pytest.approx([math.exp(20)] * 2 + [math.exp(-20)] * 2, rel=1e-5)


def test_m2po_drops_the_farthest_until_the_mean_is_low_enough(vector, dtype, matches):
    case = vector("offpolicy_m2po")
    gaps = torch.tensor(case["inputs"]["log_ratio"], dtype=dtype)
    matches(gaps.square().mean(), case["expected"]["m2_all"], case["tolerance"])
    keep = case["expected"]["keep"]
    for order in ([0, 1, 2, 3], [3, 0, 2, 1]):
        columns = {"log_mismatch_N": gaps[order] * torch.tensor([1, -1, 1, -1], dtype=dtype)}
        found = weights(configs.M2poConfig(tau=case["inputs"]["tau_M2"]), columns)
        assert found.tolist() == [float(keep[i]) for i in order]
    between = configs.M2poConfig(tau=1.001 * case["expected"]["after_drop1"])
    assert weights(between, {"log_mismatch_N": gaps}).tolist() == [1.0, 1.0, 1.0, 0.0]


def test_m2po_treats_equal_tokens_alike():
    gaps = torch.tensor([0.3, 0.0, 0.3, 0.0], dtype=torch.float64)
    # One of the two might stay (mean .03 <= .04), but nothing says which.
    assert weights(configs.M2poConfig(), {"log_mismatch_N": gaps}).tolist() == [0, 1, 0, 1]
    assert weights(configs.M2poConfig(tau=0.045), {"log_mismatch_N": gaps}).tolist() == [1] * 4


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=30), st.floats(1e-3, 2))
@settings(max_examples=100, deadline=None)
def test_what_m2po_keeps_is_within_tau_and_one_more_would_not_be(gaps, tau):
    square = torch.tensor(gaps, dtype=torch.float64).square()
    kept = weights(configs.M2poConfig(tau=tau), {"log_mismatch_N": square.sqrt()}).bool()
    if kept.any():
        assert float(square[kept].mean()) <= tau * (1 + 1e-9)
    if not kept.all():
        nearest = square[~kept].min()
        with_it = torch.cat([square[kept], square[square == nearest]])
        assert float(with_it.mean()) > tau * (1 - 1e-9)
        assert not kept.any() or float(square[kept].max()) < float(nearest)


def test_band_edges_belong_to_the_band():
    columns = {
        "log_mismatch_N": torch.tensor([0.5, 2.0, 0.499, 2.001], dtype=torch.float64).log(),
        "sequence_index_N": torch.arange(4),
    }
    for name in ("TokenMaskConfig", "SeqMaskConfig", "GeometricMaskConfig"):
        config = getattr(configs, name)(low=0.5 - 1e-12, high=2.0 + 1e-12)
        assert weights(config, columns).tolist() == [1.0, 1.0, 0.0, 0.0]
    icepop = weights(configs.IcepopConfig(low=0.5 - 1e-12, high=2.0 + 1e-12), columns)
    assert icepop.tolist() == pytest.approx([0.5, 2.0, 0.0, 0.0])


def test_truncation_has_a_floor_where_one_is_set(dtype):
    columns = {"log_mismatch_N": torch.tensor([0.1, 1.0, 9.0], dtype=dtype).log()}
    clamped = weights(configs.TisConfig(cap=5.0, floor=0.5), columns)
    assert clamped.tolist() == pytest.approx([0.5, 1.0, 5.0], rel=1e-6)


# --- the vectors of decoupled PPO ---------------------------------------------------------------


def tensors(case: dict[str, Any], dtype: torch.dtype) -> list[torch.Tensor]:
    """Log-probs of sampler, prox and policy, and advantages."""
    keys = ("p_behav", "p_prox", "p_theta")
    logprobs = [torch.tensor(case["inputs"][key], dtype=dtype).log() for key in keys]
    return [*logprobs, torch.tensor(case["inputs"]["A"], dtype=dtype)]


CLIP = {"clip_low": 0.2, "clip_high": 0.2}


@pytest.mark.parametrize(
    ("key", "chosen"),
    [
        ("decoupled", FULL),
        ("tis_cap1_5", configs.TisConfig(cap=1.5)),
        ("icepop_0_5_to_1_9", configs.IcepopConfig(low=0.5, high=1.9)),
        ("plain_ppo_prox_is_old", configs.TokenMaskConfig(low=0.0, high=WIDE)),
    ],
)
def test_decoupled_ppo_is_the_clipped_loss_times_the_weight(key, chosen, vector, dtype, matches):
    case = vector("offpolicy_decoupled_ppo")
    sampler, prox, policy, advantages = tensors(case, dtype)
    gaps = log_mismatch(prox, sampler)
    matches(gaps.exp(), case["expected"]["w"], case["tolerance"])
    matches((policy - prox).exp(), case["expected"]["r"], case["tolerance"])
    policy.requires_grad_(True)
    weight = weights(chosen, {"log_mismatch_N": gaps})
    loss = weight * ppo_clip(policy, prox, advantages, **CLIP).per_token_N
    (gradient,) = torch.autograd.grad(loss.sum() / 3, policy)
    expected = case["expected"][key]
    matches(loss, expected["per_token"], case["tolerance"])
    matches(loss.sum() / 3, expected["loss"], case["tolerance"])
    matches(gradient, expected["grad"], case["tolerance"])


def test_the_bypass_clips_against_the_sampler_and_weighs_no_more(vector, dtype, matches):
    """Ratios .88, 2.5 and .9 to the sampler; another w on top would count it twice."""
    sampler, _, policy, advantages = tensors(vector("offpolicy_decoupled_ppo"), dtype)
    matches(ppo_clip(policy, sampler, advantages, **CLIP).per_token_N, [-0.88, -1.2, 0.9])


# --- what holds for every correction ------------------------------------------------------------


@pytest.mark.parametrize("config", EVERY_RULE, ids=NAMES)
def test_without_drift_every_weight_is_exactly_one(config, dtype):
    columns = step_of([3, 1, 4], spread=0.0, dtype=dtype)
    # Selections by covariance or entropy are not about drift: give them nothing to select.
    columns["advantages_N"] = torch.ones(8, dtype=dtype)
    columns["entropy_N"] = torch.ones(8, dtype=dtype)
    assert weights(config, columns).tolist() == [1.0] * 8


@pytest.mark.parametrize("config", EVERY_RULE, ids=NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_sequences_does_not_matter(config, seed):
    lengths = [3, 1, 5, 2, 4]
    columns = step_of(lengths, seed)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed)).tolist()
    tokens = torch.cat([(columns["sequence_index_N"] == i).nonzero().squeeze(1) for i in order])
    moved = {
        name: column[tokens] if isinstance(column, torch.Tensor) else column
        for name, column in columns.items()
    }
    moved["sequence_index_N"] = torch.repeat_interleave(torch.tensor([lengths[i] for i in order]))
    assert torch.equal(weights(config, moved), weights(config, columns)[tokens])


@pytest.mark.parametrize("config", EVERY_RULE, ids=NAMES)
@pytest.mark.parametrize("lengths", [[], [1], [6]], ids=["empty", "one token", "one sequence"])
def test_small_steps_are_weighed_too(config, lengths, dtype):
    columns = step_of(lengths, dtype=dtype)
    found = weights(config, columns)
    assert found.shape == (sum(lengths),) and found.dtype == dtype
    assert found.isfinite().all() and (found >= 0).all()


@pytest.mark.parametrize("config", EVERY_RULE, ids=NAMES)
def test_extreme_logprobs_give_finite_weights_without_gradient(config, dtype):
    columns = step_of([2, 2, 2], dtype=dtype)
    prox = torch.tensor([-1e4, -0.1, -1e4, -1e-3, 0.0, -900.0], dtype=dtype, requires_grad=True)
    sampler = torch.tensor([-0.1, -1e4, -1e4, -1e-3, -80.0, 0.0], dtype=dtype)
    columns["prox_logprobs_N"] = prox.detach()
    columns["log_mismatch_N"] = log_mismatch(prox, sampler)
    before = {k: v.clone() for k, v in columns.items() if isinstance(v, torch.Tensor)}
    found = weights(config, columns)
    assert found.isfinite().all() and not found.requires_grad
    assert all(torch.equal(columns[k], v) for k, v in before.items()), "an input was changed"


@pytest.mark.parametrize("config", EVERY_RULE, ids=NAMES)
def test_a_mask_only_keeps_or_drops(config):
    found = weights(config, step_of([5] * 8))
    is_mask = bool(((found == 0) | (found == 1)).all())
    assert is_mask != type(config).is_weight


@pytest.mark.parametrize(
    "config", [c for c in EVERY_RULE if c.type.startswith(("seq_", "geometric", "k3"))]
)
def test_sequence_rules_give_one_weight_to_a_sequence(config):
    columns = step_of([5, 1, 4, 3], seed=2)
    found, index = weights(config, columns), columns["sequence_index_N"]
    assert torch.equal(segment_mean(found, index)[index], found)


# --- selections by covariance and entropy -------------------------------------------------------


def test_clip_cov_drops_only_tokens_in_the_band(vector, dtype):
    case = vector("cov_clip")
    columns = {
        "prox_logprobs_N": torch.tensor(case["inputs"]["p"], dtype=dtype).log(),
        "advantages_N": torch.tensor(case["inputs"]["A"], dtype=dtype),
    }
    band = [bool(b) for b in case["expected"]["clip_band_1_to_5"]]
    every = weights(configs.ClipCovConfig(frac=1.0), {**columns, "seed": 0})
    assert (every == 0).tolist() == band
    singles = {
        tuple(weights(configs.ClipCovConfig(), {**columns, "seed": s}).tolist()) for s in range(20)
    }
    assert singles == {(0, 1, 1, 1), (1, 1, 1, 0)}, "one token, and chance says which"


def test_clip_cov_draws_the_same_tokens_for_the_same_seed():
    columns = step_of([50] * 8, seed=5)
    config = configs.ClipCovConfig(frac=0.05, low=0.1)
    first = weights(config, columns)
    torch.manual_seed(99)  # no global generator has a say
    assert torch.equal(weights(config, columns), first)
    assert int((first == 0).sum()) == 20  # .05 of all 400 tokens, not of the candidates
    assert not torch.equal(weights(config, {**columns, "seed": 12}), first)


def test_top_entropy_keeps_the_forks(dtype):
    entropies = torch.tensor([0.1, 0.9, 0.2, 0.8, 0.3], dtype=dtype)
    for frac, kept in ((0.2, [0, 1, 0, 0, 0]), (0.4, [0, 1, 0, 1, 0]), (1.0, [1] * 5)):
        config = configs.TopEntropyConfig(frac=frac)
        assert weights(config, {"entropy_N": entropies}).tolist() == kept
