"""The options that benchmarks share, and how one ends."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import posttrain
from posttrain.benchmarks.report import MIN_REPEATS, Report, save
from posttrain.config import default_threads
from posttrain.errors import ConfigError


def checkout() -> Path:
    """The repository that this package is run from: peers and baselines are kept there.

    Raises ConfigError for an installed package.
    """
    root = Path(posttrain.__file__).parents[2]
    if not (root / "benchmarks" / "peers").is_dir():
        raise ConfigError(
            f"{root} is no checkout of the repository, which peers and baselines are kept in; "
            "install from a checkout with pip install -e, or leave out --save and use --alone"
        )
    return root


def argument_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(
        prog=f"posttrain bench {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--save", action="store_true", help="write benchmarks/baselines/NAME.json")
    parser.add_argument(
        "--repeats", type=positive, default=MIN_REPEATS, help="measurements (default %(default)s)"
    )
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The options that were given. Raises ConfigError for --save where nothing can be saved."""
    args = parser.parse_args(arguments)
    if args.save:
        checkout()
    return args


def add_model(parser: argparse.ArgumentParser) -> None:
    """--model and --dtype."""
    parser.add_argument("--model", default="smollm2-135m-instruct", help="known name or a folder")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")


def add_threads(parser: argparse.ArgumentParser) -> None:
    """--threads, for benchmarks that compute in this process."""
    parser.add_argument(
        "--threads", type=positive, default=default_threads(), help="default: the cores allowed"
    )


def add_work_dir(parser: argparse.ArgumentParser) -> None:
    """--work-dir, for benchmarks whose runs write to a disk that is part of the number."""
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=None,
        help="existing folder on the disk to measure; default: the system's temporary folder",
    )


def positive(text: str) -> int:
    """argparse type: an integer from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


@contextmanager
def scratch(work_dir: Path | None) -> Iterator[Path]:
    """A folder that is removed afterwards."""
    with TemporaryDirectory(prefix="posttrain-bench-", dir=work_dir) as folder:
        yield Path(folder)


def progress(text: str) -> None:
    """A line on standard error: standard output is the report's."""
    print(text, file=sys.stderr, flush=True)


def finish(report: Report, args: argparse.Namespace) -> None:
    """Print the report, and save it when asked to."""
    print(json.dumps(report.as_json()) if args.json else report.as_text())
    if args.save:
        progress(f"saved {save(report, checkout() / 'benchmarks' / 'baselines')}")
