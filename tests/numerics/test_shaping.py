"""Reward shaping: what is added, to whom, and what it must never turn around."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algo.columns import rule
from posttrain.algo.shaping.cosine_length import cosine_length
from posttrain.algo.shaping.kimi_length import kimi_length
from posttrain.algo.shaping.linear_length import linear_length
from posttrain.algo.shaping.multiplicative_length import multiplicative_length
from posttrain.algo.shaping.repetition import repetition
from posttrain.algo.shaping.soft_overlong import soft_overlong
from posttrain.config import shaping as configs

EVERY_RULE = [
    configs.SoftOverlongConfig(max_length=100, cache_length=40),
    configs.KimiLengthConfig(),
    configs.LinearLengthConfig(),
    configs.CosineLengthConfig(max_length=100),
    configs.MultiplicativeLengthConfig(reference_length=50),
    configs.RepetitionConfig(ngram=2),
]
NAMES = [config.type for config in EVERY_RULE]


def group_of(size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Columns of a group of random members."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 120, (size,), generator=generator)
    correct = torch.rand(size, generator=generator) < 0.5
    return {
        "lengths_G": lengths.to(dtype),
        "correct_G": correct,
        "outcomes_G": correct.to(dtype),
        "token_ids": [torch.randint(0, 9, (int(n),), generator=generator) for n in lengths],
    }


# --- vectors ------------------------------------------------------------------------------------


def test_soft_overlong_falls_over_the_last_tokens_of_the_budget(vector, dtype, matches):
    case = vector("soft_overlong")
    found = soft_overlong(
        torch.tensor(case["inputs"]["lengths"], dtype=dtype),
        max_length=case["inputs"]["L_max"],
        cache_length=case["inputs"]["L_cache"],
    )
    matches(found, case["expected"], case["tolerance"])
    assert float(found[-1]) != pytest.approx(-1.000244, abs=1e-5), "it has a floor"


def test_kimi_rewards_the_shorter_of_the_correct(vector, dtype, matches):
    case = vector("length_reward_kimi_k15")
    lengths = torch.tensor(case["inputs"]["lengths"], dtype=dtype)
    correct = torch.tensor(case["inputs"]["correct"]).bool()
    matches(kimi_length(lengths, correct, coef=1.0), case["expected"], case["tolerance"])
    quarter = [0.25 * x for x in case["expected"]]
    matches(kimi_length(lengths, correct, coef=0.25), quarter, case["tolerance"])


def test_the_linear_penalty_is_scaled_by_the_pass_rate(vector, dtype, matches):
    case = vector("length_penalty_prime_linear")
    inputs = case["inputs"]
    rewards = torch.tensor(inputs["rewards"], dtype=dtype)
    lengths = torch.tensor(inputs["output_tokens"], dtype=dtype)
    added = linear_length(lengths, rewards == 1, coef=inputs["num_output_tokens_weight"])
    shaped = rewards + added
    matches(shaped, case["expected"]["shaped"], case["tolerance"])
    matches(shaped - shaped.mean(), case["expected"]["adv"], case["tolerance"])
    assert linear_length(lengths, rewards == 2, coef=0.25).abs().max() == 0, "unsolved: no penalty"


@pytest.mark.parametrize("outcome", ["correct", "wrong"])
def test_the_cosine_takes_the_place_of_the_outcome(outcome, vector, dtype, matches):
    case = vector("cosine_length_reward")
    inputs = case["inputs"]
    lengths = torch.tensor(inputs["L_gen"], dtype=dtype)
    is_correct = torch.full((3,), outcome == "correct")
    outcomes = is_correct.to(dtype)
    ends = dict(
        zip(
            ("correct_short", "correct_long", "wrong_short", "wrong_long"),
            (*inputs["correct"], *inputs["wrong"]),
            strict=True,
        )
    )
    bounds = {"max_length": inputs["L_max"], "exceed": inputs["exceed"]}
    added = cosine_length(outcomes, lengths, is_correct, **bounds, **ends)
    matches(outcomes + added, case["expected"][outcome], case["tolerance"])
    over = cosine_length(outcomes, lengths + inputs["L_max"] + 1, is_correct, **bounds, **ends)
    matches(outcomes + over, [inputs["exceed"]] * 3, case["tolerance"])


def test_the_discount_multiplies_correct_answers_only(dtype, matches):
    outcomes = torch.tensor([1.0, 1.0, 0.2, 2.0], dtype=dtype)
    lengths = torch.tensor([0, 100, 100, 200], dtype=dtype)
    correct = torch.tensor([True, True, False, True])
    added = multiplicative_length(outcomes, lengths, correct, gamma=0.9, reference_length=100)
    matches(outcomes + added, [1.0, 0.9, 0.2, 1.62])


# --- repetition ---------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_repetition_counts_what_was_said_before(ids, ngram):
    seen, repeated, total = set(), 0, max(0, len(ids) - ngram + 1)
    for start in range(total):
        piece = tuple(ids[start : start + ngram])
        repeated += piece in seen
        seen.add(piece)
    (found,) = repetition([torch.tensor(ids, dtype=torch.int64)], ngram=ngram, coef=0.5).tolist()
    assert found == pytest.approx(-0.5 * repeated / max(total, 1), abs=1e-12)


def test_a_loop_costs_nearly_everything_and_a_single_pass_nothing():
    loop, single = torch.tensor([1, 2, 3] * 100), torch.arange(300)
    found = repetition([loop, single, single[:2], single[:0]], ngram=3, coef=1.0)
    assert found.tolist() == pytest.approx([-295 / 298, 0.0, 0.0, 0.0])


# --- what holds for every rule ------------------------------------------------------------------


@pytest.mark.parametrize("config", EVERY_RULE, ids=NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_members_does_not_matter(config, seed, dtype):
    columns = group_of(7, seed, dtype)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed)).tolist()
    moved = {
        k: [v[i] for i in order] if isinstance(v, list) else v[order] for k, v in columns.items()
    }
    apply = rule("shaping", config)
    assert torch.allclose(apply(moved), apply(columns)[order], atol=1e-12)


@pytest.mark.parametrize("config", EVERY_RULE, ids=NAMES)
@pytest.mark.parametrize("size", [0, 1])
def test_groups_of_none_and_of_one_survivor_are_shaped(config, size, dtype):
    columns = group_of(size, dtype=dtype)
    before = columns["lengths_G"].clone()
    found = rule("shaping", config)(columns)
    assert found.shape == (size,) and found.isfinite().all()
    assert torch.equal(columns["lengths_G"], before)


@pytest.mark.parametrize("config", EVERY_RULE, ids=NAMES)
@pytest.mark.parametrize("correct", [True, False])
def test_equal_members_get_equal_additions(config, correct):
    """A group without signal has none after shaping."""
    columns = group_of(4)
    columns["lengths_G"] = torch.full((4,), 80.0, dtype=torch.float64)
    columns["correct_G"] = torch.full((4,), correct)
    columns["outcomes_G"] = columns["correct_G"].double()
    columns["token_ids"] = [torch.arange(80) % 7] * 4
    found = rule("shaping", config)(columns)
    assert found.tolist() == [float(found[0])] * 4


@pytest.mark.parametrize("config", EVERY_RULE, ids=NAMES)
@pytest.mark.parametrize("seed", range(5))
def test_shaping_never_puts_a_wrong_answer_above_a_correct_one(config, seed):
    """With the defaults, on outcomes of 0 and 1, within the budget."""
    columns = group_of(12, seed)
    columns["lengths_G"] = columns["lengths_G"].clamp(max=100)
    shaped = columns["outcomes_G"] + rule("shaping", config)(columns)
    correct = columns["correct_G"]
    assert float(shaped[correct].min()) >= float(shaped[~correct].max()) - 1e-12


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=12), st.data())
@settings(max_examples=60, deadline=None)
def test_kimi_never_rewards_a_wrong_answer_and_prefers_the_shorter(lengths, data):
    size = len(lengths)
    correct = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    tensor = torch.tensor(lengths, dtype=torch.float64)
    found = kimi_length(tensor, correct, coef=0.25)
    assert float(found.abs().max()) <= 0.125 + 1e-12
    assert not bool((found[~correct] > 0).any())
    by_length = found[correct][tensor[correct].argsort(stable=True)]
    assert bool((by_length[1:] <= by_length[:-1]).all())
    if len(set(lengths)) == 1:
        assert found.tolist() == [0.0] * size


@pytest.mark.parametrize("is_correct", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_longer_correct_answer_never_gets_more(is_correct, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 100, (20,), generator=generator).double().sort().values
    correct = torch.full((20,), is_correct)
    columns = {"lengths_G": lengths, "correct_G": correct, "outcomes_G": correct.double()}
    for config in EVERY_RULE[:-1]:
        added = rule("shaping", config)(columns)
        if is_correct or config.type != "cosine_length":  # whose wrong ones are asked to try on
            assert bool((added[1:] <= added[:-1] + 1e-12).all()), config.type
