"""tiny-char: readable tokens, the same bytes everywhere."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.training.models import write_tiny_char
from posttrain.training.models.tiny import CHARACTERS


@pytest.fixture
def tokenizer(tiny_char: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_char)


def test_the_bytes_are_the_same_every_time_and_everywhere(tiny_char: Path, tmp_path: Path) -> None:
    torch.manual_seed(123)  # no global state may matter
    (tmp_path / "again").mkdir()
    write_tiny_char(tmp_path / "again")
    for path in tiny_char.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    weights = (tiny_char / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == (
        "d8653956f24a4e596f6709249bfdba27b6a5d9c5a847ee3d0f733531d4aee694"
    )


def test_transformers_finds_every_weight(tiny_char: Path) -> None:
    _, loading = AutoModelForCausalLM.from_pretrained(tiny_char, output_loading_info=True)
    assert not any(loading.values())


def test_one_character_is_one_token_and_comes_back(tokenizer: Any) -> None:
    ids = tokenizer(CHARACTERS)["input_ids"]
    assert len(ids) == len(set(ids)) == len(CHARACTERS)
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id]


def test_the_next_prompt_extends_the_sampled_ids(tokenizer: Any) -> None:
    """Recorded conversations never fork: prompt + completion is a prefix of the next prompt."""
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1="}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(prompt) == "<bos>s:be brief\nu:1+1=\na:"
    sampled = [*tokenizer("2")["input_ids"], tokenizer.eos_token_id]
    chat += [{"role": "assistant", "content": "2"}, {"role": "user", "content": "and?"}]
    longer = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert longer[: len(prompt) + len(sampled)] == [*prompt, *sampled]


def test_an_untrained_model_is_undecided(tiny_char: Path) -> None:
    """Near-uniform sampling is what first experiments rely on: no character is out of reach."""
    model = AutoModelForCausalLM.from_pretrained(tiny_char)
    with torch.no_grad():
        probabilities = model(torch.tensor([[1, 4, 5, 6]])).logits[0, -1].softmax(-1)
    assert probabilities.max() < 4 * probabilities.min()
