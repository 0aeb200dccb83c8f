"""What we compare with, as a process of its own that answers requests.

Both sides work alternately in one run, so what slows the machine down slows both. A peer waits
without work while it is not asked.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import posttrain
from posttrain.benchmarks.options import checkout
from posttrain.errors import BenchmarkError, MissingDependencyError

END_S = 30.0
"""A peer that has no more requests ends by itself within this time, or is killed."""

SAID_LINES = 8
"""Of a peer's standard error, in the message of its failure."""


def environment(name: str) -> Path:
    """The interpreter of a peer's environment. Raises MissingDependencyError without one."""
    python = checkout() / ".cache" / "peers" / name / "bin" / "python"
    if not python.exists():
        raise MissingDependencyError(
            f"peer {name}: there is no {python}; run benchmarks/peers/setup.sh {name}, or leave it "
            "out with --peers"
        )
    return python


def script(name: str) -> Path:
    """A peer's file, in the repository beside its requirements."""
    return checkout() / "benchmarks" / "peers" / name


class Peer:
    """A process that answers one request at a time; ends with the `with` block."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Start it. Its standard error goes into a file in `folder`; `settings` are variables of
        its environment, beside ours."""
        self.name = name
        self._said = folder / f"{name}.log"
        ours = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}  # set by our cli
        source = str(Path(posttrain.__file__).parents[1])
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env={**ours, "HF_HUB_OFFLINE": "1", "PYTHONPATH": source, **(settings or {})},
            )

    def __enter__(self) -> Peer:
        """Wait until it has loaded what it needs."""
        try:
            self._answer()
        except BenchmarkError:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Its answer. Raises BenchmarkError with its last words when it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure() from error
        return self._answer()

    def close(self) -> None:
        """No more requests."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended; its failure was raised where it mattered
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        return json.loads(line)

    def _failure(self) -> BenchmarkError:
        said = self._said.read_text(encoding="utf-8", errors="replace").splitlines()
        last = "\n  ".join(said[-SAID_LINES:]) or "nothing"
        return BenchmarkError(
            f"peer {self.name} ended with status {self._process.wait()} instead of an answer; mend "
            f"it or leave it out with --peers. It said:\n  {last}"
        )
