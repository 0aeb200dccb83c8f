"""posttrain train."""

from __future__ import annotations

import asyncio
import logging
import sys
from datetime import datetime
from pathlib import Path

from posttrain.commands.display import JsonObserver, Terminal, observer_for
from posttrain.commands.report import print_report
from posttrain.recipe_files import load_recipe


def train_command(
    name: str, overrides: list[str], run_dir: Path | None, resume: bool, as_json: bool
) -> None:
    """Resolve, run, report."""
    recipe, base_dir = load_recipe(name, overrides)
    if run_dir is None:
        run_dir = Path("runs") / f"{recipe.name}-{datetime.now():%Y%m%d-%H%M%S}"
    run_dir = run_dir.absolute()
    from posttrain.doctor import require_supported_versions

    require_supported_versions()
    from posttrain.run import train

    with observer_for(as_json, recipe.num_steps) as observer:
        observer.message(f"run directory: {run_dir}")
        _log_to(run_dir, observer)
        summary = asyncio.run(train(recipe, base_dir, run_dir, resume=resume, observer=observer))
    if isinstance(observer, JsonObserver):
        observer.summary(summary)
    else:
        print_report(run_dir, summary, recipe.seed)


def _log_to(run_dir: Path, observer: Terminal | JsonObserver) -> None:
    """Warnings of the project appear among the run's messages and in its log.txt."""
    logger = logging.getLogger("posttrain")
    logger.setLevel(logging.INFO)
    logger.handlers = [_Forward(run_dir, observer)]
    logger.propagate = False


class _Forward(logging.Handler):
    def __init__(self, run_dir: Path, observer: Terminal | JsonObserver) -> None:
        super().__init__()
        self._path = run_dir / "log.txt"
        self._observer = observer

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.levelname.lower()}: {record.getMessage()}"
        self._observer.message(text)
        try:
            if self._path.parent.is_dir():
                with self._path.open("a") as file:
                    file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}\n")
        except OSError as error:
            print(f"warning: {self._path} cannot be written: {error}", file=sys.stderr)
