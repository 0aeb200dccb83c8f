"""Compares our functions with those that verl, TRL and OpenRLHF publish. See README.md.

Exit status 1 when something is different without an explanation, when an explained difference is
no longer there, or when posttrain lacks a function that is compared.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from comparison import COMPARISONS, CONTROL, Result, run

CHECKS = (
    "verl_advantages",
    "verl_returns",
    "verl_losses",
    "verl_covariance",
    "verl_corrections",
    "verl_sums",
    "verl_distillation",
    "trl_losses",
    "trl_scoring",
    "trl_preferences",
    "openrlhf_losses",
    "openrlhf_advantages",
)
PACKAGES = ("torch", "verl", "trl", "openrlhf", "transformers")
RESULTS = Path(__file__).parent / "results.json"


def main() -> int:
    """Run every comparison, print the table, write results.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="comparisons whose name contains this")
    parser.add_argument("--no-save", action="store_true", help="leave results.json as it is")
    parser.add_argument(
        "--control",
        action="store_true",
        help="make our functions wrong by a thousandth: passes when every comparison notices",
    )
    args = parser.parse_args()
    CONTROL.on = args.control
    torch.set_num_threads(1)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # its warning, once a trainer
    for module in CHECKS:
        importlib.import_module(module)
    chosen = [c for c in COMPARISONS.entries if args.only in f"{c.ours} {c.theirs}"]
    results = [run(comparison) for comparison in chosen]
    print(table(results))
    if args.control:
        unnoticed = [result for result in results if result.status != "DIFFERENT"]
        print(f"{len(unnoticed)} of {len(results)} comparisons did not notice")
        return 1 if unnoticed else 0
    if not args.only and not args.no_save:
        RESULTS.write_text(json.dumps(as_json(results), indent=2) + "\n", encoding="utf-8")
    return 0 if results and all(result.is_fine for result in results) else 1


def as_json(results: Sequence[Result]) -> dict[str, object]:
    """Versions, counts and every line."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "counts": counts(results),
        "results": [asdict(result) for result in results],
    }


def counts(results: Sequence[Result]) -> dict[str, int]:
    """How many of each status."""
    statuses = [result.status for result in results]
    return {status: statuses.count(status) for status in sorted(set(statuses))}


def table(results: Sequence[Result]) -> str:
    """One line a comparison; the reason of an explained difference on the line below."""
    header = ("ours", "theirs", "value", "gradient", "before conversion", "verdict")
    rows = [
        (
            result.ours,
            _theirs(result),
            _number(result.value),
            _number(result.gradient),
            _number(result.unconverted),
            result.status,
        )
        for result in results
    ]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [_line(header, widths)]
    for row, result in zip(rows, results, strict=True):
        lines.append(_line(row, widths))
        page = f" (docs/algorithms/{result.page}.md)" if result.page else ""
        lines += [f"    {text}{page}" for text in (result.difference, result.detail) if text]
    total = ", ".join(f"{number} {status}" for status, number in counts(results).items())
    return "\n".join([*lines, f"{len(results)} comparisons: {total}"])


def _theirs(result: Result) -> str:
    package, _, path = result.theirs.partition(":")
    return f"{package} {result.version} {path}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


if __name__ == "__main__":
    sys.exit(main())
