"""What this machine can do: bytes a second from memory, operations a second of matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from posttrain.benchmarks.report import Measure, Report
from posttrain.benchmarks.work import Limits, Work

BUFFER_BYTES = 1 << 28
"""Several times the largest caches, so that every byte comes from memory."""

SQUARE = 2048
"""Rows, columns and inner size of the product that stands for the peak."""

REPEATS = 5

MIN_S = 0.05
"""A measurement repeats its work until it has taken this long."""


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Measured rates; `best` takes the most that was seen of each, which makes bounds lower."""

    read: Measure
    copy: Measure
    peaks: dict[str, Measure]  # dtype -> large square product

    def best(self, dtype: str) -> Limits:
        """For bounds of work in this type."""
        return Limits(
            peak_flops=self.peaks[dtype].high * 1e9,
            bandwidth=max(self.read.high, self.copy.high) * 1e9,
        )


def measure_limits(repeats: int) -> MachineLimits:
    """With the threads that torch has now."""
    source = torch.ones(BUFFER_BYTES // 8, dtype=torch.int64)
    target = torch.empty_like(source)
    cube = (SQUARE, SQUARE, SQUARE)
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    return MachineLimits(
        read=Measure("memory: read", "GB/s", _rates(source.sum, source.nbytes, repeats)),
        copy=Measure(
            "memory: copy, both ways",
            "GB/s",
            _rates(lambda: target.copy_(source), 2 * source.nbytes, repeats),
        ),
        peaks={
            name: product_rate(f"{name}: {SQUARE} cubed", dtype, cube, repeats)
            for name, dtype in dtypes.items()
        },
    )


def both(before: MachineLimits, after: MachineLimits) -> MachineLimits:
    """Values of the beginning and of the end of a run: a machine that was busy at one of them would
    make bounds that can be beaten."""
    peaks = {d: _joined(m, after.peaks[d]) for d, m in before.peaks.items()}
    return MachineLimits(_joined(before.read, after.read), _joined(before.copy, after.copy), peaks)


def _joined(a: Measure, b: Measure) -> Measure:
    return Measure(a.name, a.unit, a.values + b.values)


def product_rate(
    name: str, dtype: torch.dtype, sizes: tuple[int, int, int], repeats: int
) -> Measure:
    """Of [rows, inner] times a weight [columns, inner], as linear layers store it."""
    rows, inner, columns = sizes
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rows, inner, generator=generator).to(dtype)
    weight = torch.randn(columns, inner, generator=generator).to(dtype)
    flops = 2.0 * rows * inner * columns
    return Measure(name, "GFLOP/s", _rates(lambda: torch.mm(a, weight.T), flops, repeats))


def _rates(work: Callable[[], object], amount: float, repeats: int) -> tuple[float, ...]:
    """Billions of `amount` a second, `repeats` times, after a first call that is thrown away."""
    work()
    started = time.perf_counter()
    work()
    count = max(1, round(MIN_S / (time.perf_counter() - started)))
    rates = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(count):
            work()
        rates.append(count * amount / (time.perf_counter() - started) / 1e9)
    return tuple(rates)


def add_bound(
    report: Report, name: str, parts: Mapping[str, Work], limits: Limits, ours: Measure
) -> None:
    """The seconds that the parts take at least, each and together, and how far `ours` is."""
    least = {part: work.least_s(limits) for part, work in parts.items()}
    count = len(ours.values)
    for part, seconds in least.items():
        report.add(f"  {name}: {part}", "s", [seconds] * count)
    total = report.add(name, "s", [sum(least.values())] * count)
    distance = report.add_ratio(f"{ours.name} over {name}", ours, total)
    if distance.low < 1.0:
        report.notes.append(
            f"{name} was beaten, so the machine was slower when its limits were measured than "
            "later: measure again on an idle one"
        )
    for part, work in parts.items():
        report.notes.append(
            f"{name}: {part} takes {work.flops / 1e9:.3g} GFLOP and {work.bytes / 1e9:.3g} GB"
        )
