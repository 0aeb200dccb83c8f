"""Counts of operations and bytes, by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.benchmarks import work
from posttrain.benchmarks.work import Limits, ModelSize, Work

SIZE = ModelSize(
    num_layers=2,
    hidden=4,
    intermediate=8,
    layer_weights=100,
    head_weights=40,
    num_parameters=150,
    attention_width=4,
    kv_width=2,
    itemsize=2,
)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_the_sizes_of_a_model_are_its_weights() -> None:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    size = ModelSize.of(LlamaForCausalLM(config).to(torch.bfloat16))
    attention, mlp = 16 * 16 + 2 * 16 * 8 + 16 * 16, 3 * 16 * 24
    assert size.layer_weights == 2 * (attention + mlp)
    assert size.head_weights == 32 * 16
    assert size.num_parameters == size.layer_weights + size.head_weights + 5 * 16
    assert (size.attention_width, size.kv_width, size.itemsize) == (16, 8, 2)
    assert size.kv_bytes == 2 * 2 * 8 * 2


def test_a_shared_prompt_is_computed_once_and_its_keys_are_read_once() -> None:
    prompt = ids(1, 2, 3)
    assert work.prefill(SIZE, [prompt, prompt]) == work.prefill(SIZE, [prompt])
    ((flops, moved),) = work.prefill(SIZE, [prompt]).passes
    pairs = 1 + 2 + 3
    assert flops == 2 * (100 * 3 + 40 * 1) + 4 * 2 * 4 * pairs
    assert moved == (100 + 40) * 2 + 3 * SIZE.kv_bytes


def test_what_an_earlier_turn_computed_is_not_computed_again() -> None:
    ((flops, _),) = work.prefill(SIZE, [ids(1, 2, 3)], num_cached=2).passes
    assert flops == 2 * (100 * 1 + 40 * 1) + 4 * 2 * 4 * 3


def test_decoding_takes_a_pass_for_each_token_after_the_first() -> None:
    decode = work.decode(SIZE, [ids(1, 2), ids(1, 2)], new_tokens=3)
    expected = [
        (2 * (100 + 40) * 2 + 4 * 2 * 4 * (4 + 2 * done), 280 + SIZE.kv_bytes * (2 + 2 * done))
        for done in (1, 2)
    ]
    assert list(decode.passes) == expected
    assert work.decode(SIZE, [ids(1)], new_tokens=1).passes == ()


def test_the_learner_computes_forward_and_twice_that_backward_and_moves_its_state() -> None:
    (flops, _), (nothing, moved) = work.learner(SIZE, [ids(1, 2, 3), ids(1, 2, 4)], 2).passes
    assert flops == 3 * (2 * (100 * 2 + 40 * 2) + 4 * 2 * 4 * (1 + 2)), "last tokens are labels"
    assert (nothing, moved) == (0.0, (2 + 12 + 12 + 2) * 150)
    full = dataclasses.replace(SIZE, itemsize=4)
    assert work.learner(full, [ids(1, 2)], 1).passes[1][1] == (4 + 12 + 12) * 150


def test_a_pass_waits_for_the_slower_of_arithmetic_and_memory() -> None:
    limits = Limits(peak_flops=10.0, bandwidth=1.0)
    assert Work(((100.0, 1.0),)).least_s(limits) == 10.0
    assert Work(((1.0, 100.0),)).least_s(limits) == 100.0
    both = Work(((100.0, 1.0),)) + Work(((1.0, 100.0),))
    assert both.least_s(limits) == 110.0, "one after the other"
    assert (both.flops, both.bytes) == (101.0, 101.0)


def test_a_step_is_its_rollout_and_its_learner() -> None:
    prompts = [ids(1, 2, 3), ids(4, 5, 6)]
    rollout, learner = work.grpo_step(SIZE, prompts, group_size=2, new_tokens=4)
    siblings = [p for p in prompts for _ in range(2)]
    assert rollout == work.rollout(SIZE, siblings, 4)
    assert learner.passes[0][0] == pytest.approx(
        3
        * (2 * (100 * (2 * 3 + 4 * 3) + 40 * 16) + 4 * 2 * 4 * (2 * (1 + 2 + 3) + 4 * (4 + 5 + 6)))
    )
