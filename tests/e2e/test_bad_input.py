"""Bad input: status 2, one message with object, fact and remedy, and nothing on disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from posttrain.training.models import write_tiny_char

RECIPE = str(Path(__file__).parents[1] / "recipes/reverse.toml")

ROWS = [{"id": f"r{i}", "prompt": f"say {i}", "answer": str(i)} for i in range(12)]
REWARD = "def reward(completion, answer):\n    return float(completion.strip() == answer)\n"


@dataclass(frozen=True)
class Place:
    """A folder with a model, data and a reward, each good until a case spoils it."""

    folder: Path

    def write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return str(path)

    def rows(self, *rows: dict[str, Any]) -> str:
        return self.write("data.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def recipe(self, **changes: Any) -> str:
        """A dataset recipe; `changes` are keys of [env]."""
        env = {"type": "dataset", "path": "data.jsonl", "reward": "reward.py:reward", **changes}
        lines = [f"{key} = {json.dumps(value)}" for key, value in env.items()]
        text = '[model]\npath = "tiny-char"\ndtype = "float32"\n[sampler]\nmax_tokens = 4\n[env]\n'
        return self.write("mine.toml", text + "\n".join(lines) + "\n")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path / "place")
    place.folder.mkdir()
    place.rows(*ROWS)
    place.write("reward.py", REWARD)
    return place


def check(done: Any, run_dir: Path, *parts: str) -> None:
    assert done.status == 2, done.err
    for part in parts:
        assert part in done.err, f"{part!r} is not in: {done.err}"
    assert "Traceback" not in done.err
    assert f"\n{done.err}".count("\nerror: ") == 1
    assert not run_dir.exists(), "nothing is written before the input is good"


# --- recipes and overrides --------------------------------------------------------------------

SETTINGS: dict[str, tuple[list[str], list[str]]] = {
    "a mistyped key": (
        ["algo.loss.type=ppo_clip", "algo.loss.clip_hgih=0.3"],
        [
            "recipe reverse.toml",
            "algo.loss.clip_hgih is unknown",
            "did you mean algo.loss.clip_high?",
        ],
    ),
    "a mistyped section": (["optm.lr=1"], ["optm is unknown", "did you mean optim?"]),
    "a key of another environment": (
        ["env.max_number=5"],
        ["env.max_number is unknown", "known keys: ", "alphabet"],
    ),
    "a wrong type": (["num_steps=many"], ['num_steps is "many"', "valid integer"]),
    "a float for a count": (["num_steps=1.5"], ["num_steps is 1.5", "valid integer"]),
    "a value out of range": (["optim.beta1=1.5"], ["optim.beta1 is 1.5", "less than 1"]),
    "an unknown algorithm": (["algo.type=ppo"], ["algo.type is 'ppo'", "use one of rloo, grpo"]),
    "an unknown environment": (["env.type=chess"], ["env.type is 'chess'", "arithmetic, largest"]),
    "an unknown sampler": (["sampler.type=vllm"], ["sampler.type", "vllm", "embedded"]),
    "settings that need each other": (
        ["algo.fixed_length=64"],
        ["aggregation", "fixed_length", "set both", "or neither"],
    ),
    "a group of one": (["rollout.group_size=1"], ["rollout.group_size is 1", "use 2 or more"]),
    "groups that do not divide": (
        ["rollout.groups_per_step=6", "algo.num_minibatches=4"],
        ["rollout.groups_per_step 6", "algo.num_minibatches 4", "change one of them"],
    ),
    "greedy training (a26)": (["sampler.temperature=0"], ["temperature is 0", "use 1.0"]),
    "a temperature that overflows (a26)": (
        ["sampler.temperature=1e-6"],
        ["temperature is 1e-06", "use 0 for greedy or a value >= 0.001"],
    ),
    "a truncated training distribution (a10)": (
        ["sampler.top_p=0.9"],
        ["top_p is 0.9", "training needs top_p = 1", "set top_p under [eval]"],
    ),
    "top-k in training (a10)": (["sampler.top_k=5"], ["top_k is 5", "top_k = 0", "[eval]"]),
    "several greedy samples": (
        ["eval.samples_per_task=4"],
        ["samples_per_task is 4 at temperature 0", "set eval.temperature above 0"],
    ),
    "an override without a value": (["num_steps"], ["'num_steps'", "is not key=value"]),
    "an override through a value": (["num_steps.x=3"], ["num_steps.x", "which is a value"]),
    "too many held-out tasks": (
        ["env.num_eval=60"],
        ["num_eval 60", "64 strings", "lower num_eval to 32"],
    ),
    "no room for a prompt": (
        ["sampler.max_tokens=5000"],
        ["sampler.max_tokens 5000", "no room", "raise model.max_context"],
    ),
    "a context longer than the model's": (
        ["model.max_context=5000"],
        ["model.max_context is 5000", "at most 1024", "lower it"],
    ),
    "a mistyped model": (
        ["model.path=tiny-chra"],
        ["model 'tiny-chra'", "did you mean tiny-char?"],
    ),
    "a model folder that is not there": (
        ["model.path=./models/none"],
        ["models/none' is neither", "nor an existing folder", "check the path"],
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_bad_setting_is_refused(case: str, cli: Any, tmp_path: Path) -> None:
    overrides, parts = SETTINGS[case]
    done = cli("train", RECIPE, *overrides, "--run-dir", tmp_path / "run")
    check(done, tmp_path / "run", *parts)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("revrese", ["recipe revrese", "neither a shipped name nor a file", "mean reverse?"]),
        ("none.toml", ["recipe none.toml", "shipped recipes: ", "reverse"]),
    ],
)
def test_a_recipe_that_is_not_there_is_refused(
    name: str, parts: list[str], cli: Any, tmp_path: Path
) -> None:
    check(cli("train", name, "--run-dir", tmp_path / "run"), tmp_path / "run", *parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("num_steps = = 3", ["recipe bad.toml", "is not valid TOML", "line 1"]),
        ("num_steps = 3", ["recipe bad.toml", "a recipe needs [env], or [data]"]),
        (
            "[env]\ntype = 'dataset'\nreward = 'math'",
            ["recipe bad.toml", "env.path is missing", "add it"],
        ),
        (
            "[env]\nlength = 3",
            ["recipe bad.toml", "env has no type", "set env.type to one of arithmetic, "],
        ),
        ("name = 7\n[env]\ntype = 'reverse'", ["name is 7", "valid string"]),
    ],
)
def test_a_malformed_recipe_is_refused(
    text: str, parts: list[str], cli: Any, place: Place, tmp_path: Path
) -> None:
    path = place.write("bad.toml", text)
    check(cli("train", path, "--run-dir", tmp_path / "run"), tmp_path / "run", *parts)


def test_every_wrong_key_is_told_at_once(cli: Any, tmp_path: Path) -> None:
    done = cli("train", RECIPE, "a=1", "optim.lr=-1", "--run-dir", tmp_path / "run")
    check(done, tmp_path / "run", "a is unknown", "optim.lr is -1")


# --- model folders --------------------------------------------------------------------------------


def spoil_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def spoil_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def spoil_config(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (spoil_template, ["there is no chat template", "write chat_template.jinja"]),
        (spoil_weights, ["model.safetensors is damaged", "copy or download it again"]),
        (spoil_config, ["config.json is missing", "give the folder that save_pretrained wrote"]),
    ],
)
def test_an_incomplete_model_folder_is_refused(
    spoil: Callable[[Path], None], parts: list[str], cli: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_tiny_char(folder)
    spoil(folder)
    done = cli("train", RECIPE, f"model.path={folder}", "--run-dir", tmp_path / "run")
    check(done, tmp_path / "run", f"model folder {folder}", *parts)


# --- data and rewards -----------------------------------------------------------------------------

DATA: dict[str, tuple[list[dict[str, Any]], dict[str, Any], list[str]]] = {
    "no file": (ROWS, {"path": "none.jsonl"}, ["none.jsonl does not exist", "give a file"]),
    "an unknown format": (ROWS, {"path": "reward.py"}, ["reward.py ends in '.py'", ".jsonl"]),
    "an empty file": ([], {}, ["data.jsonl is empty", "at least one row"]),
    "no prompt column": (
        [{"question": f"{i}", "answer": "1"} for i in range(12)],
        {},
        ["data.jsonl has no column 'prompt'", "'question', 'answer'"],
    ),
    "a column the reward needs (l07)": (
        [{"prompt": f"{i}", "Answer": "1"} for i in range(12)],
        {},
        ["reward.py:reward", "parameter 'answer'", "Answer", "did you mean Answer?"],
    ),
    "a column the built-in reward needs (l07)": (
        [{"prompt": f"{i}", "Answer": "1"} for i in range(12)],
        {"reward": "exact"},
        ["no column 'answer'", "did you mean Answer?"],
    ),
    "ids that repeat": (
        [{**row, "id": "same"} for row in ROWS],
        {"id_column": "id"},
        ["id_column 'id' repeats 'same' (12 x)", "make the ids unique"],
    ),
    "a null prompt": (
        [*ROWS, {"prompt": None, "answer": "1"}],
        {},
        ["1 of 13 rows cannot be used", "line 13: prompt is null", "Mend or remove"],
    ),
    "a prompt longer than the context": (
        [*ROWS, {"prompt": "x" * 2000, "answer": "1"}],
        {},
        ["1 of ", "exceed 1020 tokens", 'set rollout.overlong_prompt to "drop"'],
    ),
    "one prompt only": ([ROWS[0]], {}, ["1 different prompt", "add rows or set eval_path"]),
    "no reward file": (
        ROWS,
        {"reward": "none.py:reward"},
        ["env.reward", "there is no file", "none.py", "relative path starts at"],
    ),
    "no such function": (
        ROWS,
        {"reward": "reward.py:rewrad"},
        ["has no function 'rewrad'", "did you mean reward?"],
    ),
    "an unknown reward": (ROWS, {"reward": "exat"}, ["env.reward is 'exat'", "mean exact?"]),
    "a template without a column": (
        ROWS,
        {"template": "Answer."},
        ["env.template 'Answer.'", "has no {column}", "add one"],
    ),
    "a template with an unknown column": (
        ROWS,
        {"template": "{promt}"},
        ["no column 'promt'", "did you mean prompt?"],
    ),
}


@pytest.mark.parametrize("case", DATA)
def test_bad_data_is_refused(case: str, cli: Any, place: Place, tmp_path: Path) -> None:
    rows, env, parts = DATA[case]
    place.rows(*rows)
    done = cli("train", place.recipe(**env), "--run-dir", tmp_path / "run")
    check(done, tmp_path / "run", *parts)


def test_a_reward_that_cannot_be_imported_shows_its_own_line(
    cli: Any, place: Place, tmp_path: Path
) -> None:
    place.write("reward.py", "import nonexistent_package\n" + REWARD)
    done = cli("train", place.recipe(), "--run-dir", tmp_path / "run")
    assert done.status == 2
    assert "env.reward" in done.err and "reward.py" in done.err
    assert "No module named 'nonexistent_package'" in done.err
    assert not (tmp_path / "run").exists()


def test_an_overlong_prompt_can_be_dropped_or_cut(cli: Any, place: Place, tmp_path: Path) -> None:
    """i04: each rule behaves as named; dropping says how many."""
    place.rows(*ROWS, {"prompt": "x" * 2000, "answer": "1"})
    recipe = place.recipe(eval_frac=0.2)
    steps = ["num_steps=1", "rollout.groups_per_step=2", "rollout.group_size=2", "eval.num_tasks=2"]
    dropped = cli(
        "train", recipe, *steps, "rollout.overlong_prompt=drop", "--run-dir", tmp_path / "a"
    )
    assert dropped.status == 0, dropped.err
    assert "exceed 1020 tokens" in dropped.out and "; dropped" in dropped.out
    assert "; dropped" in (tmp_path / "a" / "log.txt").read_text()
    cut = cli(
        "train",
        recipe,
        *steps,
        "rollout.overlong_prompt=truncate_left",
        "--run-dir",
        tmp_path / "b",
    )
    assert cut.status == 0, cut.err


# --- run directories ------------------------------------------------------------------------------


def test_a_run_directory_in_use_is_refused(cli: Any, reference: Path, small: Any) -> None:
    done = cli("train", RECIPE, *small, "--run-dir", reference)
    assert done.status == 2
    for part in (
        f"run directory {reference}",
        "already holds a run",
        "--resume",
        "another --run-dir",
    ):
        assert part in done.err


def test_a_resume_with_another_recipe_names_the_key_and_both_values(
    cli: Any, reference: Path, small: Any
) -> None:
    done = cli("train", RECIPE, *small, "optim.lr=0.5", "--run-dir", reference, "--resume")
    assert done.status == 2
    for part in ("another recipe", "optim.lr was 0.003, now 0.5", "same settings"):
        assert part in done.err


def test_a_resume_with_other_threads_is_refused(
    zygote: Any, argv: Any, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe leaves the number to the machine, and the machine changed."""
    command = argv(tmp_path / "run", "threads=none", "num_steps=1")
    assert zygote.run(*command, cwd=tmp_path).status == 0
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr("posttrain.build.default_threads", lambda: cores + 1)
    done = cli(*command)
    assert done.status == 2
    for part in (f"computed with {cores} threads, now {cores + 1}", f"set threads={cores}"):
        assert part in done.err


def test_a_run_directory_that_cannot_be_made_is_refused(
    cli: Any, small: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    for run_dir in (tmp_path / "file", tmp_path / "file" / "run"):
        done = cli("train", RECIPE, *small, "--run-dir", run_dir)
        assert done.status == 2, done.err
        assert str(run_dir) in done.err and "Traceback" not in done.err
        assert "run directory" in done.err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_with_other_files_can_become_a_run_directory(
    cli: Any, small: Any, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    done = cli("train", RECIPE, *small, "num_steps=1", "--run-dir", tmp_path / "run")
    assert done.status == 0, done.err
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_the_model_of_a_run_must_stay_the_same(zygote: Any, argv: Any, tmp_path: Path) -> None:
    """A redo from other weights would be another run."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_tiny_char(folder)
    command = argv(tmp_path / "run", f"model.path={folder}", "num_steps=2")
    assert zygote.run(*command, cwd=tmp_path).status == 0
    shutil.rmtree(folder)
    assert zygote.run("export", tmp_path / "run", "--to", folder, cwd=tmp_path).status == 2
    exported = zygote.run("export", tmp_path / "run", "--to", tmp_path / "m", cwd=tmp_path)
    assert exported.status == 2 and "nor an existing folder" in exported.err
