"""Equality of short answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from posttrain.rewards import ExactReward
from posttrain.types import Invalid, Scored, Task, Turn


@pytest.mark.parametrize(
    ("text", "value", "parsed"),
    [
        ("12", 1.0, True),
        (" 12.\n", 1.0, True),
        ("+012", 1.0, True),
        ("13", 0.0, True),
        ("-12", 0.0, True),
        ("12 or 13", 0.0, False),
        ("12 12", 0.0, False),
        ("the answer is 12", 0.0, False),
        ("12.0", 0.0, False),
        ("1,2", 0.0, False),
        ("\u0661\u0662", 0.0, False),  # Arabic digits, which int() would take
        ("", 0.0, False),
        (".", 0.0, False),
        ("9" * 5000, 0.0, True),
    ],
)
def test_the_whole_text_must_be_the_integer(
    make_task: Callable[..., Task],
    make_turn: Callable[[str], Turn],
    text: str,
    value: float,
    parsed: bool,
) -> None:
    reward = ExactReward(integer=True)
    verdict = asyncio.run(reward.score(make_task(12), [make_turn(text)]))
    assert isinstance(verdict, Scored)
    assert (verdict.value, verdict.parsed) == (value, parsed)


def test_negative_zero_is_zero(
    make_task: Callable[..., Task], make_turn: Callable[[str], Turn]
) -> None:
    reward = ExactReward(integer=True)
    verdict = asyncio.run(reward.score(make_task("0"), [make_turn("-0")]))
    assert isinstance(verdict, Scored) and verdict.value == 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [(" New\n York ", 1.0), ("new york", 0.0), ("New York.", 0.0), ("York", 0.0), ("", 0.0)],
)
def test_text_is_equal_up_to_white_space_only(
    make_task: Callable[..., Task], make_turn: Callable[[str], Turn], text: str, value: float
) -> None:
    verdict = asyncio.run(ExactReward().score(make_task("New York"), [make_turn(text)]))
    assert isinstance(verdict, Scored)
    assert verdict.value == value and verdict.parsed == bool(text)


@pytest.mark.parametrize(("gold", "integer"), [("", False), (None, False), ("twelve", True)])
def test_a_task_without_a_usable_answer_is_invalid(
    make_task: Callable[..., Task], make_turn: Callable[[str], Turn], gold: Any, integer: bool
) -> None:
    """An empty gold must not make an empty completion right."""
    verdict = asyncio.run(ExactReward(integer=integer).score(make_task(gold), [make_turn("")]))
    assert isinstance(verdict, Invalid)
    assert "'answer'" in verdict.reason and "t1" in verdict.reason
