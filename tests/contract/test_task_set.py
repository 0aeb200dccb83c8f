"""What every task set must do: what an environment trains and evaluates on, and lists."""

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import (
    ArithmeticConfig,
    BinarySearchConfig,
    DatasetConfig,
    LargestConfig,
    ReasoningGymConfig,
    ReverseConfig,
)
from posttrain.data.tasks import TaskList, make_task, user_prompt
from posttrain.envs import build_env_spec
from posttrain.errors import DataError
from posttrain.protocols import EnvSpec, TaskSet
from posttrain.types import Task

CONFIGS: dict[str, Any] = {
    "arithmetic": ArithmeticConfig(max_operand=12, operations=("+", "-"), num_eval=20),
    "arithmetic_some": ArithmeticConfig(num_train=30, num_eval=20),
    "reverse": ReverseConfig(),
    "largest": LargestConfig(num_train=200, num_eval=20),
    "binary_search": BinarySearchConfig(),
    "reasoning_gym": ReasoningGymConfig(dataset="basic_arithmetic", size=30, num_eval=10),
    "reasoning_gym_mixture": ReasoningGymConfig(
        composite=({"name": "leg_counting"}, {"name": "countdown"}), size=10, num_eval=5
    ),
    "dataset": DatasetConfig(path="rows.jsonl", reward="exact", eval_frac=0.3),
    "dataset_two_files": DatasetConfig(path="rows.jsonl", reward="exact", eval_path="eval.jsonl"),
}
# A small game has no held-out part: the policy must play, not remember.
NOT_HELD_OUT = ("binary_search",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, start in (("rows.jsonl", 0), ("eval.jsonl", 50)):
        rows = [{"prompt": f"question {start + i}", "answer": i} for i in range(12)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture(params=list(CONFIGS))
def spec(request: pytest.FixtureRequest, folder: Path) -> EnvSpec:
    return build_env_spec(CONFIGS[request.param], seed=0, base_dir=folder)


@pytest.fixture(params=["train", "eval"])
def tasks(request: pytest.FixtureRequest, spec: EnvSpec) -> TaskSet:
    return spec.train_tasks() if request.param == "train" else spec.eval_tasks()


def facts(task: Task) -> tuple:
    return task.task_id, task.prompt, task.hidden.reveal(), dict(task.metadata), task.fingerprint


def listed(tasks: TaskSet) -> list[Task]:
    return [tasks[i] for i in range(len(tasks))]


def test_a_task_is_the_same_whenever_it_is_asked_for(tasks: TaskSet) -> None:
    forward = [facts(task) for task in listed(tasks)]
    backward = [facts(tasks[i]) for i in reversed(range(len(tasks)))]
    assert forward == backward[::-1]


def test_ids_and_fingerprints_tell_tasks_apart(tasks: TaskSet) -> None:
    every = listed(tasks)
    assert len({task.task_id for task in every}) == len(every) > 0
    assert all(len(task.fingerprint) == 64 for task in every)
    assert len({task.fingerprint for task in every}) == len(
        {(task.prompt, repr(task.hidden.reveal())) for task in every}
    )


@pytest.mark.parametrize("past", [False, True])
def test_an_index_outside_is_an_error(tasks: TaskSet, past: bool) -> None:
    with pytest.raises(IndexError):
        tasks[len(tasks) if past else -1]


def test_the_public_part_is_json_and_holds_no_hidden_field(tasks: TaskSet) -> None:
    for task in listed(tasks):
        json.dumps(dict(task.metadata))
        assert not set(task.metadata) & {"answer", "secret", "entry"}


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in NOT_HELD_OUT])
def test_training_and_held_out_prompts_are_disjoint(name: str, folder: Path) -> None:
    """k11"""
    spec = build_env_spec(CONFIGS[name], seed=0, base_dir=folder)
    train = {task.prompt for task in listed(spec.train_tasks())}
    held_out = {task.prompt for task in listed(spec.eval_tasks())}
    assert train.isdisjoint(held_out)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_seed_is_evaluated_on_the_same_tasks(name: str, folder: Path) -> None:
    first, second = (
        build_env_spec(CONFIGS[name], seed=seed, base_dir=folder).eval_tasks() for seed in (0, 1)
    )
    assert [facts(t) for t in listed(first)] == [facts(t) for t in listed(second)]


def test_a_list_with_a_repeated_id_is_refused() -> None:
    """l06"""
    task = make_task("7", user_prompt(None, "a"), {}, grader="none")
    with pytest.raises(DataError, match="'7' occurs twice"):
        TaskList([task, task])
