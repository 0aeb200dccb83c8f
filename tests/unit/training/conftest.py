"""Learners on fresh policies, and on-policy batches for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from posttrain.algo.builder import build_algorithm
from posttrain.config import Recipe, ReverseConfig
from posttrain.training.learner import InlineLearner
from posttrain.training.policy import load_policy
from posttrain.types import SamplingParams, TrainBatch


@pytest.fixture
def make_learner(sharp_folder: Path, tiny_folder: Path) -> Callable[..., Any]:
    """A fresh policy and its learner; keyword arguments are sections of the recipe."""

    def build(
        dtype: Any = "float32", folder: str | Path = "sharp", **sections: dict[str, Any]
    ) -> InlineLearner:
        named = {"sharp": sharp_folder, "tiny": tiny_folder}
        path = named[folder] if isinstance(folder, str) else folder
        whole: dict[str, Any] = {"name": "test", "env": ReverseConfig(), "num_steps": 10}
        whole |= {"algo": {"type": "rloo"}, "optim": {"lr": 1e-3}, **sections}
        recipe = Recipe.model_validate(whole)
        policy = load_policy(path, dtype=dtype)
        return InlineLearner(policy, build_algorithm(recipe.algo), recipe)

    return build


@pytest.fixture
def on_policy(sample_all: Callable[..., Any], make: SimpleNamespace) -> Callable[..., TrainBatch]:
    """A batch sampled from the learner's own weights: 4 groups of 3 siblings, mixed advantages."""

    def build(
        learner: Any, step: int = 1, temperature: float = 1.0, scale: float = 1.0
    ) -> TrainBatch:
        policy = learner._policy
        rng = np.random.default_rng(step)
        lengths = (5, 30, 63, 9)
        prompts = [rng.integers(4, policy.vocab_size, n).astype(np.int32) for n in lengths]
        repeated = [prompts[i // 3] for i in range(12)]
        params = [
            SamplingParams(3 + i % 4, temperature=temperature, ignore_eos=True) for i in range(12)
        ]
        completions = sample_all(policy, repeated, params)
        return make.batch(
            [
                make.sample(p, c, scale * (i % 3 - 1) + 0.1 * scale, i // 3, i % 3)
                for i, (p, c) in enumerate(zip(repeated, completions, strict=True))
            ],
            step,
        )

    return build
