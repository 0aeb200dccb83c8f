"""Environments: `[env]` of a recipe becomes an `EnvSpec` here. One file per environment."""

from __future__ import annotations

from pathlib import Path
from typing import assert_never

from posttrain.config import (
    ArithmeticConfig,
    BinarySearchConfig,
    DatasetConfig,
    EnvConfig,
    LargestConfig,
    MixtureConfig,
    PythonEnvConfig,
    ReasoningGymConfig,
    ReverseConfig,
)
from posttrain.protocols import EnvSpec

__all__ = ["build_env_spec"]


def build_env_spec(config: EnvConfig, *, seed: int, base_dir: Path) -> EnvSpec:
    """The environment a recipe asks for, checked: its task sets exist and are large enough.

    `seed` is the run's; it never touches what is held out, so that evaluation asks the same of
    every run. Relative paths of `config` start at `base_dir`. Raises ConfigError, DataError or
    MissingDependencyError.
    """
    if isinstance(config, ArithmeticConfig):
        from posttrain.envs.arithmetic import ArithmeticSpec

        return ArithmeticSpec(config, seed)
    if isinstance(config, LargestConfig):
        from posttrain.envs.largest import LargestSpec

        return LargestSpec(config)
    if isinstance(config, ReverseConfig):
        from posttrain.envs.reverse import ReverseSpec

        return ReverseSpec(config)
    if isinstance(config, BinarySearchConfig):
        from posttrain.envs.binary_search import BinarySearchSpec

        return BinarySearchSpec(config)
    if isinstance(config, ReasoningGymConfig):
        from posttrain.envs.reasoning_gym_env import ReasoningGymSpec

        return ReasoningGymSpec(config)
    if isinstance(config, DatasetConfig):
        from posttrain.envs.dataset import DatasetSpec

        spec = DatasetSpec(config, base_dir)
        spec.train_tasks()
        return spec
    if isinstance(config, PythonEnvConfig):
        from posttrain.envs.python import load_spec

        return load_spec(config, base_dir)
    if isinstance(config, MixtureConfig):
        from posttrain.envs.mixture import MixtureSpec

        members = {
            name: build_env_spec(member, seed=seed, base_dir=base_dir)
            for name, member in config.members.items()
        }
        return MixtureSpec(members, config.weights)
    assert_never(config)
