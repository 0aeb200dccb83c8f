"""metrics.jsonl: one JSON object a step, derived from the journal and rewritten on resume."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from posttrain.telemetry.metrics import check_names


class MetricsFile:
    """The journal is the truth; this file is for `tail`, pandas and plotting."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def rewrite(self, steps: Iterable[tuple[int, Mapping[str, float], str | None]]) -> None:
        """Replace the file by these steps (number, metrics, reason skipped)."""
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(_line(*step) for step in steps))
        os.replace(partial, self._path)

    def append(self, step: int, metrics: Mapping[str, float], skipped: str | None) -> None:
        check_names(metrics)
        with self._path.open("a") as file:
            file.write(_line(step, metrics, skipped))


def _line(step: int, metrics: Mapping[str, float], skipped: str | None) -> str:
    record: dict[str, Any] = {"step": step, **metrics}
    if skipped:
        record["skipped"] = skipped
    return json.dumps(record) + "\n"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file so that a crash leaves the old one or the new one."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(partial, path)
