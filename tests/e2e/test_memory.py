"""`check` says beforehand what memory a run will need."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest


def posttrain(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "posttrain.cli", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "settings"),
    [("reverse", ["num_steps=12"]), ("quickstart", ["num_steps=4", "checkpoint.every=2"])],
)
def test_the_peak_that_check_states_is_within_15_percent_of_what_a_run_needs(
    recipe: str, settings: list[str], tmp_path: Path
) -> None:
    *_, facts = posttrain("check", recipe, *settings, "--json").splitlines()
    stated = json.loads(facts)["peak memory of the run"]
    found = re.match(r"([\d.]+) GB", stated)
    assert found is not None
    posttrain("train", recipe, *settings, "--run-dir", str(tmp_path / "run"), "--json")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    measured = summary["peak_memory_bytes"] / 1e9
    assert float(found[1]) == pytest.approx(measured, rel=0.15)
