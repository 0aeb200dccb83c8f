"""Equality of short answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from posttrain.rewards import ExactReward
from posttrain.types import Invalid, Scored, Task, Turn


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


@pytest.mark.parametrize("gold", ["", " \n", None])
def test_a_task_without_a_usable_answer_is_invalid(
    make_task: Callable[..., Task], make_turn: Callable[[str], Turn], gold: Any
) -> None:
    """An empty gold must not make an empty completion right."""
    verdict = asyncio.run(ExactReward().score(make_task(gold), [make_turn("")]))
    assert isinstance(verdict, Invalid)
    assert "'answer'" in verdict.reason and "t1" in verdict.reason
