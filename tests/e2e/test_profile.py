"""`train --profile`: a trace that parses, with its tracks, whose spans nest and sum up."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

RECIPE = str(Path(__file__).parents[1] / "recipes/reverse.toml")
QUICK = ("num_steps=4", "rollout.groups_per_step=2", "eval.num_tasks=2", "checkpoint.every=2")
MICROSECOND = 1.5
"""Times of a trace are rounded."""

Event = dict[str, Any]


def tracks_of(run_dir: Path) -> dict[str, list[Event]]:
    """Events of each track, outer ones first."""
    trace = json.loads((run_dir / "profile" / "trace.json").read_text())
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    tracks: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[names[event["tid"]]].append(event)
    return tracks


def check_nesting(events: list[Event]) -> None:
    """Each event ends before the one that it began in."""
    open_until: list[float] = []
    for event in events:
        end = event["ts"] + event["dur"]
        while open_until and open_until[-1] <= event["ts"] + MICROSECOND:
            open_until.pop()
        if open_until:
            assert end <= open_until[-1] + MICROSECOND, event
        open_until.append(end)


def test_a_profile_shows_where_the_seconds_of_its_steps_went(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    done = cli("train", RECIPE, *QUICK, "--run-dir", run_dir, "--profile", "--profile-steps", 2)
    assert done.status == 0, done.err
    last = done.out.strip().splitlines()[-1]
    assert str(run_dir / "profile" / "trace.json") in last
    assert "ui.perfetto.dev" in last
    tracks = tracks_of(run_dir)
    for events in tracks.values():
        check_nesting(events)

    steps = [e["args"]["step"] for e in tracks["loop"] if e["name"] == "learner"]
    assert steps == [1, 2], "as many as were asked for"
    phases = {e["name"] for e in tracks["loop"]}
    assert phases >= {"evaluation", "rollout", "batch", "learner", "weights", "checkpoint"}
    outer = [e for e in tracks["loop"] if "step" in e["args"]]
    assert all(a["ts"] + a["dur"] <= b["ts"] + MICROSECOND for a, b in pairwise(outer))
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    for line in map(json.loads, lines[:2]):
        for name, metric in (("rollout", "time/rollout_s"), ("learner", "time/learner_s")):
            (found,) = (e for e in outer if (e["name"], e["args"]["step"]) == (name, line["step"]))
            assert found["dur"] <= line[metric] * 1e6 + MICROSECOND, "the clock holds the span"

    episodes = [e for track, own in tracks.items() if track.startswith("episode ") for e in own]
    inside: dict[str, float] = defaultdict(float)
    for event in episodes:
        inside[event["name"]] += event["dur"]
    assert inside["generation"] + inside["environment: step"] <= inside["episode"]
    assert sum(e["name"] == "group" for e in tracks["journal"]) == 4


def test_operators_lie_in_the_learners_time_when_they_are_asked_for(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options = ("--profile", "--profile-ops", "--profile-steps", 1, "--json")
    done = cli("train", RECIPE, *QUICK, "eval.before=false", "--run-dir", run_dir, *options)
    assert done.status == 0, done.err
    assert any("trace.json" in e.get("text", "") for e in done.events)
    tracks = tracks_of(run_dir)
    (learner,) = (e for e in tracks["loop"] if e["name"] == "learner")
    main = max((own for t, own in tracks.items() if t.startswith("operators ")), key=len)
    check_nesting(main)
    begin, end = learner["ts"], learner["ts"] + learner["dur"]
    in_step = [e for e in main if begin <= e["ts"] and e["ts"] + e["dur"] <= end]
    assert any(e["name"].startswith("aten::") for e in in_step)


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (("--profile-ops",), "--profile-ops says what --profile records"),
        (("--profile-steps", "2"), "--profile-steps says what --profile records"),
        (("--profile", "--profile-steps", "0"), "at least 1 step"),
    ],
)
def test_a_bad_combination_is_refused_before_anything_is_started(
    cli: Callable[..., Any], tmp_path: Path, options: tuple[str, ...], fact: str
) -> None:
    done = cli("train", RECIPE, *QUICK, "--run-dir", tmp_path / "run", *options)
    assert done.status == 2
    assert fact in done.err
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_said_before_the_run(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("a file in the way")
    done = cli("train", RECIPE, *QUICK, "--run-dir", tmp_path / "run", "--profile")
    assert done.status == 2
    assert "leave out --profile" in done.err
    assert not (tmp_path / "run" / "journal.sqlite").exists()


def test_a_run_that_is_refused_leaves_no_trace_and_keeps_the_former_one(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    assert cli("train", RECIPE, *QUICK, "--run-dir", run_dir).status == 0
    assert cli("train", RECIPE, *QUICK, "--run-dir", run_dir, "--profile").status == 2
    assert not (run_dir / "profile").exists()
    (run_dir / "profile").mkdir()
    (run_dir / "profile" / "trace.json").write_text("{}")
    assert cli("train", RECIPE, *QUICK, "--run-dir", run_dir, "--profile").status == 2
    assert (run_dir / "profile" / "trace.json").read_text() == "{}"
