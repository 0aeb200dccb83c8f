"""Graders: each judges a finished episode and says `Scored` or `Invalid`.

Names are imported when they are used: grader workers import this package and must start quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.rewards.build import build_reward
    from posttrain.rewards.exact import ExactReward
    from posttrain.rewards.function import FunctionReward
    from posttrain.rewards.math import MathReward

__all__ = ["ExactReward", "FunctionReward", "MathReward", "build_reward"]

_HOMES = {
    "ExactReward": "exact",
    "FunctionReward": "function",
    "MathReward": "math",
    "build_reward": "build",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
