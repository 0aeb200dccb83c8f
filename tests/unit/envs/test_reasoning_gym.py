import asyncio
import base64
import logging
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from posttrain.config import ReasoningGymConfig
from posttrain.envs.reasoning_gym_env import ReasoningGymSpec
from posttrain.envs.reasoning_gym_reward import ReasoningGymReward, extract_answer
from posttrain.envs.reasoning_gym_worker import score
from posttrain.errors import ConfigError, DataError, MissingDependencyError
from posttrain.rewards.worker import WorkerPool
from posttrain.types import Completion, FinishReason, Invalid, InvalidKind, Scored, Turn, Verdict


def spec(**settings) -> ReasoningGymSpec:
    return ReasoningGymSpec(ReasoningGymConfig(**{"size": 10, "num_eval": 5, **settings}))


def turn(text: str) -> Turn:
    completion = Completion.build([2], [-0.1], [0], FinishReason.EOS, text)
    return Turn(np.array([1], np.int32), completion)


def test_params_reach_the_generator_and_the_suffix_the_prompt() -> None:
    it = spec(
        dataset="basic_arithmetic",
        params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        prompt_suffix=" Answer in <answer> tags.",
        system="Count.",
    )
    for i in range(10):
        system, user = it.train_tasks()[i].prompt
        entry = it.train_tasks()[i].hidden.reveal()["entry"]
        assert system.plain_text() == "Count."
        assert user.plain_text() == entry["question"] + " Answer in <answer> tags."
        assert entry["metadata"]["num_terms"] == 2


def test_a_mixture_follows_its_weights() -> None:
    it = spec(
        composite=(
            {"name": "leg_counting", "weight": 9.0},
            {"name": "basic_arithmetic", "weight": 1.0, "params": {"max_terms": 2}},
        ),
        size=200,
    )
    tasks = it.train_tasks()
    names = [tasks[i].metadata["dataset"] for i in range(len(tasks))]
    assert 160 <= names.count("leg_counting") < 200
    assert set(names) == {"leg_counting", "basic_arithmetic"}


def test_puzzles_that_are_held_out_are_removed_from_training_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """k11: a space of 90 different sums, so that the two seeds must collide."""
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]}
    it = spec(dataset="basic_arithmetic", params=params, size=100, num_eval=20)
    with caplog.at_level(logging.WARNING, logger="posttrain"):
        train = it.train_tasks()
    removed = 100 - len(train)
    assert removed > 0
    assert f"{removed} of 100 training puzzles" in caplog.text
    held_out = {it.eval_tasks()[i].prompt for i in range(20)}
    assert held_out.isdisjoint(train[i].prompt for i in range(len(train)))


def test_a_puzzle_set_with_too_few_puzzles_to_hold_any_out_is_refused() -> None:
    params = {
        "min_animals": 1,
        "max_animals": 1,
        "min_instances": 1,
        "max_instances": 1,
    }
    with pytest.raises(DataError, match="all 5 training puzzles are also among the 500"):
        spec(dataset="leg_counting", params=params, size=5, num_eval=500).train_tasks()


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"dataset": "leg_countin"}, DataError, "did you mean leg_counting"),
        ({"dataset": "composite"}, DataError, "no dataset 'composite'"),
        (
            {"dataset": "leg_counting", "params": {"max_animal": 2}},
            DataError,
            "no parameter 'max_animal'.*did you mean max_animals",
        ),
        (
            {"dataset": "leg_counting", "params": {"min_animals": 9, "max_animals": 2}},
            DataError,
            "refuses the parameters",
        ),
        ({"dataset": "leg_counting", "params": {"seed": 3}}, ConfigError, "not yours to set"),
        ({"composite": ({"name": "leg_counting"},) * 2}, ConfigError, "'leg_counting' twice"),
        ({"composite": ({"name": "countdown", "wieght": 1},)}, ConfigError, "mean weight"),
        ({"composite": ({"name": "countdown", "weight": 0},)}, ConfigError, "above 0"),
        ({"composite": ({"name": "nope"},)}, DataError, "no dataset 'nope'"),
        ({"composite": ({"name": "countdown"},), "params": {"a": 1}}, ConfigError, "in parts"),
    ],
)
def test_a_wrong_name_or_parameter_is_found_before_anything_starts(settings, error, says) -> None:
    with pytest.raises(error, match=says):
        spec(**settings)


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingDependencyError, match=r"posttrain\[reasoning-gym\]"):
        spec(dataset="leg_counting")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("42", "42"),
        ("  42\n", "42"),
        ("so <answer>42</answer>.", "42"),
        ("<answer>1</answer> wait <answer>\n42 </answer>", "42"),
        ("<answer>1 <answer>42</answer>", "42"),
        ("<answer>42", "<answer>42"),
        ("<answer></answer>", ""),
        ("</answer>42<answer>", "</answer>42<answer>"),
        ("", ""),
    ],
)
def test_the_last_complete_answer_region_counts_else_the_whole_text(text, answer) -> None:
    assert extract_answer(text) == answer


def test_reading_the_answer_takes_linear_time() -> None:
    """Quadratic matching of 200,000 open tags would take minutes."""
    text = "<answer>" * 200_000
    assert extract_answer(text) == text


@pytest.mark.parametrize("dataset", ["countdown", "leg_counting", "string_splitting"])
def test_gold_scores_1_and_another_answer_less(dataset: str) -> None:
    tasks = spec(dataset=dataset).eval_tasks()
    hidden = tasks[0].hidden.reveal()
    entry = base64.b64encode(pickle.dumps(hidden["entry"])).decode()
    assert score(dataset, "{}", entry, hidden["entry"]["answer"]) == 1.0
    assert score(dataset, "{}", entry, "not an answer") < 1.0


def test_the_reward_scores_in_a_worker_and_a_failing_scorer_is_no_zero() -> None:
    task = spec(dataset="leg_counting").eval_tasks()[0]
    gold = task.hidden.reveal()["entry"]["answer"]

    async def grade(*texts: str) -> list[Verdict]:
        reward = ReasoningGymReward()
        try:
            return [await reward.score(task, [turn(text)]) for text in texts]
        finally:
            await reward.close()

    right, wrong, silent = asyncio.run(grade(f"I count <answer>{gold}</answer>", "none", " "))
    assert isinstance(right, Scored)
    assert (right.value, right.correct, right.parsed) == (1.0, True, True)
    assert isinstance(wrong, Scored)
    assert (wrong.correct, wrong.parsed) == (False, True)
    assert isinstance(silent, Scored)
    assert (silent.value, silent.parsed) == (0.0, False)


SCORERS = {
    "import time\ndef score(**_): time.sleep(600)": InvalidKind.REWARD_TIMEOUT,
    "import os\ndef score(**_): os._exit(0)": InvalidKind.GRADER_CRASH,
    "def score(**_): return 1 // 0": InvalidKind.REWARD_ERROR,
    "def score(**_): return float('nan')": InvalidKind.REWARD_VALUE,
    "raise ValueError": InvalidKind.GRADER_CRASH,
}


@pytest.mark.parametrize("source", list(SCORERS), ids=[k.name for k in SCORERS.values()])
def test_every_failure_of_a_scorer_is_invalid_with_its_kind(source: str, tmp_path: Path) -> None:
    task = spec(dataset="leg_counting").eval_tasks()[0]
    (tmp_path / "scorer.py").write_text(source)

    async def grade() -> Verdict:
        reward = ReasoningGymReward(WorkerPool(f"{tmp_path / 'scorer.py'}:score", timeout_s=0.5))
        try:
            return await reward.score(task, [turn("4")])
        finally:
            await reward.close()

    verdict = asyncio.run(grade())
    assert isinstance(verdict, Invalid)
    assert verdict.kind == SCORERS[source]
