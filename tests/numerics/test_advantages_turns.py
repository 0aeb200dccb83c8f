"""Advantages of turns: hand values in both precisions, and what turns may and may not change."""

from __future__ import annotations

import pytest
import torch

from posttrain.algo.advantages.gigpo import gigpo
from posttrain.algo.advantages.mt_grpo import mt_grpo
from posttrain.algo.advantages.process import process
from posttrain.algo.advantages.pure_min import min_form, pure_min
from posttrain.algo.advantages.rloo import rloo
from posttrain.algo.advantages.turn_discounted import turn_discounted
from posttrain.algo.advantages.turns import return_to_go, with_outcome

GIGPO = {"gamma": 0.95, "omega": 1.0, "normalise": False}
MT_GRPO = {"lam": 1.0, "std_estimator": "unbiased", "std_eps": 1e-6}
PROCESS = {"std_estimator": "unbiased", "std_eps": 1e-6}

# Every estimator over turns, as a function of outcomes and turn rewards.
OVER_TURNS = {
    "gigpo": lambda R, turns: gigpo(R, turns, states_of(turns), **GIGPO),
    "gigpo_normalised": lambda R, turns: gigpo(
        R, turns, states_of(turns), **{**GIGPO, "normalise": True}
    ),
    "mt_grpo": lambda R, turns: mt_grpo(R, turns, **MT_GRPO),
    "turn_discounted": lambda R, turns: turn_discounted(
        R, torch.tensor([len(r) for r in turns]), gamma=0.9
    ),
    "process": lambda R, turns: process(R, turns, **PROCESS),
    "pure_min": lambda R, turns: pure_min(R, turns, temperature=0.1),
}
each = pytest.mark.parametrize("name", OVER_TURNS)


def states_of(turns):
    """Turns of one depth began in the same state."""
    return [["abc"[k] for k in range(len(rewards_K))] for rewards_K in turns]


def tensors(rows, dtype):
    return [torch.tensor(row, dtype=dtype) for row in rows]


def test_gigpo_gives_its_hand_value(vector, dtype, matches):
    case = vector("adv_gigpo")
    given, expected = case["inputs"], case["expected"]
    turns = tensors(given["step_rewards"], dtype)
    no_outcome = torch.zeros(2, dtype=dtype)
    settings = {"gamma": given["gamma"], "normalise": False}
    for turn, returns in zip(turns, expected["step_returns"], strict=True):
        matches(return_to_go(turn, given["gamma"]), returns, case["tolerance"])
    for omega, name in ((given["omega"], "A_total"), (0.0, "A_episode")):
        result = gigpo(no_outcome, turns, given["traj_states"], omega=omega, **settings)
        for ours_K, wanted in zip(result, expected[name], strict=True):
            wanted = wanted if name == "A_total" else [wanted] * len(ours_K)
            matches(ours_K, wanted, case["tolerance"])


def test_an_outcome_is_the_last_turns_reward(vector, dtype, matches):
    case = vector("adv_gigpo")
    given = case["inputs"]
    settings = {"gamma": given["gamma"], "omega": given["omega"], "normalise": False}
    outcomes = torch.tensor([sum(r) for r in given["step_rewards"]], dtype=dtype)
    no_rewards = tensors([[0.0] * len(r) for r in given["step_rewards"]], dtype)
    result = gigpo(outcomes, no_rewards, given["traj_states"], **settings)
    for ours_K, wanted in zip(result, case["expected"]["A_total"], strict=True):
        matches(ours_K, wanted, case["tolerance"])
    assert with_outcome(outcomes, no_rewards)[0].tolist() == [0.0, 1.0]


def test_a_loop_costs_because_all_its_visits_are_compared(dtype):
    # Both members start in s and succeed; the second comes back to s twice.
    outcomes = torch.ones(2, dtype=dtype)
    turns = tensors([[0.0], [0.0, 0.0, 0.0]], dtype)
    direct_K, loop_K = gigpo(outcomes, turns, [["s"], ["s", "s", "s"]], **GIGPO)
    assert float(direct_K[0]) > 0 > float(loop_K[0])
    assert loop_K.tolist() == sorted(loop_K.tolist())  # nearer to the goal is better


def test_mt_grpo_gives_its_hand_value(vector, dtype, matches):
    case = vector("adv_mt_grpo_two_turn")
    given, expected = case["inputs"], case["expected"]
    turns = tensors([[r, 0.0] for r in given["turn_rewards"]], dtype)
    outcomes = torch.tensor(given["outcome_rewards"], dtype=dtype)
    result = torch.stack(
        mt_grpo(outcomes, turns, lam=given["lam"], std_estimator=given["std"], std_eps=1e-8)
    )
    matches(result[:, 0], expected["turn1"], case["tolerance"])
    matches(result[:, 1], expected["turn2"], case["tolerance"])


def test_the_weight_of_the_outcome_ends_with_the_last_turn_reward(dtype):
    outcomes = torch.tensor([1.0, 0.0], dtype=dtype)
    turns = tensors([[1.0, 0.0], [1.0, 0.0]], dtype)
    settings = {"std_estimator": "population", "std_eps": 1e-12}
    first, second = torch.stack(mt_grpo(outcomes, turns, lam=0.25, **settings)).T
    assert torch.allclose(first, 0.25 * second)
    assert torch.allclose(second, torch.tensor([1.0, -1.0], dtype=dtype))


def test_process_supervision_gives_its_hand_value(vector, dtype, matches):
    case = vector("adv_grpo_process_supervision")
    turns = tensors(case["inputs"]["step_rewards"], dtype)
    result = process(torch.zeros(2, dtype=dtype), turns, std_estimator="unbiased", std_eps=1e-12)
    for ours_K, wanted in zip(result, case["expected"]["adv_per_step"], strict=True):
        matches(ours_K, wanted, case["tolerance"])
        steps_K = ours_K - torch.cat([ours_K[1:], ours_K.new_zeros(1)])
        wanted_norm = case["expected"]["norm"][len(wanted) == 2]
        matches(steps_K, wanted_norm, case["tolerance"])


def test_the_min_form_gives_its_hand_value(vector, dtype, matches):
    case = vector("adv_pure_minform")
    rewards_K = torch.tensor(case["inputs"]["step_rewards"], dtype=dtype)
    expected = case["expected"]
    transformed_K = min_form(rewards_K, case["inputs"]["T"])
    matches(transformed_K, expected["transformed"], case["tolerance"])
    matches(transformed_K / rewards_K, expected["weights"], case["tolerance"])
    matches(min_form(rewards_K, 1e-3).sum(), expected["hard_min_return"], case["tolerance"])


def test_the_worst_step_is_blamed_on_the_turns_up_to_it_and_good_steps_cannot_hide_it(dtype):
    turns = tensors([[1.0, -1.0, 1.0, 1.0, 1.0], [0.5, 0.5]], dtype)
    bad_K, good_K = pure_min(torch.zeros(2, dtype=dtype), turns, temperature=0.05)
    # Their sums are 3 and 1: added up, the trajectory with the bad step would win.
    assert float(bad_K[0]) < 0 < float(good_K[0])
    assert torch.allclose(bad_K[:2], torch.full((2,), -1.5, dtype=dtype), atol=1e-4)
    assert float(bad_K[2]) == pytest.approx(-0.5, abs=1e-4)


def test_pure_min_without_turn_rewards_is_leave_one_out(dtype):
    outcomes = torch.tensor([1.0, 0.0, 0.0], dtype=dtype)
    result = pure_min(outcomes, tensors([[0.0], [0.0] * 3, [0.0] * 2], dtype), temperature=0.1)
    for ours_K, wanted in zip(result, rloo(outcomes), strict=True):
        assert torch.allclose(ours_K, wanted.expand(len(ours_K)))


def test_a_turn_discount_leaves_the_last_turn_whole(dtype):
    outcomes = torch.tensor([1.0, 0.0], dtype=dtype)
    long_K, short_K = turn_discounted(outcomes, torch.tensor([3, 1]), gamma=0.5)
    assert long_K.tolist() == [0.25, 0.5, 1.0]
    assert short_K.tolist() == [-1.0]


@each
def test_a_group_whose_rewards_are_all_equal_teaches_no_turn(name, dtype):
    one_turn = tensors([[0.3], [0.3], [0.3]], dtype)
    for advantages_K in OVER_TURNS[name](torch.full((3,), 0.1, dtype=dtype), one_turn):
        assert advantages_K.tolist() == [0.0]


@each
def test_a_single_member_with_one_turn_gets_zero(name, dtype):
    result = OVER_TURNS[name](torch.full((1,), 0.7, dtype=dtype), tensors([[0.2]], dtype))
    assert [a_K.tolist() for a_K in result] == [[0.0]]


@each
def test_members_of_any_length_get_one_finite_advantage_a_turn(name, dtype):
    turns = tensors([[0.5, 0.0, 1.0], [0.0], [-1.0, 0.25]], dtype)
    outcomes = torch.tensor([1.0, 0.0, 0.5], dtype=dtype)
    result = OVER_TURNS[name](outcomes, turns)
    assert [len(a_K) for a_K in result] == [3, 1, 2]
    assert all(a_K.dtype == dtype and bool(a_K.isfinite().all()) for a_K in result)
    reversed_ = OVER_TURNS[name](outcomes.flip(0), turns[::-1])
    for a_K, same_K in zip(result, reversed_[::-1], strict=True):
        assert torch.allclose(a_K, same_K, atol=1e-5)
    assert [t.tolist() for t in turns] == [[0.5, 0.0, 1.0], [0.0], [-1.0, 0.25]]


@each
def test_an_outcome_shifted_by_ten_changes_nothing_unless_steps_of_other_depths_are_compared(name):
    turns = tensors([[0.5, 0.0, 0.0], [0.0, 0.25], [-1.0, 0.25]], torch.float64)
    outcomes = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    plain = torch.cat(OVER_TURNS[name](outcomes, turns))
    shifted = torch.cat(OVER_TURNS[name](outcomes + 10.0, turns))
    # gigpo discounts the shift by the turns that are left, process sees it at last steps only.
    feels_it = name in ("gigpo", "gigpo_normalised", "process")
    assert torch.allclose(plain, shifted, atol=1e-9) is not feels_it
