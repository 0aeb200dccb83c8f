"""What a command shows, to people and to programs, and where it puts things."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from posttrain.journal import Journal
from posttrain.recipe_files import load_recipe, resolve

RECIPE = str(Path(__file__).parents[1] / "recipes/reverse.toml")

QUICK = ("num_steps=2", "rollout.groups_per_step=2", "eval.num_tasks=2")


def test_help_loads_nothing_heavy() -> None:
    """i11: neither torch nor anything that only a GPU machine has."""
    code = (
        "import sys\nfrom posttrain.cli import main\nsys.argv = ['posttrain', '--help']\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'tokenizers', 'safetensors'}\n"
        "print('loaded:', *sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "posttrain train quickstart" in " ".join(done.stdout.split())
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_json_output_is_one_object_a_line_and_tells_the_whole_run(
    cli: Any, tmp_path: Path, read_json: Any
) -> None:
    done = cli("train", RECIPE, *QUICK, "--run-dir", tmp_path / "run", "--json")
    assert done.status == 0 and done.err == ""
    kinds = [event["event"] for event in done.events]
    evaluation = ["progress", "evaluation"]
    assert kinds == ["message", *evaluation, "step", "step", *evaluation, "summary"]
    summary = done.events[-1]
    del summary["event"]
    assert summary == read_json(tmp_path / "run" / "summary.json")
    assert summary["wall_s"] > 0 and summary["exit_reason"] == "finished"
    recipe = tomllib.loads((tmp_path / "run" / "recipe.resolved.toml").read_text())
    assert resolve(recipe, [], "of the run") == load_recipe(RECIPE, QUICK)[0]


def test_a_run_that_explodes_stops_with_the_reason_and_every_line_is_json(
    zygote: Any, tmp_path: Path, read_json: Any
) -> None:
    done = zygote.run(
        *("train", RECIPE, "num_steps=12", "optim.lr=1e30", "optim.warmup_steps=0"),
        *("--run-dir", tmp_path / "run", "--json"),
        cwd=tmp_path,
    )
    assert done.status == 1
    assert "logits hold NaN or infinity" in done.err and "Traceback" not in done.err
    assert {event["event"] for event in done.events} >= {"evaluation", "step"}
    assert read_json(tmp_path / "run" / "summary.json")["exit_reason"] == "failed"


def test_without_a_terminal_a_run_is_plain_lines_with_the_time_left(
    cli: Any, tmp_path: Path
) -> None:
    """i02: the sampling that evaluation used is there to read."""
    run_dir = tmp_path / "[bold]run[/x]"
    done = cli("train", RECIPE, *QUICK, "--run-dir", run_dir)
    assert done.status == 0, done.err
    assert "\x1b" not in done.out
    assert re.search(r"^step 1/2  \d+ s left  reward ", done.out, re.MULTILINE)
    assert re.search(r"^step 2/2  0 s left  ", done.out, re.MULTILINE)
    assert "held-out accuracy 0.000" in done.out
    assert "draws: 4 drawn = " in done.out
    assert f"run directory: {run_dir}" in done.out.splitlines()
    assert f"posttrain replay {run_dir} --verify" in done.out


def test_the_default_run_directory_is_named_in_full_and_lies_where_the_user_is(
    cli: Any, tmp_path: Path
) -> None:
    """i10: results are kept in the working directory, never in a system folder for temporaries."""
    done = cli("train", RECIPE, *QUICK)
    assert done.status == 0, done.err
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("reverse-")
    assert done.out.splitlines()[0] == f"run directory: {run_dir}"


def test_the_model_cache_is_where_the_user_wants_it(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """i08: nothing is shared between users unless they say so."""
    for variable, folder in (("POSTTRAIN_CACHE", "mine"), ("XDG_CACHE_HOME", "xdg/posttrain")):
        monkeypatch.delenv("POSTTRAIN_CACHE", raising=False)
        monkeypatch.setenv(variable, str(tmp_path / folder.partition("/")[0]))
        done = cli("models", "info", "tiny-char", "--json")
        assert done.status == 0, done.err
        assert done.events[-1]["folder"] == str(tmp_path / folder / "models" / "tiny-char")


def test_sampling_settings_reach_the_sampler(cli: Any, tmp_path: Path) -> None:
    """i02, i03, k09: each block has its own; what is set is what sampled."""
    done = cli(
        *("train", RECIPE, *QUICK, "num_steps=1", "rollout.group_size=6"),
        *('sampler.stop=["a", "b", "c", "d", "e"]', "sampler.max_tokens=40"),
        *("eval.temperature=0.8", "eval.samples_per_task=3", 'eval.stop=["Z", "z"]'),
        *("eval.max_tokens=12", "eval.top_k=20", "--run-dir", tmp_path / "run", "--json"),
    )
    assert done.status == 0, done.err
    report = next(e for e in done.events if e["event"] == "evaluation")
    assert report["sampling"] == {
        "max_tokens": 12,
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": 20,
        "stop": ["Z", "z"],
        "ignore_eos": False,
    }
    with Journal.open(tmp_path / "run", readonly=True) as journal:
        train = [t for s in journal.steps() for d in s.draw_ids for t in journal.group(d)]
        held_out = [t for g in journal.eval_groups(0) for t in g]
        groups = [len(g) for g in journal.eval_groups(0)]
    texts = [t.turns[0].completion.text for t in train]
    assert len(texts) == 12 and not any(set("abcde") & set(text) for text in texts)
    assert "stop_string" in {t.turns[0].completion.finish_reason.value for t in train}
    assert max(len(t.turns[0].completion) for t in train) > 12
    assert groups == [3, 3]
    assert max(len(t.turns[0].completion) for t in held_out) <= 12
    answers = [t.turns[0].completion.text for t in held_out]
    assert len(set(answers)) > 1 and any(set("abcde") & set(answer) for answer in answers)


def test_greedy_evaluation_is_the_same_each_time(cli: Any, tmp_path: Path) -> None:
    """k12, without a run: a recipe's base model."""
    reports = [cli("eval", RECIPE, "eval.num_tasks=4", "--json").events[-1] for _ in range(2)]
    assert reports[0] == reports[1]
    assert reports[0]["policy_version"] == 0 and reports[0]["num_tasks"] == 4
    assert list(tmp_path.iterdir()) == []


def test_eval_shows_questions_and_answers_to_people(cli: Any, reference: Path) -> None:
    done = cli("eval", reference, "--show", 2)
    assert done.status == 0, done.err
    assert "held-out accuracy" in done.out and "at step 8" in done.out
    assert len(re.findall(r"^  (right|wrong): '[abcd]{3}' -> ", done.out, re.MULTILINE)) == 2


def test_a_replay_shows_what_changed_to_people(cli: Any, reference: Path) -> None:
    done = cli("replay", reference, "algo.type=grpo")
    assert done.status == 0, done.err
    assert "grad norm " in done.out and "other weights" in done.out
    assert "was not kept: add --to FOLDER" in done.out
    verified = cli("replay", reference, "--verify")
    assert "verified: 8 steps re-trained from the journal, every hash equal" in verified.out


@pytest.mark.parametrize("command", [("recipes",), ("models", "list"), ("doctor",)])
def test_lists_are_json_when_asked(command: tuple[str, ...], cli: Any) -> None:
    done = cli(*command, "--json")
    assert done.status == 0, done.err
    assert len(done.events) == 1
    assert cli(*command).out.strip()


REPORT_MODULES = """
import json, sys
from posttrain.cli import main
try:
    main()
finally:
    banned = {"ray", "vllm", "sglang", "flash_attn", "triton"}
    json.dump(sorted(banned & set(sys.modules)), open("modules.json", "w"))
"""


def test_a_reader_that_goes_away_does_not_stop_a_run(
    tmp_path: Path, argv: Any, read_json: Any
) -> None:
    """i05: the tracker here is a pipe that nobody reads any more.

    i11: nor does a run load what only a GPU machine or a cluster has.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", REPORT_MODULES, *argv(tmp_path / "run")],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if '"event": "step"' in line:
            break
    process.stdout.close()
    _, err = process.communicate()
    summary = read_json(tmp_path / "run" / "summary.json")
    assert (summary["exit_reason"], summary["steps"]) == ("finished", 8)
    assert "cannot show the run any more" in err
    assert "cannot show the run any more" in (tmp_path / "run" / "log.txt").read_text()
    assert read_json(tmp_path / "modules.json") == []
