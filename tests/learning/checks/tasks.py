"""Problems with a known optimum, as environments of the project."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from posttrain.data.tasks import TaskList, make_task, user_prompt
from posttrain.envs.single_turn import SingleTurnEnv
from posttrain.protocols import Env, Reward, TaskSet
from posttrain.types import FinishReason, Observation, RewardTerm, Scored, StepOutcome, Task, Turn

TARGET_LENGTH = 8


@dataclass(frozen=True, slots=True)
class SmallSpec:
    """A few tasks, each with its own grading; training and evaluation ask for the same."""

    name: str
    tasks: tuple[Task, ...]
    make_env: Callable[[Task], Env]

    def train_tasks(self) -> TaskSet:
        return TaskList(self.tasks)

    def eval_tasks(self) -> TaskSet:
        return TaskList(self.tasks)

    def make(self, task: Task) -> Env:
        return self.make_env(task)

    def reward(self) -> Reward | None:
        return None


def digit_map() -> SmallSpec:
    """The digit d is asked for, (3d + 1) mod 10 is right: 1 for it, else 0. Optimum 1."""
    tasks = tuple(
        make_task(f"d{d}", user_prompt(None, str(d)), {"answer": str((3 * d + 1) % 10)}, grader="1")
        for d in range(10)
    )
    return SmallSpec("digit_map", tasks, lambda task: SingleTurnEnv(task, _grade_digit))


def _grade_digit(task: Task, text: str) -> Scored:
    value = float(text == task.hidden.reveal()["answer"])
    return Scored(value, (RewardTerm("exact", value),), text)


def length_target() -> SmallSpec:
    """1 - |L - 8| / 8 for L tokens before the end of the turn, which must come: an answer that is
    cut at 16 tokens gets 0. Optimum 1."""
    task = make_task("length", user_prompt(None, "go"), {}, grader="1")
    return SmallSpec("length_target", (task,), _LengthEnv)


class _LengthEnv:
    """One answer, of which the number of tokens counts."""

    def __init__(self, task: Task) -> None:
        self._task = task

    async def reset(self, seed: int) -> Observation:
        return Observation(self._task.prompt)

    async def step(self, turn: Turn) -> StepOutcome:
        length = len(turn.completion) - (turn.completion.finish_reason is FinishReason.EOS)
        value = max(0.0, 1 - abs(length - TARGET_LENGTH) / TARGET_LENGTH)
        return StepOutcome(None, terminated=True, verdict=Scored(value, evidence=str(length)))

    async def close(self) -> None: ...
