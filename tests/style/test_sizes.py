"""Files have one noun and functions fit on a screen."""

from __future__ import annotations

import ast
from typing import Any

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

# "path" or "path:function" -> (date, why it may be longer).
LONGER: dict[str, tuple[str, str]] = {
    "src/posttrain/types.py": ("2026-11-30", "every record in one place; each is short"),
}


def test_files_and_functions_stay_short_or_carry_a_dated_reason(source: Any) -> None:
    longer: dict[str, int] = {}
    for module in source.modules:
        path = str(module.path.relative_to(source.root))
        if (lines := module.text.count("\n")) > MAX_FILE_LINES:
            longer[path] = lines
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    longer[f"{path}:{node.name}"] = lines
    unexplained = {name: lines for name, lines in longer.items() if name not in LONGER}
    assert not unexplained, f"too long: {unexplained}"
    assert not set(LONGER) - set(longer), "a reason for something that is short by now must go"
