"""Habits that a reader relies on: what is caught, what is documented, what an import costs."""

from __future__ import annotations

import ast
import doctest
import importlib
import subprocess
import sys
from typing import Any

import pytest

HEAVY = {"torch", "transformers", "numpy", "pydantic", "typer", "rich", "datasets", "ray"}


def _catches_everything(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
    return bool(names & {"Exception", "BaseException"})


def test_errors_are_never_swallowed_without_a_name(source: Any) -> None:
    """Catching everything needs a `# boundary:` comment that says what records it, or a `raise`.

    A bare except is never right: it hides that KeyboardInterrupt is meant too.
    """
    found = []
    for module in source.modules:
        lines = module.text.splitlines()
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ExceptHandler) or not _catches_everything(node):
                continue
            line = lines[node.lineno - 1]
            raises_again = isinstance(node.body[-1], ast.Raise)
            if node.type is None or not (raises_again or "# boundary:" in line):
                found.append(f"{module.where(node.lineno)}: {line.strip()}")
    assert not found, "\n".join(found)


def test_public_functions_and_classes_say_what_they_are(source: Any) -> None:
    silent = [
        f"{module.where(node.lineno)}: {node.name}"
        for module in source.modules
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    silent += [module.where(1) for module in source.modules if not ast.get_docstring(module.tree)]
    assert not silent, "no docstring:\n" + "\n".join(silent)


def test_every_example_in_a_docstring_is_true(source: Any) -> None:
    failed, examples = [], 0
    for module in source.modules:
        if ">>>" not in module.text:
            continue
        result = doctest.testmod(importlib.import_module(module.name))
        examples += result.attempted
        if result.failed:
            failed.append(module.name)
    assert not failed and examples > 20


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("posttrain", HEAVY),
        ("posttrain.config", HEAVY - {"pydantic"}),
        ("posttrain.errors", HEAVY),
        ("posttrain.types", HEAVY - {"numpy"}),
    ],
)
def test_importing_loads_nothing_heavy(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; print(*({absent!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_importing_changes_nothing_and_starts_nothing() -> None:
    code = (
        "import os, threading; before = dict(os.environ)\n"
        "import posttrain\n"
        "assert dict(os.environ) == before and threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
