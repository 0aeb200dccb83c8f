"""The arithmetic of reports."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from posttrain.benchmarks import report


def report_of(repeats: int, cpu: str = "abacus", load: float = 0.0) -> report.Report:
    machine = dataclasses.replace(report.this_machine(threads=1), cpu=cpu, load=load)
    made = report.Report("b", "what", "whom", "floor", "aim", machine, {"size": 3})
    made.add("step", "s", [0.25 * (i + 1) for i in range(repeats)])
    return made


# --- arithmetic ---------------------------------------------------------------------------------


def test_median_and_spread_are_those_of_all_values() -> None:
    odd = report.Measure("m", "s", (9.0, 1.0, 2.0))
    assert (odd.median, odd.low, odd.high) == (2.0, 1.0, 9.0)
    assert report.Measure("m", "s", (4.0, 1.0, 2.0, 9.0)).median == 3.0


def test_a_measure_without_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match="'m' has no value"):
        report.Measure("m", "s", ())


def test_a_ratio_compares_what_was_measured_at_the_same_time() -> None:
    """The machine was twice as slow for the second pair: that moves no quotient."""
    old = report.Measure("old", "s", (6.0, 12.0, 7.0))
    new = report.Measure("new", "s", (2.0, 4.0, 3.5))
    quotient = report.ratio("speed-up", old, new)
    assert quotient.values == (3.0, 3.0, 2.0)
    assert quotient.median == 3.0
    assert old.median / new.median == 2.0, "the quotient of medians would say another thing"


def test_different_units_or_counts_make_no_ratio() -> None:
    seconds = report.Measure("a", "s", (1.0, 2.0))
    with pytest.raises(ValueError, match="like with like"):
        report.ratio("r", seconds, report.Measure("b", "tok/s", (1.0, 2.0)))
    with pytest.raises(ValueError, match="no pairs"):
        report.ratio("r", seconds, report.Measure("b", "s", (1.0,)))


# --- reports ------------------------------------------------------------------------------------


def test_numbers_that_should_not_be_quoted_say_so() -> None:
    assert report_of(repeats=5).warnings() == []
    assert "medians of 4" in report_of(repeats=4).warnings()[0]
    busy = report_of(repeats=5, load=3.5)
    assert "3.5" in busy.warnings()[0]
    assert "WARNING: load" in busy.as_text()
    assert busy.as_json()["warnings"] == busy.warnings()


def test_text_and_json_say_the_same() -> None:
    made = report_of(repeats=5)
    record, text = json.loads(json.dumps(made.as_json())), made.as_text()
    (measure,) = record["measures"]
    assert (measure["median"], measure["min"], measure["max"]) == (0.75, 0.25, 1.25)
    assert all(f"{measure[key]:.3f}" in text for key in ("median", "min", "max"))
    for said in ("what", "whom", "floor", "aim", "abacus", "size 3", record["machine"]["torch"]):
        assert said in text


def test_saving_keeps_the_numbers_of_other_machines(tmp_path: Path) -> None:
    folder = tmp_path / "baselines"
    report.save(report_of(repeats=5), folder)
    report.save(report_of(repeats=6, cpu="slide rule"), folder)
    path = report.save(report_of(repeats=7), folder)
    saved = json.loads(path.read_text())
    counts = {key.split(",")[0]: len(r["measures"][0]["values"]) for key, r in saved.items()}
    assert counts == {"abacus": 7, "slide rule": 6}
