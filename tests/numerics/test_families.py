"""Packed and cached computation against plain transformers, one model family after another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from posttrain.data.packing import pack
from posttrain.data.prefix_tree import build_prefix_tree
from posttrain.errors import ModelError
from posttrain.sampling import embedded
from posttrain.sampling.embedded import EmbeddedSampler
from posttrain.training.forward import score_tokens
from posttrain.training.policy import load_policy
from posttrain.types import SamplingParams

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
NO_KV = {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
GEMMA: dict[str, Any] = BASE | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 10}
GPT2: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.2,
}
# Windows are shorter than the sequences, caps and multipliers far from 1: each must matter.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_gqa": ("LlamaConfig", BASE),
    "llama_mha": ("LlamaConfig", BASE | {"num_key_value_heads": 4}),
    "qwen2_tied": ("Qwen2Config", BASE | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", BASE | {"head_dim": 8}),
    "mistral_window": ("MistralConfig", BASE | {"sliding_window": 10}),
    "gemma2_caps": (
        "Gemma2Config",
        GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        GEMMA | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3_window": ("Phi3Config", BASE | {"sliding_window": 10}),
    "granite": ("GraniteConfig", BASE | {"logits_scaling": 3.0, "attention_multiplier": 0.3}),
    "cohere": ("CohereConfig", BASE),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        BASE
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "gpt2": ("GPT2Config", GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "gpt_neox": ("GPTNeoXConfig", NO_KV),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "falcon": (
        "FalconConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "initializer_range": 0.2,
        },
        "gives other logits through packed attention",
    ),
    "bloom": (
        "BloomConfig",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
        "gives other logits through packed attention",
    ),
    "lfm2": ("Lfm2Config", BASE | {"layer_types": ["conv", "full_attention"]}, "type conv"),
    "llama4_chunks": (
        "Llama4TextConfig",
        BASE
        | {
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "layer_types": ["chunked_attention", "full_attention"],
        },
        "type chunked_attention",
    ),
    "gpt_oss_sinks": (
        "GptOssConfig",
        BASE
        | {
            "head_dim": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        "attention sinks",
    ),
}
LONGROPE: dict[str, Any] = BASE | {
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 16.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 16,
    },
}


def some_sequences(vocab: int) -> list[np.ndarray]:
    """A trunk, a branch off it, a stranger, the trunk's own prefix, the branch again: 5 paths."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(3, vocab, 70)
    branch = np.concatenate([trunk[:40], rng.integers(3, vocab, 27)])
    return [trunk, branch, rng.integers(3, vocab, 12), trunk[:20], branch]


@pytest.fixture(scope="module", params=list(FAMILIES))
def folder(request: pytest.FixtureRequest, make_folder: Callable[..., Path]) -> Path:
    config_class, fields = FAMILIES[request.param]
    return make_folder(getattr(transformers, config_class), **fields)


def test_a_tree_gives_each_sequence_the_log_probs_it_has_alone(
    folder: Path, read_policy: Callable[..., Any]
) -> None:
    """a12: positions, windows, caps and scalings are the model's own, wherever a sequence lies."""
    policy = read_policy(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    sequences = some_sequences(policy.vocab_size)
    tree = build_prefix_tree(sequences)
    with torch.no_grad():
        packed = policy.logits(policy.tree_hidden(tree)).log_softmax(-1)
        for ids, path in zip(sequences, tree.paths, strict=True):
            alone = plain(input_ids=torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
            torch.testing.assert_close(packed[torch.from_numpy(path)], alone, rtol=0, atol=1e-5)


def test_cached_decoding_and_teacher_forcing_give_the_same_log_probs(
    folder: Path,
    read_policy: Callable[..., Any],
    sample_all: Callable[..., Any],
    make: Any,
) -> None:
    """a09, a13: per position, from 1 token on, over the 64-key border and past the window."""
    policy = read_policy(folder)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, policy.vocab_size, n).astype(np.int32) for n in (1, 9, 58, 64)]
    params = SamplingParams(9, temperature=0.7, ignore_eos=True)
    completions = sample_all(policy, [*prompts, prompts[2]], params)
    samples = [make.sample(p, c) for p, c in zip([*prompts, prompts[2]], completions, strict=True)]
    for micro in pack(samples, 150):
        with torch.no_grad():
            scores = score_tokens(policy, micro, 0.7)
        torch.testing.assert_close(
            scores.policy_logprobs_N, torch.from_numpy(micro.sampler_logprobs), rtol=0, atol=1e-5
        )
        spread = scores.policy_logprobs_N.max() - scores.policy_logprobs_N.min()
        assert spread > 0.3, "a flat distribution would make the test easy"


def test_in_bf16_a_crowded_engine_gives_the_learners_log_probs_bit_for_bit(
    folder: Path,
    read_policy: Callable[..., Any],
    make: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts computed in pieces, read from the cache, and computed again after a preemption."""
    policy = read_policy(folder, "bfloat16")
    monkeypatch.setattr(embedded, "PREFILL_ROWS", 24)
    rng = np.random.default_rng(2)
    trunk = rng.integers(3, policy.vocab_size, 66).astype(np.int32)
    prompts = [trunk[n % 5 :][:n] for n in (1, 33, 33, 40, 58, 61)]
    params = SamplingParams(12, temperature=0.7, ignore_eos=True)
    sampler = EmbeddedSampler(policy, max_batch=4, kv_tokens=112)

    async def twice() -> list[Any]:
        done = []
        for _ in range(2):
            calls = [sampler.generate(p, params, seed) for seed, p in enumerate(prompts)]
            done += await asyncio.gather(*calls)
        return done

    completions = asyncio.run(twice())
    stats = sampler.stats()
    assert stats["sampler/preemptions"] > 0 and stats["sampler/cached_tokens"] > 0
    samples = [make.sample(p, c) for p, c in zip(prompts * 2, completions, strict=True)]
    for micro in pack(samples, 150):
        with torch.no_grad():
            found = score_tokens(policy, micro, 0.7).policy_logprobs_N
        assert found.tolist() == micro.sampler_logprobs.tolist()


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_model_whose_attention_cannot_be_packed_is_refused_not_silently_wrong(
    name: str, make_folder: Callable[..., Path]
) -> None:
    """Each of them sees its neighbours, or other keys, when sequences share a row of tokens."""
    config_class, fields, reason = REFUSED[name]
    folder = make_folder(getattr(transformers, config_class), **fields)
    with pytest.raises(ModelError, match=reason):
        load_policy(folder, dtype="float32")


def test_longrope_is_refused_where_neighbours_would_change_its_rotation(
    make_folder: Callable[..., Path],
) -> None:
    """transformers picks the long or the short factors for the whole batch by its longest row."""
    folder = make_folder(transformers.Phi3Config, **LONGROPE)
    with pytest.raises(ModelError, match="set model.max_context to 16 or less"):
        load_policy(folder, dtype="float32")
    assert load_policy(folder, dtype="float32", max_context=16).max_context == 16
