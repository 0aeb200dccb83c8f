"""posttrain train."""

from __future__ import annotations

import asyncio
import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from posttrain.commands.display import JsonObserver, Terminal, observer_for
from posttrain.commands.report import print_report
from posttrain.config import Recipe
from posttrain.errors import ConfigError
from posttrain.recipe_files import load_recipe


def train_command(
    name: str, overrides: list[str], run_dir: Path | None, resume: bool, as_json: bool
) -> None:
    """Resolve, run, report. Raises KeyboardInterrupt when it was interrupted, however that came."""
    recipe, base_dir = load_recipe(name, overrides)
    if run_dir is None and resume:
        raise ConfigError("--resume needs the run to go on with: add --run-dir DIR")
    if run_dir is None:
        run_dir = Path("runs") / f"{recipe.name}-{datetime.now():%Y%m%d-%H%M%S}"
    run_dir = run_dir.absolute()
    try:
        _train(recipe, base_dir, run_dir, resume, as_json)
    except (KeyboardInterrupt, asyncio.CancelledError) as stop:
        print(f"interrupted: {_what_is_left(run_dir)}", file=sys.stderr)
        raise KeyboardInterrupt from stop


def _train(recipe: Recipe, base_dir: Path, run_dir: Path, resume: bool, as_json: bool) -> None:
    from posttrain.doctor import require_supported_versions

    require_supported_versions()
    from posttrain.run import train
    from posttrain.stages import prepare

    async def run() -> dict[str, Any]:
        await prepare(recipe, observer)
        return await train(recipe, base_dir, run_dir, resume=resume, observer=observer)

    with observer_for(as_json, recipe.num_steps) as observer:
        observer.message(f"run directory: {run_dir}")
        with _logging_to(run_dir, observer):
            summary = asyncio.run(run())
    if isinstance(observer, JsonObserver):
        observer.summary(summary)
    else:
        print_report(run_dir, summary)


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
