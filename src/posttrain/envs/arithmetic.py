"""Integer arithmetic, made on the spot."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

from posttrain.config import ArithmeticConfig
from posttrain.data.permutation import Permutation
from posttrain.data.tasks import SPLIT_SEED, IndexedTasks, TaskList, make_task, user_prompt
from posttrain.data.template import PromptTemplate
from posttrain.envs.integers import INTEGER, MAX_DIGITS, whole_integer
from posttrain.envs.single_turn import SingleTurnEnv
from posttrain.errors import ConfigError, DataError
from posttrain.protocols import Reward, TaskSet
from posttrain.randomness import derive_seed
from posttrain.types import RewardTerm, Scored, Task

_MIN_TRAIN = 8
_GRADER = "arithmetic/1"


@dataclass(frozen=True, slots=True)
class Problem:
    """a op b.

    Example:
        >>> Problem(7, "+", 2).key == Problem(2, "+", 7).key
        True
    """

    a: int
    op: str
    b: int

    @property
    def key(self) -> tuple[str, int, int]:
        """Equal for a problem and its mirror image, where order does not matter."""
        if self.op == "-":
            return self.op, self.a, self.b
        return self.op, min(self.a, self.b), max(self.a, self.b)

    @property
    def answer(self) -> int:
        if self.op == "+":
            return self.a + self.b
        return self.a - self.b if self.op == "-" else self.a * self.b


@dataclass(frozen=True)
class ArithmeticSpec:
    """All a op b of a range. Held-out problems, and their mirror images, never train.

    Problems are numbered (operation, a, b) and made when asked for, so a range of millions costs
    nothing. `seed` chooses which `num_train` problems train, where that is set; never the split.

    Example:
        >>> spec = ArithmeticSpec(ArithmeticConfig(max_operand=9, num_eval=5), seed=0)
        >>> len(spec.eval_tasks()), len(spec.train_tasks()) > 85
        (5, True)
    """

    config: ArithmeticConfig
    seed: int

    def __post_init__(self) -> None:
        """Raises ConfigError for a bad prompt or range, DataError when the range is too small."""
        if len(set(self.config.operations)) < len(self.config.operations):
            raise ConfigError(f"env.operations {self.config.operations} names one twice")
        self._check_prompt()
        self._check_answers()
        width = self._width
        distinct = sum(
            width * width if op == "-" else width * (width + 1) // 2
            for op in self.config.operations
        )
        need = self.config.num_eval + _MIN_TRAIN
        if distinct < need:
            raise DataError(
                f"arithmetic: {' '.join(self.config.operations)} over {self.config.min_operand}.."
                f"{self.config.max_operand} holds {distinct} different problems (a mirrored one "
                f"is the same), but num_eval {self.config.num_eval} needs at least {need}; widen "
                "the range or lower num_eval"
            )
        left = self._num_problems - len(self._held_out)
        if self.config.num_train is not None and self.config.num_train > left:
            raise DataError(
                f"arithmetic: num_train is {self.config.num_train}, but {left} problems remain "
                f"after holding out {self.config.num_eval}; lower it or widen the range"
            )

    def __reduce__(self) -> tuple[type[ArithmeticSpec], tuple[ArithmeticConfig, int]]:
        return type(self), (self.config, self.seed)

    @property
    def name(self) -> str:
        return "arithmetic"

    def train_tasks(self) -> TaskSet:
        return IndexedTasks(self.num_train, self.train_task)

    def eval_tasks(self) -> TaskSet:
        return TaskList(self.task(self.problem(number)) for number in self._eval_numbers)

    def make(self, task: Task) -> SingleTurnEnv:
        return SingleTurnEnv(task, grade)

    def reward(self) -> Reward | None:
        return None

    def problem(self, number: int) -> Problem:
        """Problem `number` of all, held out or not."""
        op_index, rest = divmod(number, self._width**2)
        a, b = divmod(rest, self._width)
        low = self.config.min_operand
        return Problem(low + a, self.config.operations[op_index], low + b)

    def task(self, problem: Problem) -> Task:
        values = {"a": problem.a, "op": problem.op, "b": problem.b}
        return make_task(
            f"{problem.a}{problem.op}{problem.b}",
            user_prompt(self.config.system, self._template.render(values), self.config.examples),
            {**values, "answer": problem.answer},
            grader=_GRADER,
        )

    def train_task(self, index: int) -> Task:
        """Training problem `index`: their numbers skip what is held out."""
        num_free = self._num_problems - len(self._held_out)
        position = Permutation(num_free, derive_seed(self.seed, "arithmetic"))[index]
        number = position + bisect_right(self._held_out_shifted, position)
        return self.task(self.problem(number))

    @property
    def num_train(self) -> int:
        return self.config.num_train or self._num_problems - len(self._held_out)

    @property
    def _width(self) -> int:
        return self.config.max_operand - self.config.min_operand + 1

    @property
    def _num_problems(self) -> int:
        return len(self.config.operations) * self._width**2

    @cached_property
    def _template(self) -> PromptTemplate:
        return PromptTemplate(self.config.prompt, owner="env.prompt")

    def _check_prompt(self) -> None:
        needed = ["a", "b"] + (["op"] if len(self.config.operations) > 1 else [])
        self._template.require_known(("a", "op", "b"))
        for name in needed:
            if name not in self._template.names:
                raise ConfigError(
                    f"env.prompt {self.config.prompt!r} lacks {{{name}}}, so different problems "
                    "would read the same; add it"
                )

    def _check_answers(self) -> None:
        ends = (self.config.min_operand, self.config.max_operand)
        # Each operation is linear in each operand: its extremes lie where both are at an end.
        problems = [Problem(a, op, b) for op in self.config.operations for a in ends for b in ends]
        worst = max(problems, key=lambda problem: abs(problem.answer))
        if abs(worst.answer) >= 10**MAX_DIGITS:
            raise ConfigError(
                f"env.min_operand {ends[0]} and env.max_operand {ends[1]} give "
                f"{worst.a} {worst.op} {worst.b} = {worst.answer}, but answers are read up to "
                f"{MAX_DIGITS} digits; narrow the range"
            )

    @cached_property
    def _eval_numbers(self) -> tuple[int, ...]:
        order = Permutation(self._num_problems, derive_seed(SPLIT_SEED, "arithmetic"))
        chosen: list[int] = []
        keys: set[tuple[str, int, int]] = set()
        for position in range(self._num_problems):
            number = order[position]
            key = self.problem(number).key
            if key not in keys:
                keys.add(key)
                chosen.append(number)
            if len(chosen) == self.config.num_eval:
                break
        return tuple(chosen)

    @cached_property
    def _held_out(self) -> tuple[int, ...]:
        """Numbers of held-out problems and their mirror images, ascending."""
        numbers = set(self._eval_numbers)
        for number in self._eval_numbers:
            if self.problem(number).op != "-":
                start = number - number % self._width**2
                a, b = divmod(number - start, self._width)
                numbers.add(start + b * self._width + a)
        return tuple(sorted(numbers))

    @cached_property
    def _held_out_shifted(self) -> list[int]:
        """Held-out number minus the held-out ones below it: where a gap falls among the rest."""
        return [number - rank for rank, number in enumerate(self._held_out)]


def grade(task: Task, text: str) -> Scored:
    """1 when the whole text is the answer, or the task's own equation with it; else 0.

    Accepts "12", "12." and "5 + 7 = 12" (spaces as you like), each with outer white space, and
    nothing before or after: several candidates, other equations and prose don't count.

    Example:
        >>> spec = ArithmeticSpec(ArithmeticConfig(max_operand=99), seed=0)
        >>> task = spec.task(Problem(5, "+", 7))
        >>> [grade(task, t).value for t in ("12", "5+7=12", "11", "12 or 13", "6 + 6 = 12")]
        [1.0, 1.0, 0.0, 0.0, 0.0]
    """
    hidden = task.hidden.reveal()
    said = whole_integer(text)
    if said is None:
        equation = rf"{hidden['a']} *{re.escape(hidden['op'])} *{hidden['b']} *= *({INTEGER})"
        match = re.fullmatch(equation, text.strip())
        said = int(match[1]) if match else None
    if said is None:
        reason = "the text is neither an integer nor the equation"
        return Scored(0.0, (RewardTerm("exact", 0.0),), reason, parsed=False)
    value = float(said == hidden["answer"])
    return Scored(value, (RewardTerm("exact", value),), f"said {said}, gold {hidden['answer']}")
