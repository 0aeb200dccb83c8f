"""The user's own rows, graded by the user's own reward."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from posttrain.config import DatasetConfig
from posttrain.data.chat import checked_text, read_prompt
from posttrain.data.rows import Row, RowError, RowSet, read_rows
from posttrain.data.tasks import TaskList, make_task, prompt_key, user_prompt
from posttrain.data.template import PromptTemplate
from posttrain.envs.single_turn import SingleTurnEnv
from posttrain.errors import ConfigError, DataError
from posttrain.protocols import Reward, TaskSet
from posttrain.types import Message, Task

logger = logging.getLogger("posttrain")

_NEEDS_ANSWER = ("math", "exact")
_SHOWN_IDS = 5


@dataclass(frozen=True)
class DatasetSpec:
    """Every row is a task: a prompt, and all other columns hidden for the reward.

    Rows are read and checked when tasks are first asked for; pickling drops them, so a worker
    that only makes environments reads nothing. With `eval_path` that file is held out; without,
    the rows are split by a hash of their prompts, so that identical prompts never straddle. The
    split does not depend on the order of the rows, nor on the run's seed.

    A row that brings a system message of its own keeps it; `system` is for the others.

    Raises (from `train_tasks` and `eval_tasks`) ConfigError, DataError, MissingDependencyError.
    """

    config: DatasetConfig
    base_dir: Path

    def __reduce__(self) -> tuple[type[DatasetSpec], tuple[DatasetConfig, Path]]:
        return type(self), (self.config, self.base_dir)

    @property
    def name(self) -> str:
        return "dataset"

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every task hides, which a reward function may ask for by name."""
        return self._loaded.columns

    def train_tasks(self) -> TaskSet:
        return self._loaded.train

    def eval_tasks(self) -> TaskSet:
        return self._loaded.held_out

    def make(self, task: Task) -> SingleTurnEnv:
        return SingleTurnEnv(task)

    def reward(self) -> Reward | None:
        from posttrain.rewards import build_reward

        return build_reward(
            self.config.reward,
            answer_column=self.config.answer,
            timeout_s=self.config.reward_timeout_s,
            correct_at=self.config.correct_at,
            num_workers=self.config.reward_workers,
            base_dir=self.base_dir,
        )

    @cached_property
    def _loaded(self) -> _Loaded:
        path = _resolve(self.config.path, self.base_dir)
        tasks = _Reader(self.config, read_rows(path, self.config.split)).tasks()
        if self.config.eval_path is None:
            train, held_out = _split(tasks, self.config, path)
        else:
            eval_path = _resolve(self.config.eval_path, self.base_dir)
            rows = read_rows(eval_path)
            train, held_out = tasks, _Reader(self.config, rows).tasks()
            _warn_about_overlap(train, held_out, path, eval_path)
            held_out = _first_by_hash(held_out, self.config.num_eval)
        hidden = [set(task.hidden.reveal()) for task in (*train, *held_out)]
        shared = set.intersection(*hidden)
        ordered = tuple(name for name in train[0].hidden.reveal() if name in shared)
        return _Loaded(TaskList(train), TaskList(held_out), ordered)


@dataclass(frozen=True, slots=True)
class _Loaded:
    train: TaskList
    held_out: TaskList
    columns: tuple[str, ...]


class _Reader:
    """Turns the rows of one source into tasks, or says everything that is wrong with them."""

    def __init__(self, config: DatasetConfig, rows: RowSet) -> None:
        self._config, self._rows = config, rows
        self._template = None
        if config.template is not None:
            self._template = PromptTemplate(config.template, owner="env.template")
            if not self._template.names:
                raise ConfigError(
                    f"env.template {config.template!r} has no {{column}}, so every prompt would "
                    "be the same; add one"
                )

    def tasks(self) -> list[Task]:
        """Raises DataError with all bad rows, counted by reason."""
        for name, purpose in self._required:
            self._rows.require_column(name, purpose)
        bad = self._rows.bad
        total = len(self._rows.rows) + len(bad.found)
        tasks = []
        for row in self._rows.rows:
            try:
                tasks.append(self._task(row))
            except RowError as error:
                bad.add(row.number, error.reason, error.detail)
        bad.raise_if_any(total)
        self._check_ids(tasks)
        return tasks

    @cached_property
    def _required(self) -> list[tuple[str, str]]:
        config = self._config
        if self._template is None:
            required = [(config.prompt, "env.prompt")]
        else:
            required = [(name, "env.template") for name in self._template.names]
        if config.reward in _NEEDS_ANSWER:
            required.append((config.answer, f"env.answer, for the {config.reward!r} reward,"))
        if config.id_column is not None:
            required.append((config.id_column, "env.id_column"))
        return required

    def _task(self, row: Row) -> Task:
        for name, _ in self._required:
            if name not in row.values:
                raise RowError(f"column {name!r} is missing")
        prompt = self._prompt(row)
        if self._config.reward in _NEEDS_ANSWER:
            answer = row.values[self._config.answer]
            # 0 and False are answers; only what says nothing is refused.
            if answer is None or (isinstance(answer, float) and math.isnan(answer)):
                raise RowError(f"{self._config.answer} is null")
            if isinstance(answer, str) and not answer.strip():
                raise RowError(f"{self._config.answer} is empty")
        # A template leaves its columns to the reward; a plain prompt is in the task already.
        dropped = self._config.prompt if self._template is None else None
        hidden = {name: value for name, value in row.values.items() if name != dropped}
        return make_task(
            self._task_id(row),
            prompt,
            hidden,
            grader=f"dataset/1 {self._config.reward}",
            metadata={"source": Path(self._rows.source).name, self._rows.unit: row.number},
        )

    def _prompt(self, row: Row) -> tuple[Message, ...]:
        if self._template is None:
            return read_prompt(
                row.values[self._config.prompt], self._config.system, self._config.examples
            )
        for name in self._template.names:
            value = row.values[name]
            if value is None or (isinstance(value, str) and not value.strip()):
                raise RowError(f"{name} is {'null' if value is None else 'empty'}")
        text = checked_text(self._template.render(row.values))
        return user_prompt(self._config.system, text, self._config.examples)

    def _task_id(self, row: Row) -> str:
        """Ids are never taken from the data unasked: rows may share one."""
        if self._config.id_column is None:
            return f"{Path(self._rows.source).stem}:{row.number}"
        value = row.values[self._config.id_column]
        if value is None or not str(value).strip():
            raise RowError(f"{self._config.id_column} is empty")
        return str(value)

    def _check_ids(self, tasks: list[Task]) -> None:
        counts = Counter(task.task_id for task in tasks)
        repeated = [f"{i!r} ({count} x)" for i, count in counts.items() if count > 1]
        if repeated:
            more = "" if len(repeated) <= _SHOWN_IDS else f" and {len(repeated) - _SHOWN_IDS} more"
            raise DataError(
                f"{self._rows.source}: id_column {self._config.id_column!r} repeats "
                f"{', '.join(repeated[:_SHOWN_IDS])}{more}; make the ids unique, or leave "
                "id_column out and rows are told apart by number"
            )


def _resolve(path: str, base_dir: Path) -> Path:
    return base_dir / Path(path).expanduser()  # an absolute path stays itself


def _digest(task: Task) -> str:
    return hashlib.sha256(prompt_key(task.prompt).encode()).hexdigest()


def _split(tasks: list[Task], config: DatasetConfig, path: Path) -> tuple[list[Task], list[Task]]:
    """Holds out all rows of the `eval_frac` of prompts with the lowest hash, `num_eval` at most."""
    digests = [_digest(task) for task in tasks]
    distinct = sorted(set(digests))
    if len(distinct) < 2:
        raise DataError(
            f"{path} holds {len(tasks)} rows with {len(distinct)} different prompt, which cannot "
            "be split into training and evaluation; add rows or set eval_path"
        )
    wanted = min(config.num_eval, math.ceil(config.eval_frac * len(distinct)), len(distinct) - 1)
    chosen = set(distinct[:wanted])
    train = [t for t, d in zip(tasks, digests, strict=True) if d not in chosen]
    held_out = [t for t, d in zip(tasks, digests, strict=True) if d in chosen]
    return train, held_out


def _first_by_hash(tasks: list[Task], limit: int) -> list[Task]:
    """At most `limit` tasks, in their order: a choice that a sorted file does not bias."""
    if len(tasks) <= limit:
        return tasks
    logger.info("evaluation uses %d of %d rows (env.num_eval)", limit, len(tasks))
    by_hash = sorted(range(len(tasks)), key=lambda i: (_digest(tasks[i]), i))
    return [tasks[i] for i in sorted(by_hash[:limit])]


def _warn_about_overlap(
    train: list[Task], held_out: list[Task], path: Path, eval_path: Path
) -> None:
    shared: set[Any] = {_digest(t) for t in train} & {_digest(t) for t in held_out}
    if shared:
        logger.warning(
            "%d identical prompts are in both %s and %s: evaluation is not held out; remove them "
            "from one of the two",
            len(shared),
            path,
            eval_path,
        )
