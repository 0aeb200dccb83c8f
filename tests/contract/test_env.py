"""What every environment and its spec must do, whoever wrote it."""

import asyncio
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.config import (
    ArithmeticConfig,
    BinarySearchConfig,
    DatasetConfig,
    LargestConfig,
    ReasoningGymConfig,
    ReverseConfig,
)
from posttrain.envs import build_env_spec
from posttrain.protocols import Env, EnvSpec
from posttrain.types import Completion, FinishReason, Scored, StepOutcome, Task, Turn

CONFIGS: dict[str, Any] = {
    "arithmetic": ArithmeticConfig(num_eval=10),
    "reverse": ReverseConfig(),
    "largest": LargestConfig(num_train=200, num_eval=20),
    "binary_search": BinarySearchConfig(),
    "binary_search_terse": BinarySearchConfig(terse=True),
    "reasoning_gym": ReasoningGymConfig(dataset="leg_counting", size=10, num_eval=5),
    "reasoning_gym_mixture": ReasoningGymConfig(
        composite=({"name": "leg_counting"}, {"name": "countdown", "weight": 2.0}),
        size=10,
        num_eval=5,
    ),
    "dataset": DatasetConfig(path="rows.jsonl", reward="exact"),
}
HOSTILE = (
    "",
    " \n",
    "\x00\x1b[2J",
    "{answer} %s {0.__class__}",
    "<answer>",
    "é🦆\u202e\u2028",
    "٣",
    "-",
    "1" * 100_000,
    "nan",
    "1e999",
    "1,2;3|4",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"prompt": f"question {i}", "answer": f"gold {i}"} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture(params=list(CONFIGS))
def spec(request: pytest.FixtureRequest, folder: Path) -> EnvSpec:
    return build_env_spec(CONFIGS[request.param], seed=0, base_dir=folder)


def turn(text: str) -> Turn:
    completion = Completion.build([2], [-0.1], [0], FinishReason.EOS, text)
    return Turn(np.array([1], np.int32), completion)


async def play(spec: EnvSpec, task: Task, texts: tuple[str, ...], seed: int = 0):
    """Messages of the reset and all outcomes, to the end of the episode or of `texts`."""
    env = spec.make(task)
    first = await env.reset(seed)
    outcomes: list[StepOutcome] = []
    for text in texts:
        outcomes.append(await env.step(turn(text)))
        if outcomes[-1].terminated or outcomes[-1].truncated:
            break
    await env.close()
    return first, outcomes


def test_a_spec_and_what_it_makes_follow_the_protocols(spec: EnvSpec) -> None:
    assert isinstance(spec, EnvSpec)
    assert isinstance(spec.make(spec.eval_tasks()[0]), Env)


def test_a_spec_travels_to_a_worker_light_and_gives_the_same_tasks(spec: EnvSpec) -> None:
    spec.train_tasks()  # what it has loaded by now must stay behind
    packed = pickle.dumps(spec)
    assert len(packed) < 4000
    copy = pickle.loads(packed)
    assert copy.name == spec.name
    for ours, theirs in (
        (spec.train_tasks()[0], copy.train_tasks()[0]),
        (spec.eval_tasks()[0], copy.eval_tasks()[0]),
    ):
        assert (ours.task_id, ours.prompt, ours.fingerprint) == (
            theirs.task_id,
            theirs.prompt,
            theirs.fingerprint,
        )


def test_an_episode_starts_with_the_prompt_of_its_task(spec: EnvSpec) -> None:
    task = spec.train_tasks()[0]
    first, _ = asyncio.run(play(spec, task, ()))
    assert first.messages == task.prompt


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_of_a_policy_raises_or_earns(spec: EnvSpec, text: str) -> None:
    """Ends within the turns the environment allows; a wrong answer is a 0, not an error."""
    _, outcomes = asyncio.run(play(spec, spec.train_tasks()[0], (text,) * 20))
    last = outcomes[-1]
    assert last.terminated
    standing = [o.verdict for o in outcomes[:-1] if o.verdict is not None]
    assert all(isinstance(v, Scored) and not v.correct for v in standing)
    if spec.reward() is None:
        assert isinstance(last.verdict, Scored)
        assert not last.verdict.correct
    else:
        assert last.verdict is None


def test_the_same_episode_twice_is_the_same_whatever_the_seed(spec: EnvSpec) -> None:
    """These environments draw nothing at random, so a replay must agree word for word."""
    task = spec.train_tasks()[1]
    texts = ("3", "5", "dcba", "3", "3", "3")
    assert asyncio.run(play(spec, task, texts, seed=1)) == asyncio.run(
        play(spec, task, texts, seed=2)
    )


def test_an_environment_is_used_once_and_in_order(spec: EnvSpec) -> None:
    async def misuse() -> None:
        task = spec.train_tasks()[0]
        env = spec.make(task)
        with pytest.raises(RuntimeError, match="is new"):
            await env.step(turn("1"))
        await env.reset(0)
        with pytest.raises(RuntimeError, match="used once"):
            await env.reset(0)
        while not (await env.step(turn("nonsense"))).terminated:
            pass
        with pytest.raises(RuntimeError, match="is over"):
            await env.step(turn("1"))

    asyncio.run(misuse())


def test_closing_twice_or_before_the_start_is_fine(spec: EnvSpec) -> None:
    async def close_twice() -> None:
        env = spec.make(spec.train_tasks()[0])
        await env.close()
        await env.close()
        with pytest.raises(RuntimeError):
            await env.step(turn("1"))

    asyncio.run(close_twice())


def test_two_episodes_of_one_task_know_nothing_of_each_other(spec: EnvSpec) -> None:
    async def interleave() -> tuple[list[StepOutcome], list[StepOutcome]]:
        task = spec.train_tasks()[0]
        first, second = spec.make(task), spec.make(task)
        await first.reset(0)
        await second.reset(0)
        return [await first.step(turn("1"))], [await second.step(turn("1"))]

    a, b = asyncio.run(interleave())
    assert a == b


GOLD: dict[str, Callable[[dict[str, Any]], str]] = {
    "arithmetic": lambda hidden: str(hidden["answer"]),
    "reverse": lambda hidden: hidden["answer"],
    "binary_search": lambda hidden: str(hidden["secret"]),
    "binary_search_terse": lambda hidden: str(hidden["secret"]),
}


@pytest.mark.parametrize("name", list(GOLD))
def test_gold_scores_1_and_the_negative_controls_are_not_correct(name: str, folder: Path) -> None:
    spec = build_env_spec(CONFIGS[name], seed=0, base_dir=folder)
    tasks = spec.eval_tasks()
    golds = [GOLD[name](tasks[i].hidden.reveal()) for i in range(len(tasks))]
    for i in range(len(tasks)):
        _, outcomes = asyncio.run(play(spec, tasks[i], (golds[i],)))
        verdict = outcomes[-1].verdict
        assert isinstance(verdict, Scored)
        assert (verdict.value, verdict.correct, verdict.parsed) == (1.0, True, True)
        other = next(gold for gold in golds if gold != golds[i])
        echo = tasks[i].prompt[-1].plain_text()
        for text in (echo, other, "I cannot help with that.", f"{golds[i]} {other}"):
            if text == golds[i]:
                continue  # a palindrome is its own echo
            _, outcomes = asyncio.run(play(spec, tasks[i], (text,) * 9))
            assert isinstance(outcomes[-1].verdict, Scored)
            assert not outcomes[-1].verdict.correct, text
