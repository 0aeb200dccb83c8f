"""The source tree as the style tests see it: parsed once, named as Python names it."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"


@dataclass(frozen=True)
class Import:
    """One imported name. `at_import_time` is False inside functions and TYPE_CHECKING blocks."""

    target: str
    line: int
    at_import_time: bool


class Module:
    """One file of src/posttrain."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        parts = path.relative_to(SRC).with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)

    def where(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}"

    @cached_property
    def imports(self) -> list[Import]:
        return list(self._walk(self.tree, at_import_time=True))

    def _walk(self, node: ast.AST, at_import_time: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, at_import_time)
            elif isinstance(child, ast.ImportFrom):
                base = self._absolute(child)
                for alias in child.names:
                    yield Import(f"{base}.{alias.name}", child.lineno, at_import_time)
            else:
                later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
                    isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                )
                yield from self._walk(child, at_import_time and not later)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name.split(".")
        keep = len(package) - node.level + (1 if self.is_package else 0)
        return ".".join([*package[:keep], *([node.module] if node.module else [])])


class Source:
    """All modules, and the files of the project."""

    root = ROOT

    def __init__(self) -> None:
        self.modules = [Module(path) for path in sorted((SRC / "posttrain").rglob("*.py"))]
        self.by_name = {module.name: module for module in self.modules}

    def module_of(self, target: str) -> str | None:
        """The posttrain module that an imported name lives in, or None for other packages."""
        while target:
            if target in self.by_name:
                return target
            target = target.rpartition(".")[0]
        return None

    @cached_property
    def files(self) -> list[Path]:
        """Every text file that is or would be tracked."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if listed.returncode == 0:
            paths = [ROOT / name for name in listed.stdout.split("\0") if name]
        else:  # a source archive
            paths = [path for path in ROOT.rglob("*") if not self._is_generated(path)]
        return sorted(path for path in paths if path.is_file() and self._is_text(path))

    @staticmethod
    def _is_generated(path: Path) -> bool:
        made = {"__pycache__", "runs", "dist", "build"}
        return any(part.startswith(".") or part in made for part in path.relative_to(ROOT).parts)

    @staticmethod
    def _is_text(path: Path) -> bool:
        return b"\0" not in path.read_bytes()


@pytest.fixture(scope="session")
def source() -> Source:
    """Parsed once. An empty tree would make every rule hold, so it is refused."""
    source = Source()
    assert len(source.modules) > 30
    return source
