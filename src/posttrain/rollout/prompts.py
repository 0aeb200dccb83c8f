"""Prompts that do not fit: refused, dropped or cut, by one rule and one length for everything."""

from __future__ import annotations

import logging
from typing import Literal

from posttrain.data.mixture import MixtureTasks
from posttrain.errors import DataError
from posttrain.protocols import TaskSet
from posttrain.rollout.recorder import Renderer
from posttrain.types import Task

logger = logging.getLogger("posttrain")

MAX_SCANNED = 20_000
"""Tasks whose prompts are measured before the run. Beyond that a prompt is measured when drawn."""


class ChosenTasks:
    """Some tasks of a set, by index."""

    def __init__(self, tasks: TaskSet, indices: list[int]) -> None:
        self._tasks = tasks
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[self._indices[index]]


def fit_prompts(
    tasks: TaskSet,
    renderer: Renderer,
    max_prompt: int,
    rule: Literal["error", "drop", "truncate_left"],
    name: str,
) -> TaskSet:
    """Apply `rollout.overlong_prompt` to a task set, measuring with the renderer of the run.

    Members of a mixture are measured each by itself. Raises DataError for an overlong prompt under
    "error", and when "drop" leaves nothing.
    """
    if rule == "truncate_left":
        return tasks  # the recorder cuts
    if isinstance(tasks, MixtureTasks):
        return tasks.map(
            lambda own, member: fit_prompts(own, renderer, max_prompt, rule, f"{name} of {member}")
        )
    scanned = min(len(tasks), MAX_SCANNED)
    lengths = [len(renderer.prompt_ids(tasks[i].prompt)) for i in range(scanned)]
    long = [i for i, length in enumerate(lengths) if length > max_prompt]
    if not long:
        return tasks
    worst = max(long, key=lambda i: lengths[i])
    fact = (
        f"{name}: {len(long)} of {scanned} prompts exceed {max_prompt} tokens (model.max_context "
        f"minus max_tokens); the longest, task {tasks[worst].task_id!r}, has {lengths[worst]}"
    )
    if rule == "error":
        raise DataError(
            f'{fact}; set rollout.overlong_prompt to "drop" or "truncate_left", or lower max_tokens'
        )
    too_long = set(long)
    kept = [i for i in range(len(tasks)) if i not in too_long]
    if not kept:
        raise DataError(f"{fact}; dropping them leaves no task")
    logger.warning("%s; dropped", fact)
    return ChosenTasks(tasks, kept)
