"""Spans: what is recorded, on which track, and that nothing is while nobody asks."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from posttrain.errors import StorageError
from posttrain.telemetry import spans
from posttrain.telemetry.spans import Span, SpanRecorder, lane, recording, span


def found(recorder: SpanRecorder) -> list[tuple[str, str]]:
    return sorted((s.track, s.name) for s in recorder.spans)


def test_nothing_is_recorded_or_made_while_nobody_records() -> None:
    recorder = SpanRecorder()
    assert span("before", step=1) is span("again") is lane("episode")
    with recording(recorder):
        pass
    with span("after"):
        assert recorder.spans == []


def test_an_inner_span_lies_within_the_outer_one_on_the_same_track() -> None:
    with recording(SpanRecorder()) as recorder, span("outer", step=3), span("inner"):
        pass
    inner, outer = recorder.spans
    assert (inner.name, outer.name) == ("inner", "outer")
    assert inner.track == outer.track == "loop"
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
    assert outer.facts == {"step": 3}


def test_what_runs_at_once_takes_a_lane_each_and_gives_it_back() -> None:
    async def episode(name: str) -> None:
        with lane("episode"), span(name):
            await asyncio.sleep(0)
            with span("step"):
                await asyncio.sleep(0)

    async def run() -> None:
        await asyncio.gather(episode("a"), episode("b"))
        await episode("c")
        with span("loop again"):
            pass

    with recording(SpanRecorder()) as recorder:
        asyncio.run(run())
    assert found(recorder) == [
        ("episode 1", "a"),
        ("episode 1", "c"),
        ("episode 1", "step"),
        ("episode 1", "step"),
        ("episode 2", "b"),
        ("episode 2", "step"),
        ("loop", "loop again"),
    ]


def test_a_thread_of_its_own_records_too() -> None:
    def work() -> None:
        for _ in range(200):
            with span("decode", "engine"):
                pass

    with recording(SpanRecorder()) as recorder:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found(recorder) == [("engine", "decode")] * 600


def test_a_span_that_ends_by_an_error_says_so() -> None:
    with recording(SpanRecorder()) as recorder, pytest.raises(KeyError), span("grading"):
        raise KeyError("x")
    assert recorder.spans[0].facts == {"raised": "KeyError"}


def test_two_recordings_at_once_are_refused() -> None:
    with recording(SpanRecorder()), pytest.raises(RuntimeError, match="already"):
        recording(SpanRecorder()).__enter__()
    with recording(SpanRecorder()):
        pass


def test_a_trace_has_microseconds_from_its_beginning_and_names_its_tracks(tmp_path: Path) -> None:
    recorder = SpanRecorder()
    for number in (10, 2):
        recorder.add(Span(f"episode {number}", "episode", 7_000, 9_500))
    recorder.add(Span("loop", "rollout", 5_000, 10_000, {"step": 1}))
    recorder.write(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["loop", "episode 2", "episode 10"], "lanes by number"
    first = next(e for e in trace["traceEvents"] if e["ph"] == "X")
    assert (first["name"], first["ts"], first["dur"], first["args"]) == (
        "rollout",
        0.0,
        5.0,
        {"step": 1},
    )
    assert [e["ts"] for e in trace["traceEvents"] if e["name"] == "episode"] == [2.0, 2.0]


def test_spans_beyond_the_limit_are_counted_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "MAX_SPANS", 2)
    with recording(SpanRecorder()) as recorder:
        for _ in range(5):
            with span("x"):
                pass
    recorder.write(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert len(recorder.spans) == 2
    assert trace["otherData"] == {"spans_left_out": 3}


def test_a_trace_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"trace\.json"):
        SpanRecorder().write(tmp_path / "missing" / "trace.json")
