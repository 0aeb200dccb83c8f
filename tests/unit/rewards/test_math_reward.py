"""The math reward through its worker processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from posttrain.rewards import MathReward
from posttrain.types import Invalid, InvalidKind, Scored, Task, Turn, Verdict

TOWER = r"\boxed{(5^{5^{5^{5^5}}-4}-5)/16}"


def test_bold_and_boxed_and_spoken_answers_are_right(score: Callable[..., Verdict]) -> None:
    """Cases c01 and c27: correctness does not ask for a format, which has its own term."""
    bold = score("... is **73**.\n\nFinal Answer: **73**", 73)
    boxed = score(r"\boxed{42}", "42")
    spoken = score("The answer is 42.", "42")
    for verdict, is_boxed in ((bold, 0.0), (boxed, 1.0), (spoken, 0.0)):
        assert isinstance(verdict, Scored)
        assert verdict.value == 1.0 and verdict.correct and verdict.parsed
        assert [(t.name, t.value, t.weight) for t in verdict.terms] == [
            ("correct", 1.0, 1.0),
            ("boxed", is_boxed, 0.0),
        ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        r"\boxed{1} or perhaps \boxed{42}",
        "1\n2\n3\n42",
        r"<think>it must be \boxed{42}</think>",
        r"<think>it must be \boxed{42}",
    ],
)
def test_without_a_single_final_answer_the_reward_is_0_and_says_why(
    score: Callable[..., Verdict], text: str
) -> None:
    """Attacks: empty answer, several boxes, many candidates, answers inside the thinking."""
    verdict = score(text, "42")
    assert isinstance(verdict, Scored)
    assert verdict.value == 0.0 and not verdict.parsed and not verdict.correct
    assert verdict.evidence.startswith("no answer: ")


def test_copying_the_question_scores_0(score: Callable[..., Verdict]) -> None:
    verdict = score(r"\boxed{40 + 2}", "42", "What is 40 + 2?")
    assert isinstance(verdict, Scored) and verdict.value == 0.0 and verdict.parsed


@pytest.mark.parametrize("gold", [None, "", r"\frac{"])
def test_an_unusable_gold_is_invalid(score: Callable[..., Verdict], gold: Any) -> None:
    verdict = score("5", gold)
    assert isinstance(verdict, Invalid) and verdict.kind is InvalidKind.REWARD_ERROR


def test_a_hundred_parallel_grades_are_right_from_any_thread(
    math_reward: MathReward, make_task: Callable[..., Task], make_turn: Callable[[str], Turn]
) -> None:
    """Case c11: no signals, so asyncio, threads and changing loops all work."""

    async def grade_many(count: int) -> list[Verdict]:
        task, turn = make_task(r"7.41\%"), make_turn(r"\boxed{7.41\%}")
        return await asyncio.gather(*(math_reward.score(task, [turn]) for _ in range(count)))

    verdicts: list[Verdict] = []
    thread = threading.Thread(target=lambda: verdicts.extend(asyncio.run(grade_many(50))))
    thread.start()
    verdicts_here = asyncio.run(grade_many(50))
    thread.join()
    verdicts.extend(verdicts_here)
    assert len(verdicts) == 100
    assert all(isinstance(v, Scored) and v.value == 1.0 for v in verdicts)


def test_an_exponent_tower_scores_0_and_the_next_answer_is_graded(
    make_task: Callable[..., Task],
    make_turn: Callable[[str], Turn],
    child_pids: Callable[[], set[int]],
) -> None:
    """Case c10: the worker is killed from outside; nothing of it is left."""
    before = child_pids()

    async def run() -> tuple[Verdict, Verdict]:
        reward = MathReward(timeout_s=2.0)
        try:
            tower = await reward.score(make_task(1), [make_turn(TOWER)])
            return tower, await reward.score(make_task(1), [make_turn("1")])
        finally:
            await reward.close()

    tower, after = asyncio.run(run())
    assert isinstance(tower, Scored), tower
    assert tower.value == 0.0 and tower.evidence.startswith("timeout: "), tower
    assert isinstance(after, Scored) and after.value == 1.0, after
    assert child_pids() == before


def test_a_gold_that_hangs_the_grader_is_invalid_whatever_the_answer(
    make_task: Callable[..., Task], make_turn: Callable[[str], Turn]
) -> None:
    """A time-out is blamed on the answer only when the gold alone is graded in time."""

    async def run() -> Verdict:
        reward = MathReward(timeout_s=0.001)
        try:
            return await reward.score(make_task(1), [make_turn("1")])
        finally:
            await reward.close()

    verdict = asyncio.run(run())
    assert isinstance(verdict, Invalid)
    assert verdict.kind is InvalidKind.REWARD_TIMEOUT and verdict.retryable
