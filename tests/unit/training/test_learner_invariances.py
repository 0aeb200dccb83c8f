"""Weights after steps of every kind of algorithm: no cut changes them, and two parts are one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.algo.builder import build_algorithm
from posttrain.build import Trainable, build_trainable
from posttrain.config import Recipe
from posttrain.data.samples import build_batch
from posttrain.telemetry.observer import SilentObserver
from posttrain.types import (
    Draw,
    Group,
    SamplingParams,
    Scored,
    StepResult,
    StopReason,
    TokenSequence,
    Trajectory,
    Turn,
)

KL = {"coef": 0.2}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "rloo": {"type": "rloo"},
    "grpo_gspo": {"type": "grpo", "loss": "gspo"},
    "grpo_batch_std_prompt_mean": {"type": "grpo", "std": "batch", "aggregation": "prompt_mean"},
    "reinforce_pp": {"type": "reinforce_pp"},
    "optimal_token_baseline": {"type": "optimal_token_baseline"},
    "gae_shared_critic": {"type": "gae", "critic": {"lr": 1.0}},
    "gae_own_critic": {"type": "gae", "critic": {"trunk": "own", "lr": 1.0}},
    "vtrace": {"type": "vtrace", "critic": {"lr": 1.0}},
    "rloo_kl_in_reward": {"type": "rloo", "kl": KL},
    "rloo_kl_in_loss": {"type": "rloo", "kl": {**KL, "place": "loss", "estimator": "k2"}},
    "rloo_moving_reference": {"type": "rloo", "kl": {**KL, "sync_every": 1}},
    "rloo_entropy": {"type": "rloo", "entropy": {"coef": 0.1}},
    "rloo_m2po": {"type": "rloo", "corrections": [{"type": "m2po", "tau": 0.01}]},
    "rloo_epochs": {"type": "rloo", "num_minibatches": 2, "num_epochs": 2},
    "reinforce_pp_epochs": {"type": "reinforce_pp", "num_epochs": 2, "kl": KL},
    "rloo_positive_nll": {"type": "rloo", "positive_nll_coef": 0.1},
    "distill": {"type": "distill"},
    "distill_forward_kl": {"type": "distill", "divergence": "forward_kl"},
    "raft": {"type": "raft"},
    "sft": {"type": "sft"},
    "preference": {"type": "preference"},
    "kto": {"type": "preference", "loss": "kto"},
    "reward_model": {"type": "reward_model"},
}
GIVEN = {"sft": {"type": "demonstrations", "path": "unread.jsonl"}}


@pytest.fixture
def train(sharp_folder: Path, tiny_folder: Path) -> Callable[..., Trainable]:
    """Policy, learner and whatever the algorithm reads beside them, in fp32.

    With a large eps AdamW's step is proportional to the gradient: with a small one the sign of a
    gradient of 0, which is rounding, would move a weight.
    """

    def build(algo: dict[str, Any], max_tokens: int = 100_000, **sections: Any) -> Trainable:
        if algo["type"] == "distill":
            algo = {**algo, "teacher": str(tiny_folder)}
        source = {"data": GIVEN[algo["type"]]} if algo["type"] in GIVEN else {}
        whole: dict[str, Any] = {
            "name": "test",
            "env": {"type": "reverse"},
            "model": {"path": str(sharp_folder), "dtype": "float32"},
            "optim": {"lr": 1.0, "eps": 1.0},
            "learner": {"max_tokens_per_microbatch": max_tokens},
            "algo": algo,
        }
        return build_trainable(
            Recipe.model_validate({**whole, **source, **sections}), SilentObserver()
        )

    return build


@pytest.fixture(scope="module")
def groups(
    read_policy: Callable[..., Any], sample_all: Callable[..., Any], make: SimpleNamespace
) -> list[Group]:
    """Four draws of three siblings, sampled from the initial weights, with different rewards."""
    policy = read_policy("sharp")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, policy.vocab_size, n).astype(np.int32) for n in (5, 30, 63, 9)]
    repeated = [prompts[i // 3] for i in range(12)]
    params = [SamplingParams(3 + i % 4, ignore_eos=True) for i in range(12)]
    completions = sample_all(policy, repeated, params)
    members = [
        Trajectory(
            i // 3,
            i % 3,
            i,
            (Turn(prompt, completion),),
            (make.sequence(prompt.tolist(), completion),),
            Scored(float((i * 7 + i // 3) % 3) / 2),
            StopReason.TERMINATED,
        )
        for i, (prompt, completion) in enumerate(zip(repeated, completions, strict=True))
    ]
    return [
        Group(Draw(d, f"t{d}", 0, d), tuple(m for m in members if m.draw_id == d)) for d in range(4)
    ]


def as_demonstrations(groups: Sequence[Group]) -> list[Group]:
    """The same answers as given ones: no policy sampled them."""

    def given(member: Trajectory) -> Trajectory:
        (s,) = member.sequences
        kinds = np.where(s.loss_mask, 3, 2)
        sequence = TokenSequence.build(s.token_ids, kinds, 0 * s.sampler_logprobs, 0 * kinds - 1)
        return replace(member, turns=(), sequences=(sequence,), role="demonstration")

    return [Group(g.draw, tuple(given(t) for t in g)) for g in groups]


def steps(trainable: Trainable, groups: Sequence[Group], count: int = 2) -> list[StepResult]:
    """The second step sees what the first one moved: a policy away from its reference, and heads
    that began at 0 and pass no gradient on before."""
    learner = trainable.learner
    results = []
    for step in range(1, count + 1):
        batch = build_batch(step, groups, trainable.algorithm, learner.memory)
        results.append(learner.step(batch))
        assert results[-1].skipped is None
    return results


def weights(trainable: Trainable) -> dict[str, torch.Tensor]:
    """Everything that was trained, flat: the policy, and a critic or a reward head."""
    learner = trainable.learner
    masters = {"policy": learner.masters}
    if learner.scorer is not None:
        masters["scorer"] = learner.scorer.optimizer.masters
    return {
        name: torch.cat([m.detach().flatten().clone() for m in own.values()])
        for name, own in masters.items()
    }


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_cut_into_microbatches_does_not_change_the_weights(
    name: str, train: Callable[..., Trainable], groups: list[Group]
) -> None:
    """a01, a07: one forward, a few, and one a sample or a pair, with every kind of algorithm."""
    given = as_demonstrations(groups) if name in GIVEN else groups
    before = weights(train(ALGORITHMS[name]))
    after, metrics, num_micros = [], [], []
    for max_tokens in (100_000, 70, 1):
        trainable = train(ALGORITHMS[name], max_tokens)
        results = steps(trainable, given)
        after.append(weights(trainable))
        metrics.append([r.metrics for r in results])
        num_micros.append(results[0].metrics["learner/microbatches"])
    assert num_micros[0] < num_micros[1] <= num_micros[2], "they are cut in different ways"
    for other in after[1:]:
        for part, whole in after[0].items():
            moved = float((whole - before[part]).norm())
            assert moved > 1e-3, f"{part} learned something"
            assert float((other[part] - whole).norm()) < 1e-5 * max(moved, float(whole.norm()))
            assert float((other[part] - whole).norm()) < 1e-3 * moved
    same = [k for k in metrics[0][1] if k.startswith(("policy/", "value/", "preference/", "algo/"))]
    for other in metrics[1:]:
        for key in same:
            assert other[1][key] == pytest.approx(metrics[0][1][key], rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize(
    "algo",
    [
        {"type": "rloo"},
        {"type": "grpo", "loss": "gspo", "zero_variance": "keep"},
        {"type": "rloo", "aggregation": "prompt_mean", "kl": {"coef": 0.2}},
        {"type": "rloo", "num_minibatches": 2, "num_epochs": 2},
    ],
)
def test_two_environments_with_one_algorithm_are_one(
    algo: dict[str, Any], train: Callable[..., Trainable], groups: list[Group]
) -> None:
    """Bit for bit: denominators are of all tokens, whichever environment they came from."""
    mixed = [
        Group(replace(g.draw, environment="b" if i % 2 else "a"), g.trajectories)
        for i, g in enumerate(groups)
    ]
    config = Recipe.model_validate({"name": "t", "env": {"type": "reverse"}, "algo": algo}).algo
    hashes, losses = [], []
    for algorithm in (build_algorithm(config), build_algorithm(config, {"b": config})):
        trainable = train(algo, 70)
        trainable.learner._algorithm = algorithm
        results = steps(replace(trainable, algorithm=algorithm), mixed)
        hashes.append([r.weights_hash for r in results])
        losses.append([r.metrics["learner/loss"] for r in results])
        names = {n for s in build_batch(1, mixed, algorithm).samples for n in s.streams}
        assert names == ({"policy"} if len(algorithm.parts) == 1 else {"policy", "policy@b"})
    assert hashes[0] == hashes[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-6)


def test_parts_of_one_kind_share_their_denominators(
    train: Callable[..., Trainable], groups: list[Group]
) -> None:
    """The second environment's tokens count in the first one's mean: an algorithm of its own that
    gives it no gradient leaves the other's share as it was."""
    mixed = [
        Group(replace(g.draw, environment="b" if i % 2 else "a"), g.trajectories)
        for i, g in enumerate(groups)
    ]
    rloo = Recipe.model_validate({"name": "t", "env": {"type": "reverse"}}).algo
    algorithm = build_algorithm(rloo, {"b": rloo})
    both = build_batch(1, mixed, algorithm)
    silent = [
        replace(s, streams={n: w * (n == "policy") for n, w in s.streams.items()})
        for s in both.samples
    ]
    alone = [s for s in both.samples if "policy" in s.streams]
    moves = []
    for samples in (silent, alone):
        trainable = train({"type": "rloo"}, optim={"lr": 1.0, "eps": 1e3, "max_grad_norm": 1e3})
        trainable.learner._algorithm = algorithm
        before = weights(trainable)["policy"]
        trainable.learner.step(replace(both, samples=tuple(samples)))
        moves.append(weights(trainable)["policy"] - before)
    share = sum(s.num_loss_tokens for s in alone) / both.num_loss_tokens
    assert 0.3 < share < 0.7
    ratio = float(moves[0] @ moves[1] / (moves[1] @ moves[1]))
    assert ratio == pytest.approx(share, rel=1e-2)
