"""From the `reward` of a recipe to a grader."""

from __future__ import annotations

from pathlib import Path

from posttrain.errors import ConfigError
from posttrain.names import did_you_mean
from posttrain.protocols import Reward
from posttrain.rewards.exact import ExactReward
from posttrain.rewards.function import FunctionReward
from posttrain.rewards.math import MathReward

_NAMES = ("math", "exact")


def build_reward(
    kind: str,
    *,
    answer_column: str = "answer",
    timeout_s: float = 10.0,
    correct_at: float = 1.0,
    base_dir: Path | None = None,
    num_workers: int = 1,
) -> Reward:
    """A grader for "math", "exact", "FILE.py:FUNCTION" or "package.module:FUNCTION".

    A relative file is looked for in `base_dir`, then in the working directory. Starts nothing.
    Raises ConfigError for any other `kind`.
    """
    if kind == "math":
        return MathReward(answer_column, timeout_s=timeout_s, num_workers=num_workers)
    if kind == "exact":
        return ExactReward(answer_column)
    if ":" in kind:
        return FunctionReward(
            kind,
            timeout_s=timeout_s,
            correct_at=correct_at,
            base_dir=base_dir,
            num_workers=num_workers,
        )
    raise ConfigError(
        f'env.reward is {kind!r}; use "math", "exact", "FILE.py:FUNCTION" or '
        '"package.module:FUNCTION"' + did_you_mean(kind, _NAMES)
    )
