"""Small tokenizers with the chat templates of several families."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from posttrain.rollout.recorder import Renderer
from posttrain.types import FinishReason, Message, Observation

# name -> (template, special tokens, BOS, EOS). The EOS is what the policy samples to end a turn.
_LOOP = "{% for m in messages %}"
_ROLE = "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
_GEN = "{% endfor %}{% if add_generation_prompt %}"
FAMILIES: dict[str, tuple[str, list[str], str | None, str]] = {
    "chatml": (
        _LOOP
        + "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
        + _GEN
        + "{{ '<|im_start|>assistant\n' }}{% endif %}",
        ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        None,
        "<|im_end|>",
    ),
    "chatml_default_system": (
        "{% if messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are kind.<|im_end|>\n' }}{% endif %}"
        + _LOOP
        + "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
        + _GEN
        + "{{ '<|im_start|>assistant\n' }}{% endif %}",
        ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        None,
        "<|im_end|>",
    ),
    "llama3": (
        "{{ bos_token }}"
        + _LOOP
        + "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
        + "{{ m['content'] | trim + '<|eot_id|>' }}"
        + _GEN
        + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "mistral": (
        "{{ bos_token }}"
        + _LOOP
        + "{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
        + "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}",
        ["<s>", "</s>", "[INST]", "[/INST]"],
        "<s>",
        "</s>",
    ),
    "gemma": (
        "{{ bos_token }}"
        + _LOOP
        + _ROLE
        + "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}"
        + _GEN
        + "{{ '<start_of_turn>model\n' }}{% endif %}",
        ["<bos>", "<start_of_turn>", "<end_of_turn>"],
        "<bos>",
        "<end_of_turn>",
    ),
    "phi3": (
        _LOOP
        + "{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}"
        + _GEN
        + "{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}",
        ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"],
        None,
        "<|end|>",
    ),
    "zephyr": (
        _LOOP
        + "{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}"
        + _GEN
        + "{{ '<|assistant|>\n' }}{% endif %}",
        ["<s>", "</s>"],
        "<s>",
        "</s>",
    ),
    "drops_thinking": (
        _LOOP
        + "{% set text = m['content'] %}"
        + "{% if m['role'] == 'assistant' and not loop.last %}"
        + "{% set text = text.split('</think>')[-1] %}{% endif %}"
        + "{{ '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>\n' }}"
        + _GEN
        + "{{ '<|im_start|>assistant\n' }}{% endif %}",
        ["<|im_start|>", "<|im_end|>", "<think>", "</think>"],
        None,
        "<|im_end|>",
    ),
    "thinks_in_the_prompt": (
        _LOOP
        + "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
        + _GEN
        + "{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}",
        ["<|im_start|>", "<|im_end|>", "<think>", "</think>"],
        None,
        "<|im_end|>",
    ),
}


def _tokenizer(name: str) -> Any:
    template, specials, bos, eos = FAMILIES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("1", "2"), ("ab", "12")]
    vocab = [*alphabet, *(a + b for a, b in merges)]
    raw = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(vocab)}, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    raw.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    raw.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=bos, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, Any]:
    return {name: _tokenizer(name) for name in FAMILIES}


@pytest.fixture(scope="session")
def renderers(tokenizers: dict[str, Any]) -> dict[str, Renderer]:
    return {name: Renderer(t, [t.eos_token_id]) for name, t in tokenizers.items()}


@pytest.fixture(scope="session")
def say() -> Callable[..., Observation]:
    """An observation of user messages."""
    return lambda *texts: Observation(tuple(Message.text("user", t) for t in texts))


@pytest.fixture(scope="session")
def speak(tokenizers: dict[str, Any], make: SimpleNamespace) -> Callable[..., Any]:
    """What a policy sampled: canonical ids of a text, the EOS of the family, and the text."""

    def build(name: str, text: str, reason: FinishReason | None = None) -> Any:
        tokenizer = tokenizers[name]
        ids = tokenizer.encode(text, add_special_tokens=False)
        if reason is None:
            return make.completion([*ids, tokenizer.eos_token_id], text)
        return make.completion(ids, text, reason)

    return build
