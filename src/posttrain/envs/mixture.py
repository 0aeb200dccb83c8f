"""Several environments in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from posttrain.data.mixture import MixtureTasks
from posttrain.protocols import Env, EnvSpec, Reward
from posttrain.types import Invalid, InvalidKind, Task, Turn, Verdict


@dataclass(frozen=True)
class MixtureSpec:
    """Members by name. A task's id begins with its member's name and a slash."""

    members: Mapping[str, EnvSpec]
    weights: Mapping[str, int]

    @property
    def name(self) -> str:
        return "mixture of " + ", ".join(self.members)

    def train_tasks(self) -> MixtureTasks:
        return self._tasks(lambda spec: spec.train_tasks())

    def eval_tasks(self) -> MixtureTasks:
        return self._tasks(lambda spec: spec.eval_tasks())

    def _tasks(self, of: Callable[[EnvSpec], object]) -> MixtureTasks:
        return MixtureTasks({n: of(spec) for n, spec in self.members.items()}, self.weights)  # type: ignore[arg-type]

    def make(self, task: Task) -> Env:
        return self._member(task).make(task)

    def reward(self) -> Reward | None:
        """One that asks the member's own; None when no member has one."""
        rewards = {name: spec.reward() for name, spec in self.members.items()}
        present = {name: reward for name, reward in rewards.items() if reward is not None}
        return MixtureReward(present) if present else None

    def relabel(self, task: Task, turns: Sequence[Turn]) -> Task | None:
        """The member's own, for members that can name the task an answer solves."""
        relabel = getattr(self._member(task), "relabel", None)
        return None if relabel is None else relabel(task, turns)

    def _member(self, task: Task) -> EnvSpec:
        return self.members[task.task_id.partition("/")[0]]


@dataclass(frozen=True)
class MixtureReward:
    """Sends each episode to the reward of its environment."""

    rewards: Mapping[str, Reward]

    async def score(self, task: Task, turns: Sequence[Turn]) -> Verdict:
        name = task.task_id.partition("/")[0]
        if name not in self.rewards:
            return Invalid(
                InvalidKind.ENV_ERROR,
                f"environment {name} ended without a verdict and has no reward; give a verdict "
                "with each StepOutcome that a limit may make the last",
            )
        return await self.rewards[name].score(task, turns)

    async def close(self) -> None:
        for reward in self.rewards.values():
            await reward.close()
