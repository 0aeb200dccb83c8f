"""Checks 3 and 7 b, d: a map of ten digits, through sampler, batch and learner."""

from __future__ import annotations

import pytest
from checks.contextual import (
    ESTIMATORS,
    LOSSES,
    NUM_STEPS,
    PLAIN,
    SMALL,
    learn_map,
    learn_off_policy,
    learn_with_estimator,
    learn_with_loss,
    with_loss,
)
from checks.controls import BROKEN, BROKEN_STEPS, ten_more
from checks.trial import Curve, Spoil

SEEDS = pytest.mark.parametrize("seed", [0, 1, 2])
COMPARED = 10
"""Steps over which curves must coincide."""


@pytest.fixture(scope="module")
def sound() -> Curve:
    """PPO's clip with leave-one-out advantages, seed 0."""
    return learn_with_loss("ppo_clip", 0)


# --- it learns ----------------------------------------------------------------------------------


def reached_in_time(curve: Curve) -> bool:
    return curve.reached is not None and curve.reached <= NUM_STEPS


def test_the_map_is_learned(sound: Curve) -> None:
    assert sound.rewards[0] < 0.1 and reached_in_time(sound)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_map_is_learned_with_other_seeds(seed: int) -> None:
    assert reached_in_time(learn_with_loss("ppo_clip", seed))


@pytest.mark.slow
@SEEDS
@pytest.mark.parametrize("name", ["grpo", "gae"])
def test_an_estimator_with_std_and_one_with_a_critic_learn_with_every_seed(
    name: str, seed: int
) -> None:
    assert reached_in_time(learn_with_estimator(name, seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n not in ("rloo", "grpo", "gae")])
def test_every_estimator_learns(name: str) -> None:
    assert reached_in_time(learn_with_estimator(name, 0))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in LOSSES if n != "ppo_clip"])
def test_every_loss_learns_whatever_the_size_of_its_micro_batches(name: str) -> None:
    whole = learn_with_loss(name, 0)
    assert reached_in_time(whole)
    assert_same_curve(whole, learn_with_loss(name, 0, max_tokens=SMALL, num_steps=COMPARED))


# --- what must not matter -----------------------------------------------------------------------


def assert_same_curve(whole: Curve, other: Curve) -> None:
    """The same rewards step by step, and gradients equal up to rounding."""
    steps = len(other.rewards)
    assert other.rewards == whole.rewards[:steps]
    for one, two in zip(whole.metrics[:steps], other.metrics, strict=True):
        assert two["learner/grad_norm"] == pytest.approx(one["learner/grad_norm"], rel=1e-4)


def test_the_cut_into_micro_batches_does_not_change_a_curve(sound: Curve) -> None:
    cut = learn_with_loss("ppo_clip", 0, max_tokens=SMALL, num_steps=COMPARED)
    assert max(m["learner/microbatches"] for m in cut.metrics) >= 8
    assert_same_curve(sound, cut)


@pytest.mark.parametrize(
    "aggregation",
    [
        {"aggregation": "seq_mean_token_mean"},
        {"aggregation": "seq_mean_token_sum"},
        {"aggregation": "prompt_mean"},
        {"aggregation": "fixed_length", "fixed_length": 1},
    ],
    ids=lambda settings: settings["aggregation"],
)
def test_all_aggregations_agree_on_answers_of_one_token(
    aggregation: dict[str, object], sound: Curve
) -> None:
    other = learn_map(with_loss("ppo_clip", **aggregation), 0, num_steps=4)
    assert_same_curve(sound, other)


@pytest.mark.parametrize(
    ("name", "matters"), [("rloo", False), ("grpo", False), ("reinforce", True)]
)
def test_ten_more_for_everyone_matters_only_without_a_baseline(name: str, matters: bool) -> None:
    plain = learn_map({"type": name}, 0, num_steps=3)
    more = learn_map({"type": name}, 0, num_steps=3, spoil=Spoil(groups=ten_more))
    assert (plain.hashes != more.hashes) == matters


# --- what must not learn ------------------------------------------------------------------------


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_run_stays_at_chance(name: str, sound: Curve) -> None:
    broken = learn_map(PLAIN, 0, num_steps=BROKEN_STEPS, spoil=BROKEN[name])
    assert broken.best < 0.05
    assert sound.rewards[BROKEN_STEPS - 1] > 0.2
    if name == "weight_sync_disabled":
        drift = [m["mismatch/abs_mean"] for m in broken.metrics if "mismatch/abs_mean" in m]
        assert drift[-1] > 0.3 and drift[-1] > 10 * drift[0], "the mismatch must tell why"


# --- off-policy ---------------------------------------------------------------------------------


def test_a_step_finds_the_log_probs_that_the_sampler_reported(sound: Curve) -> None:
    assert max(m["mismatch/abs_max"] for m in sound.metrics) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize(("lag", "temperature"), [(8, 1.0), (0, 2.0), (8, 2.0)])
def test_the_map_is_learned_off_policy(lag: int, temperature: float, corrected: bool) -> None:
    curve = learn_off_policy(0, lag=lag, temperature=temperature, corrected=corrected)
    assert reached_in_time(curve)
    assert curve.metrics[-1]["policy/lag_max"] == lag
    assert max(m["mismatch/abs_max"] for m in curve.metrics) > 0.1
