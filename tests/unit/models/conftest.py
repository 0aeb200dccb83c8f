"""A tiny Llama, as a Hugging Face model and as the GGUF file that llama.cpp would make of it."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.training.models import write_tiny_char

HEADS, KV_HEADS, LAYERS = 4, 2, 2
TEMPLATE = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
SPECIALS = ["<unk>", "<bos>", "<eos>"]
# "1 2" would make one token of two digits: only the digit splitter keeps them apart.
MERGES = ["a b", "1 2", "ab c"]
TOKENS = [*SPECIALS, *sorted(ByteLevel.alphabet()), "ab", "12", "abc"]

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _tiny_llama(tied: bool) -> LlamaForCausalLM:
    """Weights that bf16 holds exactly, so that a right conversion is equal bit for bit."""
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).bfloat16() * 0.25)
    return model


def _gguf_name(name: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in top:
        return f"{top[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.weight"


def _permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's convert_hf_to_gguf.py does to q and k (LlamaModel.permute)."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


@dataclass
class GgufFactory:
    """Writes GGUF files of the tiny model, with the fields and tensors a test wants changed."""

    folder: Path

    def __call__(
        self,
        model: LlamaForCausalLM,
        *,
        fields: dict[str, Any] | None = None,
        quant: Quant = Quant.F32,
        drop: str | None = None,
        architecture: str = "llama",
    ) -> Path:
        path = self.folder / "tiny.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        self._metadata(writer, fields or {})
        for name, parameter in model.named_parameters():
            weight = parameter.detach().numpy()
            if ".q_proj." in name or ".k_proj." in name:
                weight = _permute(weight, HEADS if ".q_proj." in name else KV_HEADS)
            kind = quant if weight.ndim == 2 else Quant.F32
            if _gguf_name(name) != drop:
                data = gguf.quants.quantize(np.ascontiguousarray(weight), kind)
                writer.add_tensor(_gguf_name(name), data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _metadata(self, writer: gguf.GGUFWriter, changed: dict[str, Any]) -> None:
        numbers = {
            "llama.block_count": LAYERS,
            "llama.context_length": 128,
            "llama.embedding_length": 64,
            "llama.feed_forward_length": 96,
            "llama.attention.head_count": HEADS,
            "llama.attention.head_count_kv": KV_HEADS,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.padding_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        }
        for key, number in numbers.items():
            if key not in changed:
                writer.add_uint32(key, number)
        writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        writer.add_float32("llama.rope.freq_base", 50000.0)
        texts = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.chat_template": TEMPLATE,
        }
        for key, text in (texts | changed).items():
            if text is not None:
                writer.add_string(key, text)
        writer.add_token_list(TOKENS)
        writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
        writer.add_token_merges(MERGES)


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    """Tied embeddings, as SmolLM2."""
    return _tiny_llama(tied=True)


@pytest.fixture(scope="session")
def untied_llama() -> LlamaForCausalLM:
    return _tiny_llama(tied=False)


@pytest.fixture
def make_gguf(tmp_path: Path) -> GgufFactory:
    folder = tmp_path / "gguf"
    folder.mkdir()
    return GgufFactory(folder)


@pytest.fixture
def tiny_char(tmp_path: Path) -> Path:
    """A fresh copy of the tiny-char folder, to break."""
    folder = tmp_path / "tiny-char"
    folder.mkdir()
    write_tiny_char(folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache of this test alone."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("POSTTRAIN_CACHE", str(folder))
    return folder


@pytest.fixture
def make_wheel(tmp_path: Path) -> Callable[..., tuple[Path, str]]:
    """Write a wheel that pip accepts; return its path and sha256."""

    def make(members: dict[str, Path | bytes], package: str = "fake-model") -> tuple[Path, str]:
        stem = package.replace("-", "_")
        folder = tmp_path / "wheels"
        folder.mkdir(exist_ok=True)
        wheel = folder / f"{stem}-1.0-py3-none-any.whl"
        info = f"{stem}-1.0.dist-info"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, content in members.items():
                archive.writestr(
                    name, content if isinstance(content, bytes) else content.read_bytes()
                )
            archive.writestr(
                f"{info}/METADATA",
                f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: not-there\n",
            )
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "")
        return wheel, hashlib.sha256(wheel.read_bytes()).hexdigest()

    return make
