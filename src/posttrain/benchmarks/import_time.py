"""import-time: what starting costs, in fresh processes, and whether anything heavy was loaded."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

from posttrain.benchmarks.options import argument_parser, finish, parse
from posttrain.benchmarks.report import Report, this_machine

HEAVY = frozenset(
    {"torch", "transformers", "numpy", "pydantic", "typer", "rich", "datasets", "ray"}
)
CASES = {
    "python alone": ["-c", "pass"],
    "import posttrain": ["-c", "import posttrain"],
    "import posttrain.config": ["-c", "import posttrain.config"],
    "posttrain --help": ["-c", "from posttrain.cli import main; main()", "--help"],
}


def wall_s(options: list[str]) -> float:
    """Seconds of a whole process, which must succeed."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *options], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def heavy_modules(options: list[str]) -> list[str]:
    """Which of `HEAVY` the process imports, from the interpreter's own log of imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *options], capture_output=True, text=True, check=True
    )
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0]
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    return sorted(HEAVY & imported)


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    args = parse(argument_parser("import-time", __doc__), arguments)
    report = Report(
        name="import-time",
        measures_what="wall time of a whole process, interpreter included",
        against="python alone",
        floor="import posttrain < 0.3 s, posttrain --help < 0.5 s, nothing heavy loaded",
        aim="the same",
        machine=this_machine(threads=1),
        settings={"repeats": args.repeats},
    )
    heavy = {name: heavy_modules(options) for name, options in CASES.items()}
    walls: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(args.repeats):
        for name, options in CASES.items():
            walls[name].append(wall_s(options))
    for name, values in walls.items():
        report.add(name, "s", values)
        report.notes.append(f"{name} loads of the heavy: {', '.join(heavy[name]) or 'none'}")
    finish(report, args)
