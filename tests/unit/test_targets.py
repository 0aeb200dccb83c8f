"""Functions named as FILE.py:FUNCTION."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from posttrain.targets import load_module, parse_target


def test_two_files_of_one_name_are_two_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And neither hides a module of that name from others."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    modules = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        (folder / "json.py").write_text(f"where = {folder.name!r}\n")
        modules.append(load_module(parse_target("json.py:where"), (folder,)))
    assert [module.where for module in modules] == ["a", "b"]
    assert all(sys.modules[module.__name__] is module for module in modules)
    assert "where" not in vars(sys.modules["json"])
