"""Who watches a run: the terminal display, a JSON stream, nobody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Observer(Protocol):
    """Told what happens; never asked, and never able to stop a run."""

    def message(self, text: str) -> None:
        """One line about what goes on (model loading, resume, warnings)."""
        ...

    def progress(self, what: str, done: int, total: int) -> None:
        """`done` of `total` parts of something that takes a while."""
        ...

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """A step was finished and journalled."""
        ...

    def evaluation(self, policy_version: int, report: Mapping[str, Any]) -> None:
        """An evaluation was finished and journalled."""
        ...


class SilentObserver:
    """Nobody."""

    def message(self, text: str) -> None: ...

    def progress(self, what: str, done: int, total: int) -> None: ...

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None: ...

    def evaluation(self, policy_version: int, report: Mapping[str, Any]) -> None: ...
