"""Building tasks: prompts, fingerprints, and task sets that are held in memory."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from posttrain.errors import DataError
from posttrain.types import Hidden, Message, Task

# What is held out must not depend on the run: seeds are compared on the same evaluation.
SPLIT_SEED = 0x5EED


class TaskList:
    """A `TaskSet` in memory.

    Example:
        >>> tasks = TaskList([make_task("t", user_prompt(None, "hi"), {}, grader="none")])
        >>> len(tasks), tasks[0].task_id
        (1, 't')
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        """Raises DataError when two tasks share an id."""
        self._tasks = tuple(tasks)
        seen: set[str] = set()
        for task in self._tasks:
            if task.task_id in seen:
                raise DataError(f"task id {task.task_id!r} occurs twice; make the ids unique")
            seen.add(task.task_id)

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[_checked_index(index, len(self._tasks))]

    def fingerprint(self) -> str:
        """SHA-256 of ids, prompts and hidden data of all tasks, in order."""
        digest = hashlib.sha256()
        for task in self._tasks:
            digest.update(repr((task.task_id, task.fingerprint)).encode())
        return digest.hexdigest()


class IndexedTasks:
    """A `TaskSet` whose tasks are made when they are asked for, so that its size costs nothing.

    `make` must give an index the same task each time.

    Example:
        >>> prompt = user_prompt(None, "hi")
        >>> tasks = IndexedTasks(10**9, lambda i: make_task(str(i), prompt, {}, grader="none"))
        >>> len(tasks), tasks[7].task_id
        (1000000000, '7')
    """

    def __init__(self, size: int, make: Callable[[int], Task]) -> None:
        # len() of Python ends at sys.maxsize; nobody trains on more.
        self._size, self._make = min(size, sys.maxsize), make

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Task:
        """Raises IndexError outside 0..size-1: a task set does not count backwards."""
        return self._make(_checked_index(index, self._size))


def _checked_index(index: int, size: int) -> int:
    """`index` itself. Raises IndexError outside 0..size-1: a task set does not count backwards."""
    if not 0 <= index < size:
        raise IndexError(f"task index {index} is outside a set of {size}")
    return index


def user_prompt(
    system: str | None, text: str, examples: Sequence[tuple[str, str]] = ()
) -> tuple[Message, ...]:
    """A user message, after a system message where one is set and after worked examples as turns.

    Example:
        >>> [m.role for m in user_prompt("Be brief.", "3 + 4", [("1 + 1", "2")])]
        ['system', 'user', 'assistant', 'user']
    """
    head = () if system is None else (Message.text("system", system),)
    shown = [
        Message.text(role, content)
        for pair in examples
        for role, content in zip(("user", "assistant"), pair, strict=True)
    ]
    return (*head, *shown, Message.text("user", text))


def prompt_key(prompt: Sequence[Message]) -> str:
    """Canonical text of a prompt: two prompts are the same exactly when their keys are."""
    return json.dumps([[m.role, m.plain_text()] for m in prompt], ensure_ascii=True)


def make_task(
    task_id: str,
    prompt: tuple[Message, ...],
    hidden: dict[str, Any],
    *,
    grader: str,
    metadata: dict[str, Any] | None = None,
) -> Task:
    """A task whose fingerprint covers prompt, hidden data and `grader`.

    `grader` names the grading rule and its version. Hidden values that JSON does not know enter
    the fingerprint by `repr`.
    """
    data = json.dumps([prompt_key(prompt), hidden, grader], sort_keys=True, default=repr)
    fingerprint = hashlib.sha256(data.encode()).hexdigest()
    return Task(task_id, prompt, Hidden(hidden), metadata or {}, fingerprint)
