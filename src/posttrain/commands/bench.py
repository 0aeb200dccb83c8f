"""posttrain bench."""

from __future__ import annotations

import json
from collections.abc import Sequence

from posttrain.benchmarks.catalog import BENCHMARKS, benchmark


def bench_command(name: str | None, arguments: Sequence[str]) -> None:
    """Run one benchmark, which reads its own options, or list them all."""
    if name is not None and not name.startswith("-"):
        benchmark(name).run(arguments)
        return
    given = [*([] if name is None else [name]), *arguments]
    if given == ["--json"]:
        print(json.dumps([{"name": b.name, "summary": b.summary} for b in BENCHMARKS]))
        return
    if given and given != ["--help"]:
        benchmark(given[0])  # raises: an option is no name
    width = max(len(b.name) for b in BENCHMARKS)
    for b in BENCHMARKS:
        print(f"{b.name.ljust(width)}  {b.summary}")
