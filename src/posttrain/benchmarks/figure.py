"""Curves on logarithmic axes, as an SVG that a browser and a repository's page show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Told apart by people with any colour vision (Okabe and Ito 2008)."""

WIDTH, HEIGHT = 400, 300  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 40, 44
COLUMNS = 2
TITLE, LEGEND = 34, 30


@dataclass(frozen=True, slots=True)
class Curve:
    """Values [N] against sizes [N], all above 0."""

    name: str
    sizes: Sequence[float]
    values: Sequence[float]
    colour: int
    dashed: bool


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over one size. All panels of a figure name the same curves."""

    size_name: str
    value_name: str
    curves: Sequence[Curve]


@dataclass(frozen=True, slots=True)
class Scale:
    """A logarithmic axis from `low` to `high`, drawn from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        """Where a value is drawn.

        Example:
            >>> Scale(1.0, 100.0, 0.0, 50.0)(10.0)
            25.0
        """
        span = math.log(self.high / self.low) or 1.0
        return self.start + (self.stop - self.start) * math.log(value / self.low) / span


def decades(low: float, high: float) -> list[float]:
    """Powers of ten that hold both between them.

    Example:
        >>> decades(0.02, 3.0)
        [0.01, 0.1, 1.0, 10.0]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**e for e in range(first, max(last, first + 1) + 1)]


def write_svg(path: Path, title: str, panels: Sequence[Panel], note: str) -> None:
    """Panels side by side, one legend, a note below. Raises ValueError without a panel."""
    if not panels:
        raise ValueError("a figure needs a panel; measure along at least one axis")
    rows = -(-len(panels) // COLUMNS)
    width, height = WIDTH * min(COLUMNS, len(panels)), TITLE + LEGEND + HEIGHT * rows
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="{width - RIGHT}" y="22" text-anchor="end" fill="#555">{escape(note)}</text>',
        *_legend(panels[0].curves),
    ]
    for number, panel in enumerate(panels):
        x, y = WIDTH * (number % COLUMNS), TITLE + LEGEND + HEIGHT * (number // COLUMNS)
        parts += [f'<g transform="translate({x} {y})">', *_panel(panel), "</g>"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def _legend(curves: Sequence[Curve]) -> list[str]:
    parts, x, y = [], LEFT, TITLE + 12
    for curve in curves:
        parts.append(_line(f"M{x} {y}h28", curve))
        parts.append(f'<text x="{x + 34}" y="{y + 4}">{escape(curve.name)}</text>')
        x += 60 + 7 * len(curve.name)
    return parts


def _panel(panel: Panel) -> list[str]:
    sizes = sorted({s for c in panel.curves for s in c.sizes})
    values = [v for c in panel.curves for v in c.values]
    marks = decades(min(values), max(values))
    across = Scale(sizes[0], sizes[-1], LEFT, WIDTH - RIGHT)
    up = Scale(marks[0], marks[-1], HEIGHT - BOTTOM, TOP)
    parts = []
    for mark in marks:
        y = f"{up(mark):.1f}"
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y}" dy="4" text-anchor="end">{mark:g}</text>')
    for size in sizes:
        x = f"{across(size):.1f}"
        parts.append(f'<path d="M{x} {TOP}V{HEIGHT - BOTTOM}" stroke="#eee"/>')
        parts.append(
            f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{size:g}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{escape(panel.size_name)}</text>"
    )
    parts.append(f'<text x="{LEFT}" y="{TOP - 10}" fill="#555">{escape(panel.value_name)}</text>')
    for curve in panel.curves:
        points = [(across(s), up(v)) for s, v in zip(curve.sizes, curve.values, strict=True)]
        parts.append(_line("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), curve))
        if not curve.dashed:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[curve.colour]}"/>'
                for x, y in points
            ]
    return parts


def _line(path: str, curve: Curve) -> str:
    dashes = ' stroke-dasharray="6 4"' if curve.dashed else ""
    return (
        f'<path d="{path}" fill="none" stroke="{COLOURS[curve.colour]}" stroke-width="2"{dashes}/>'
    )
