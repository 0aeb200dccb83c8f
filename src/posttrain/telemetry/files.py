"""metrics.jsonl: one JSON object a step, derived from the journal and rewritten on resume."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from posttrain.errors import StorageError
from posttrain.telemetry.metrics import check_names


class MetricsFile:
    """The journal is the truth; this file is for `tail`, pandas and plotting.

    Writing raises StorageError when the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def rewrite(self, steps: Iterable[tuple[int, Mapping[str, float], str | None]]) -> None:
        """Replace the file by these steps (number, metrics, reason skipped)."""
        write_text(self._path, "".join(_line(*step) for step in steps))

    def append(self, step: int, metrics: Mapping[str, float], skipped: str | None) -> None:
        check_names(metrics)
        with _storage_errors(self._path), self._path.open("a") as file:
            file.write(_line(step, metrics, skipped))


def _line(step: int, metrics: Mapping[str, float], skipped: str | None) -> str:
    record: dict[str, Any] = {"step": step, **metrics}
    if skipped:
        record["skipped"] = skipped
    return to_json(record) + "\n"


def to_json(value: Any) -> str:
    """JSON that every parser reads: NaN and infinities, which JSON lacks, become null."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file as `write_text` does."""
    write_text(path, json.dumps(_finite(value), indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file so that a crash leaves the old one or the new one.

    Raises StorageError when the disk refuses; the old file stays.
    """
    partial = path.with_suffix(".partial")
    try:
        with _storage_errors(path):
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, path)
    except StorageError:
        with suppress(OSError):  # the error that is raised already says what is wrong
            partial.unlink(missing_ok=True)
        raise


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written: {error.strerror or error}; make room or mend the "
            "permissions, then run the same command with --resume: the journal has every step"
        ) from error
