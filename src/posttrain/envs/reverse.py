"""Write a short string backwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from posttrain.config import ReverseConfig
from posttrain.data.permutation import Permutation
from posttrain.data.tasks import SPLIT_SEED, IndexedTasks, make_task, user_prompt
from posttrain.envs.single_turn import SingleTurnEnv
from posttrain.errors import ConfigError, DataError
from posttrain.protocols import Reward, TaskSet
from posttrain.randomness import derive_seed
from posttrain.types import RewardTerm, Scored, Task, Turn

_GRADER = "reverse/1"


@dataclass(frozen=True, slots=True)
class ReverseSpec:
    """All strings of one length over an alphabet; the prompt is the string and nothing else.

    The first `num_eval` strings of a fixed order are held out; at most half of all may be.

    Example:
        >>> spec = ReverseSpec(ReverseConfig(alphabet="ab", length=4, num_eval=4))
        >>> len(spec.train_tasks()), len(spec.eval_tasks())
        (12, 4)
    """

    config: ReverseConfig

    def __post_init__(self) -> None:
        """Raises ConfigError for a bad alphabet, DataError when there are too few strings."""
        alphabet = self.config.alphabet
        if len(alphabet) < 2 or len(set(alphabet)) < len(alphabet):
            raise ConfigError(
                f"env.alphabet {alphabet!r} needs at least 2 characters, each once, to make "
                "different strings"
            )
        if any(c.isspace() for c in alphabet):
            raise ConfigError(
                f"env.alphabet {alphabet!r} holds white space, which is stripped from answers; "
                "take it out"
            )
        if self.config.num_eval > self.num_strings // 2:
            raise DataError(
                f"reverse: {len(alphabet)} characters and length {self.config.length} make "
                f"{self.num_strings} strings, and num_eval {self.config.num_eval} is more than "
                f"half of them; lower num_eval to {self.num_strings // 2} or less, or raise length"
            )

    @property
    def num_strings(self) -> int:
        return len(self.config.alphabet) ** self.config.length

    @property
    def name(self) -> str:
        return "reverse"

    def train_tasks(self) -> TaskSet:
        held_out = self.config.num_eval
        return self._tasks(held_out, self.num_strings - held_out)

    def eval_tasks(self) -> TaskSet:
        return self._tasks(0, self.config.num_eval)

    def make(self, task: Task) -> SingleTurnEnv:
        return SingleTurnEnv(task, grade)

    def reward(self) -> Reward | None:
        return None

    def relabel(self, task: Task, turns: Sequence[Turn]) -> Task | None:
        """The training task that an answer solves; None for what is no string of this set, or a
        held-out one."""
        said = turns[-1].completion.text.strip()
        if len(said) != self.config.length or not set(said) <= set(self.config.alphabet):
            return None
        order = Permutation(self.num_strings, derive_seed(SPLIT_SEED, "reverse"))
        text = said[::-1]
        if text in {self.string(order[i]) for i in range(self.config.num_eval)}:
            return None
        return self._named(text)

    def string(self, number: int) -> str:
        """String `number`, in base len(alphabet)."""
        letters = []
        for _ in range(self.config.length):
            number, digit = divmod(number, len(self.config.alphabet))
            letters.append(self.config.alphabet[digit])
        return "".join(letters)

    def _tasks(self, first: int, size: int) -> IndexedTasks:
        """Positions first..first+size-1 of the fixed order of all strings."""
        order = Permutation(self.num_strings, derive_seed(SPLIT_SEED, "reverse"))
        return IndexedTasks(size, partial(self._task, order, first))

    def _task(self, order: Permutation, first: int, index: int) -> Task:
        return self._named(self.string(order[first + index]))

    def _named(self, text: str) -> Task:
        prompt = user_prompt(self.config.system, text, self.config.examples)
        return make_task(f"reverse-{text}", prompt, {"answer": text[::-1]}, grader=_GRADER)


def grade(task: Task, text: str) -> Scored:
    """Characters in the right place over the longer of both lengths; correct only when equal.

    Example:
        >>> task = ReverseSpec(ReverseConfig(alphabet="ab", length=3, num_eval=2)).eval_tasks()[0]
        >>> gold = task.hidden.reveal()["answer"]
        >>> [grade(task, t).value for t in (gold, gold + "aaa", "")]
        [1.0, 0.5, 0.0]
    """
    gold: str = task.hidden.reveal()["answer"]
    said = text.strip()
    right = sum(a == b for a, b in zip(said, gold, strict=False))
    value = right / max(len(said), len(gold))
    evidence = f"{right} of {len(gold)} characters right, {len(said)} written"
    return Scored(
        value, (RewardTerm("characters", value),), evidence, bool(said), correct=said == gold
    )
