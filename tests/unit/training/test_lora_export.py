"""What an adapter is written as: merged into the weights, or alone in peft's format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from posttrain.config import LoraConfig, OptimConfig
from posttrain.data.prefix_tree import build_prefix_tree
from posttrain.errors import ConfigError
from posttrain.training.optimizer import MasterOptimizer
from posttrain.training.policy import Policy, load_policy

IDS = torch.arange(4, 24)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "qwen2_tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "gpt2": (
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.2},
    ),
}


def trained(folder: Path, dtype: Any, **settings: Any) -> tuple[Policy, MasterOptimizer]:
    """An adapter that moved far, so that what is left out shows."""
    policy = load_policy(folder, dtype=dtype, lora=LoraConfig(rank=4, **settings))
    optimizer = MasterOptimizer(policy, OptimConfig())
    for _ in range(3):
        optimizer.zero_grad()
        policy.logits(hidden(policy)).log_softmax(-1)[:, 5].sum().backward()
        optimizer.update(0.05, 0.0)
    return policy, optimizer


def hidden(policy: Policy) -> torch.Tensor:
    return policy.tree_hidden(build_prefix_tree([IDS.int().numpy()]))


@torch.no_grad()
def policy_logits(policy: Policy) -> torch.Tensor:
    return policy.logits(hidden(policy))


@torch.no_grad()
def plain_logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS[None]).logits[0].float()


@pytest.fixture
def family(make_folder: Callable[..., Path]) -> Callable[[str], Path]:
    small = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
    }

    def make(name: str) -> Path:
        config, fields = FAMILIES[name]
        return make_folder(
            getattr(transformers, config), **(fields if name == "gpt2" else small | fields)
        )

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_merged_weights_are_a_plain_model_with_the_adapters_logits(
    name: str, family: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = family(name)
    policy, optimizer = trained(folder, "float32")
    (tmp_path / "out").mkdir()
    policy.export(tmp_path / "out", torch.float32, optimizer.masters)
    expected = policy_logits(policy)
    moved = (expected - policy_logits(load_policy(folder, dtype="float32"))).abs().max()
    merged = plain_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-4)
    assert moved > 0.5, "the adapter says something"
    base, ours = (load_file(d / "model.safetensors") for d in (folder, tmp_path / "out"))
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in base.items()}


def test_a_bf16_merge_rounds_the_fp32_sum_once(
    family: Callable[[str], Path], tmp_path: Path
) -> None:
    policy, optimizer = trained(family("llama"), "bfloat16")
    name = "model.layers.0.mlp.up_proj"
    a, b = (optimizer.masters[f"{name}.lora_{x}.default.weight"] for x in "AB")
    base = policy.model.get_parameter(f"{name}.base_layer.weight").float()
    expected = (base + 8.0 * (b @ a)).bfloat16()
    (tmp_path / "out").mkdir()
    policy.export(tmp_path / "out", torch.bfloat16, optimizer.masters)
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")[f"{name}.weight"], expected)
    logits = policy_logits(policy)
    error = (policy_logits(load_policy(tmp_path / "out", dtype="bfloat16")) - logits).abs().max()
    assert error < 0.02 * logits.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_an_adapter_alone_is_what_peft_loads_on_the_base(
    name: str, family: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = family(name)
    policy, optimizer = trained(folder, "float32")
    policy.export_adapter(tmp_path, torch.float32, optimizer.masters, "some-model")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(tmp_path))
    torch.testing.assert_close(plain_logits(loaded), policy_logits(policy), rtol=1e-4, atol=1e-4)
    text = (tmp_path / "adapter_config.json").read_text()
    config = json.loads(text)
    assert config["base_model_name_or_path"] == "some-model" and str(folder) not in text
    assert (config["r"], config["lora_alpha"], config["inference_mode"]) == (4, 32, True)
    assert config["target_modules"] == sorted(config["target_modules"])


def test_modules_trained_whole_are_in_both_exports(
    family: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = family("llama")
    policy, optimizer = trained(
        folder, "float32", target_modules=["q_proj"], train_also=["lm_head", "model.norm"]
    )
    expected = policy_logits(policy)
    (tmp_path / "whole").mkdir()
    policy.export(tmp_path / "whole", torch.float32, optimizer.masters)
    merged = plain_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "whole"))
    base_names, names = (load_file(d / "model.safetensors") for d in (folder, tmp_path / "whole"))
    assert names.keys() == base_names.keys(), "no second copy of what was trained whole"
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-4)
    (tmp_path / "alone").mkdir()
    policy.export_adapter(tmp_path / "alone", torch.float32, optimizer.masters, "some-model")
    base = AutoModelForCausalLM.from_pretrained(folder)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "alone"))
    torch.testing.assert_close(plain_logits(loaded), expected, rtol=1e-4, atol=1e-4)


def test_the_policy_still_trains_after_an_export(
    family: Callable[[str], Path], tmp_path: Path
) -> None:
    policy, optimizer = trained(family("llama"), "bfloat16")
    before, weights_hash = policy_logits(policy), optimizer.weights_hash()
    (tmp_path / "out").mkdir()
    policy.export(tmp_path / "out", torch.bfloat16, optimizer.masters)
    policy.export_adapter(tmp_path, torch.bfloat16, optimizer.masters, "some-model")
    assert torch.equal(policy_logits(policy), before)
    assert optimizer.weights_hash() == weights_hash
    assert policy.model.config._attn_implementation == "posttrain_exact"
    optimizer.zero_grad()
    policy.logits(hidden(policy)).log_softmax(-1)[:, 5].sum().backward()
    assert optimizer.grad_norm() > 0


def test_without_an_adapter_there_is_none_to_export(
    read_policy: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="has no adapter"):
        read_policy("sharp").export_adapter(tmp_path, torch.float32, {}, "some-model")
