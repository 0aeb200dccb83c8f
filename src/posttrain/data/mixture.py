"""Tasks of several environments, and the order in which they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from posttrain.data.curriculum import UniformCurriculum
from posttrain.protocols import Curriculum, TaskSet
from posttrain.randomness import derive_seed
from posttrain.types import Draw, Group, Task


class MixtureTasks:
    """A `TaskSet` of several, taken in turn: the first of each, the second of each, and so on, so
    that any beginning of it holds every member. Ids get the member's name and a slash in front."""

    def __init__(self, members: Mapping[str, TaskSet], weights: Mapping[str, int]) -> None:
        self.members = {name: _Named(name, tasks) for name, tasks in members.items()}
        self.weights = {name: weights.get(name, 1) for name in members}
        self._ends = sorted({len(tasks) for tasks in members.values()})

    def map(self, change: Callable[[TaskSet, str], TaskSet]) -> MixtureTasks:
        """Each member changed by itself; the function gets the member's name too."""
        inner = {name: change(named.tasks, name) for name, named in self.members.items()}
        return MixtureTasks(inner, self.weights)

    def __len__(self) -> int:
        return sum(len(tasks) for tasks in self.members.values())

    def __getitem__(self, index: int) -> Task:
        """Raises IndexError outside 0..size-1."""
        if not 0 <= index < len(self):
            raise IndexError(f"task index {index} is outside a set of {len(self)}")
        begun = 0
        for end in self._ends:
            going = [tasks for tasks in self.members.values() if len(tasks) > begun]
            held = (end - begun) * len(going)
            if index < held:
                row, column = divmod(index, len(going))
                return going[column][begun + row]
            index -= held
            begun = end
        raise AssertionError("the rounds hold every task")


class _Named:
    """A task set whose ids begin with its environment's name."""

    def __init__(self, name: str, tasks: TaskSet) -> None:
        self._name = name
        self.tasks = tasks

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> Task:
        task = self.tasks[index]
        return replace(task, task_id=f"{self._name}/{task.task_id}")


class MixtureCurriculum:
    """Rounds in which each member is drawn `weight` times, each by a uniform curriculum of its own.

    A draw is a pure function of (tasks, weights, seed, draw_id), as there.
    """

    def __init__(self, tasks: MixtureTasks, seed: int) -> None:
        self._seed = seed
        self._uniform = {
            name: UniformCurriculum(members, derive_seed(seed, "member", i))
            for i, (name, members) in enumerate(tasks.members.items())
        }
        self._weights = dict(tasks.weights)
        self._round = _interleaved(self._weights)

    def draw(self, draw_id: int) -> Draw:
        """The draw of this number, from 0. Raises ValueError for a negative number."""
        name, position = self._locate(draw_id)
        inner = self._uniform[name].draw(position)
        seed = derive_seed(self._seed, "draw", draw_id)
        return Draw(draw_id, inner.task_id, inner.epoch, seed, environment=name)

    def task(self, draw: Draw) -> Task:
        """The task of a draw. Raises DataError when the tasks are not those it was drawn from."""
        name, position = self._locate(draw.draw_id)
        return self._uniform[name].task(replace(draw, draw_id=position))

    def observe(self, group: Group) -> None:
        """Outcomes don't change the order."""

    def _locate(self, draw_id: int) -> tuple[str, int]:
        if draw_id < 0:
            raise ValueError(f"draw_id is {draw_id}; draws count from 0")
        rounds, place = divmod(draw_id, len(self._round))
        name, nth = self._round[place]
        return name, rounds * self._weights[name] + nth


def curriculum_of(tasks: TaskSet, seed: int) -> Curriculum:
    """Uniform, or in rounds for a mixture."""
    if isinstance(tasks, MixtureTasks):
        return MixtureCurriculum(tasks, seed)
    return UniformCurriculum(tasks, seed)


def _interleaved(weights: Mapping[str, int]) -> list[tuple[str, int]]:
    """One round: each name with its number in the round, spread evenly."""
    places = [
        ((nth + 0.5) / weight, name, nth)
        for name, weight in weights.items()
        for nth in range(weight)
    ]
    return [(name, nth) for _, name, nth in sorted(places)]
