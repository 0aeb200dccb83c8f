"""The protocols between the parts that can be exchanged, each with a contract test suite.

`posttrain.build` puts real parts behind them; `posttrain.loop` joins those with the journal, the
producer of rollouts and the checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from posttrain.types import (
    Completion,
    Draw,
    Group,
    Int32,
    Observation,
    SamplingParams,
    StepOutcome,
    StepResult,
    Task,
    TrainBatch,
    Turn,
    Verdict,
)


@runtime_checkable
class Sampler(Protocol):
    """Tokens in, tokens out, on weights of a known version."""

    async def generate(self, token_ids: Int32, params: SamplingParams, seed: int) -> Completion:
        """Sample one completion of `token_ids` [P] int32.

        The result depends on the ids, the params, the seed and the weights; not on what else is
        running. Raises EngineError when the engine cannot serve.
        """
        ...

    async def load_weights(self, version: int) -> None:
        """Serve the learner's weights of this version from the next token on."""
        ...

    async def pause(self) -> None:
        """Compute nothing until `resume`. Requests wait and lose nothing."""
        ...

    async def resume(self) -> None:
        """Go on where `pause` stopped. Without a pause it changes nothing."""
        ...

    async def abort(self) -> None:
        """End everything in flight with FinishReason.ABORT."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Counters since the last call, as metrics (`sampler/...`)."""
        ...


@runtime_checkable
class Learner(Protocol):
    """Owns the weights and moves them."""

    @property
    def policy_version(self) -> int:
        """Completed steps."""
        ...

    @property
    def memory(self) -> MutableMapping[str, float]:
        """What the algorithm remembers between steps; part of the saved state."""
        ...

    def step(self, batch: TrainBatch) -> StepResult:
        """One optimizer step on the whole batch. A non-finite loss or gradient skips the step."""
        ...

    def weights_hash(self) -> str:
        """A hash of the trainable parameters in fp32, names and shapes included."""
        ...

    def save(self, folder: Path) -> None:
        """Write everything `restore` needs into an existing empty folder."""
        ...

    def restore(self, folder: Path) -> None:
        """Back to exactly the saved state."""
        ...


@runtime_checkable
class Env(Protocol):
    """One episode. Used once. Authors write text and parts; tokens are the recorder's business."""

    async def reset(self, seed: int) -> Observation: ...

    async def step(self, turn: Turn) -> StepOutcome: ...

    async def close(self) -> None: ...


@runtime_checkable
class Reward(Protocol):
    """Judges a finished episode. Sees the hidden part of the task; never raises for bad output."""

    async def score(self, task: Task, turns: Sequence[Turn]) -> Verdict: ...

    async def close(self) -> None: ...


@runtime_checkable
class TaskSet(Protocol):
    """Tasks by index, the same for the same index whenever asked. Ids are unique within it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Task: ...


@runtime_checkable
class EnvSpec(Protocol):
    """What `[env]` of a recipe builds: the tasks, and a fresh `Env` for each episode."""

    @property
    def name(self) -> str: ...

    def train_tasks(self) -> TaskSet: ...

    def eval_tasks(self) -> TaskSet: ...

    def make(self, task: Task) -> Env: ...

    def reward(self) -> Reward | None:
        """The grader for environments whose steps carry no verdict."""
        ...


@runtime_checkable
class Curriculum(Protocol):
    """Chooses the next task. Its state is a function of the draws and outcomes journalled."""

    def draw(self, draw_id: int) -> Draw: ...

    def task(self, draw: Draw) -> Task: ...

    def observe(self, group: Group) -> None: ...


@runtime_checkable
class GroupSource(Protocol):
    """Hands out the groups that a step trains, in the order of their draws."""

    async def take(self, policy_version: int) -> list[Group]:
        """The groups of the next step, journalled."""
        ...

    async def close(self) -> None:
        """Stop what is in flight; its draws stay open in the journal."""
        ...


@runtime_checkable
class GroupEvaluator(Protocol):
    """Measures a policy version on what is held out."""

    async def evaluate(
        self, policy_version: int, progress: Callable[[int, int], None]
    ) -> tuple[dict[str, Any], list[Group]]:
        """The JSON-able report, and the groups it is about."""
        ...


class DrawJournal(Protocol):
    """What rollouts need of the journal. `posttrain.journal` is the real one."""

    def record_draw(self, draw: Draw) -> None: ...

    def record_group(self, group: Group) -> None: ...

    def drop_draw(self, draw_id: int, reason: str) -> None: ...
