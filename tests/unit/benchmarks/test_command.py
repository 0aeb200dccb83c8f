"""`posttrain bench`: each benchmark runs, in its smallest size, and reports under its name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from posttrain.benchmarks import options
from posttrain.benchmarks.catalog import BENCHMARKS
from posttrain.cli import app
from posttrain.commands.bench import bench_command
from posttrain.errors import ConfigError

ROOT = Path(__file__).parents[3]
NAMES = [b.name for b in BENCHMARKS]

TINY = ["--model", "tiny-char", "--threads", "1"]
FP32 = [*TINY, "--dtype", "float32"]
RECIPE = str(Path(__file__).parents[2] / "recipes/reverse.toml")
TWO_BY_TWO = ["rollout.groups_per_step=2", "rollout.group_size=2"]
STEP = ["--prompts", "2", "--group-size", "2", "--prompt-tokens", "8", "--new-tokens", "4"]
ROUND = ["--requests", "4", "--new-tokens", "2", "--prompt-tokens", "8"]
SMALLEST = {
    "grpo-short": [*TINY, *STEP, "--alone"],
    "grpo-long-prompt": [*TINY, *STEP, "--alone"],
    "rollout": [*FP32, *ROUND, "--alone"],
    "limits": [*TINY, "--shrink", "16", "--works", "grpo-short", "rollout"],
    "scaling": [*TINY, "--largest", "4", "--axes", "group size", "turns"],
    "train-step": [
        *(*FP32, "--groups", "2", "--group-size", "2", "--prompt-tokens", "6"),
        *("--shared-tokens", "4", "--completion-tokens", "2"),
    ],
    "loop-overhead": ["--steps", "5", "--checkpoint-every", "3", "--recipe", RECIPE, *TWO_BY_TWO],
    "control-plane": ["--trajectories", "64", "--groups-per-step", "2"],
    "resume": ["--recipe", RECIPE, "--checkpoint-every", "3", "--redo", "2", *TWO_BY_TWO],
    "import-time": [],
}
SLOW = {"resume", "grpo-long-prompt"}  # processes of its own; the same code as grpo-short


def test_no_benchmark_is_left_out_here() -> None:
    assert set(NAMES) == set(SMALLEST)


@pytest.mark.parametrize("name", NAMES)
def test_help_says_what_is_measured(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_command(name, ["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert name in text.splitlines()[0]
    assert f"{name}: " in text or f"{name}, " in text or f", {name}: " in text
    assert all(option in text for option in ("--json", "--save", "--repeats"))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in NAMES]
)
def test_each_benchmark_runs_and_reports_under_its_name(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("posttrain.benchmarks.machine_limits.BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr("posttrain.benchmarks.machine_limits.SQUARE", 64)
    monkeypatch.setattr("posttrain.benchmarks.machine_limits.MIN_S", 0.001)
    before = sorted((ROOT / "benchmarks").rglob("*.json"))
    bench_command(name, ["--json", "--repeats", "1", *SMALLEST[name]])
    record = json.loads(capsys.readouterr().out)
    assert record["name"] == name
    assert record["measures"] and record["floor"] and record["machine"]["cores"] >= 1
    names = [m["name"] for m in record["measures"]]
    assert len(set(names)) == len(names), "a value is found by its name"
    for measure in record["measures"]:
        assert np.isfinite(measure["values"]).all(), measure
        assert measure["unit"] != "s" or "%" in measure["unit"] or measure["min"] >= 0
    assert sorted((ROOT / "benchmarks").rglob("*.json")) == before, "only --save writes"


@pytest.mark.slow
def test_transformers_gives_as_many_tokens_with_a_log_prob_in_both_of_its_ways(
    capsys: pytest.CaptureFixture[str],
) -> None:
    peers = ["generate", "continuous"]
    bench_command("rollout", ["--json", "--repeats", "1", *FP32, *ROUND, "--peers", *peers])
    measures = {m["name"]: m for m in json.loads(capsys.readouterr().out)["measures"]}
    assert all(measures[f"embedded engine over {peer}"]["median"] > 0 for peer in peers)


def test_without_a_name_every_benchmark_is_listed_on_a_line_that_begins_with_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench_command(None, [])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES, "make bench reads the first word"
    bench_command(None, ["--json"])
    assert [b["name"] for b in json.loads(capsys.readouterr().out)] == NAMES


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean rollout"):
        bench_command("rolout", [])
    with pytest.raises(ConfigError, match="'--repeats' is unknown"):
        bench_command(None, ["--repeats", "1"])


def test_the_command_line_hands_on_what_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[object] = []
    monkeypatch.setattr(
        "posttrain.commands.bench.bench_command", lambda *given: heard.append(given)
    )
    app(["bench", "rollout", "--json", "--repeats", "2", "--help"], standalone_mode=False)
    app(["bench"], standalone_mode=False)
    assert heard == [("rollout", ["--json", "--repeats", "2", "--help"]), (None, [])]


def test_saving_outside_of_a_checkout_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "site-packages" / "posttrain" / "__init__.py"
    monkeypatch.setattr("posttrain.__file__", str(package))
    parser = options.argument_parser("x", "")
    assert options.parse(parser, []).save is False
    with pytest.raises(ConfigError, match="no checkout of the repository"):
        options.parse(parser, ["--save"])
