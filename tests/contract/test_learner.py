"""What every learner must do, whatever computes underneath."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from posttrain.algo.builder import build_algorithm
from posttrain.config import Recipe, ReverseConfig
from posttrain.protocols import Learner
from posttrain.training.learner import InlineLearner
from posttrain.training.policy import load_policy
from posttrain.types import TrainBatch

VARIANTS: dict[str, Any] = {
    "bf16_exact": ("bfloat16", "exact"),
    "fp32_exact": ("float32", "exact"),
    "bf16_fused": ("bfloat16", "sdpa"),
}


@pytest.fixture(params=list(VARIANTS))
def new_learner(request: pytest.FixtureRequest, sharp_folder: Path) -> Callable[[], Learner]:
    dtype, kind = VARIANTS[request.param]

    def build() -> Learner:
        recipe = Recipe(name="contract", env=ReverseConfig(), num_steps=9)
        policy = load_policy(sharp_folder, dtype=dtype, attention_kind=kind)
        return InlineLearner(policy, build_algorithm(recipe.algo), recipe)

    return build


@pytest.fixture
def batch(make: SimpleNamespace) -> TrainBatch:
    """Two siblings of one prompt and a stranger; the log-probs are anybody's."""
    prompt, other = np.arange(4, 30, dtype=np.int32), np.arange(30, 37, dtype=np.int32)
    return make.batch(
        [
            make.sample(prompt, make.completion([8, 9, 2]), 1.0, 0, 0),
            make.sample(prompt, make.completion([8, 30]), -1.0, 0, 1),
            make.sample(other, make.completion([40] * 5), 0.5, 1, 0),
        ]
    )


def test_it_is_a_learner(new_learner: Callable[[], Learner]) -> None:
    assert isinstance(new_learner(), Learner)


def test_a_step_moves_the_weights_and_says_which_version_they_are(
    new_learner: Callable[[], Learner], batch: TrainBatch
) -> None:
    learner = new_learner()
    before = learner.weights_hash()
    result = learner.step(batch)
    assert (result.step, result.policy_version, learner.policy_version) == (1, 1, 1)
    assert result.skipped is None
    assert result.weights_hash == learner.weights_hash() != before


def test_the_same_batches_give_the_same_bits(
    new_learner: Callable[[], Learner], batch: TrainBatch
) -> None:
    """What a redo from the journal rests on."""
    hashes = []
    for _ in range(2):
        learner = new_learner()
        hashes.append([learner.step(replace(batch, step=s)).weights_hash for s in (1, 2, 3)])
    assert hashes[0] == hashes[1] and len(set(hashes[0])) == 3


def test_save_and_restore_continue_the_uninterrupted_run(
    new_learner: Callable[[], Learner], batch: TrainBatch, tmp_path: Path
) -> None:
    whole = new_learner()
    for step in (1, 2):
        whole.step(replace(batch, step=step))
    whole.save(tmp_path)
    resumed = new_learner()
    resumed.restore(tmp_path)
    assert (resumed.policy_version, resumed.weights_hash()) == (2, whole.weights_hash())
    expected, actual = (one.step(replace(batch, step=3)) for one in (whole, resumed))
    assert actual.weights_hash == expected.weights_hash
    assert actual.metrics["learner/grad_norm"] == expected.metrics["learner/grad_norm"]


def test_what_the_algorithm_remembers_is_part_of_the_saved_state(
    new_learner: Callable[[], Learner], tmp_path: Path
) -> None:
    learner = new_learner()
    learner.memory["policy.kl_coef"] = 0.1 + 0.2
    learner.save(tmp_path)
    resumed = new_learner()
    assert dict(resumed.memory) == {}
    resumed.restore(tmp_path)
    assert dict(resumed.memory) == {"policy.kl_coef": 0.1 + 0.2}


def test_an_empty_batch_counts_as_a_step_and_moves_nothing(
    new_learner: Callable[[], Learner],
) -> None:
    learner = new_learner()
    before = learner.weights_hash()
    result = learner.step(TrainBatch(1, (), (0,), {0: "zero_variance"}))
    assert (result.skipped, result.policy_version) == ("no_trainable_tokens", 1)
    assert learner.weights_hash() == before
