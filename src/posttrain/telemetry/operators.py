"""torch's operators as spans, by torch.profiler."""

from __future__ import annotations

import time
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from posttrain.telemetry.spans import Span

_CLOCK = "posttrain: clock"
TRACK = "operators"


class TorchOperators:
    """Implements `telemetry.profile.OperatorSource`.

    Recording them takes time: with it a step of a small model takes several times as long.
    """

    def __init__(self) -> None:
        config = _ExperimentalConfig(profile_all_threads=True)
        self._profile = profile(activities=[ProfilerActivity.CPU], experimental_config=config)
        self._clock_ns = 0

    def start(self) -> None:
        self._profile.start()
        self._clock_ns = time.perf_counter_ns()
        with record_function(_CLOCK):  # the same moment on both clocks
            pass

    def stop(self) -> list[Span]:
        """The operators of every thread, on a track for each thread."""
        self._profile.stop()
        events: list[Any] = list(self._profile.events() or ())
        clock = next(e for e in events if e.name == _CLOCK)
        numbers = {t: i for i, t in enumerate(dict.fromkeys(e.thread for e in events), 1)}

        def nanoseconds(microseconds: float) -> int:
            return self._clock_ns + round((microseconds - clock.time_range.start) * 1000)

        return [
            Span(
                f"{TRACK} {numbers[e.thread]}",
                e.name,
                nanoseconds(e.time_range.start),
                nanoseconds(e.time_range.end),
            )
            for e in events
            if e is not clock
        ]
