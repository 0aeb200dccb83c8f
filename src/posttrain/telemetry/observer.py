"""Who watches a run: the terminal display, a JSON stream, nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

logger = logging.getLogger("posttrain")


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


class ContainedObserver:
    """Passes everything on; what the observer raises is a warning, once, and never stops a run.

    A tracker that is down or a terminal that went away costs what it would have shown, no sample.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._warned = False

    def message(self, text: str) -> None:
        self._tell(lambda: self._observer.message(text))

    def progress(self, what: str, done: int, total: int) -> None:
        self._tell(lambda: self._observer.progress(what, done, total))

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        self._tell(lambda: self._observer.step(step, num_steps, metrics))

    def evaluation(self, policy_version: int, report: Mapping[str, Any]) -> None:
        self._tell(lambda: self._observer.evaluation(policy_version, report))

    def _tell(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception as error:  # boundary: logged; the run's own files are complete without it
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s cannot show the run any more (%s: %s); the run goes on, its files in the "
                    "run directory are complete",
                    type(self._observer).__name__,
                    type(error).__name__,
                    error,
                )
