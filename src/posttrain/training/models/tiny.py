"""`tiny-char`: a random two-layer Llama over characters, written in milliseconds.

For tests and first experiments: one token is one character, so that every prompt, completion and
token id can be read by eye. Its bytes are the same on every machine: the weights come from a
counter-based stream (`posttrain.randomness`), never from torch.
"""

from __future__ import annotations

import json
import math
import string
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.randomness import stream

REVISION = 2
"""Part of the stamp of a cached folder: other bytes need another number."""

_SEED = 20260
_EMBEDDING_STD = 0.1
_HEAD_STD = 0.02  # so small that an untrained model finds every character about equally likely
# Positions a few characters apart must look different: with the usual 10000 most frequencies
# hardly turn over so short a text.
_ROPE_THETA = 100.0
_HIDDEN, _INTERMEDIATE, _LAYERS, _HEADS, _KV_HEADS, _CONTEXT = 64, 128, 2, 4, 2, 1024

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
CHARACTERS = (
    string.ascii_lowercase + string.ascii_uppercase + string.digits + " \n.,:;!?'\"+-*/=()<>"
)

# One letter and a colon for the role, then the content as it is. An assistant message ends with
# EOS, as sampled; the others with a line break. So the next prompt extends the sampled ids.
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'][0] + ':' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)


def write_tiny_char(folder: Path) -> None:
    """Write config, float32 weights, tokenizer and chat template into an existing folder."""
    from safetensors.numpy import save_file

    tokens = [PAD, BOS, EOS, UNK, *CHARACTERS]
    save_file(_weights(len(tokens)), folder / "model.safetensors", metadata={"format": "pt"})
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    _write_json(folder / "config.json", _config(len(tokens)) | special)
    _write_json(folder / "generation_config.json", special)
    _write_tokenizer(folder, tokens)


def _config(vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "head_dim": _HIDDEN // _HEADS,
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "initializer_range": _HEAD_STD,
        "intermediate_size": _INTERMEDIATE,
        "max_position_embeddings": _CONTEXT,
        "mlp_bias": False,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": _KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": _ROPE_THETA, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": vocab_size,
    }


def _shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    kv = _HIDDEN // _HEADS * _KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, _HIDDEN),
        "model.norm.weight": (_HIDDEN,),
        "lm_head.weight": (vocab_size, _HIDDEN),
    }
    for index in range(_LAYERS):
        layer = f"model.layers.{index}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (_HIDDEN,),
            f"{layer}.self_attn.q_proj.weight": (_HIDDEN, _HIDDEN),
            f"{layer}.self_attn.k_proj.weight": (kv, _HIDDEN),
            f"{layer}.self_attn.v_proj.weight": (kv, _HIDDEN),
            f"{layer}.self_attn.o_proj.weight": (_HIDDEN, _HIDDEN),
            f"{layer}.post_attention_layernorm.weight": (_HIDDEN,),
            f"{layer}.mlp.gate_proj.weight": (_INTERMEDIATE, _HIDDEN),
            f"{layer}.mlp.up_proj.weight": (_INTERMEDIATE, _HIDDEN),
            f"{layer}.mlp.down_proj.weight": (_HIDDEN, _INTERMEDIATE),
        }
    return shapes


def _weights(vocab_size: int) -> dict[str, np.ndarray]:
    """One stream a tensor, so that none depends on another.

    Norms are ones and matrices of the layers N(0, 1/inputs). With a flat 0.02 attention starts so
    close to uniform that a policy settles on constant answers before it learns where to look.
    """
    weights: dict[str, np.ndarray] = {}
    for index, (name, shape) in enumerate(sorted(_shapes(vocab_size).items())):
        if len(shape) == 1:
            weights[name] = np.ones(shape, np.float32)
            continue
        draws = stream(_SEED, "tiny-char", index).standard_normal(shape)
        weights[name] = (_std(name, shape) * draws).astype(np.float32)
    return weights


def _std(name: str, shape: tuple[int, ...]) -> float:
    if name == "model.embed_tokens.weight":
        return _EMBEDDING_STD
    return _HEAD_STD if name == "lm_head.weight" else 1 / math.sqrt(shape[1])


def _write_tokenizer(folder: Path, tokens: list[str]) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (PAD, BOS, EOS, UNK)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": _CONTEXT,
            "clean_up_tokenization_spaces": False,
            "pad_token": PAD,
            "bos_token": BOS,
            "eos_token": EOS,
            "unk_token": UNK,
        },
    )
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE, encoding="utf-8")


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
