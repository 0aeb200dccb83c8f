"""Exit statuses, and what the commands do when standard output or the user goes away."""

from __future__ import annotations

import asyncio
import io
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from posttrain import errors
from posttrain.cli import main
from posttrain.commands.display import Terminal, duration
from posttrain.commands.report import print_report

RECIPE = str(Path(__file__).parents[1] / "recipes/reverse.toml")

Outcome = tuple[int, str, str]


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Outcome]:
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["posttrain", *argv])
        with pytest.raises(SystemExit) as stop:
            main()
        return (int(stop.value.code or 0), *capsys.readouterr())

    return run


def raising(error: BaseException) -> Callable[..., Any]:
    async def train(*_: Any, **__: Any) -> None:
        raise error

    return train


USER_ERRORS = [
    errors.ConfigError,
    errors.ModelError,
    errors.DataError,
    errors.RunDirectoryError,
    errors.NetworkError,
    errors.MissingDependencyError,
]
RUN_ERRORS = [
    errors.JournalError,
    errors.JournalCorruptError,
    errors.SchemaVersionError,
    errors.StorageError,
    errors.ReplayMismatchError,
    errors.EngineError,
    errors.RolloutError,
    errors.TrainingError,
]


@pytest.mark.parametrize(
    ("kind", "status"), [(e, 2) for e in USER_ERRORS] + [(e, 1) for e in RUN_ERRORS]
)
def test_an_error_is_its_status_and_one_line_without_a_traceback(
    kind: type[errors.PosttrainError],
    status: int,
    cli: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("posttrain.run.train", raising(kind("object: fact; remedy")))
    got, _, err = cli("train", RECIPE)
    assert (got, err) == (status, "error: object: fact; remedy\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError()])
def test_an_interrupt_is_130_and_says_how_to_go_on(
    error: BaseException,
    cli: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The default run directory has the time in its name: the command alone would start anew."""
    monkeypatch.setattr("posttrain.run.train", raising(error))
    run_dir = tmp_path / "my run"
    status, _, err = cli("train", RECIPE, "--run-dir", str(run_dir))
    assert status == 130
    assert err == "interrupted: the run had not begun, nothing was written\n"
    run_dir.mkdir()
    (run_dir / "journal.sqlite").write_text("")
    status, _, err = cli("train", RECIPE, "--run-dir", str(run_dir), "--resume")
    assert status == 130
    assert f"--run-dir '{run_dir}' --resume goes on" in err


@pytest.mark.parametrize(
    "argv", [("tran",), ("train",), ("train", RECIPE, "--resum"), ("export", "run")]
)
def test_a_wrong_command_line_is_2(argv: tuple[str, ...], cli: Callable[..., Outcome]) -> None:
    status, _, err = cli(*argv)
    assert status == 2 and "Traceback" not in err
    assert "No such" in err or "Missing" in err


def test_the_version_is_printed(cli: Callable[..., Outcome]) -> None:
    status, out, _ = cli("--version")
    assert status == 0 and re.fullmatch(r"posttrain \d+\.\d+\.\d+\S*\n", out)


def test_a_command_leaves_logging_as_it_was(
    cli: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("posttrain")
    before = (logger.level, logger.handlers, logger.propagate)
    monkeypatch.setattr("posttrain.run.train", raising(errors.DataError("d")))
    cli("train", RECIPE)
    assert (logger.level, logger.handlers, logger.propagate) == before


def test_a_warning_before_the_run_directory_exists_is_in_its_log_once_it_does(
    cli: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def train(*_: Any, **__: Any) -> None:
        logging.getLogger("posttrain").warning("3 prompts were dropped")
        (tmp_path / "run").mkdir()
        raise errors.RolloutError("stopped")

    monkeypatch.setattr("posttrain.run.train", train)
    status, out, _ = cli("train", RECIPE, "--run-dir", "run", "--json")
    assert status == 1 and "3 prompts were dropped" in out
    log = (tmp_path / "run" / "log.txt").read_text()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d warning: 3 prompts were dropped\n", log)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_resumed_display_counts_from_the_true_step_to_the_true_end() -> None:
    """f13"""
    out = io.StringIO()
    terminal = Terminal(Console(file=out, width=200), num_steps=100)
    terminal.step(97, 100, {"time/step_s": 2.0})
    assert out.getvalue().startswith("step 97/100  6 s left  ")


def test_invalid_samples_are_shown_loudly() -> None:
    out = io.StringIO()
    terminal = Terminal(Console(file=out, width=200), num_steps=1)
    terminal.step(1, 1, {"time/step_s": 1.0, "trajectories/invalid_frac": 0.25})
    assert "INVALID 25 %" in out.getvalue()
    terminal.evaluation(
        1,
        {
            "accuracy": None,
            "num_tasks": 2,
            "num_invalid": 2,
            "invalid_reasons": {"reward_error": 2},
        },
    )
    assert "no valid sample at step 1" in out.getvalue()
    assert "2 invalid: {'reward_error': 2}" in out.getvalue()


def test_a_report_without_evaluations_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    summary = {
        "steps": 3,
        "wall_s": 4.0,
        "training_s": 2.0,
        "draws": {"drawn": 6, "trained": 5, "dropped": {"stale": 1}, "open": 0},
        "evaluation": None,
    }
    print_report(Path("/runs/[a]"), summary)
    out = capsys.readouterr().out
    assert "6 drawn = 5 trained + 1 dropped (1 stale) + 0 open" in out
    assert "run directory: /runs/[a]" in out
