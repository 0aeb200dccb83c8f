"""Loading: what can serve as a policy, what it ends with, and what it is exported as."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.errors import ModelError
from posttrain.training.policy import load_policy


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A tiny-char folder to change."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def rewrite(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_every_end_token_of_generation_config_model_and_tokenizer_ends_a_turn(folder: Path) -> None:
    """Instruct models list several, and the tokenizer's own may be yet another."""
    rewrite(folder / "generation_config.json", eos_token_id=[7, 9])
    rewrite(folder / "config.json", eos_token_id=8)
    assert load_policy(folder, dtype="float32").eos_token_ids == (2, 7, 8, 9)


def test_a_context_beyond_the_models_own_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="max_context is 1025, but .* at most 1024.*lower it"):
        load_policy(folder, dtype="float32", max_context=1025)
    assert load_policy(folder, dtype="float32").max_context == 1024
    assert load_policy(folder, dtype="float32", max_context=100).max_context == 100


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        load_policy(tmp_path, dtype="float32")


def test_dropout_of_the_config_is_off(make_folder: Callable[..., Path]) -> None:
    """Sampler and learner must be the same function."""
    from transformers import GPT2Config

    folder = make_folder(
        GPT2Config, n_embd=32, n_layer=1, n_head=2, n_positions=64, resid_pdrop=0.5, attn_pdrop=0.5
    )
    policy = load_policy(folder, dtype="float32")
    assert not policy.model.training
    assert not any(module.training for module in policy.model.modules())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_export_is_a_folder_that_transformers_loads_with_the_same_weights(
    dtype: Any, folder: Path, tmp_path: Path
) -> None:
    policy = load_policy(folder, dtype=dtype)
    (tmp_path / "out").mkdir()
    policy.export(tmp_path / "out", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32
    for name, weight in policy.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight.float()), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == policy.tokenizer.chat_template
    again = load_policy(tmp_path / "out", dtype=dtype)
    assert again.eos_token_ids == policy.eos_token_ids
    assert policy.model.config._attn_implementation == "posttrain_exact", "and it still trains"


def test_special_tokens_stay_visible_in_decoded_text(read_policy: Callable[..., Any]) -> None:
    policy = read_policy("tiny")
    ids = policy.tokenizer.encode("a b", add_special_tokens=False)
    assert policy.decode([1, *ids, 2]) == "<bos>a b<eos>"
    assert policy.decode([]) == ""


def test_an_fp32_export_of_a_bf16_policy_holds_the_masters(
    tiny_folder: Path, read_policy: Any, tmp_path: Path
) -> None:
    """f11: master weights are not lost to the compute type when fp32 is asked for."""
    policy = read_policy(tiny_folder, dtype="bfloat16")
    name = next(n for n, _ in policy.model.named_parameters())
    master = policy.model.state_dict()[name].float() + 1e-5  # far below bf16's resolution
    policy.export(tmp_path / "out", torch.float32, {name: master})
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()[name]
    assert torch.equal(written, master)
