"""Curves as SVG."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from posttrain.benchmarks.figure import Curve, Panel, Scale, decades, write_svg

SVG = "{http://www.w3.org/2000/svg}"


def test_a_value_is_drawn_by_its_logarithm() -> None:
    scale = Scale(low=1.0, high=16.0, start=100.0, stop=20.0)
    assert [scale(v) for v in (1, 4, 16)] == pytest.approx([100.0, 60.0, 20.0])
    assert Scale(low=8.0, high=8.0, start=10.0, stop=20.0)(8.0) == 10.0, "a single size"


def test_marks_hold_all_values_between_them() -> None:
    assert decades(0.2, 30.0) == pytest.approx([0.1, 1, 10, 100])
    assert decades(1.0, 1.0) == pytest.approx([1, 10])


def test_a_figure_is_well_formed_and_shows_every_measured_point(tmp_path: Path) -> None:
    panels = [
        Panel(
            f"a < {i}",
            "s",
            [
                Curve("ours", [1, 2, 4], [0.5, 0.9, 2.0], 0, False),
                Curve("bound", [1, 2, 4], [0.1, 0.2, 0.4], 0, True),
            ],
        )
        for i in range(3)
    ]
    path = tmp_path / "new" / "folder" / "f.svg"
    write_svg(path, "Cost & size", panels, "a machine")
    root = ElementTree.parse(path).getroot()
    assert len(root.findall(f".//{SVG}circle")) == 3 * 3
    dashed = [p for p in root.iter(f"{SVG}path") if p.get("stroke-dasharray")]
    assert len(dashed) == 3 + 1, "the bound of each panel, and the legend's"
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert "Cost & size" in texts and "a < 2" in texts
    width, height = (float(root.get(k, "0")) for k in ("width", "height"))
    for circle in root.iter(f"{SVG}circle"):
        assert 0 < float(circle.get("cx", "0")) < width
        assert 0 < float(circle.get("cy", "0")) < height
    heights = [float(c.get("cy", "0")) for c in list(root.iter(f"{SVG}circle"))[:3]]
    assert heights == sorted(heights, reverse=True), "more seconds are higher up"


def test_a_figure_without_a_panel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a panel"):
        write_svg(tmp_path / "f.svg", "t", [], "")
