"""One question, one answer."""

from __future__ import annotations

from collections.abc import Callable

from posttrain.types import Observation, StepOutcome, Task, Turn, Verdict

Grade = Callable[[Task, str], Verdict]


class SingleTurnEnv:
    """Shows the prompt of a task and ends with the first turn.

    Without `grade` the outcome carries no verdict and a `Reward` judges the episode. `grade` is
    for rules that are pure, quick and safe on any text; it gets the task and the answer.

    Example:
        >>> import asyncio
        >>> from posttrain.data.tasks import make_task, user_prompt
        >>> env = SingleTurnEnv(make_task("t", user_prompt(None, "hi"), {}, grader="none"))
        >>> asyncio.run(env.reset(0)).messages[0].plain_text()
        'hi'
    """

    def __init__(self, task: Task, grade: Grade | None = None) -> None:
        self._task, self._grade = task, grade
        self._state = "new"

    async def reset(self, seed: int) -> Observation:
        """The prompt; nothing here is random. Raises RuntimeError when called again."""
        if self._state != "new":
            raise RuntimeError(f"environment of task {self._task.task_id!r} is used once; make one")
        self._state = "going"
        return Observation(self._task.prompt)

    async def step(self, turn: Turn) -> StepOutcome:
        """Ends the episode. Raises RuntimeError before `reset` and after the end."""
        if self._state != "going":
            raise RuntimeError(f"environment of task {self._task.task_id!r} is {self._state}")
        self._state = "over"
        verdict = self._grade(self._task, turn.completion.text) if self._grade else None
        return StepOutcome(None, terminated=True, verdict=verdict)

    async def close(self) -> None:
        self._state = "over"
