"""A user's own rows and reward function, through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.journal import Journal
from posttrain.types import Invalid, Scored

STEPS = (
    "num_steps=3",
    "threads=1",
    "rollout.groups_per_step=3",
    "rollout.group_size=4",
    "rollout.max_attempts=1",
    "checkpoint.every=2",
    "eval.num_tasks=2",
)
RECIPE = """
[model]
path = "tiny-char"
dtype = "float32"
[sampler]
max_tokens = 4
[optim]
lr = 3e-3
[env]
type = "dataset"
path = "data.jsonl"
reward = "reward.py:reward"
eval_frac = 0.2
reward_timeout_s = 1.0
"""
GOOD = """
def reward(completion, answer):
    return sum(c in "aeiou" for c in completion) / 4
"""
# The task says how its grading fails, so that every kind occurs at a known place.
FAILING = """
import time

def reward(completion, mode):
    if mode == "raise":
        raise ValueError("no such answer")
    if mode == "hang":
        time.sleep(60)
    value = sum(c.islower() for c in completion) / 4
    return {"nan": float("nan"), "text": "0.5"}.get(mode, value)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.toml").write_text(RECIPE)
    return tmp_path


def write_rows(folder: Path, modes: list[str]) -> None:
    rows = [{"prompt": f"q {i}", "answer": "a", "mode": mode} for i, mode in enumerate(modes)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def command(folder: Path, *more: str, run: str = "run") -> list[str]:
    run_dir = str(folder / run)
    return ["train", "mine.toml", *STEPS, *more, "--run-dir", run_dir, "--resume", "--json"]


def test_a_failing_grader_is_counted_by_kind_and_never_a_reward_of_zero(
    cli: Any, folder: Path
) -> None:
    """c21: some samples have no verdict; the others train, the run goes on."""
    modes = ["raise", "nan", "text", "hang"] + ["fine"] * 8
    write_rows(folder, modes)
    (folder / "reward.py").write_text(FAILING)
    done = cli(*command(folder, "rollout.max_invalid_frac=1.0", "num_steps=4"))
    assert done.status == 0, done.err
    kinds = {"raise": "reward_error", "nan": "reward_value", "text": "reward_value"}
    kinds["hang"] = "reward_timeout"
    expected: dict[str, int] = {}
    with Journal.open(folder / "run", readonly=True) as journal:
        for record in journal.draws():
            mode = modes[int(record.draw.task_id.split(":")[1]) - 1]
            for trajectory in journal.group(record.draw.draw_id):
                verdict = trajectory.verdict
                if mode == "fine":
                    assert isinstance(verdict, Scored)
                    continue
                assert isinstance(verdict, Invalid) and verdict.kind.value == kinds[mode]
                expected[kinds[mode]] = expected.get(kinds[mode], 0) + 1
            if mode != "fine":
                assert (record.status.value, record.reason) == ("dropped", "invalid")
    assert sum(expected.values()) >= 8
    summary = done.events[-1]
    assert summary["invalid"] == expected
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    counted: dict[str, float] = {}
    for line in lines:
        metrics = json.loads(line)
        for kind in expected:
            count = metrics.get(f"trajectories/invalid/{kind}", 0.0)
            counted[kind] = counted.get(kind, 0.0) + count
        assert metrics.get("reward/mean", 1.0) > 0, "nothing failed is averaged in as 0"
    assert counted == expected


def test_when_every_sample_fails_the_run_stops_and_goes_on_once_that_is_mended(
    cli: Any, folder: Path, read_json: Any
) -> None:
    write_rows(folder, ["raise"] * 12)
    (folder / "reward.py").write_text(FAILING)
    stopped = cli(*command(folder))
    assert stopped.status == 1
    for part in (
        "step 1: 12 of 12 episodes have no reward",
        "reward_error",
        "ValueError: no such answer",
        "reward.py:6",
        "not trained as 0",
        "--resume",
    ):
        assert part in stopped.err
    assert "Traceback" not in stopped.err
    summary = read_json(folder / "run" / "summary.json")
    assert (summary["exit_reason"], summary["steps"]) == ("failed", 0)
    assert summary["evaluation"]["before"]["accuracy"] is None
    (folder / "reward.py").write_text(GOOD)
    done = cli(*command(folder))
    assert done.status == 0, done.err
    assert done.events[-1]["steps"] == 3
    draws = done.events[-1]["draws"]
    assert draws["dropped"]["invalid"] == 3 and draws["open"] == 0
    assert draws["drawn"] == 12


def test_two_runs_of_one_seed_are_the_same_run(cli: Any, folder: Path, outcome: Any) -> None:
    """k12: the evaluation before training too; k05: a reward per trajectory decides pass@k."""
    write_rows(folder, ["fine"] * 12)
    (folder / "reward.py").write_text(GOOD)
    more = ["eval.temperature=1.0", "eval.samples_per_task=4"]
    for run in ("one", "two"):
        assert cli(*command(folder, *more, run=run)).status == 0
    one, two = outcome(folder / "one"), outcome(folder / "two")
    assert one == two
    report = one.evaluations[0]
    assert set(report["pass_at_k"]) == {"1", "2", "4"}
    assert {len(row) for row in report["correct"].values()} == {4}
    assert cli(*command(folder, *more, "seed=1", run="other")).status == 0
    assert outcome(folder / "other").weights_hash != one.weights_hash


def test_an_overlap_of_training_and_evaluation_is_said(cli: Any, folder: Path) -> None:
    """k11: the same prompts in both files; the warning is shown and kept."""
    write_rows(folder, ["fine"] * 12)
    (folder / "reward.py").write_text(GOOD)
    lines = (folder / "data.jsonl").read_text().splitlines(keepends=True)
    (folder / "held_out.jsonl").write_text("".join(lines[:3]))
    done = cli(*command(folder, "env.eval_path=held_out.jsonl", "env.eval_frac=0.1", "num_steps=1"))
    assert done.status == 0, done.err
    messages = [e["text"] for e in done.events if e["event"] == "message"]
    assert any("3 identical prompts are in both" in text for text in messages)
    assert "3 identical prompts" in (folder / "run" / "log.txt").read_text()


def test_a_reward_function_sees_every_column_and_the_recipe_finds_it_from_anywhere(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """l07: paths of a recipe start beside it, whatever the working directory is."""
    write_rows(folder, ["fine"] * 12)
    (folder / "reward.py").write_text(
        "def reward(completion, prompt, task, answer, mode):\n"
        "    assert (answer, mode, task.answer, prompt[:2]) == ('a', 'fine', 'a', 'q ')\n"
        "    return len(set(completion)) / 4\n"
    )
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    argv = command(folder, "num_steps=1")
    argv[1] = "../mine.toml"
    done = cli(*argv)
    assert done.status == 0, done.err
    assert done.events[-1]["invalid"] == {}
