"""The benchmarks' arithmetic, and that each of them runs, in its smallest size."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SCRIPTS = sorted(p.stem for p in BENCHMARKS.glob("*.py") if not p.stem.startswith("_"))

TINY = ["--model", "tiny-char", "--dtype", "float32", "--threads", "1"]
RECIPE = str(Path(__file__).parents[2] / "recipes/reverse.toml")
SMALLEST = {
    "import_time": [],
    "control_plane": ["--trajectories", "64", "--groups-per-step", "2"],
    "loop_overhead": [
        *("--steps", "5", "--checkpoint-every", "3", "--recipe", RECIPE),
        *("rollout.groups_per_step=2", "rollout.group_size=2"),
    ],
    "rollout": [*TINY, "--requests", "4", "--new-tokens", "2", "--prompt-tokens", "8"],
    "resume": [
        *("--recipe", RECIPE),
        *("--checkpoint-every", "3", "--redo", "2"),
        *("rollout.groups_per_step=2", "rollout.group_size=2"),
    ],
    "train_step": [
        *(*TINY, "--groups", "2", "--group-size", "2", "--prompt-tokens", "6"),
        *("--shared-tokens", "4", "--completion-tokens", "2"),
    ],
}
SLOW = {"resume"}  # three processes of its own


@pytest.fixture(autouse=True)
def benchmark_surroundings(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Scripts import their harness by name, and set what is global in torch."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path_factory.getbasetemp() / "bench-cache"))
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def load(stem: str) -> ModuleType:
    name = f"bench_{stem.lstrip('_')}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{stem}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture
def harness() -> ModuleType:
    return load("_harness")


def report_of(harness: ModuleType, repeats: int, cpu: str = "abacus", load: float = 0.0) -> Any:
    machine = dataclasses.replace(harness.this_machine(threads=1), cpu=cpu, load=load)
    report = harness.Report("b", "what", "whom", "floor", "aim", machine, {"size": 3})
    report.add("step", "s", [0.25 * (i + 1) for i in range(repeats)])
    return report


# --- arithmetic ---------------------------------------------------------------------------------


def test_median_and_spread_are_those_of_all_values(harness: ModuleType) -> None:
    odd = harness.Measure("m", "s", (9.0, 1.0, 2.0))
    assert (odd.median, odd.low, odd.high) == (2.0, 1.0, 9.0)
    assert harness.Measure("m", "s", (4.0, 1.0, 2.0, 9.0)).median == 3.0


def test_a_measure_without_a_value_is_refused(harness: ModuleType) -> None:
    with pytest.raises(ValueError, match="'m' has no value"):
        harness.Measure("m", "s", ())


def test_a_ratio_compares_what_was_measured_at_the_same_time(harness: ModuleType) -> None:
    """The machine was twice as slow for the second pair: that moves no quotient."""
    old = harness.Measure("old", "s", (6.0, 12.0, 7.0))
    new = harness.Measure("new", "s", (2.0, 4.0, 3.5))
    quotient = harness.ratio("speed-up", old, new)
    assert quotient.values == (3.0, 3.0, 2.0)
    assert quotient.median == 3.0
    assert old.median / new.median == 2.0, "the quotient of medians would say another thing"


def test_different_units_or_counts_make_no_ratio(harness: ModuleType) -> None:
    seconds = harness.Measure("a", "s", (1.0, 2.0))
    with pytest.raises(ValueError, match="like with like"):
        harness.ratio("r", seconds, harness.Measure("b", "tok/s", (1.0, 2.0)))
    with pytest.raises(ValueError, match="no pairs"):
        harness.ratio("r", seconds, harness.Measure("b", "s", (1.0,)))


# --- reports ------------------------------------------------------------------------------------


def test_numbers_that_should_not_be_quoted_say_so(harness: ModuleType) -> None:
    assert report_of(harness, repeats=5).warnings() == []
    assert "medians of 4" in report_of(harness, repeats=4).warnings()[0]
    busy = report_of(harness, repeats=5, load=3.5)
    assert "3.5" in busy.warnings()[0]
    assert "WARNING: load" in busy.as_text()
    assert busy.as_json()["warnings"] == busy.warnings()


def test_text_and_json_say_the_same(harness: ModuleType) -> None:
    report = report_of(harness, repeats=5)
    record, text = json.loads(json.dumps(report.as_json())), report.as_text()
    (measure,) = record["measures"]
    assert (measure["median"], measure["min"], measure["max"]) == (0.75, 0.25, 1.25)
    assert all(f"{measure[key]:.3f}" in text for key in ("median", "min", "max"))
    for said in ("what", "whom", "floor", "aim", "abacus", "size 3", record["machine"]["torch"]):
        assert said in text


def test_saving_keeps_the_numbers_of_other_machines(harness: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "baselines"
    harness.save(report_of(harness, repeats=5), folder)
    harness.save(report_of(harness, repeats=6, cpu="slide rule"), folder)
    path = harness.save(report_of(harness, repeats=7), folder)
    saved = json.loads(path.read_text())
    counts = {key.split(",")[0]: len(r["measures"][0]["values"]) for key, r in saved.items()}
    assert counts == {"abacus": 7, "slide rule": 6}


# --- the scripts --------------------------------------------------------------------------------


def test_no_benchmark_is_left_out_here() -> None:
    assert set(SCRIPTS) == set(SMALLEST)


@pytest.mark.parametrize("stem", SCRIPTS)
def test_help_says_what_is_measured(
    stem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [stem, "--help"])
    with pytest.raises(SystemExit) as ended:
        load(stem).main()
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"{stem.replace('_', '-')}: " in text
    assert all(option in text for option in ("--json", "--save", "--repeats"))


@pytest.mark.parametrize(
    "stem", [pytest.param(s, marks=pytest.mark.slow if s in SLOW else ()) for s in SCRIPTS]
)
def test_each_benchmark_runs_and_reports_under_the_name_that_make_takes(
    stem: str,
    harness: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted(BENCHMARKS.rglob("*.json"))
    monkeypatch.setattr(sys, "argv", [stem, "--json", "--repeats", "1", *SMALLEST[stem]])
    load(stem).main()
    record = json.loads(capsys.readouterr().out)
    assert record["name"] == stem.replace("_", "-")
    assert record["measures"] and record["floor"] and record["machine"]["cores"] >= 1
    for measure in record["measures"]:
        assert np.isfinite(measure["values"]).all(), measure
    assert sorted(BENCHMARKS.rglob("*.json")) == before, "only --save writes"


def test_the_parts_of_a_step_add_up_to_its_wall_time() -> None:
    step = load("loop_overhead").Step(
        number=2,
        wall_s=10.0,
        metrics={
            "time/rollout_s": 5.0,
            "time/learner_s": 4.0,
            "sampler/busy_s": 4.5,
            "learner/step_s": 3.75,
        },
        checkpoint=False,
    )
    assert (step.other_s, step.hash_s, step.beside_engine_s) == (1.0, 0.25, 0.5)
    assert step.strict_s == step.other_s + step.hash_s + step.beside_engine_s


def test_without_sharing_every_token_is_a_row_and_the_work_is_the_same() -> None:
    module = load("train_step")
    args = module.argparse.Namespace(
        groups=3, group_size=2, prompt_tokens=6, shared_tokens=4, max_tokens=1000
    )
    shared = module.shared_samples(args, completion=5, vocab=50_000)
    alone = module.without_sharing(shared, vocab=50_000)
    assert module.num_rows(alone, 1000) == sum(len(s) for s in shared) == 6 * 11
    assert module.num_rows(shared, 1000) == 4 + 3 * 2 + 6 * 5
    for a, b in zip(shared, alone, strict=True):
        assert a.num_loss_tokens == b.num_loss_tokens == 5
        assert (a.token_ids[1:] == b.token_ids[1:]).all()


def test_a_resume_is_compared_with_what_its_own_steps_took() -> None:
    module = load("resume")
    report = load("_harness").Report(
        "resume", "", "", "", "", load("_harness").this_machine(threads=1), {}
    )
    cost = module.Regeneration(checkpoint=5, num_steps=2, num_timed=2, rollout_s=9.0, learner_s=3.0)
    resumes = [module.Resume(start_up_s=1.0, restore_s=0.5, redo_s=4.5)] * 2
    module.add_results(report, resumes, cost)
    found = {m.name.strip(): m.median for m in report.measures}
    assert found["regenerating over the whole resume"] == 12.0 / 6.0
    assert found["redo over the learner alone"] == 4.5 / 3.0
