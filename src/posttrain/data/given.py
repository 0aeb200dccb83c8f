"""Given rows: demonstrations to imitate, pairs to compare."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.config import DataConfig, DemonstrationsConfig
from posttrain.data.chat import checked_text, read_prompt
from posttrain.data.rows import Row, RowError, RowSet, read_rows
from posttrain.data.tasks import make_task, prompt_key
from posttrain.errors import DataError
from posttrain.types import Task

logger = logging.getLogger("posttrain")

_READER = "given/1"


@dataclass(frozen=True, slots=True)
class GivenAnswer:
    """One answer to a row's prompt: its role, its reward, its text.

    Example:
        >>> GivenAnswer("chosen", 1.0, "4").role
        'chosen'
    """

    role: str
    reward: float
    text: str


def given_tasks(
    config: DataConfig, base_dir: Path, *, hold_out: bool = True
) -> tuple[list[Task], list[Task]]:
    """Rows as tasks, for training and held out; the answers are the tasks' hidden part.

    Without `eval_path` the rows are split by a hash of their prompts, whatever their order, so
    that equal prompts never straddle; with `hold_out` False every row is for training. Raises
    DataError with every unusable row, counted by reason.
    """
    path = base_dir / Path(config.path).expanduser()
    tasks = _tasks(config, read_rows(path, config.split))
    if not hold_out:
        return tasks, []
    if config.eval_path is not None:
        eval_path = base_dir / Path(config.eval_path).expanduser()
        held_out = sorted(_tasks(config, read_rows(eval_path)), key=_digest)[: config.num_eval]
        if shared := {_digest(t) for t in tasks} & {_digest(t) for t in held_out}:
            logger.warning(
                "%d identical prompts are in both %s and %s: evaluation is not held out; remove "
                "them from one of the two",
                len(shared),
                path,
                eval_path,
            )
        return tasks, held_out
    distinct = sorted({_digest(task) for task in tasks})
    if len(distinct) < 2:
        raise DataError(
            f"{path} holds {len(tasks)} rows with {len(distinct)} different prompt, which cannot "
            "be split into training and evaluation; add rows or set data.eval_path"
        )
    wanted = min(config.num_eval, math.ceil(config.eval_frac * len(distinct)), len(distinct) - 1)
    chosen = set(distinct[:wanted])
    train = [task for task in tasks if _digest(task) not in chosen]
    return train, [task for task in tasks if _digest(task) in chosen]


def answers(task: Task) -> Sequence[GivenAnswer]:
    """The given answers of a task made here."""
    return [GivenAnswer(*answer) for answer in task.hidden.reveal()["answers"]]


def _tasks(config: DataConfig, rows: RowSet) -> list[Task]:
    if isinstance(config, DemonstrationsConfig):
        columns = {"data.completion": (config.completion, "demonstration", 1.0)}
    else:
        columns = {
            "data.chosen": (config.chosen, "chosen", 1.0),
            "data.rejected": (config.rejected, "rejected", 0.0),
        }
    for owner, name in [("data.prompt", config.prompt), *((o, c[0]) for o, c in columns.items())]:
        rows.require_column(name, owner)
    total, tasks = len(rows.rows) + len(rows.bad.found), []
    for row in rows.rows:
        try:
            given = [(role, reward, _text(row, name)) for name, role, reward in columns.values()]
            tasks.append(_task(config, rows, row, given))
        except RowError as error:
            rows.bad.add(row.number, error.reason, error.detail)
    rows.bad.raise_if_any(total)
    return tasks


def _task(config: DataConfig, rows: RowSet, row: Row, given: list[tuple[str, float, str]]) -> Task:
    if len(given) == 2 and given[0][2] == given[1][2]:
        raise RowError("chosen and rejected are the same")
    prompt = read_prompt(row.values.get(config.prompt), config.system)
    return make_task(
        f"{Path(rows.source).stem}:{row.number}",
        prompt,
        {"answers": given},
        grader=_READER,
        metadata={"source": Path(rows.source).name, rows.unit: row.number},
    )


def _text(row: Row, name: str) -> str:
    value = row.values.get(name)
    if not isinstance(value, str):
        kind = "null" if value is None else f"a {type(value).__name__}, not text"
        raise RowError(f"{name} is {kind}")
    return checked_text(value, name)


def _digest(task: Task) -> str:
    return hashlib.sha256(prompt_key(task.prompt).encode()).hexdigest()
