"""import-time: what starting costs, in fresh processes, and whether anything heavy was loaded."""

from __future__ import annotations

import subprocess
import sys
import time

from _harness import Report, argument_parser, finish, this_machine

HEAVY = frozenset(
    {"torch", "transformers", "numpy", "pydantic", "typer", "rich", "datasets", "ray"}
)
CASES = {
    "python alone": ["-c", "pass"],
    "import posttrain": ["-c", "import posttrain"],
    "import posttrain.config": ["-c", "import posttrain.config"],
    "posttrain --help": ["-c", "from posttrain.cli import main; main()", "--help"],
}


def wall_s(arguments: list[str]) -> float:
    """Seconds of a whole process, which must succeed."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def heavy_modules(arguments: list[str]) -> list[str]:
    """Which of `HEAVY` the process imports, from the interpreter's own log of imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True
    )
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0]
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    return sorted(HEAVY & imported)


def main() -> None:
    args = argument_parser(__doc__).parse_args()
    report = Report(
        name="import-time",
        measures_what="wall time of a whole process, interpreter included",
        against="python alone",
        floor="import posttrain < 0.3 s, posttrain --help < 0.5 s, nothing heavy loaded",
        aim="the same",
        machine=this_machine(threads=1),
        settings={"repeats": args.repeats},
    )
    heavy = {name: heavy_modules(arguments) for name, arguments in CASES.items()}
    walls: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(args.repeats):
        for name, arguments in CASES.items():
            walls[name].append(wall_s(arguments))
    for name, values in walls.items():
        report.add(name, "s", values)
        report.notes.append(f"{name} loads of the heavy: {', '.join(heavy[name]) or 'none'}")
    finish(report, args)


if __name__ == "__main__":
    main()
