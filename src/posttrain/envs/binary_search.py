"""Find a hidden number by guessing: the smallest game that needs several turns."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config import BinarySearchConfig
from posttrain.data.permutation import Permutation
from posttrain.data.tasks import SPLIT_SEED, TaskList, make_task, user_prompt
from posttrain.envs.integers import only_integer, whole_integer
from posttrain.protocols import Reward, TaskSet
from posttrain.randomness import derive_seed
from posttrain.types import Message, Observation, RewardTerm, Scored, StepOutcome, Task, Turn

_GRADER = "binary_search/1"
TERSE_PROMPT = "g"
# What the environment says, and with `terse`: about the secret, seen from the guess.
_FEEDBACK = {
    "higher": ("The number is higher.", "h"),
    "lower": ("The number is lower.", "l"),
    "unreadable": ("That is not one whole number. Reply with a single whole number.", "?"),
}


@dataclass(frozen=True, slots=True)
class BinarySearchSpec:
    """One task for each secret in low..high.

    A game this small has no held-out part: training and evaluation ask for the same secrets, and
    the policy must play well, not remember. `num_eval` is a cap: min(num_eval, size of the range)
    secrets are evaluated, a fixed choice that is the same for every run.

    Example:
        >>> spec = BinarySearchSpec(BinarySearchConfig(low=1, high=7, max_guesses=3))
        >>> len(spec.train_tasks()), len(spec.eval_tasks())
        (7, 7)
    """

    config: BinarySearchConfig

    @property
    def name(self) -> str:
        return "binary_search"

    def train_tasks(self) -> TaskSet:
        return TaskList(self._task(s) for s in range(self.config.low, self.config.high + 1))

    def eval_tasks(self) -> TaskSet:
        low, size = self.config.low, self.config.high - self.config.low + 1
        order = Permutation(size, derive_seed(SPLIT_SEED, "binary_search"))
        chosen = sorted(order[i] for i in range(min(self.config.num_eval, size)))
        return TaskList(self._task(low + offset) for offset in chosen)

    def make(self, task: Task) -> BinarySearchEnv:
        return BinarySearchEnv(task, self.config)

    def reward(self) -> Reward | None:
        return None

    def _task(self, secret: int) -> Task:
        c = self.config
        rules = (
            f"I am thinking of a whole number from {c.low} to {c.high}. You have {c.max_guesses} "
            f"{'guess' if c.max_guesses == 1 else 'guesses'} to find it. After each guess I say "
            "whether the number is higher or lower. Reply with your guess only: a single number."
        )
        prompt = user_prompt(c.system, TERSE_PROMPT if c.terse else rules, c.examples)
        grader = f"{_GRADER} {c.low} {c.high} {c.max_guesses} {c.terse}"
        return make_task(f"secret-{secret}", prompt, {"secret": secret}, grader=grader)


class BinarySearchEnv:
    """One game. Reward 1 for finding the secret within `max_guesses` guesses, else 0.

    A guess that can't be read counts as a guess. The spoken game reads a guess from any sentence
    with exactly one number in it; the terse game wants the number alone. The prompt never holds
    the secret, and an answer is compared with it only here.

    Example:
        >>> import asyncio
        >>> config = BinarySearchConfig(low=1, high=7, terse=True)
        >>> env = BinarySearchSpec(config).make(BinarySearchSpec(config).eval_tasks()[0])
        >>> asyncio.run(env.reset(0)).messages[0].plain_text()
        'g'
    """

    def __init__(self, task: Task, config: BinarySearchConfig) -> None:
        self._task, self._config = task, config
        self._secret: int = task.hidden.reveal()["secret"]
        self._num_guesses = 0
        self._num_read = 0
        self._state = "new"
        self._possible = range(config.low, config.high + 1)

    async def reset(self, seed: int) -> Observation:
        """The rules; nothing here is random. Raises RuntimeError when called again."""
        if self._state != "new":
            raise RuntimeError(f"environment of task {self._task.task_id!r} is used once; make one")
        self._state = "going"
        return Observation(self._task.prompt)

    async def step(self, turn: Turn) -> StepOutcome:
        """One guess. Raises RuntimeError before `reset` and after the end."""
        if self._state != "going":
            raise RuntimeError(f"environment of task {self._task.task_id!r} is {self._state}")
        read = whole_integer if self._config.terse else only_integer
        guess = read(turn.completion.text)
        self._num_guesses += 1
        self._num_read += guess is not None
        reward = self._turn_reward(guess)
        if guess == self._secret or self._num_guesses == self._config.max_guesses:
            self._state = "over"
            verdict = self._verdict(guess)
            return StepOutcome(None, terminated=True, verdict=verdict, reward=reward)
        kind = "unreadable"
        if guess is not None:
            kind = "higher" if self._secret > guess else "lower"
        text = _FEEDBACK[kind][self._config.terse]
        observation = Observation((Message.text("user", text),))
        return StepOutcome(observation, verdict=self._verdict(guess), reward=reward)

    async def close(self) -> None:
        self._state = "over"

    def _turn_reward(self, guess: int | None) -> float:
        """`turn_reward` for a guess that the answers so far allow; narrows what they allow."""
        if guess is None or guess not in self._possible:
            return 0.0
        low, high = self._possible.start, self._possible.stop
        self._possible = range(guess + 1, high) if self._secret > guess else range(low, guess)
        return self._config.turn_reward

    def _verdict(self, guess: int | None) -> Scored:
        value = float(guess == self._secret)
        outcome = "found" if value else "not found"
        return Scored(
            value,
            (RewardTerm("found", value),),
            f"{self._secret} {outcome} in {self._num_guesses} guesses, {self._num_read} readable",
            parsed=self._num_read > 0,
        )
