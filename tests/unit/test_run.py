"""What a run writes beside its journal, and who cannot stop it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import StorageError
from posttrain.journal import Journal, RunHeader, StepRecord
from posttrain.summary import evaluation_summary, invalid_kinds
from posttrain.telemetry.files import MetricsFile, to_json, write_json
from posttrain.telemetry.metrics import METRICS, check_names
from posttrain.telemetry.observer import ContainedObserver, SilentObserver

HEADER = RunHeader({}, "0.1.0", {}, seed=0, threads=1, created_at="2026-01-01T00:00:00Z")


class Broken(SilentObserver):
    """A tracker that is down from step 3 on."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        if step == 3:
            raise ConnectionError("tracker is down")
        self.steps.append(step)


def test_an_observer_that_raises_is_one_warning_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """i05: the outage of a tracker neither stops a run nor is repeated at every step."""
    broken = Broken()
    observer = ContainedObserver(broken)
    with caplog.at_level(logging.WARNING, logger="posttrain"):
        for step in (1, 2, 3, 4, 3):
            observer.step(step, 5, {})
    assert broken.steps == [1, 2, 4]
    (record,) = caplog.records
    assert "Broken" in record.getMessage() and "tracker is down" in record.getMessage()


def test_an_interrupt_inside_an_observer_is_not_swallowed() -> None:
    class Stopped(SilentObserver):
        def message(self, text: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ContainedObserver(Stopped()).message("hello")


def test_numbers_that_json_lacks_are_null() -> None:
    record = {"nan": float("nan"), "deep": [{"inf": float("inf")}, (1.5, -float("inf"))], "n": 3}
    text = to_json(record)
    assert json.loads(text) == {"nan": None, "deep": [{"inf": None}, [1.5, None]], "n": 3}


def test_the_metrics_file_is_replaced_whole_and_then_grows(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    file.rewrite([(1, {"learner/loss": 0.5}, None)])
    file.append(2, {"learner/loss": float("nan")}, "non_finite")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "learner/loss": 0.5},
        {"step": 2, "learner/loss": None, "skipped": "non_finite"},
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_metric_without_a_declaration_is_an_error(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"'loss' is not declared"):
        file.append(1, {"loss": 0.5}, None)
    check_names({"reward/term/format": 1.0, "trajectories/invalid/reward_error": 2.0})


def test_every_metric_name_is_a_group_and_a_name() -> None:
    for name, meaning in METRICS.items():
        group, _, rest = name.partition("/")
        assert group and rest and meaning, name


def test_a_file_that_cannot_be_written_is_a_storage_error_and_leaves_the_old_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"steps": 1})
    (tmp_path / "summary.partial").mkdir()
    with pytest.raises(StorageError, match=r"summary\.json: cannot be written: .*--resume"):
        write_json(path, {"steps": 2})
    assert json.loads(path.read_text()) == {"steps": 1}
    with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot be written"):
        MetricsFile(tmp_path / "none" / "metrics.jsonl").append(1, {}, None)


def test_invalid_trajectories_are_added_up_by_kind() -> None:
    def record(step: int, **counts: float) -> StepRecord:
        metrics = {f"trajectories/invalid/{kind}": n for kind, n in counts.items()}
        metrics["trajectories/invalid_frac"] = 0.5
        return StepRecord(step, (), {}, "", {}, True, "", step, None, metrics)

    steps = [record(1, reward_error=2.0), record(2), record(3, reward_error=1.0, aborted=4.0)]
    assert invalid_kinds(steps) == {"aborted": 4, "reward_error": 3}


def report(version: int, correct: dict[str, list[float]]) -> dict[str, Any]:
    return {"policy_version": version, "correct": correct, "accuracy": None}


def test_a_summary_compares_the_first_evaluation_with_the_last_over_common_tasks(
    tmp_path: Path,
) -> None:
    with Journal.create(tmp_path / "run", HEADER) as journal:
        assert evaluation_summary(journal, 0) is None
        journal.record_evaluation(0, report(0, {"a": [0.0], "b": [0.0], "c": [1.0]}))
        only = evaluation_summary(journal, 0)
        assert only == {"before": {"policy_version": 0, "accuracy": None}}
        journal.record_evaluation(5, report(5, {"a": [0.0]}))
        journal.record_evaluation(10, report(10, {"a": [1.0], "b": [1.0]}))
        summary = evaluation_summary(journal, 0)
    assert summary is not None and summary["after"]["policy_version"] == 10
    assert summary["comparison"]["num_questions"] == 2
    assert summary["comparison"]["mean_diff"] == 1.0


def test_evaluations_without_a_common_valid_task_are_not_compared(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "run", HEADER) as journal:
        journal.record_evaluation(0, report(0, {}))
        journal.record_evaluation(1, report(1, {"a": [1.0]}))
        summary = evaluation_summary(journal, 0)
    assert summary is not None and "comparison" not in summary
