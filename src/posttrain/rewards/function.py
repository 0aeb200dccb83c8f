"""The user's Python function as a reward. It runs in grader workers, never in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError, DataError
from posttrain.names import did_you_mean
from posttrain.rewards.conversation import answer_text, chat_dicts, conversation, prompt_text
from posttrain.rewards.user_function import KNOWN_PARAMETERS
from posttrain.rewards.worker import (
    WorkerCrash,
    WorkerError,
    WorkerPool,
    WorkerStartError,
    WorkerTimeout,
)
from posttrain.targets import parse_target
from posttrain.types import Invalid, InvalidKind, RewardTerm, Scored, Task, Turn, Verdict


class FunctionReward:
    """`spec` is "FILE.py:FUNCTION" or "package.module:FUNCTION".

    The function's parameters name what it needs:

    - `completion`: text of the last turn; `completions`: texts of all turns;
    - `prompt`: the question as text, or as chat dicts when annotated as a list;
    - `messages`: the whole conversation as chat dicts;
    - `task`: an object with `id`, `prompt`, `columns`, and each column as attribute and item;
    - any other name: a column, that is a key of the task's metadata or hidden fields.

    It may be `async`. It returns a number, or a dict of numbers whose "reward" counts and whose
    other entries are recorded as terms of weight 0. Anything else, `None` too, is no verdict:
    `Invalid`, as are exceptions, time-outs and crashes. `correct_at` is the reward from which a
    sample counts as correct. `timeout_s` bounds one call; loading the file is bounded apart.
    """

    def __init__(
        self,
        spec: str,
        *,
        timeout_s: float = 10.0,
        correct_at: float = 1.0,
        base_dir: Path | None = None,
        num_workers: int = 1,
        memory_limit_mb: int | None = 8192,
    ) -> None:
        try:
            parse_target(spec)
        except ValueError as error:
            raise ConfigError(f"env.reward: {error}") from error
        self._spec = spec
        self._correct_at = correct_at
        folders = dict.fromkeys(str(f.resolve()) for f in (base_dir or Path(), Path()))
        self._pool = WorkerPool(
            "posttrain.rewards.user_function:call",
            num_workers,
            timeout_s=timeout_s,
            memory_limit_mb=memory_limit_mb,
            setup={"spec": spec, "folders": list(folders)},
        )

    async def prepare(self, columns: Sequence[str]) -> None:
        """Check before the run starts that the function can be loaded and called.

        `columns` are the names that every task will have. Raises ConfigError when the file or the
        function cannot be loaded, DataError when a parameter is not among the columns.
        """
        try:
            facts = await self._pool.call("describe", {})
        except WorkerError as error:
            raise ConfigError(f"env.reward {self._spec!r} cannot be loaded: {error}") from error
        if facts["problem"] is not None:
            raise ConfigError(f"env.reward {self._spec!r}: {facts['problem']}")
        for name in facts["required_columns"]:
            if name not in columns:
                raise DataError(
                    f"env.reward {self._spec!r} has a parameter {name!r}, but the data has no such "
                    f"column; its columns are {', '.join(columns) or 'none'}, and "
                    f"{', '.join(KNOWN_PARAMETERS)} are always there"
                    f"{did_you_mean(name, [*columns, *KNOWN_PARAMETERS])}"
                )

    async def score(self, task: Task, turns: Sequence[Turn]) -> Verdict:
        """Grade the last turn. Never raises for what the policy or the function did."""
        if not turns:
            return Invalid(InvalidKind.ABORTED, "the episode has no turn to grade")
        columns = {**task.metadata, **task.hidden.reveal()}
        try:
            columns = {name: _plain(name, value) for name, value in columns.items()}
            answer = await self._pool.call(
                None,
                {
                    "completion": answer_text(turns),
                    "completions": [turn.completion.text for turn in turns],
                    "prompt": prompt_text(task),
                    "prompt_messages": chat_dicts(task.prompt),
                    "messages": conversation(task, turns),
                    "task_id": task.task_id,
                    "columns": columns,
                },
            )
        except WorkerTimeout as error:
            return Invalid(InvalidKind.REWARD_TIMEOUT, f"{self._spec}: {error}", retryable=True)
        except WorkerCrash as error:
            return Invalid(InvalidKind.GRADER_CRASH, f"{self._spec}: {error}", retryable=True)
        except (WorkerError, DataError) as error:
            retryable = isinstance(error, WorkerStartError)
            return Invalid(InvalidKind.REWARD_ERROR, f"{self._spec}: {error}", retryable)
        return self._verdict(answer)

    def _verdict(self, answer: dict[str, Any]) -> Verdict:
        if "error" in answer:
            return Invalid(InvalidKind.REWARD_ERROR, f"{self._spec}: {answer['error']}")
        if "bad_value" in answer:
            return Invalid(
                InvalidKind.REWARD_VALUE,
                f"{self._spec} returned {answer['bad_value']}; a reward is a finite number",
            )
        value = float(answer["value"])
        terms = tuple(RewardTerm(name, term, 0.0) for name, term in answer["terms"].items())
        return Scored(
            value,
            (RewardTerm("reward", value), *terms),
            f"{self._spec} returned {value:g}",
            correct=value >= self._correct_at,
        )

    async def close(self) -> None:
        """Kill the workers."""
        await self._pool.close()


def _plain(name: str, value: Any) -> Any:
    """A column's value as JSON data: arrays become lists, dates ISO text.

    Raises DataError for anything else that JSON cannot hold.
    """
    try:
        return json.loads(json.dumps(value, default=_to_json))
    except (TypeError, ValueError) as error:
        raise DataError(f"column {name!r} cannot be given to a reward function: {error}") from error


def _to_json(value: Any) -> Any:
    for method in ("tolist", "isoformat"):  # numpy arrays and scalars; dates and times
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"a {type(value).__name__} is no JSON data; convert it to text or numbers")
