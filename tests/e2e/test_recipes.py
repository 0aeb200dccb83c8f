"""The shipped recipes do what they claim; one that is broken on purpose does not learn."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.algo.credit import Credit, TurnWeights
from posttrain.recipe_files import load_recipe, shipped_recipes

SEEDS = {"reverse": (0, 1, 2), "binary-search": (0, 1, 2)}
CLAIMS = [(name, seed) for name in shipped_recipes() for seed in SEEDS.get(name, (0,))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), CLAIMS)
def test_a_shipped_recipe_keeps_its_claim(name: str, seed: int, tmp_path: Path) -> None:
    claim = load_recipe(name)[0].expect
    assert claim is not None
    short = ["num_steps=1", "eval.num_tasks=4"] if claim.accuracy_after_min == 0 else []
    command = [sys.executable, "-m", "posttrain.cli", "train", name, f"seed={seed}", *short]
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run"), "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    before, after = (summary["evaluation"][k]["accuracy"]["mean"] for k in ("before", "after"))
    assert claim.accuracy_before_max is None or before <= claim.accuracy_before_max
    assert claim.accuracy_after_min is None or after >= claim.accuracy_after_min
    assert claim.wall_s_max is None or summary["wall_s"] <= claim.wall_s_max


SHORT = ("num_steps=40", "rollout.groups_per_step=32", "eval.num_tasks=16", "checkpoint.every=40")


def reward_after(cli: Any, run_dir: Path) -> float:
    done = cli("train", "reverse", *SHORT, "--run-dir", run_dir)
    assert done.status == 0, done.err
    report = json.loads((run_dir / "summary.json").read_text())["evaluation"]["after"]
    return float(report["reward"]["mean"])


def test_a_shortened_recipe_learns_and_with_negated_advantages_it_does_not(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = reward_after(cli, tmp_path / "sound")
    from posttrain.algo.algorithm import Algorithm

    sound = Algorithm.credit

    def opposite(weights: TurnWeights) -> TurnWeights:
        return replace(weights, per_turn=tuple(-w for w in weights.per_turn))

    def negated(self: Algorithm, *args: Any) -> Credit:
        credit = sound(self, *args)
        streams = {
            key: {name: opposite(weights) for name, weights in own.items()}
            for key, own in credit.streams.items()
        }
        return replace(credit, streams=streams)

    monkeypatch.setattr(Algorithm, "credit", negated)
    spoiled = reward_after(cli, tmp_path / "negated")
    assert learned > 0.15 and spoiled < learned / 2
