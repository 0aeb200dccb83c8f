"""Environments in one run: each task played, judged and credited as its own member says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from posttrain.algo.builder import build_algorithm
from posttrain.config import MixtureConfig, ReverseConfig, RlooConfig
from posttrain.config.estimators import GrpoConfig, RaeConfig, ReinforceConfig
from posttrain.config.supervised import RaftConfig
from posttrain.data.samples import build_batch
from posttrain.data.tasks import TaskList, make_task, user_prompt
from posttrain.envs import build_env_spec
from posttrain.envs.binary_search import BinarySearchEnv
from posttrain.envs.mixture import MixtureSpec
from posttrain.envs.reverse import ReverseSpec
from posttrain.envs.single_turn import SingleTurnEnv
from posttrain.types import (
    Completion,
    Draw,
    FinishReason,
    Group,
    Invalid,
    InvalidKind,
    Scored,
    StopReason,
    Task,
    Trajectory,
    Turn,
    Verdict,
)

CONFIG = MixtureConfig.model_validate(
    {
        "type": "mixture",
        "members": {
            "back": {"type": "reverse", "alphabet": "ab", "length": 3, "num_eval": 3},
            "game": {"type": "binary_search", "terse": True, "num_eval": 4},
        },
        "weights": {"game": 2},
    }
)


@pytest.fixture
def spec() -> MixtureSpec:
    built = build_env_spec(CONFIG, seed=0, base_dir=Path())
    assert isinstance(built, MixtureSpec)
    return built


def turns(text: str) -> tuple[Turn, ...]:
    completion = Completion.build([5], [-0.1], [0], FinishReason.EOS, text)
    return (Turn(np.array([1], np.int32), completion),)


def test_each_task_is_played_in_its_own_environment(spec: MixtureSpec) -> None:
    made = {"back": SingleTurnEnv, "game": BinarySearchEnv}
    for tasks in (spec.train_tasks(), spec.eval_tasks()):
        for index in range(len(tasks)):
            task = tasks[index]
            assert type(spec.make(task)) is made[task.task_id.partition("/")[0]]


def test_the_weights_and_the_held_out_sets_are_the_members_own(spec: MixtureSpec) -> None:
    assert spec.train_tasks().weights == {"back": 1, "game": 2}
    held_out = [spec.eval_tasks()[i].task_id for i in range(7)]
    assert [h.partition("/")[0] for h in held_out] == ["back", "game"] * 3 + ["game"]
    alone = ReverseSpec(CONFIG.members["back"])  # type: ignore[arg-type]
    mine = [h.partition("/")[2] for h in held_out if h.startswith("back")]
    assert mine == [alone.eval_tasks()[i].task_id for i in range(3)]


@dataclass
class Judge:
    """A reward that gives one value and remembers what it was asked."""

    value: float
    asked: list[str] = field(default_factory=list)
    closed: int = 0

    async def score(self, task: Task, turns: Sequence[Turn]) -> Verdict:
        self.asked.append(task.task_id)
        return Scored(self.value)

    async def close(self) -> None:
        self.closed += 1


@dataclass
class Judged:
    """An environment with a reward, or without one."""

    judge: Judge | None
    name: str = "judged"

    def train_tasks(self) -> TaskList:
        return TaskList([make_task("t", user_prompt(None, "q"), {}, grader="none")])

    eval_tasks = train_tasks

    def make(self, task: Task) -> SingleTurnEnv:
        return SingleTurnEnv(task)

    def reward(self) -> Judge | None:
        return self.judge


def test_each_episode_is_judged_by_the_reward_of_its_environment() -> None:
    one, two = Judge(0.25), Judge(0.75)
    mixed = MixtureSpec({"one": Judged(one), "two": Judged(two), "own": Judged(None)}, {})  # type: ignore[dict-item]
    reward = mixed.reward()
    assert reward is not None
    tasks = mixed.train_tasks()

    async def scenario() -> list[Verdict]:
        verdicts = [await reward.score(tasks[i], turns("x")) for i in range(3)]
        await reward.close()
        return verdicts

    first, second, third = asyncio.run(scenario())
    assert (first, second) == (Scored(0.25), Scored(0.75))
    assert (one.asked, two.asked) == (["one/t"], ["two/t"]) and one.closed == two.closed == 1
    assert isinstance(third, Invalid) and third.kind is InvalidKind.ENV_ERROR
    assert "environment own ended without a verdict" in third.reason


def test_members_that_grade_themselves_need_no_reward(spec: MixtureSpec) -> None:
    assert spec.reward() is None


def test_only_members_that_can_name_a_task_relabel(spec: MixtureSpec) -> None:
    tasks = spec.train_tasks()
    of = {tasks[i].task_id.partition("/")[0]: tasks[i] for i in range(2)}
    assert spec.relabel(of["game"], turns("4")) is None
    text = next(
        tasks[i].hidden.reveal()["answer"]
        for i in range(2, len(tasks))
        if tasks[i].task_id.startswith("back")
    )
    solved = spec.relabel(of["back"], turns(text))
    assert solved is not None and solved.hidden.reveal()["answer"] == text


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"weights": {"nope": 1}}, r"weights names 'nope', which is no member; members are back"),
        ({"weights": {"back": 0}}, r"greater than or equal to 1"),
        ({"members": {"back": {"type": "reverse"}}}, r"at least 2"),
        ({"members": {"a/b": {"type": "reverse"}, "c": {"type": "reverse"}}}, r"pattern"),
        ({"members": {"a": CONFIG.model_dump(), "c": {"type": "reverse"}}}, r"mixture"),
    ],
)
def test_unknown_names_and_impossible_mixtures_are_refused(
    values: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        MixtureConfig.model_validate(CONFIG.model_dump(exclude={"weights"}) | values)


# --- algorithms of members ------------------------------------------------------------------------

Make = Callable[..., Group]


@pytest.fixture
def group(make: SimpleNamespace) -> Make:
    """A group of an environment with these rewards; answers get longer with each member."""

    def build(draw_id: int, environment: str, rewards: Sequence[float]) -> Group:
        members = []
        for index, reward in enumerate(rewards):
            completion = make.completion([*range(10, 11 + index), 2])
            turn = Turn(np.array([1, 5], np.int32), completion)
            row = make.sequence([1, 5], completion)
            members.append(
                Trajectory(
                    *(draw_id, index, 0, (turn,), (row,), Scored(reward), StopReason.TERMINATED)
                )
            )
        draw = Draw(draw_id, f"{environment}/t", 0, 0, environment)
        return Group(draw, tuple(members))

    return build


def test_samples_carry_the_streams_of_their_own_algorithm_alone(group: Make) -> None:
    algorithm = build_algorithm(
        RlooConfig(),
        {"raft": RaftConfig(), "plain": ReinforceConfig(positive_nll_coef=0.1)},
    )
    groups = [group(i, name, [1.0, 0.0]) for i, name in enumerate(["other", "raft", "plain"])]
    batch = build_batch(1, groups, algorithm)
    carried = {(s.draw_id, s.sample_index): set(s.streams) for s in batch.samples}
    assert carried == {
        (0, 0): {"policy"},
        (0, 1): {"policy"},
        (1, 0): {"imitation@raft"},
        (2, 0): {"policy@plain", "imitation@plain"},
        (2, 1): {"policy@plain"},
    }
    assert {c.stream for c in algorithm.components} == set().union(*carried.values())


def test_one_algorithm_written_for_each_member_gives_each_sample_the_same_weights(
    group: Make,
) -> None:
    groups = [group(0, "a", [1.0, 0.0]), group(1, "b", [0.5, 0.0, 0.25]), group(2, "a", [1.0, 1.0])]
    one = build_batch(1, groups, build_algorithm(RlooConfig()))
    split = build_batch(1, groups, build_algorithm(RlooConfig(), {"b": RlooConfig()}))
    assert one.dropped == split.dropped == {2: "zero_variance"} and one.metrics == split.metrics
    for mine, theirs in zip(one.samples, split.samples, strict=True):
        (weights,), (others,) = mine.streams.values(), theirs.streams.values()
        assert np.array_equal(weights, others)


def test_the_order_of_groups_and_of_samples_is_that_of_the_draws(group: Make) -> None:
    names = ["b", "a", "c", "a", "b"]
    groups = [group(i, name, [1.0, 0.0]) for i, name in enumerate(names)]
    algorithm = build_algorithm(GrpoConfig(), {"a": RlooConfig(), "b": RaeConfig()})
    batch = build_batch(1, groups, algorithm, {})
    assert [s.draw_id for s in batch.samples] == [i for i in range(5) for _ in range(2)]


def test_moving_averages_are_those_of_each_environment(group: Make) -> None:
    memory: dict[str, float] = {}
    algorithm = build_algorithm(RaeConfig(decay=0.5))
    groups = [group(0, "easy", [1.0, 1.0]), group(1, "hard", [0.0, 0.0])]
    algorithm.credit(groups, memory)
    assert memory == {"baseline/easy/": 0.75, "baseline/hard/": 0.0}


def test_a_reverse_member_is_the_environment_it_is_alone(spec: MixtureSpec) -> None:
    alone = ReverseSpec(ReverseConfig(alphabet="ab", length=3, num_eval=3))
    task = spec.members["back"].train_tasks()[0]
    assert task.fingerprint == alone.train_tasks()[0].fingerprint


def test_evaluating_what_another_member_trains_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Members over one range of problems: what one holds out the other may train."""
    from types import SimpleNamespace

    from posttrain.build import warn_about_trained_evaluation
    from posttrain.config import ReverseConfig
    from posttrain.data.mixture import MixtureTasks
    from posttrain.envs.reverse import ReverseSpec

    few, many = (ReverseSpec(ReverseConfig(alphabet="abc", length=3, num_eval=n)) for n in (2, 6))
    both = {"few": few, "many": many}
    rollable = SimpleNamespace(
        train_tasks=MixtureTasks({n: s.train_tasks() for n, s in both.items()}, {}),
        eval_tasks=MixtureTasks({n: s.eval_tasks() for n, s in both.items()}, {}),
    )
    warn_about_trained_evaluation(rollable, ())  # type: ignore[arg-type]
    assert "4 of the evaluated prompts are trained by another member" in caplog.text
