"""The user's own environment, found by name."""

from __future__ import annotations

import inspect
from pathlib import Path

from posttrain.config import PythonEnvConfig
from posttrain.errors import ConfigError
from posttrain.names import did_you_mean
from posttrain.protocols import EnvSpec
from posttrain.targets import load_module, parse_target

_NEEDED = ("name", "train_tasks", "eval_tasks", "make", "reward")


def load_spec(config: PythonEnvConfig, base_dir: Path) -> EnvSpec:
    """Call the target with `params`. The user's code runs in this process: it is trusted.

    Raises ConfigError naming target, fact and remedy.
    """
    where = f"env.target {config.target!r}"
    try:
        target = parse_target(config.target)
        module = load_module(target, (base_dir, Path.cwd()))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:  # boundary: the user's module failed while it was imported
        raise ConfigError(
            f"{where}: importing it raised {type(error).__name__}: {error}"
        ) from error
    factory = getattr(module, target.function, None)
    if not callable(factory):
        names = [name for name, value in vars(module).items() if inspect.isclass(value)]
        raise ConfigError(
            f"{where}: {target.place} has no class or function of that name"
            + (did_you_mean(target.function, names) or f"; it has {', '.join(names) or 'no class'}")
        )
    try:
        spec = factory(**config.params)
    except Exception as error:  # boundary: the user's constructor
        raise ConfigError(
            f"{where}: calling it with params {config.params} raised {_said(error)}"
        ) from error
    missing = [name for name in _NEEDED if not hasattr(spec, name)]
    if missing:
        raise ConfigError(
            f"{where}: {type(spec).__name__} lacks {', '.join(missing)}; see protocols.EnvSpec"
        )
    assert isinstance(spec, EnvSpec)
    return spec


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
