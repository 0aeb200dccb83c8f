"""posttrain doctor."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from posttrain.doctor import collect

_MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}


def doctor_command(as_json: bool) -> None:
    """Print every check; exit status 1 when one fails."""
    report = collect()
    if as_json:
        print(json.dumps(asdict(report)))
    else:
        for check in report.checks:
            print(f"{_MARKS[check.status]} {check.name}: {check.detail}")
            if check.remedy:
                print(f"       -> {check.remedy}")
    if any(check.status == "fail" for check in report.checks):
        sys.exit(1)
