"""The learning rate is a function of the step alone."""

from __future__ import annotations

import math
from typing import Any

import pytest

from posttrain.config import OptimConfig
from posttrain.training.schedule import learning_rate


def rates(steps: list[int], num_steps: int = 100, **fields: Any) -> list[float]:
    return [learning_rate(OptimConfig(lr=1.0, **fields), s, num_steps) for s in steps]


def test_warm_up_rises_linearly_from_the_first_step_to_the_full_rate() -> None:
    assert rates([1, 5, 10, 11, 100], warmup_steps=10) == pytest.approx([0.1, 0.5, 1, 1, 1])


def test_without_warm_up_the_first_step_has_the_full_rate() -> None:
    assert rates([1]) == [1.0]


def test_linear_decay_ends_at_its_floor_on_the_last_step() -> None:
    actual = rates([10, 55, 100, 150], warmup_steps=10, schedule="linear", min_lr_frac=0.2)
    assert actual == pytest.approx([1, 0.6, 0.2, 0.2])


def test_cosine_decay_is_half_way_in_the_middle() -> None:
    actual = rates([25, 50, 75, 100], schedule="cosine")
    expected = [(1 + math.cos(math.pi * p)) / 2 for p in (0.25, 0.5, 0.75, 1)]
    assert actual == pytest.approx(expected, abs=1e-12)


def test_a_run_as_long_as_its_warm_up_only_warms_up() -> None:
    assert rates([1, 10], num_steps=10, warmup_steps=10, schedule="cosine") == [0.1, 1.0]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_rate_never_exceeds_lr_and_never_falls_before_the_warm_up_ends(schedule: str) -> None:
    floor = {} if schedule == "constant" else {"min_lr_frac": 0.1}
    actual = rates(list(range(1, 101)), warmup_steps=10, schedule=schedule, **floor)
    assert max(actual) == 1.0 and min(actual) >= 0.1 - 1e-12
    assert actual[:10] == sorted(actual[:10]) and actual[10:] == sorted(actual[10:], reverse=True)
