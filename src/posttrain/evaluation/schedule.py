"""When an evaluation is due."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EvaluationSchedule:
    """Before training, every `every` versions, and after the last step.

    A version that jumps over a multiple of `every` is due once, labelled with itself.

    Example:
        >>> s = EvaluationSchedule(num_steps=100, every=25, before=True, after=True)
        >>> s.due(0, set()), s.due(24, {0}), s.due(26, {0}), s.due(27, {0, 26}), s.due(100, {0})
        (True, False, True, False, True)
    """

    num_steps: int
    every: int
    before: bool
    after: bool

    def due(self, version: int, done: Set[int]) -> bool:
        """Whether `version` should be evaluated, given the versions that were."""
        if version in done:
            return False
        if version == 0:
            return self.before
        if version >= self.num_steps:
            return self.after
        if self.every == 0:
            return False
        last = max(done, default=0)
        return version // self.every > last // self.every
