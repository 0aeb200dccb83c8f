"""What comes out of a journal: proofs, what-ifs, evaluations and model folders."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.sampling.embedded import EmbeddedSampler
from posttrain.training.policy import load_policy
from posttrain.types import SamplingParams

RECIPE = str(Path(__file__).parents[1] / "recipes/reverse.toml")


def fingerprints(folder: Path) -> dict[str, str]:
    """Every file of a folder and the hash of its bytes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def copy(reference: Path, tmp_path: Path) -> Path:
    """A run that may be damaged."""
    shutil.copytree(reference, tmp_path / "copy")
    return tmp_path / "copy"


def test_verify_retrains_every_step_to_the_recorded_weights(
    cli: Any, reference: Path, read_json: Callable[[Path], Any]
) -> None:
    before = fingerprints(reference)
    done = cli("replay", reference, "--verify", "--json")
    assert done.status == 0, done.err
    report = done.events[-1]
    summary = read_json(reference / "summary.json")
    assert (report["verified"], report["steps"]) == (True, 8)
    assert report["weights_hash"] == summary["weights_hash"]
    assert report["draws"] == summary["draws"]
    assert fingerprints(reference) == before


def test_verify_names_file_and_byte_of_one_flipped_bit(cli: Any, copy: Path) -> None:
    (segment,) = sorted((copy / "segments").iterdir())
    content = bytearray(segment.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    segment.write_bytes(content)
    done = cli("replay", copy, "--verify")
    assert done.status == 1
    assert f"segments/{segment.name}: byte " in done.err
    assert "draw " in done.err and "Restore the file" in done.err
    assert "Traceback" not in done.err


def test_verify_names_the_step_of_a_forged_hash(cli: Any, copy: Path) -> None:
    database = sqlite3.connect(copy / "journal.sqlite")
    for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'"):
        database.execute(f"DROP TRIGGER {name}")  # they forbid what a forger would do
    database.execute("UPDATE steps SET weights_hash = 'forged' WHERE step = 6")
    database.commit()
    database.close()
    done = cli("replay", copy, "--verify")
    assert done.status == 1
    assert "step 6: weights" in done.err and "recorded forged" in done.err


def test_verify_refuses_settings(cli: Any, reference: Path) -> None:
    done = cli("replay", reference, "algo.type=grpo", "--verify")
    assert done.status == 2
    assert "leave out the settings" in done.err


def test_other_settings_train_other_weights_and_leave_the_run_as_it_is(
    cli: Any, reference: Path
) -> None:
    before = fingerprints(reference)
    same = cli("replay", reference, "--json").events[-1]
    assert [row["same_weights"] for row in same["steps"]] == [True] * 8
    other = cli("replay", reference, "algo.type=grpo", "--json").events[-1]
    moved = [row["same_weights"] for row in other["steps"]]
    assert len(moved) == 8 and not all(moved) and not moved[-1]
    assert fingerprints(reference) == before


def test_a_run_of_one_algorithm_can_be_replayed_with_one_that_has_other_keys(
    zygote: Any, argv: Any, cli: Any, tmp_path: Path
) -> None:
    """GRPO records `algo.std`, which RLOO does not know."""
    command = argv(tmp_path / "run", "algo.type=grpo", "num_steps=3", "eval.before=false")
    assert zygote.run(*command, cwd=tmp_path).status == 0
    other = cli("replay", tmp_path / "run", "algo.type=rloo", "--json")
    assert other.status == 0, other.err
    assert not all(row["same_weights"] for row in other.events[-1]["steps"])


@pytest.mark.parametrize("override", ["env.length=2", "seed=1", "sampler.temperature=0.5"])
def test_what_was_rolled_out_cannot_be_changed_by_a_replay(
    override: str, cli: Any, reference: Path
) -> None:
    done = cli("replay", reference, "algo.type=grpo", override)
    assert done.status == 2
    assert f"replay cannot change {override}" in done.err and "train a new run" in done.err


def test_an_evaluation_of_a_run_is_that_of_its_own_journal(
    cli: Any, reference: Path, outcome: Any
) -> None:
    recorded = outcome(reference).evaluations
    for step in (0, 4, 8):
        report = cli("eval", reference, "--step", step, "--json").events[-1]
        assert report == recorded[step]


def test_an_evaluation_takes_other_settings_but_not_another_model(
    cli: Any, reference: Path
) -> None:
    """k09: temperature and samples of the command line reach the sampler."""
    done = cli(
        "eval", reference, "eval.temperature=0.8", "eval.samples_per_task=4", "--json", "--show", 0
    )
    report = done.events[-1]
    assert report["sampling"]["temperature"] == 0.8
    assert {len(row) for row in report["correct"].values()} == {4}
    refused = cli("eval", reference, "model.dtype=bfloat16")
    assert refused.status == 2 and "the run's own model" in refused.err


def test_a_step_that_the_run_does_not_have_is_named(cli: Any, reference: Path) -> None:
    done = cli("eval", reference, "--step", 9)
    assert done.status == 2
    assert "finished steps 0 to 8; step 9 is not among them" in done.err


PROMPTS = ("abc", "dcb", "aaaa", "hello there")


def greedy_by_transformers(folder: Path, prompt: str) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**ids, do_sample=False, max_new_tokens=12)
    return out[0, ids["input_ids"].shape[1] :].tolist()


def greedy_by_posttrain(folder: Path, prompt: str) -> list[int]:
    policy = load_policy(folder, dtype="float32")
    text = policy.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    ids = np.asarray(policy.tokenizer.encode(text, add_special_tokens=False), np.int32)
    sampler = EmbeddedSampler(policy, max_batch=4)
    params = SamplingParams(max_tokens=12, temperature=0)
    return asyncio.run(sampler.generate(ids, params, seed=0)).token_ids.tolist()


def test_an_exported_folder_is_the_policy_for_plain_transformers(
    cli: Any, reference: Path, outcome: Any, tmp_path: Path
) -> None:
    done = cli("export", reference, "--to", tmp_path / "model")
    assert done.status == 0, done.err
    for prompt in PROMPTS:
        ours = greedy_by_posttrain(tmp_path / "model", prompt)
        assert greedy_by_transformers(tmp_path / "model", prompt) == ours
    report = cli("eval", RECIPE, f"model.path={tmp_path / 'model'}", "eval.num_tasks=4", "--json")
    assert report.events[-1]["correct"] == outcome(reference).evaluations[8]["correct"]
    assert report.events[-1]["reward"] == outcome(reference).evaluations[8]["reward"]


def test_export_of_an_earlier_step_is_that_policy(
    cli: Any, reference: Path, tmp_path: Path
) -> None:
    """Steps 2 and 5 lie between checkpoints; step 0 is the model that the run began with."""
    weights = {}
    for step in (0, 2, 5, 8):
        done = cli("export", reference, "--to", tmp_path / f"{step}", "--step", step)
        assert done.status == 0 and f"policy version {step}" in done.out
        weights[step] = load_file(tmp_path / f"{step}" / "model.safetensors")
    names = weights[0].keys()
    for a, b in ((0, 2), (2, 5), (5, 8)):
        assert any(not torch.equal(weights[a][n], weights[b][n]) for n in names)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), (None, 4)])
def test_an_export_has_the_dtype_that_it_says(
    dtype: str | None, size: int, cli: Any, reference: Path, tmp_path: Path, read_json: Any
) -> None:
    """f11: no fp32 masters in a bf16 export; without a wish it is the run's compute type."""
    wish = () if dtype is None else ("--dtype", dtype)
    assert cli("export", reference, "--to", tmp_path / "m", *wish).status == 0
    weights = load_file(tmp_path / "m" / "model.safetensors")
    expected = dtype or "float32"
    assert {t.dtype for t in weights.values()} == {getattr(torch, expected)}
    assert read_json(tmp_path / "m" / "config.json")["dtype"] == expected
    num_parameters = sum(t.numel() for t in weights.values())
    file_size = (tmp_path / "m" / "model.safetensors").stat().st_size
    assert file_size == pytest.approx(size * num_parameters, rel=0.05)


def test_a_replay_can_be_exported(cli: Any, reference: Path, tmp_path: Path) -> None:
    done = cli("replay", reference, "algo.type=grpo", "--to", tmp_path / "grpo")
    assert done.status == 0 and f"is in {tmp_path / 'grpo'}" in done.out
    cli("export", reference, "--to", tmp_path / "rloo")
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in ("grpo", "rloo"))
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_an_export_never_touches_a_folder_with_content(
    cli: Any, reference: Path, tmp_path: Path
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine.txt").write_text("mine")
    for command in (("export", reference), ("replay", reference)):
        done = cli(*command, "--to", tmp_path / "m")
        assert done.status == 2
        assert "not empty; choose another" in done.err
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["mine.txt"]


def test_an_export_that_fails_leaves_nothing(zygote: Any, reference: Path, tmp_path: Path) -> None:
    done = zygote.run(
        "export", reference, "--to", tmp_path / "m", cwd=tmp_path, max_file_bytes=100_000
    )
    assert done.status == 1
    assert f"{tmp_path / 'm'}: cannot be written" in done.err and "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_killed_export_is_whole_or_absent_and_can_be_repeated(
    zygote: Any, reference: Path, tmp_path: Path
) -> None:
    at = "posttrain.training.policy:Policy.export"
    death = {"at": at, "nth": 1, "after": True, "signal": 9}
    command = ("export", reference, "--to", tmp_path / "m")
    assert zygote.run(*command, cwd=tmp_path, deaths=[death]).status == -9
    assert not (tmp_path / "m").exists()
    assert zygote.run(*command, cwd=tmp_path).status == 0
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("command", "fact"),
    [
        (("replay", "nowhere"), "holds no journal"),
        (("export", "nowhere", "--to", "m"), "holds no journal"),
        (("export", "REFERENCE", "--to", "m", "--dtype", "int8"), "use bfloat16 or float32"),
        (("eval", "nowhere"), "neither a shipped name nor a file"),
        (("eval", RECIPE, "--step", "3"), "--step goes with a run directory"),
    ],
)
def test_a_wrong_target_is_status_2(
    command: tuple[str, ...], fact: str, cli: Any, reference: Path, tmp_path: Path
) -> None:
    done = cli(*(str(reference) if part == "REFERENCE" else part for part in command))
    assert done.status == 2
    assert fact in done.err and "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []
