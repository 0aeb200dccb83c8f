"""Models that are read and not trained, and a reference that moves only when it is told to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.data.packing import pack
from posttrain.training.forward import score_tokens
from posttrain.training.frozen import CopiedReference, FrozenModel
from posttrain.training.policy import Policy, load_policy
from posttrain.types import Microbatch, SamplingParams


@pytest.fixture
def load(sharp_folder: Path) -> Callable[..., Policy]:
    return lambda dtype="float32": load_policy(sharp_folder, dtype=dtype)


@pytest.fixture
def micro(read_policy: Any, sample_all: Any, make: Any) -> Microbatch:
    prompts = [np.arange(4, 9 + i).astype(np.int32) for i in range(3)]
    completions = sample_all(read_policy("sharp"), prompts, SamplingParams(5, ignore_eos=True))
    samples = [
        make.sample(p, c, 1.0, i) for i, (p, c) in enumerate(zip(prompts, completions, strict=True))
    ]
    return pack(samples, 1000)[0]


def moved(policy: Policy, by: float) -> None:
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(by)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_frozen_copy_of_the_policy_gives_its_very_log_probs(
    temperature: float, load: Callable[..., Policy], micro: Microbatch
) -> None:
    """So a KL to the initial reference begins at exactly 0."""
    policy, frozen = load(), FrozenModel(load())
    mine = score_tokens(policy, micro, temperature).policy_logprobs_N.detach()
    assert torch.equal(frozen.logprobs(micro, temperature), mine)


def test_nothing_of_a_frozen_model_has_a_gradient(
    load: Callable[..., Policy], micro: Microbatch
) -> None:
    frozen = FrozenModel(load())
    assert not frozen.logprobs(micro, 1.0).requires_grad
    assert not any(p.requires_grad for p in frozen.policy.model.parameters())


def test_a_reference_stays_where_it_is_when_the_policy_moves(
    load: Callable[..., Policy], micro: Microbatch
) -> None:
    policy, reference = load(), CopiedReference(load(), moves=True)
    before = reference.logprobs(micro, 1.0)
    moved(policy, 0.01)
    assert torch.equal(reference.logprobs(micro, 1.0), before)


def test_a_reset_makes_the_reference_the_policy(
    load: Callable[..., Policy], micro: Microbatch
) -> None:
    policy, reference = load(), CopiedReference(load(), moves=True)
    moved(policy, 0.01)
    reference.follow(policy, 1.0)
    mine = score_tokens(policy, micro, 1.0).policy_logprobs_N.detach()
    assert torch.equal(reference.logprobs(micro, 1.0), mine)
    moved(policy, 0.01)
    assert not torch.equal(
        reference.logprobs(micro, 1.0), score_tokens(policy, micro, 1.0).policy_logprobs_N.detach()
    ), "a copy, not the policy itself"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixed_reference_is_the_weighted_mean_of_both(
    dtype: str, load: Callable[..., Policy]
) -> None:
    policy, reference = load(dtype), CopiedReference(load(dtype), moves=True)
    moved(policy, 0.5)
    expected = [
        (0.25 * theirs.double() + 0.75 * mine.double())
        for mine, theirs in zip(
            reference.policy.model.parameters(), policy.model.parameters(), strict=True
        )
    ]
    reference.follow(policy, 0.25)
    for mine, mean in zip(reference.policy.model.parameters(), expected, strict=True):
        torch.testing.assert_close(
            mine.double(), mean, rtol=1e-2 if dtype != "float32" else 1e-5, atol=1e-6
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_moved_reference_comes_back_bit_for_bit(
    dtype: str, load: Callable[..., Policy], tmp_path: Path
) -> None:
    policy, reference = load(dtype), CopiedReference(load(dtype), moves=True)
    moved(policy, 0.03)
    reference.follow(policy, 0.6)
    reference.save(tmp_path)
    fresh = CopiedReference(load(dtype), moves=True)
    fresh.restore(tmp_path)
    for mine, theirs in zip(
        fresh.policy.model.parameters(), reference.policy.model.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_a_reference_that_never_moves_needs_no_room_in_a_checkpoint(
    load: Callable[..., Policy], tmp_path: Path
) -> None:
    reference = CopiedReference(load(), moves=False)
    reference.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    reference.restore(tmp_path)
