"""What every benchmark reports: repeated measurements, ratios, facts of the machine.

A number without its spread and its machine is not a result, so a report always carries both.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from posttrain.config import default_threads

MIN_REPEATS = 5
"""Fewer values than this have no median worth recording."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One quantity, measured several times in `unit`.

    Example:
        >>> m = Measure("step", "s", (3.0, 1.0, 2.0))
        >>> m.median, m.low, m.high
        (2.0, 1.0, 3.0)
    """

    name: str
    unit: str
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError(f"measure {self.name!r} has no value; measure at least once")

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


def ratio(name: str, numerator: Measure, denominator: Measure) -> Measure:
    """Quotients of values that were measured alternately, pair by pair.

    A pair shares what the machine did at its time, so that the median of quotients moves less than
    the quotient of medians. Raises ValueError when units or counts differ.

    Example:
        >>> ratio("speed-up", Measure("old", "s", (4.0, 9.0)), Measure("new", "s", (2.0, 3.0)))
        Measure(name='speed-up', unit='x', values=(2.0, 3.0))
    """
    if numerator.unit != denominator.unit:
        raise ValueError(
            f"{name}: {numerator.name} is in {numerator.unit}, {denominator.name} in "
            f"{denominator.unit}; compare like with like"
        )
    if len(numerator.values) != len(denominator.values):
        raise ValueError(
            f"{name}: {len(numerator.values)} values of {numerator.name} and "
            f"{len(denominator.values)} of {denominator.name} are no pairs; alternate them"
        )
    pairs = zip(numerator.values, denominator.values, strict=True)
    return Measure(name, "x", tuple(a / b for a, b in pairs))


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a number was taken. `load` is the one-minute load average before the measurement."""

    cpu: str
    cores: int
    threads: int
    torch: str
    transformers: str
    python: str
    system: str
    load: float

    @property
    def key(self) -> str:
        """What baselines of one kind of machine share."""
        return f"{self.cpu}, {self.cores} cores"


def this_machine(threads: int) -> Machine:
    """Facts of this machine; `threads` is what the measured code computes with."""
    return Machine(
        cpu=_cpu_model(),
        cores=default_threads(),
        threads=threads,
        torch=importlib.metadata.version("torch"),
        transformers=importlib.metadata.version("transformers"),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        load=os.getloadavg()[0],
    )


def _cpu_model() -> str:
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        for line in facts.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


@dataclass
class Report:
    """What one benchmark found. `floor` and `aim` are the design's words for it."""

    name: str
    measures_what: str
    against: str
    floor: str
    aim: str
    machine: Machine
    settings: Mapping[str, Any]
    measures: list[Measure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, unit: str, values: Sequence[float]) -> Measure:
        """Record a measure and return it."""
        measure = Measure(name, unit, tuple(values))
        self.measures.append(measure)
        return measure

    def add_ratio(self, name: str, numerator: Measure, denominator: Measure) -> Measure:
        """Record `ratio(...)` of two measures and return it."""
        measure = ratio(name, numerator, denominator)
        self.measures.append(measure)
        return measure

    def as_json(self) -> dict[str, Any]:
        """Everything, with median and spread beside the values."""
        record = asdict(self)
        record["warnings"] = self.warnings()
        record["measures"] = [
            {**asdict(m), "median": m.median, "min": m.low, "max": m.high} for m in self.measures
        ]
        return record

    def warnings(self) -> list[str]:
        """Why these numbers should not be quoted, if so."""
        warnings = []
        fewest = min(len(m.values) for m in self.measures)
        if fewest < MIN_REPEATS:
            warnings.append(f"medians of {fewest} values: a result needs {MIN_REPEATS}")
        if self.machine.load > 0.5:
            warnings.append(
                f"load average was {self.machine.load:.1f} before the start: not an idle machine"
            )
        return warnings

    def as_text(self) -> str:
        """For people: what, against what, a table, the goal, the machine."""
        rows = [("", "median", "min", "max", "unit", "values")]
        rows += [
            (m.name, *(_number(v) for v in (m.median, m.low, m.high)), m.unit, str(len(m.values)))
            for m in self.measures
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        table = [
            "  ".join(
                cell.ljust(width) if i in (0, 4) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        machine = self.machine
        settings = ", ".join(f"{key} {value}" for key, value in self.settings.items())
        return "\n".join(
            [
                f"{self.name}: {self.measures_what}",
                f"against: {self.against}",
                f"settings: {settings}",
                *table,
                f"floor: {self.floor}; aim: {self.aim}",
                f"machine: {machine.key}, {machine.threads} threads, torch {machine.torch}, "
                f"transformers {machine.transformers}, Python {machine.python}, {machine.system}",
                *(f"note: {note}" for note in self.notes),
                *(f"WARNING: {warning}" for warning in self.warnings()),
            ]
        )


def _number(value: float) -> str:
    if value != 0 and abs(value) < 0.01:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"


def save(report: Report, folder: Path) -> Path:
    """Put the report into NAME.json under this kind of machine; others' numbers stay."""
    path = folder / f"{report.name}.json"
    saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    saved[report.machine.key] = report.as_json()
    folder.mkdir(exist_ok=True)
    path.write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return path
