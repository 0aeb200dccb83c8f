"""One optimizer step: invariances, skips, several updates a batch, and what it may not touch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from posttrain.errors import TrainingError
from posttrain.training import learner as learner_module
from posttrain.training.health import refuse_sick_learner
from posttrain.types import TrainBatch

AGGREGATIONS: list[dict[str, Any]] = [
    {"aggregation": "token_mean"},
    {"aggregation": "seq_mean_token_mean"},
    {"aggregation": "seq_mean_token_sum"},
    {"aggregation": "fixed_length", "fixed_length": 8},
    {"aggregation": "prompt_mean"},
]


def weights(learner: Any) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in learner._policy.model.parameters()])


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The accumulated gradient of every update, as the optimizer is about to use it."""
    seen: list[torch.Tensor] = []
    update = learner_module.MasterOptimizer.update

    def spy(self: Any, lr: float, grad_norm: float) -> None:
        seen.append(torch.cat([m.grad.flatten().clone() for m in self._masters.values()]))
        update(self, lr, grad_norm)

    monkeypatch.setattr(learner_module.MasterOptimizer, "update", spy)
    return seen


# --- the split does not matter --------------------------------------------------------------------


@pytest.mark.parametrize("algo", AGGREGATIONS, ids=lambda a: a["aggregation"])
def test_the_cut_into_microbatches_changes_neither_gradient_nor_weights(
    algo: dict[str, Any],
    make_learner: Callable[..., Any],
    on_policy: Callable[..., TrainBatch],
    gradients: list[torch.Tensor],
) -> None:
    """a01, a07: one forward, a few, one a sample; shared prompts split over micro-batches too."""
    # With a large eps AdamW's step is proportional to the gradient: at a small one its sign
    # alone moves a weight, and the sign of a gradient of 0 is rounding.
    optim = {"lr": 1e-3, "eps": 1.0}
    after = []
    for max_tokens in (100_000, 60, 1):
        learner = make_learner(
            algo={"type": "rloo", **algo},
            optim=optim,
            learner={"max_tokens_per_microbatch": max_tokens},
        )
        before = weights(learner)
        result = learner.step(on_policy(learner))
        assert result.metrics["learner/microbatches"] == {100_000: 1, 60: 5, 1: 12}[max_tokens]
        after.append(weights(learner))
    for other, gradient in zip(after[1:], gradients[1:], strict=True):
        assert relative(gradient, gradients[0]) < 5e-6
        assert relative(other, after[0]) < 1e-6
    assert relative(after[0], before) > 1e-6, "something was learned"


def test_the_order_of_samples_does_not_matter(
    make_learner: Callable[..., Any],
    on_policy: Callable[..., TrainBatch],
    gradients: list[torch.Tensor],
) -> None:
    for order in (range(12), [7, 2, 11, 0, 5, 9, 1, 10, 3, 8, 6, 4]):
        learner = make_learner(learner={"max_tokens_per_microbatch": 150})
        batch = on_policy(learner)
        learner.step(replace(batch, samples=tuple(batch.samples[i] for i in order)))
    assert relative(gradients[1], gradients[0]) < 5e-6


def test_a_local_denominator_would_be_noticed(
    make_learner: Callable[..., Any],
    on_policy: Callable[..., TrainBatch],
    gradients: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mutant of a01: each micro-batch normalised by its own token count."""
    real = learner_module.GlobalCounts

    class LocalCounts(real):
        def denominators(self, component: Any, micro: Any) -> Any:
            return real([component], [micro]).denominators(component, micro)

    monkeypatch.setattr(learner_module, "GlobalCounts", LocalCounts)
    for max_tokens in (100_000, 60):
        learner = make_learner(learner={"max_tokens_per_microbatch": max_tokens})
        learner.step(on_policy(learner))
    assert relative(gradients[1], gradients[0]) > 0.1


# --- on-policy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_on_policy_in_bf16_the_ratio_is_exactly_one_and_the_mismatch_exactly_zero(
    temperature: float, make_learner: Callable[..., Any], on_policy: Callable[..., TrainBatch]
) -> None:
    """a08, a09: step after step, with weights that the learner has moved."""
    learner = make_learner("bfloat16", sampler={"temperature": temperature}, optim={"lr": 1e-2})
    for step in (1, 2, 3):
        metrics = learner.step(on_policy(learner, step, temperature)).metrics
        assert metrics["policy/ratio_mean"] == metrics["policy/ratio_max"] == 1
        assert metrics["mismatch/abs_max"] == 0
        assert metrics["mismatch/weight_mean"] == metrics["mismatch/ess_frac"] == 1


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_on_policy_in_fp32_the_mismatch_is_rounding(
    temperature: float, make_learner: Callable[..., Any], on_policy: Callable[..., TrainBatch]
) -> None:
    """a09: mean ratio 1, not about 2 at T = 0.6."""
    learner = make_learner(sampler={"temperature": temperature})
    metrics = learner.step(on_policy(learner, 1, temperature)).metrics
    assert metrics["mismatch/abs_max"] < 2e-5
    assert metrics["mismatch/weight_mean"] == pytest.approx(1, abs=1e-5)


def test_a_sampler_at_another_temperature_shows_as_mismatch(
    make_learner: Callable[..., Any], on_policy: Callable[..., TrainBatch]
) -> None:
    """The negative control of a09."""
    learner = make_learner(sampler={"temperature": 1.0})
    assert learner.step(on_policy(learner, 1, 0.6)).metrics["mismatch/abs_mean"] > 0.1


def test_zero_advantages_give_a_gradient_of_exactly_zero(
    make_learner: Callable[..., Any], on_policy: Callable[..., TrainBatch]
) -> None:
    learner = make_learner()
    before = weights(learner)
    result = learner.step(on_policy(learner, scale=0.0))
    assert (result.metrics["learner/grad_norm"], result.skipped) == (0.0, None)
    assert torch.equal(weights(learner), before)


def test_a_step_raises_the_log_prob_of_what_was_good(
    make_learner: Callable[..., Any], on_policy: Callable[..., TrainBatch], make: Any
) -> None:
    """A sign flip anywhere on the way from advantage to weight would lower it."""
    learner = make_learner()
    batch = on_policy(learner)
    mean_ratio = []
    for sign in (1.0, -1.0):
        learner = make_learner()
        samples = [
            replace(s, streams={"policy": np.where(s.loss_mask, sign, 0).astype(np.float32)})
            for s in batch.samples
        ]
        learner.step(make.batch(samples, 1))
        drift = learner.step(make.batch(samples, 2)).metrics["mismatch/mean"]
        mean_ratio.append(drift)
    assert mean_ratio[0] > 0.01 and mean_ratio[1] < -0.01


# --- steps that move nothing ----------------------------------------------------------------------


def test_a_batch_without_trainable_tokens_is_skipped_and_counted(
    make_learner: Callable[..., Any],
) -> None:
    """a06: nothing is NaN, nothing moves, the version counts on."""
    learner = make_learner(optim={"lr": 1e-3, "weight_decay": 0.1})
    before = learner.weights_hash()
    result = learner.step(TrainBatch(1, (), (0, 1), {0: "zero_variance", 1: "invalid"}))
    assert (result.skipped, result.policy_version) == ("no_trainable_tokens", 1)
    assert result.weights_hash == learner.weights_hash() == before
    assert all(np.isfinite(v) for v in result.metrics.values())


def broken(batch: TrainBatch, value: float) -> TrainBatch:
    sample = batch.samples[5]
    bad = np.where(sample.loss_mask, value, 0).astype(np.float32)
    spoilt = replace(sample, streams={"policy": bad})
    return replace(batch, samples=(*batch.samples[:5], spoilt, *batch.samples[6:]))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_non_finite_loss_moves_nothing_and_the_next_good_step_is_as_if_it_had_not_been(
    dtype: str,
    value: float,
    make_learner: Callable[..., Any],
    on_policy: Callable[..., TrainBatch],
) -> None:
    learner, spared = make_learner(dtype), make_learner(dtype)
    good = on_policy(learner)
    before = learner.weights_hash()
    result = learner.step(broken(good, value))
    assert (result.skipped, result.weights_hash) == ("non_finite", before)
    after = [one.step(replace(good, step=2)) for one in (learner, spared)]
    assert after[0].skipped is None
    assert after[0].weights_hash == after[1].weights_hash != before


def test_a_non_finite_step_adapts_nothing(
    make_learner: Callable[..., Any], on_policy: Callable[..., TrainBatch]
) -> None:
    """A coefficient that took over a NaN would spoil every later step, and every resume."""
    learner = make_learner(algo={"type": "rloo", "entropy": {"coef": 0.01, "target": 5.0}})
    good = on_policy(learner)
    assert learner.step(broken(good, np.nan)).skipped == "non_finite"
    assert learner.memory == {}
    assert learner.step(replace(good, step=2)).skipped is None
    assert all(np.isfinite(value) for value in learner.memory.values()) and learner.memory


def test_an_infinite_gradient_of_a_finite_loss_is_skipped_too(
    make_learner: Callable[..., Any],
    on_policy: Callable[..., TrainBatch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = make_learner()
    batch = on_policy(learner)
    before = learner.weights_hash()
    monkeypatch.setattr(learner._optimizer, "grad_norm", lambda: float("inf"))
    assert learner.step(batch).skipped == "non_finite"
    assert learner.weights_hash() == before


def test_the_third_non_finite_step_in_a_row_stops_with_a_diagnosis(
    make_learner: Callable[..., Any], on_policy: Callable[..., TrainBatch]
) -> None:
    learner = make_learner(optim={"lr": 1e-6})
    good = on_policy(learner)
    bad = broken(good, np.nan)
    steps = iter(range(1, 20))
    for batch in (bad, bad, good, bad):  # a good one in between starts the count anew
        refuse_sick_learner(learner.step(replace(batch, step=next(steps))), max_skipped_steps=3)
    before = learner.weights_hash()
    refuse_sick_learner(learner.step(replace(bad, step=next(steps))), max_skipped_steps=3)
    third = learner.step(replace(bad, step=next(steps)))
    with pytest.raises(TrainingError, match=r"3 times in a row.*optim\.lr"):
        refuse_sick_learner(third, max_skipped_steps=3)
    assert learner.weights_hash() == before


# --- several updates a batch ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "num_updates"),
    [
        ({"num_minibatches": 2}, 2),
        ({"num_epochs": 3}, 3),
        ({"num_minibatches": 4, "num_epochs": 2}, 8),
    ],
)
def test_the_proximal_log_probs_are_taken_once_before_the_first_update(
    algo: dict[str, int],
    num_updates: int,
    make_learner: Callable[..., Any],
    on_policy: Callable[..., TrainBatch],
    gradients: list[torch.Tensor],
) -> None:
    """Later updates see a ratio that is not 1; the mismatch stays that of the batch's start."""
    learner = make_learner("bfloat16", algo={"type": "rloo", **algo}, optim={"lr": 1e-2})
    result = learner.step(on_policy(learner))
    assert len(gradients) == num_updates
    assert result.metrics["policy/ratio_max"] > 1.001
    assert result.metrics["mismatch/abs_max"] == 0


@pytest.mark.parametrize(
    ("dtype", "shift", "passes"),
    [("bfloat16", 0.0, 0), ("bfloat16", 1e-3, 3), ("float32", 0.0, 4)],
)
def test_the_policy_is_not_scored_twice_when_the_sampler_computed_the_same(
    dtype: str,
    shift: float,
    passes: int,
    make_learner: Callable[..., Any],
    on_policy: Callable[..., TrainBatch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In bf16 on a CPU it is proved by the first update; where that finds another number, and in
    fp32, mini-batches are scored before anything moves. The result is the same."""
    results = []
    for provable in (True, False):
        learner = make_learner(dtype, algo={"type": "rloo", "num_minibatches": 4})
        batch = on_policy(learner)
        samples = tuple(
            replace(s, sampler_logprobs=s.sampler_logprobs + np.float32(shift) * s.loss_mask)
            for s in batch.samples
        )
        batch = replace(batch, samples=samples)
        if not provable:
            monkeypatch.setattr(type(learner._policy), "exact", property(lambda self: False))
        learner._score_without_grad = Mock(wraps=learner._score_without_grad)
        results.append(learner.step(batch))
        assert learner._score_without_grad.call_count == (passes if provable else 4)
    assert results[0].weights_hash == results[1].weights_hash


def test_siblings_stay_in_one_minibatch_and_every_sample_is_used_once_an_epoch(
    make_learner: Callable[..., Any], on_policy: Callable[..., TrainBatch]
) -> None:
    learner = make_learner(algo={"type": "rloo", "num_minibatches": 2})
    batch = on_policy(learner)
    parts = list(learner_module._split_by_group(batch.samples, 2))
    assert [{s.draw_id for s in part} for part in parts] == [{0, 1}, {2, 3}]
    assert [s for part in parts for s in part] == list(batch.samples)
    result = learner.step(batch)
    assert result.metrics["learner/tokens"] == sum(len(s) for s in batch.samples)


def test_fewer_groups_than_minibatches_leave_some_empty_and_train_the_rest(
    make_learner: Callable[..., Any],
    on_policy: Callable[..., TrainBatch],
    gradients: list[torch.Tensor],
) -> None:
    """g04-like: dropped groups can leave one where four minibatches were asked for."""
    learner = make_learner(algo={"type": "rloo", "num_minibatches": 4})
    batch = on_policy(learner)
    result = learner.step(replace(batch, samples=batch.samples[:3]))
    assert (result.skipped, len(gradients)) == (None, 1)


# --- metrics --------------------------------------------------------------------------------------


def test_the_lag_is_counted_from_the_oldest_sampled_token(
    make_learner: Callable[..., Any], on_policy: Callable[..., TrainBatch]
) -> None:
    learner = make_learner()
    batch = on_policy(learner, 5)
    newer = replace(batch.samples[0], policy_versions=batch.samples[0].policy_versions + 3)
    mixed = replace(batch, samples=(newer, *batch.samples[1:]))
    assert learner.step(mixed).metrics["policy/lag_max"] == 4


def test_every_metric_of_a_step_is_declared_and_finite(
    make_learner: Callable[..., Any], on_policy: Callable[..., TrainBatch]
) -> None:
    from posttrain.telemetry.metrics import check_names

    learner = make_learner()
    metrics = learner.step(on_policy(learner)).metrics
    check_names(metrics)
    assert all(np.isfinite(v) for v in metrics.values())
    assert metrics["learner/shared_frac"] == pytest.approx(
        1 - (107 + metrics["learner/loss_tokens"]) / metrics["learner/tokens"], abs=0.02
    )


def test_nothing_of_a_step_is_alive_in_the_next(
    make_learner: Callable[..., Any], on_policy: Callable[..., TrainBatch]
) -> None:
    """h06: the number of live tensors is the same after step 2 and after step 4."""
    import gc

    learner = make_learner()
    batch = on_policy(learner)

    def live() -> int:
        gc.collect()
        return sum(1 for o in gc.get_objects() if type(o) is torch.Tensor)

    counts = []
    for step in (1, 2, 3, 4):
        learner.step(replace(batch, step=step))
        counts.append(live())
    assert counts[1] == counts[3]
