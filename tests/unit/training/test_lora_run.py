"""Whole runs with an adapter: the same bits again, resumed, redone, exported."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from posttrain.commands.export import export_command
from posttrain.errors import ConfigError, ModelError
from posttrain.recipe_files import load_recipe
from posttrain.run import train
from posttrain.telemetry.observer import SilentObserver
from posttrain.training.models import cached_folder

RECIPE = str(Path(__file__).parents[2] / "recipes/reverse.toml")
SMALL = (
    "num_steps=4",
    "rollout.groups_per_step=4",
    "rollout.group_size=8",
    "eval.num_tasks=2",
    "checkpoint.every=2",
    "model.dtype=bfloat16",
    "optim.lr=0.03",
)
LORA = ("model.lora.rank=4",)


class StopsAfter(SilentObserver):
    """Ctrl-C after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        if step == self._step:
            raise asyncio.CancelledError


def run(run_dir: Path, *overrides: str, stop_after: int = -1) -> dict[str, Any]:
    recipe, base_dir = load_recipe(RECIPE, [*SMALL, *overrides])
    observer = StopsAfter(stop_after)
    return asyncio.run(train(recipe, base_dir, run_dir, resume=True, observer=observer))


@pytest.fixture(scope="module", autouse=True)
def _own_cache_and_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POSTTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run; tests only read it."""
    run_dir = tmp_path_factory.mktemp("lora") / "run"
    assert run(run_dir, *LORA)["steps"] == 4
    return run_dir


def weights_hash(run_dir: Path) -> str:
    return json.loads((run_dir / "summary.json").read_text())["weights_hash"]


def lines(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_on_policy_and_sampler_and_learner_agree_to_the_bit(finished: Path) -> None:
    metrics = lines(finished)
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert all(row["mismatch/abs_max"] == 0 for row in metrics)
    assert any(row["learner/grad_norm"] > 0 for row in metrics)


def test_a_run_is_the_same_again_and_another_with_another_seed(
    finished: Path, tmp_path: Path
) -> None:
    assert run(tmp_path / "again", *LORA)["weights_hash"] == weights_hash(finished)
    other = run(tmp_path / "other", *LORA, "seed=1", "num_steps=1")
    assert other["weights_hash"] != weights_hash(finished)


@pytest.mark.parametrize("keeps_checkpoints", [True, False])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    keeps_checkpoints: bool, finished: Path, tmp_path: Path
) -> None:
    """From the checkpoint of step 2 and a redone step, or from the seed's own first adapter."""
    with pytest.raises(asyncio.CancelledError):
        run(tmp_path / "run", *LORA, stop_after=3)
    assert (tmp_path / "run/checkpoints/step-000002").is_dir()
    if not keeps_checkpoints:
        shutil.rmtree(tmp_path / "run/checkpoints")
    assert run(tmp_path / "run", *LORA)["weights_hash"] == weights_hash(finished)


def test_a_checkpoint_holds_the_adapter_alone(finished: Path) -> None:
    masters = load_file(finished / "checkpoints/step-000004/masters.safetensors")
    assert masters and all(".lora_" in name for name in masters)


def test_a_resume_on_other_base_weights_is_refused(tmp_path: Path) -> None:
    """One weight that is frozen differs: redone steps would not be those of the run."""
    run(tmp_path / "first", "num_steps=1", "eval.before=false")  # tiny-char is in the cache
    base = Path(shutil.copytree(cached_folder("tiny-char"), tmp_path / "base"))
    recipe = (*LORA, f"model.path={base}")
    with pytest.raises(asyncio.CancelledError):
        run(tmp_path / "run", *recipe, stop_after=2)
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][0] += 0.25
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="weights are not those that .*began with"):
        run(tmp_path / "run", *recipe)


def test_other_settings_of_the_adapter_are_another_run(finished: Path) -> None:
    with pytest.raises(ValueError, match="model.lora.rank was 4, now 8"):
        run(finished, "model.lora.rank=8")


# --- export -------------------------------------------------------------------------------------

IDS = torch.arange(4, 30)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


def test_an_export_is_merged_and_an_adapter_alone_gives_the_same_model(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export_command(finished, tmp_path / "merged", None, "float32", False)
    export_command(finished, tmp_path / "adapter", None, "float32", True)
    assert "exported the adapter of policy version 4" in capsys.readouterr().out
    assert not (tmp_path / "merged/adapter_config.json").exists()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(cached_folder("tiny-char"), dtype=torch.bfloat16)
    plain = logits(base.float())
    loaded = PeftModel.from_pretrained(base.float(), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(loaded), logits(merged), rtol=1e-4, atol=1e-4)
    assert (logits(merged) - plain).abs().max() > 1e-3, "it was trained"


def test_an_adapter_names_its_base_as_the_recipe_did_and_no_path_of_this_machine(
    finished: Path, tmp_path: Path
) -> None:
    export_command(finished, tmp_path / "adapter", None, None, True)
    text = (tmp_path / "adapter/adapter_config.json").read_text()
    assert json.loads(text)["base_model_name_or_path"] == "tiny-char"
    assert "/" not in text
    (weights,) = (load_file(p) for p in (tmp_path / "adapter").glob("*.safetensors"))
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}, "the run's compute type"


def test_a_run_of_all_weights_has_no_adapter_to_export(tmp_path: Path) -> None:
    run(tmp_path / "full", "num_steps=1", "eval.before=false")
    with pytest.raises(ConfigError, match="trained every weight.*leave --adapter out"):
        export_command(tmp_path / "full", tmp_path / "out", None, None, True)
    assert not (tmp_path / "out").exists()
