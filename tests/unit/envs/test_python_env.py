from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pydantic import ValidationError

from posttrain.config import PythonEnvConfig
from posttrain.envs import build_env_spec
from posttrain.errors import ConfigError

SOURCE = """
from posttrain.data.tasks import TaskList, make_task, user_prompt
from posttrain.types import Scored
from posttrain.envs.single_turn import SingleTurnEnv


class Echo:
    name = "echo"

    def __init__(self, size=2):
        self.size = size

    def train_tasks(self):
        return TaskList(
            make_task(f"t{i}", user_prompt(None, f"say {i}"), {"answer": str(i)}, grader="echo")
            for i in range(self.size)
        )

    eval_tasks = train_tasks

    def make(self, task):
        return SingleTurnEnv(task, lambda task, text: Scored(float(text == "x")))

    def reward(self):
        return None


class Half:
    name = "half"


def broken():
    raise KeyError("nothing here")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "bad.py").write_text("import no_such_module_at_all\n")
    return tmp_path


def build(folder: Path, target: str, **params: object) -> object:
    return build_env_spec(PythonEnvConfig(target=target, params=params), seed=0, base_dir=folder)


def test_a_class_in_a_file_beside_the_recipe_is_called_with_its_params(folder: Path) -> None:
    spec = build(folder, "mine.py:Echo", size=5)
    assert len(spec.train_tasks()) == 5  # type: ignore[attr-defined]
    env = spec.make(spec.train_tasks()[3])  # type: ignore[attr-defined]
    assert asyncio.run(env.reset(0)).messages[0].plain_text() == "say 3"


@pytest.mark.parametrize(
    ("target", "params", "said"),
    [
        ("mine.py:Ehco", {}, "did you mean Echo"),
        ("mine.py:Half", {}, "lacks train_tasks, eval_tasks, make, reward"),
        ("mine.py:Echo", {"sise": 3}, "TypeError"),
        ("mine.py:broken", {}, "KeyError: 'nothing here'"),
        ("bad.py:X", {}, "no_such_module_at_all"),
        ("gone.py:X", {}, "no file"),
        ("mine.py", {}, "names no function"),
    ],
)
def test_a_target_that_cannot_serve_is_named_with_the_reason(
    folder: Path, target: str, params: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match="env.target") as caught:
        build(folder, target, **params)
    assert said in str(caught.value)


def test_settings_that_it_would_ignore_are_refused() -> None:
    with pytest.raises(ValidationError, match="makes its own tasks"):
        PythonEnvConfig(target="mine.py:Echo", system="Be brief.")
