"""Where the time of a run goes, span by span, for a viewer of traces.

Code says `with span("grading"):` wherever something takes a while. Nothing is recorded, and next to
nothing is done, unless somebody is `recording`. Spans lie on named tracks. On one track they nest:
a span ends before the one that it began in. What overlaps, as episodes do, takes a `lane` each.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from posttrain.telemetry.files import write_text

LOOP = "loop"
MAX_SPANS = 500_000
"""A trace beyond this is more than a viewer opens; later spans are counted and left out."""

Fact = str | int | float
_track: ContextVar[str] = ContextVar("track", default=LOOP)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took from `start_ns` to `end_ns` of `time.perf_counter_ns`.

    Example:
        >>> Span("learner", "step", 1_000, 3_000, {"step": 1}).track
        'learner'
    """

    track: str
    name: str
    start_ns: int
    end_ns: int
    facts: dict[str, Fact] = field(default_factory=dict)


class SpanRecorder:
    """Keeps spans of all threads. Adding one is a single append, so no lock is needed for it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.num_left_out = 0
        self._lock = threading.Lock()
        self._taken: dict[str, set[int]] = {}

    def add(self, span: Span) -> None:
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)
        else:
            self.num_left_out += 1

    def take_lane(self, name: str) -> int:
        """The lowest number, from 1, that no lane of this name has now."""
        with self._lock:
            taken = self._taken.setdefault(name, set())
            number = next(n for n in range(1, len(taken) + 2) if n not in taken)
            taken.add(number)
        return number

    def free_lane(self, name: str, number: int) -> None:
        with self._lock:
            self._taken[name].discard(number)

    def write(self, path: Path) -> None:
        """The spans as trace events, which ui.perfetto.dev and chrome://tracing open.

        Format: "Trace Event Format" (Chromium): complete events "X" with microseconds since the
        first span. Raises StorageError.
        """
        spans = sorted(self.spans, key=lambda s: (s.start_ns, -s.end_ns))
        zero = spans[0].start_ns if spans else 0
        tracks = {name: i for i, name in enumerate(sorted({s.track for s in spans}, key=_place), 1)}
        process = os.getpid()
        events: list[dict[str, Any]] = [_meta(process, 0, "process_name", {"name": "posttrain"})]
        for name, number in tracks.items():
            events.append(_meta(process, number, "thread_name", {"name": name}))
            events.append(_meta(process, number, "thread_sort_index", {"sort_index": number}))
        for span in spans:
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.track,
                    "ts": (span.start_ns - zero) / 1000,
                    "dur": (span.end_ns - span.start_ns) / 1000,
                    "pid": process,
                    "tid": tracks[span.track],
                    "args": span.facts,
                }
            )
        other = {"spans_left_out": self.num_left_out}
        trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
        write_text(path, json.dumps(trace))


_recorder: SpanRecorder | None = None


@contextmanager
def recording(recorder: SpanRecorder) -> Iterator[SpanRecorder]:
    """Spans of this process go to `recorder` until the end. Raises RuntimeError when they go to
    another already."""
    global _recorder
    if _recorder is not None:
        raise RuntimeError("spans are being recorded already; end that recording first")
    _recorder = recorder
    try:
        yield recorder
    finally:
        _recorder = None


def span(name: str, track: str | None = None, **facts: Fact) -> AbstractContextManager[None]:
    """Records how long its body takes, on a track or on that of the present lane."""
    recorder = _recorder  # read once: another thread may end the recording
    if recorder is None:
        return _NOTHING
    return _Open(recorder, name, track or _track.get(), facts)


def lane(name: str) -> AbstractContextManager[None]:
    """A track of its own, `name` and a number, for all spans of its body without a track."""
    recorder = _recorder
    return _NOTHING if recorder is None else _Lane(recorder, name)


class _Nothing:
    """What is returned while nobody records."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


_NOTHING = _Nothing()


class _Open:
    """A span that goes on. What raises ends it too, and is named in its facts."""

    def __init__(
        self, recorder: SpanRecorder, name: str, track: str, facts: dict[str, Fact]
    ) -> None:
        self._recorder, self._name, self._track, self._facts = recorder, name, track, facts

    def __enter__(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        end_ns = time.perf_counter_ns()
        if kind is not None:
            self._facts["raised"] = kind.__name__
        self._recorder.add(Span(self._track, self._name, self._start_ns, end_ns, self._facts))


class _Lane:
    def __init__(self, recorder: SpanRecorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __enter__(self) -> None:
        self._number = self._recorder.take_lane(self._name)
        self._former = _track.set(f"{self._name} {self._number}")

    def __exit__(self, *_: object) -> None:
        _track.reset(self._former)
        self._recorder.free_lane(self._name, self._number)


def _meta(process: int, thread: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": args}


_ORDER = ("loop", "engine", "journal", "learner", "operators", "episode")


def _place(track: str) -> tuple[int, int, str]:
    """The loop first, lanes last and by number."""
    name, _, number = track.rpartition(" ")
    if not number.isdigit():
        name, number = track, "0"
    known = _ORDER.index(name) if name in _ORDER else len(_ORDER)
    return known, int(number), track
