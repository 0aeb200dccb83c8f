"""A profile of the first steps of a run, in RUN_DIR/profile/trace.json."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol, Self

from posttrain.errors import RunDirectoryError, StorageError
from posttrain.telemetry.observer import Observer
from posttrain.telemetry.spans import Span, SpanRecorder, recording

logger = logging.getLogger("posttrain")

FOLDER_NAME = "profile"
TRACE_NAME = "trace.json"


class OperatorSource(Protocol):
    """Records what the numeric library does; see `telemetry.operators`."""

    def start(self) -> None: ...

    def stop(self) -> list[Span]: ...


class Profile:
    """Records spans from its beginning until `num_steps` steps are done, or until the end if that
    comes first, and writes them.

    Raises RunDirectoryError at its beginning when the folder cannot be written: not after the
    steps. When writing fails in the end it is a warning, for the run itself is well.
    """

    def __init__(
        self, run_dir: Path, num_steps: int, operators: Callable[[], OperatorSource] | None = None
    ) -> None:
        self.path = run_dir / FOLDER_NAME / TRACE_NAME
        self.written = False
        self._num_steps = num_steps
        self._operators = None if operators is None else operators()
        self._recorder = SpanRecorder()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        folder = self.path.parent
        self._made = [f for f in (self.path, folder, folder.parent) if not f.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.path.open("a").close()
        except OSError as error:
            raise RunDirectoryError(
                f"profile folder {folder} cannot be written: {error.strerror or error}; mend its "
                "permissions, choose another --run-dir or leave out --profile"
            ) from error
        self._open.enter_context(recording(self._recorder))
        if self._operators is not None:
            self._operators.start()
        self._recording = True
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def step_finished(self) -> None:
        """One step more is done."""
        self._num_steps -= 1
        if self._num_steps <= 0:
            self.finish()

    def finish(self) -> None:
        """End the recording and write what there is. Again, it changes nothing."""
        if not self._recording:
            return
        self._recording = False
        self._open.close()
        if self._operators is not None:
            for operator in self._operators.stop():
                self._recorder.add(operator)
        if not self._recorder.spans:
            self._leave_no_trace()
            return
        try:
            self._recorder.write(self.path)
        except StorageError as error:
            logger.warning("the profile is lost: %s", error)
            return
        self.written = True

    def _leave_no_trace(self) -> None:
        """Nothing ran: the run was refused, and its folder is as it was."""
        with suppress(OSError):  # someone else wrote there meanwhile
            for made in self._made:
                if made == self.path:
                    made.unlink()
                else:
                    made.rmdir()


class ProfiledObserver:
    """Tells a profile of each step before the observer sees it."""

    def __init__(self, observer: Observer, profile: Profile) -> None:
        self._observer = observer
        self._profile = profile
        self.message = observer.message
        self.progress = observer.progress
        self.evaluation = observer.evaluation

    def step(self, step: int, num_steps: int, metrics: Mapping[str, Any]) -> None:
        self._profile.step_finished()
        self._observer.step(step, num_steps, metrics)
