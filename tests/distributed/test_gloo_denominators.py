"""Ranks that add up three counts before and the gradient after are one process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).with_name("gloo_ranks.py")


@pytest.fixture(scope="module")
def ranks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gloo_ranks", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_gradient_does_not_depend_on_the_number_of_ranks(ranks, tmp_path) -> None:
    """Report a02. Three losses with every aggregation, a rank without any sample, groups whose
    members are on different ranks. Counts that are not added up are another loss."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    expected = ranks.one_process()
    assert len(expected) == 3 * 5
    assert ranks.mine_of(1, 2) == ranks.mine_of(3, 4) == [], "one rank has nothing"
    for world_size in (1, 2, 4):
        results = torch.load(tmp_path / f"{world_size}.pt")
        for name, (loss, gradient) in expected.items():
            assert float(gradient.abs().max()) > 1e-3
            found_loss, found = results["global"][name]
            assert float(found_loss) == pytest.approx(float(loss), abs=1e-12)
            assert float((found - gradient).abs().max()) < 1e-12, (world_size, name)
            local = results["local"][name][1]
            differs = float((local - gradient).abs().max()) > 1e-4
            assert differs == (world_size == 4), (world_size, name)
