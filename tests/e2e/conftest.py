"""Runs of the real program: in this process, forked from a warm one, and what they left behind."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.cli import main
from posttrain.journal import Journal, verify_segments

SMALL = (
    "num_steps=8",
    "rollout.groups_per_step=4",
    "eval.num_tasks=4",
    "eval.every=4",
    "checkpoint.every=3",
)

RECIPE = str(Path(__file__).parents[1] / "recipes/reverse.toml")
"""The recipe `reverse` in less than a second: evaluations at 0, 4, 8, checkpoints at 3, 6, 8."""


def strict_json(text: str) -> Any:
    """What any JSON parser reads: Python's NaN and Infinity are refused."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """The lines of --json."""
        return [strict_json(line) for line in self.out.splitlines()]


# --- in this process ------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of its own, so that no test reads what a user has."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POSTTRAIN_CACHE", str(folder))
        yield folder


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Finished]]:
    """`cli("train", "reverse")` runs the command in `tmp_path` and returns how it ended."""
    monkeypatch.chdir(tmp_path)
    # transformers holds the standard error of an earlier test, which is closed by now.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    logger = logging.getLogger("posttrain")
    former = (logger.level, list(logger.handlers), logger.propagate)

    def run(*argv: object) -> Finished:
        monkeypatch.setattr(sys, "argv", ["posttrain", *map(str, argv)])
        capfd.readouterr()
        status = 0
        try:
            main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        return Finished(status, *capfd.readouterr())

    yield run
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    assert (logger.level, logger.handlers, logger.propagate) == former, "logging stays as it was"


# --- forked from a warm process ------------------------------------------------------------------


@dataclass
class Child:
    """A running command; `lines` ends when it ends."""

    pid: int
    _zygote: Zygote
    _out: Any
    _err: Any
    out: list[str] = field(default_factory=list)

    @property
    def lines(self) -> Iterator[str]:
        for line in self._out:
            self.out.append(line)
            yield line

    def events(self) -> Iterator[dict[str, Any]]:
        for line in self.lines:
            yield strict_json(line)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def wait(self) -> Finished:
        for _ in self.lines:
            pass
        err = self._err.read()
        self._out.close()
        self._err.close()
        status = self._zygote.ask({"wait": self.pid})["status"]
        return Finished(status, "".join(self.out), err)


class Zygote:
    """The helper process of zygote.py."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        script = Path(__file__).with_name("zygote.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self._socket = ours
        self._replies = ours.makefile("rb")
        assert self._replies.readline() == b"ready\n"

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        message = json.dumps(request).encode()
        if descriptors:
            socket.send_fds(self._socket, [message], descriptors)
        else:
            self._socket.sendall(message)
        return json.loads(self._replies.readline())

    def start(
        self,
        *argv: object,
        cwd: Path,
        deaths: Sequence[dict[str, Any]] = (),
        max_file_bytes: int | None = None,
    ) -> Child:
        """Fork a child that runs `posttrain ARGV`."""
        request = {
            "argv": [str(a) for a in argv],
            "cwd": str(cwd),
            "env": {"POSTTRAIN_CACHE": os.environ["POSTTRAIN_CACHE"]},
            "deaths": list(deaths),
            "max_file_bytes": max_file_bytes,
        }
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        pid = self.ask(request, [out_write, err_write])["pid"]
        os.close(out_write)
        os.close(err_write)
        return Child(pid, self, os.fdopen(out_read), os.fdopen(err_read))

    def run(self, *argv: object, cwd: Path, **options: Any) -> Finished:
        return self.start(*argv, cwd=cwd, **options).wait()

    def close(self) -> None:
        self._replies.close()
        self._socket.close()
        self._process.wait()


@pytest.fixture(scope="session")
def zygote(model_cache: Path) -> Iterator[Zygote]:
    helper = Zygote()
    yield helper
    helper.close()


def train_argv(run_dir: Path, *more: str) -> list[str]:
    """The same command starts and resumes."""
    return ["train", RECIPE, *SMALL, *more, "--run-dir", str(run_dir), "--resume", "--json"]


@pytest.fixture(scope="session")
def argv() -> Callable[..., list[str]]:
    return train_argv


@pytest.fixture(scope="session")
def reference(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of an uninterrupted run; tests only read it."""
    folder = tmp_path_factory.mktemp("reference")
    done = zygote.run(*train_argv(folder / "run"), cwd=folder)
    assert done.status == 0, done.err
    return folder / "run"


# --- what a run left -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Everything about a finished run that an interruption must not change."""

    weights_hash: str
    steps: list[tuple[Any, ...]]
    draws: list[tuple[Any, ...]]
    ledger: dict[str, Any]
    evaluations: dict[int, Any]
    evaluation: Any
    checkpoints: list[Any]
    metrics_steps: list[int]


def outcome_of(run_dir: Path) -> Outcome:
    """Read and cross-check a run directory."""
    assert verify_segments(run_dir) == []
    summary = strict_json((run_dir / "summary.json").read_text())
    assert summary["exit_reason"] == "finished"
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    with Journal.open(run_dir, readonly=True) as journal:
        ledger = journal.ledger()
        assert ledger.balanced and ledger.open == 0
        assert summary["draws"]["trained"] == ledger.trained
        return Outcome(
            weights_hash=summary["weights_hash"],
            steps=[
                (s.step, s.draw_ids, dict(s.dropped), s.fingerprint, s.weights_hash, s.skipped)
                for s in journal.steps()
            ],
            draws=[(d.draw, d.status, d.step, d.reason) for d in journal.draws()],
            ledger=summary["draws"],
            evaluations={e.policy_version: e.report for e in journal.evaluations()},
            evaluation=summary["evaluation"],
            checkpoints=journal.checkpoints(),
            metrics_steps=[strict_json(line)["step"] for line in lines],
        )


@pytest.fixture(scope="session")
def outcome() -> Callable[[Path], Outcome]:
    return outcome_of


@pytest.fixture(scope="session")
def small() -> tuple[str, ...]:
    return SMALL


@pytest.fixture(scope="session")
def read_json() -> Callable[[Path], Any]:
    return lambda path: strict_json(path.read_text())
