"""posttrain train."""

from __future__ import annotations

import asyncio
import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from posttrain.commands.display import JsonObserver, Terminal, observer_for
from posttrain.commands.report import print_report
from posttrain.config import Recipe
from posttrain.errors import ConfigError
from posttrain.recipe_files import load_recipe
from posttrain.telemetry.profile import Profile, ProfiledObserver

PROFILED_STEPS = 3
"""Steps that --profile records: the first warms up, the others are as all that follow."""


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What `--profile` and its companions say."""

    wanted: bool = False
    num_steps: int | None = None
    operators: bool = False

    def check(self) -> None:
        """Raise ConfigError for a companion without --profile, and for less than one step."""
        for option, given in (
            ("--profile-steps", self.num_steps is not None),
            ("--profile-ops", self.operators),
        ):
            if given and not self.wanted:
                raise ConfigError(f"{option} says what --profile records: add --profile")
        if self.num_steps is not None and self.num_steps < 1:
            raise ConfigError(f"--profile-steps is {self.num_steps}; record at least 1 step")

    def of(self, run_dir: Path) -> Profile | None:
        """The profile of a run that is about to begin; None when none is wanted."""
        if not self.wanted:
            return None
        operators = None
        if self.operators:
            from posttrain.telemetry.operators import TorchOperators

            operators = TorchOperators
        return Profile(run_dir, self.num_steps or PROFILED_STEPS, operators)


def train_command(
    name: str,
    overrides: list[str],
    run_dir: Path | None,
    resume: bool,
    as_json: bool,
    profile: ProfileOptions,
) -> None:
    """Resolve, run, report. Raises KeyboardInterrupt when it was interrupted, however that came."""
    profile.check()
    recipe, base_dir = load_recipe(name, overrides)
    if run_dir is None and resume:
        raise ConfigError("--resume needs the run to go on with: add --run-dir DIR")
    if run_dir is None:
        run_dir = Path("runs") / f"{recipe.name}-{datetime.now():%Y%m%d-%H%M%S}"
    run_dir = run_dir.absolute()
    try:
        _train(recipe, base_dir, run_dir, resume, as_json, profile)
    except (KeyboardInterrupt, asyncio.CancelledError) as stop:
        print(f"interrupted: {_what_is_left(run_dir)}", file=sys.stderr)
        raise KeyboardInterrupt from stop


def _train(
    recipe: Recipe,
    base_dir: Path,
    run_dir: Path,
    resume: bool,
    as_json: bool,
    options: ProfileOptions,
) -> None:
    from posttrain.doctor import require_supported_versions

    require_supported_versions()
    from posttrain.run import train
    from posttrain.stages import prepare

    profile = options.of(run_dir)

    async def run() -> dict[str, Any]:
        await prepare(recipe, observer)
        if profile is None:
            return await train(recipe, base_dir, run_dir, resume=resume, observer=observer)
        with profile:
            watched = ProfiledObserver(observer, profile)
            return await train(recipe, base_dir, run_dir, resume=resume, observer=watched)

    with observer_for(as_json, recipe.num_steps) as observer:
        observer.message(f"run directory: {run_dir}")
        with _logging_to(run_dir, observer):
            summary = asyncio.run(run())
    if isinstance(observer, JsonObserver):
        observer.summary(summary)
    else:
        print_report(run_dir, summary)
    if profile is not None and profile.written:
        observer.message(_how_to_open(profile))


def _how_to_open(profile: Profile) -> str:
    return f"profile: {profile.path}; open it in https://ui.perfetto.dev or chrome://tracing"


def _what_is_left(run_dir: Path) -> str:
    if not (run_dir / "journal.sqlite").exists():
        return "the run had not begun, nothing was written"
    option = f"--run-dir {shlex.quote(str(run_dir))} --resume"
    return f"everything finished so far is kept; the same command with {option} goes on"


@contextmanager
def _logging_to(run_dir: Path, observer: Terminal | JsonObserver) -> Iterator[None]:
    """Warnings of the project appear among the run's messages and in its log.txt."""
    logger = logging.getLogger("posttrain")
    former = (logger.level, logger.handlers, logger.propagate)
    handler = _Forward(run_dir, observer)
    logger.setLevel(logging.INFO)
    logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        handler.close()
        logger.setLevel(former[0])
        logger.handlers, logger.propagate = former[1:]


class _Forward(logging.Handler):
    """What is logged before the run directory exists is written once it does."""

    def __init__(self, run_dir: Path, observer: Terminal | JsonObserver) -> None:
        super().__init__()
        self._path = run_dir / "log.txt"
        self._observer = observer
        self._unwritten = ""

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.levelname.lower()}: {record.getMessage()}"
        self._unwritten += f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}\n"
        self._write()
        try:
            self._observer.message(text)
        except (OSError, ValueError) as error:  # a pipe without a reader, a closed stream
            print(f"{text}\nwarning: standard output is gone: {error}", file=sys.stderr)

    def close(self) -> None:
        self._write()
        super().close()

    def _write(self) -> None:
        if not self._unwritten or not self._path.parent.is_dir():
            return
        try:
            with self._path.open("a") as file:
                file.write(self._unwritten)
        except OSError as error:
            print(f"warning: {self._path} cannot be written: {error}", file=sys.stderr)
        self._unwritten = ""
