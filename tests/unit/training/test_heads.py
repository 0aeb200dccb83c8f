"""Scalars from hidden states: where they are read, what they train, and that they come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.config import OptimConfig
from posttrain.data.packing import pack
from posttrain.training.heads import ScalarHead, Scorer
from posttrain.training.policy import Policy, load_policy
from posttrain.types import Microbatch, SamplingParams

CONFIG = OptimConfig(lr=1e-2)


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


def test_an_untrained_head_says_nothing(load: Callable[..., Policy], micro: Microbatch) -> None:
    policy = load()
    scorer = Scorer(policy, CONFIG)
    values = scorer.read(policy.tree_hidden(micro), micro, "predict_rows")
    assert values.dtype == torch.float32 and not values.any()


@pytest.mark.parametrize("at", ["predict_rows", "own_rows"])
def test_a_value_is_read_before_its_token_and_a_score_after_it(
    at: str, load: Callable[..., Policy], micro: Microbatch
) -> None:
    """A value must not know the token it judges; a score is of the whole answer, its end too."""
    policy = load()
    scorer = Scorer(policy, CONFIG)
    with torch.no_grad():
        scorer.head.weight.copy_(torch.linspace(-1, 1, len(scorer.head.weight)))
    hidden_TH = policy.tree_hidden(micro).detach()
    read_N = scorer.read(hidden_TH, micro, at).detach()
    for position, row in enumerate(getattr(micro, at)):
        expected = float(hidden_TH[int(row)].float() @ scorer.head.weight.detach())
        assert float(read_N[position]) == pytest.approx(expected, rel=1e-5)
    shifted = micro.token_ids.copy()
    last = int(micro.own_rows[-1])
    shifted[last] = shifted[last] % 50 + 4
    other = replace(micro, token_ids=shifted)
    again_N = scorer.read(policy.tree_hidden(other), other, at).detach()
    changed = float(again_N[-1]) != float(read_N[-1])
    assert changed == (at == "own_rows")


def test_a_head_on_the_policys_trunk_moves_it_and_one_on_its_own_does_not(
    load: Callable[..., Policy], micro: Microbatch
) -> None:
    for own in (False, True):
        policy = load()
        scorer = Scorer(policy, CONFIG, load() if own else None)
        with torch.no_grad():
            scorer.head.weight.fill_(0.1)
        hidden = None if own else policy.tree_hidden(micro)
        scorer.read(hidden, micro, "predict_rows").sum().backward()
        touched = any(p.grad is not None and p.grad.any() for p in policy.model.parameters())
        assert touched != own
        assert scorer.head.weight.grad is not None and scorer.head.weight.grad.any()
        names = set(scorer.optimizer.masters)
        assert {"head.weight", "head.bias"} <= names
        assert any(name.startswith("trunk.") for name in names) == own


def test_a_reward_models_head_has_no_bias(load: Callable[..., Policy]) -> None:
    """Scores are compared, and the exported classifier has none either."""
    assert set(Scorer(load(), CONFIG, bias=False).optimizer.masters) == {"head.weight"}
    assert ScalarHead(4, bias=True)(torch.ones(2, 4)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scorer_and_its_moments_come_back_bit_for_bit(
    own: bool, dtype: str, load: Callable[..., Policy], micro: Microbatch, tmp_path: Path
) -> None:
    def build() -> tuple[Policy, Scorer]:
        policy = load(dtype)
        return policy, Scorer(policy, CONFIG, load(dtype) if own else None)

    def update(policy: Policy, scorer: Scorer) -> None:
        scorer.optimizer.zero_grad()
        hidden = None if own else policy.tree_hidden(micro).detach()
        values = scorer.read(hidden, micro, "predict_rows")
        (values - 1).square().sum().backward()
        scorer.optimizer.update(1e-2, scorer.optimizer.grad_norm())

    policy, scorer = build()
    update(policy, scorer)
    scorer.save(tmp_path / "scorer")
    other_policy, restored = build()
    restored.restore(tmp_path / "scorer")
    assert restored.optimizer.weights_hash() == scorer.optimizer.weights_hash()
    update(policy, scorer)
    update(other_policy, restored)
    assert restored.optimizer.weights_hash() == scorer.optimizer.weights_hash()
