"""Checks 4 to 6: a length, a game of several turns, two stages."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks.controls import reinforce_pp_restarting
from checks.longer import (
    BY_TURNS,
    WITHOUT_FEEDBACK,
    learn_length,
    learn_search,
    sft_then_rl,
)


def test_a_length_is_learned_with_its_end_of_turn() -> None:
    assert learn_length(0).reached is not None


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_length_is_learned_with_other_seeds(seed: int) -> None:
    assert learn_length(seed).reached is not None


@pytest.mark.slow
def test_a_game_of_three_turns_is_learned_by_returns_of_tokens() -> None:
    """The shipped recipe plays it with leave-one-out advantages: tests/e2e/test_recipes.py."""
    assert learn_search("reinforce_pp", 0).reached is not None


@pytest.mark.slow
def test_a_game_is_not_learned_when_returns_restart_at_every_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sound estimator is above .9 by then; this one hardly uses the answers."""
    monkeypatch.setattr(
        "posttrain.algo.advantages.reinforce_pp.reinforce_pp", reinforce_pp_restarting
    )
    assert learn_search("reinforce_pp", 0, num_steps=90).best < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_TURNS)
def test_credit_by_turns_learns_to_use_the_answers(name: str) -> None:
    assert learn_search(name, 0, num_steps=40).best > WITHOUT_FEEDBACK + 0.05


@pytest.mark.slow
def test_reinforcement_finishes_what_a_short_supervised_start_half_taught(tmp_path: Path) -> None:
    before, after = sft_then_rl(1, tmp_path)
    assert before < 0.85 and after >= 0.95
