"""Name the largest of several numbers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from posttrain.config import LargestConfig
from posttrain.data.tasks import SPLIT_SEED, IndexedTasks, TaskList, make_task, user_prompt
from posttrain.data.template import PromptTemplate
from posttrain.envs.integers import whole_integer
from posttrain.envs.single_turn import SingleTurnEnv
from posttrain.errors import ConfigError, DataError
from posttrain.protocols import Reward, TaskSet
from posttrain.randomness import stream
from posttrain.types import RewardTerm, Scored, Task

_HELD_OUT_SHARE = 10  # one problem in ten
_MAX_DRAWS = 1000  # of one problem; even the smallest range with a free set needs far fewer
_GRADER = "largest/1"


@dataclass(frozen=True)
class LargestSpec:
    """Problems are sets of different numbers in a drawn order. A tenth of all sets, by hash, is
    held out in every order, so no held-out set is ever trained on.

    Example:
        >>> spec = LargestSpec(LargestConfig(num_train=50, num_eval=5))
        >>> task = spec.train_tasks()[3]
        >>> task.hidden.reveal()["answer"] == max(task.hidden.reveal()["numbers"])
        True
    """

    config: LargestConfig

    def __post_init__(self) -> None:
        """Raises ConfigError for a prompt without {numbers}, DataError when sets run out."""
        self._template.require_known(("numbers",))
        if "numbers" not in self._template.names:
            raise ConfigError(f"env.prompt {self.config.prompt!r} lacks {{numbers}}; add it")
        self.eval_tasks()
        self.train_task(0)

    @property
    def name(self) -> str:
        return "largest"

    def train_tasks(self) -> TaskSet:
        return IndexedTasks(self.config.num_train, self.train_task)

    def eval_tasks(self) -> TaskSet:
        """`num_eval` different held-out sets. Raises DataError when the range has too few."""
        chosen: dict[tuple[int, ...], tuple[int, ...]] = {}
        for index in range(100 * self.config.num_eval):
            numbers = self._drawn("eval", index)
            if _is_held_out(numbers):
                chosen.setdefault(tuple(sorted(numbers)), numbers)
            if len(chosen) == self.config.num_eval:
                return TaskList(self._task(n, f"eval-{i}") for i, n in enumerate(chosen.values()))
        raise DataError(
            f"largest: {self.config.count} numbers of {self.config.min_number}.."
            f"{self.config.max_number} give fewer than num_eval = {self.config.num_eval} held-out "
            "sets; widen the range or lower num_eval"
        )

    def make(self, task: Task) -> SingleTurnEnv:
        return SingleTurnEnv(task, grade)

    def reward(self) -> Reward | None:
        return None

    def train_task(self, index: int) -> Task:
        """Training problem `index`: its first draw that is not held out.

        Raises DataError when none is found, because all sets of a tiny range are held out.
        """
        for attempt in range(_MAX_DRAWS):
            numbers = self._drawn("train", index, attempt)
            if not _is_held_out(numbers):
                return self._task(numbers, f"train-{index}")
        raise DataError(
            f"largest: {self.config.count} numbers of {self.config.min_number}.."
            f"{self.config.max_number} gave no set to train on in {_MAX_DRAWS} draws, all were "
            "held out; widen the range"
        )

    @cached_property
    def _template(self) -> PromptTemplate:
        return PromptTemplate(self.config.prompt, owner="env.prompt")

    def _drawn(self, purpose: str, *key: int) -> tuple[int, ...]:
        generator = stream(SPLIT_SEED, f"largest-{purpose}", *key)
        low, width = self.config.min_number, self.config.max_number - self.config.min_number + 1
        chosen = generator.choice(width, self.config.count, replace=False)
        return tuple(low + int(n) for n in np.asarray(chosen))

    def _task(self, numbers: tuple[int, ...], task_id: str) -> Task:
        text = self._template.render({"numbers": ", ".join(map(str, numbers))})
        prompt = user_prompt(self.config.system, text, self.config.examples)
        hidden = {"numbers": list(numbers), "answer": max(numbers)}
        return make_task(f"largest-{task_id}", prompt, hidden, grader=_GRADER)


def _is_held_out(numbers: tuple[int, ...]) -> bool:
    digest = hashlib.sha256(repr(sorted(numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little") % _HELD_OUT_SHARE == 0


def grade(task: Task, text: str) -> Scored:
    """1 when the whole text is the number, a trailing period allowed; else 0.

    Example:
        >>> task = LargestSpec(LargestConfig(num_eval=1)).eval_tasks()[0]
        >>> gold = task.hidden.reveal()["answer"]
        >>> [grade(task, t).value for t in (f" {gold}.", f"{gold} or 3", "")]
        [1.0, 0.0, 0.0]
    """
    gold = task.hidden.reveal()["answer"]
    said = whole_integer(text)
    value = float(said == gold)
    evidence = "the text is no integer" if said is None else f"said {said}, gold {gold}"
    return Scored(value, (RewardTerm("exact", value),), evidence, parsed=said is not None)
