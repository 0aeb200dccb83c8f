"""What every `Reward` promises, whatever judges."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from posttrain.protocols import Reward
from posttrain.rewards import build_reward
from posttrain.types import (
    Completion,
    FinishReason,
    Hidden,
    Invalid,
    Message,
    Scored,
    Task,
    Turn,
)

FUNCTION = "def grade(completion, answer): return completion.strip() == str(answer)\n"
NASTY = [
    "",
    " ",
    "\x00",
    "\ud800",
    "\\boxed{",
    "{" * 2000,
    "9" * 6000,
    "NaN",
    "</think>",
    "🙂" * 500,
]


def _make(name: str, folder: Path) -> Reward:
    (folder / "user.py").write_text(FUNCTION)
    kind = "user.py:grade" if name == "function" else name
    return build_reward(
        kind, answer_column="answer", timeout_s=20.0, correct_at=1.0, base_dir=folder
    )


@pytest.fixture(scope="module", params=["math", "exact", "function"])
def reward(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reward]:
    reward = _make(request.param, tmp_path_factory.mktemp("reward"))
    yield reward
    asyncio.run(reward.close())


def _task(**hidden: object) -> Task:
    return Task("t1", (Message.text("user", "What is 6 times 7?"),), Hidden(hidden))


def _turn(text: str) -> Turn:
    completion = Completion.build([2], [-0.1], [0], FinishReason.EOS, text)
    return Turn(np.array([1], np.int32), completion)


def test_it_is_a_reward(reward: Reward) -> None:
    assert isinstance(reward, Reward)


def test_the_gold_answer_scores_1_and_controls_score_0(reward: Reward) -> None:
    gold = asyncio.run(reward.score(_task(answer="42"), [_turn("42")]))
    assert isinstance(gold, Scored) and gold.value == 1.0 and gold.correct and gold.parsed
    for control in ("", "41", "What is 6 times 7?", "I cannot answer that.", "41 or 42", "4"):
        verdict = asyncio.run(reward.score(_task(answer="42"), [_turn(control)]))
        assert isinstance(verdict, Scored), verdict
        assert verdict.value == 0.0 and not verdict.correct, verdict


def test_a_verdict_has_finite_terms_evidence_and_can_be_pickled(reward: Reward) -> None:
    verdict = asyncio.run(reward.score(_task(answer="42"), [_turn("42")]))
    assert isinstance(verdict, Scored)
    assert verdict.evidence
    weighted = sum(term.value * term.weight for term in verdict.terms)
    assert weighted == verdict.value
    assert pickle.loads(pickle.dumps(verdict)) == verdict


@pytest.mark.parametrize("text", NASTY)
def test_no_output_of_a_policy_makes_it_raise(reward: Reward, text: str) -> None:
    verdict = asyncio.run(reward.score(_task(answer="42"), [_turn(text)]))
    assert isinstance(verdict, Scored), verdict
    assert verdict.value == 0.0


def test_only_the_last_turn_is_graded(reward: Reward) -> None:
    verdict = asyncio.run(reward.score(_task(answer="42"), [_turn("42"), _turn("41")]))
    assert isinstance(verdict, Scored) and verdict.value == 0.0


def test_a_task_without_its_answer_is_invalid_not_0(reward: Reward) -> None:
    verdict = asyncio.run(reward.score(_task(Answer="42"), [_turn("42")]))
    assert isinstance(verdict, Invalid)
    assert "answer" in verdict.reason


def test_an_episode_without_a_turn_is_invalid(reward: Reward) -> None:
    assert isinstance(asyncio.run(reward.score(_task(answer="42"), [])), Invalid)


def test_parallel_grades_keep_their_own_verdicts(reward: Reward) -> None:
    async def grade_all() -> list[float]:
        tasks = [_task(answer=str(i % 5)) for i in range(20)]
        verdicts = await asyncio.gather(*(reward.score(t, [_turn("3")]) for t in tasks))
        return [v.value if isinstance(v, Scored) else -1.0 for v in verdicts]

    assert asyncio.run(grade_all()) == [float(i % 5 == 3) for i in range(20)]


@pytest.mark.parametrize("name", ["math", "exact", "function"])
def test_closing_twice_and_closing_unused_is_fine(name: str, tmp_path: Path) -> None:
    async def run() -> None:
        reward = _make(name, tmp_path)
        await reward.close()
        await reward.close()

    asyncio.run(run())
