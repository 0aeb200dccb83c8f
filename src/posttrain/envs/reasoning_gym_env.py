"""reasoning-gym: a hundred procedural puzzle sets, one of them or a mixture."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import logging
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

from posttrain.config import ReasoningGymConfig
from posttrain.data.tasks import TaskList, make_task, user_prompt
from posttrain.envs.single_turn import SingleTurnEnv
from posttrain.errors import ConfigError, DataError, MissingDependencyError
from posttrain.names import did_you_mean
from posttrain.protocols import Reward, TaskSet
from posttrain.types import Task

logger = logging.getLogger("posttrain")

# Many of its generators seed item i with seed + i: the two must lie further apart than any size.
_TRAIN_SEED = 1_000_003
_EVAL_SEED = 2_000_000_011
_OWN_PARAMS = ("seed", "size")


@dataclass(frozen=True)
class ReasoningGymSpec:
    """Puzzles generated from two fixed seeds: `size` for training, `num_eval` held out.

    A training puzzle whose text is that of a held-out one is taken out and counted. Neither set
    depends on the run's seed. Raises ConfigError, DataError or MissingDependencyError, for names
    and parameters when it is made, for overlap when the training tasks are first asked for.
    """

    config: ReasoningGymConfig

    def __post_init__(self) -> None:
        _library()
        for part in self._parts:
            part.check()

    def __reduce__(self) -> tuple[type[ReasoningGymSpec], tuple[ReasoningGymConfig]]:
        return type(self), (self.config,)

    @property
    def name(self) -> str:
        return "reasoning_gym"

    def train_tasks(self) -> TaskSet:
        return self._train

    def eval_tasks(self) -> TaskSet:
        return TaskList(self._task(entry, "eval", i) for i, entry in enumerate(self._held_out))

    def make(self, task: Task) -> SingleTurnEnv:
        return SingleTurnEnv(task)

    def reward(self) -> Reward | None:
        from posttrain.envs.reasoning_gym_reward import ReasoningGymReward

        return ReasoningGymReward()

    @cached_property
    def _parts(self) -> tuple[_Part, ...]:
        if self.config.dataset is not None:
            return (_Part(self.config.dataset, 1.0, self.config.params),)
        if self.config.params:
            raise ConfigError("env.params goes with env.dataset; a composite has params in parts")
        parts = tuple(_Part.parse(entry) for entry in self.config.composite)
        names = [part.name for part in parts]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"env.composite names {name!r} twice; give each dataset once")
        return parts

    @cached_property
    def _held_out(self) -> tuple[dict[str, Any], ...]:
        return self._generate(_EVAL_SEED, self.config.num_eval)

    @cached_property
    def _train(self) -> TaskList:
        held_out = {entry["question"] for entry in self._held_out}
        entries = self._generate(_TRAIN_SEED, self.config.size)
        kept = [(i, e) for i, e in enumerate(entries) if e["question"] not in held_out]
        num_removed = len(entries) - len(kept)
        if not kept:
            raise DataError(
                f"{self._label}: all {len(entries)} training puzzles are also among the "
                f"{len(self._held_out)} held-out ones; there are too few different puzzles: "
                "widen its params or lower num_eval"
            )
        if num_removed:
            logger.warning(
                "%s: %d of %d training puzzles are also held out and were removed from training",
                self._label,
                num_removed,
                len(entries),
            )
        return TaskList(self._task(entry, "train", i) for i, entry in kept)

    @cached_property
    def _grader(self) -> str:
        return f"reasoning_gym/1 {importlib.metadata.version('reasoning-gym')}"

    @property
    def _label(self) -> str:
        return "reasoning-gym " + "+".join(part.name for part in self._parts)

    def _generate(self, seed: int, size: int) -> tuple[dict[str, Any], ...]:
        library = _library()
        if len(self._parts) == 1:
            part = self._parts[0]
            data = library.create_dataset(part.name, seed=seed, size=size, **part.params)
        else:
            composite = importlib.import_module("reasoning_gym.composite")
            specs = [composite.DatasetSpec(p.name, p.weight, dict(p.params)) for p in self._parts]
            data = library.create_dataset("composite", seed=seed, size=size, datasets=specs)
        return tuple(data[i] for i in range(size))

    def _task(self, entry: dict[str, Any], split: str, index: int) -> Task:
        name = entry["metadata"]["source_dataset"]
        part = next(part for part in self._parts if part.name == name)
        return make_task(
            f"{name}-{split}-{index}",
            user_prompt(
                self.config.system,
                entry["question"] + self.config.prompt_suffix,
                self.config.examples,
            ),
            {"dataset": name, "params": part.params, "entry": entry},
            grader=self._grader,
            metadata={"dataset": name},
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """One dataset of the mixture."""

    name: str
    weight: float
    params: dict[str, Any]

    @classmethod
    def parse(cls, entry: dict[str, Any]) -> _Part:
        known = ("name", "weight", "params")
        for key in entry:
            if key not in known:
                raise ConfigError(
                    f"env.composite: {key!r} is unknown; a part has name, weight and params"
                    f"{did_you_mean(key, known)}"
                )
        name, weight, params = entry.get("name"), entry.get("weight", 1.0), entry.get("params", {})
        if not isinstance(name, str):
            raise ConfigError(f"env.composite: a part has name {name!r}; give a dataset's name")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
            raise ConfigError(f"env.composite {name}: weight is {weight!r}; need a number above 0")
        if not isinstance(params, dict):
            raise ConfigError(f"env.composite {name}: params is {params!r}; need a table")
        return cls(name, float(weight), params)

    def check(self) -> None:
        """Raises ConfigError for `seed` and `size`, DataError for what the library refuses."""
        from reasoning_gym.factory import DATASETS

        names = [name for name in DATASETS if name != "composite"]
        if self.name not in names:
            raise DataError(
                f"reasoning-gym has no dataset {self.name!r}{did_you_mean(self.name, names)} "
                f"({len(names)} are known)"
            )
        fields = [f.name for f in dataclasses.fields(DATASETS[self.name][1])]
        allowed = [name for name in fields if name not in _OWN_PARAMS]
        for key in self.params:
            if key in _OWN_PARAMS:
                raise ConfigError(
                    f"env.params.{key} is not yours to set: the split fixes the seeds, and "
                    "env.size and env.num_eval the numbers"
                )
            if key not in allowed:
                raise DataError(
                    f"reasoning-gym {self.name} has no parameter {key!r}; it has "
                    f"{', '.join(allowed)}{did_you_mean(key, allowed)}"
                )
        try:
            _library().create_dataset(self.name, seed=_TRAIN_SEED, size=1, **self.params)
        except (AssertionError, ValueError, TypeError) as error:
            raise DataError(
                f"reasoning-gym {self.name} refuses the parameters {self.params}: {error}"
            ) from error


def _library() -> ModuleType:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise MissingDependencyError(
            'env.type "reasoning_gym" needs reasoning-gym: pip install "posttrain[reasoning-gym]"'
        ) from error
