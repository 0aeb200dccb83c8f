"""Which task comes next."""

from __future__ import annotations

from functools import lru_cache

from posttrain.data.permutation import Permutation
from posttrain.errors import DataError
from posttrain.protocols import TaskSet
from posttrain.randomness import derive_seed
from posttrain.types import Draw, Group, Task

MAX_LOCATED = 1024
"""Draws whose place is remembered: it is asked for when a task is drawn, and when it is rolled."""


class UniformCurriculum:
    """Every task exactly once an epoch, in an order of its own for each epoch, without end.

    A draw is a pure function of (tasks, seed, draw_id). There is no cursor to save: a resumed run
    that asks for the draws that are still open gets exactly the tasks an uninterrupted run would
    have had, across epoch boundaries too.

    Example:
        >>> from posttrain.data.tasks import TaskList, make_task, user_prompt
        >>> tasks = TaskList(make_task(n, user_prompt(None, n), {}, grader="g") for n in "abc")
        >>> curriculum = UniformCurriculum(tasks, seed=0)
        >>> sorted(curriculum.draw(i).task_id for i in range(3, 6))
        ['a', 'b', 'c']
        >>> curriculum.draw(5).epoch
        1
    """

    def __init__(self, tasks: TaskSet, seed: int) -> None:
        """Raises DataError when there is no task."""
        if len(tasks) == 0:
            raise DataError("the training set holds 0 tasks; nothing can be drawn from it")
        self._tasks = tasks
        self._seed = seed
        self._locate = lru_cache(MAX_LOCATED)(self._locate_anew)

    def draw(self, draw_id: int) -> Draw:
        """The draw of this number, from 0. Raises ValueError for a negative number."""
        epoch, index = self._locate(draw_id)
        task_id = self._tasks[index].task_id
        return Draw(draw_id, task_id, epoch, derive_seed(self._seed, "draw", draw_id))

    def task(self, draw: Draw) -> Task:
        """The task of a draw. Raises DataError when the tasks are not those it was drawn from."""
        task = self._tasks[self._locate(draw.draw_id)[1]]
        if task.task_id != draw.task_id:
            raise DataError(
                f"draw {draw.draw_id} was of task {draw.task_id!r} but is {task.task_id!r} now: "
                "the training tasks or the seed changed since it was recorded; restore them or "
                "start a new run directory"
            )
        return task

    def observe(self, group: Group) -> None:
        """Outcomes don't change a uniform order."""

    def _locate_anew(self, draw_id: int) -> tuple[int, int]:
        if draw_id < 0:
            raise ValueError(f"draw_id is {draw_id}; draws count from 0")
        size = len(self._tasks)
        epoch, position = divmod(draw_id, size)
        order = Permutation(size, derive_seed(self._seed, "epoch", epoch))
        return epoch, order[position]
