"""The learner of one process: a batch in, one policy version further.

It knows no algorithm by name: an `Algorithm` turns log-probs into a loss.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from posttrain.algo.aggregation import Denominators
from posttrain.algo.algorithm import Algorithm
from posttrain.algo.token_stats import TokenStats
from posttrain.config import Recipe
from posttrain.data.packing import pack
from posttrain.training.forward import score_tokens
from posttrain.training.optimizer import MasterOptimizer
from posttrain.training.policy import Policy
from posttrain.training.schedule import learning_rate
from posttrain.types import Microbatch, StepResult, TrainBatch, TrainSample


class InlineLearner:
    """Implements `protocols.Learner` on the policy's own weights."""

    def __init__(self, policy: Policy, algorithm: Algorithm, recipe: Recipe) -> None:
        self._policy = policy
        self._algorithm = algorithm
        self._recipe = recipe
        self._optimizer = MasterOptimizer(policy, recipe.optim)
        self._version = 0
        self._skipped_in_a_row = 0

    @property
    def policy_version(self) -> int:
        return self._version

    def step(self, batch: TrainBatch) -> StepResult:
        """Train on the batch: `num_epochs` passes over `num_minibatches` optimizer steps.

        A step without trainable tokens, or with a non-finite loss or gradient, leaves the weights
        alone and says so; of several optimizer steps each is left out for itself. Steps skipped in
        a row for the latter reason are counted in learner/non_finite_in_a_row.
        """
        started = time.perf_counter()
        meter = _Meter()
        lr = learning_rate(self._recipe.optim, batch.step, self._recipe.num_steps)
        skipped = None if batch.num_loss_tokens else "no_trainable_tokens"
        if skipped is None:
            minibatches = self._minibatches(batch)
            moved = [
                self._update(microbatches, prox, lr, meter)
                for _ in range(self._recipe.algo.num_epochs)
                for microbatches, prox in minibatches
            ]
            skipped = None if any(moved) else "non_finite"
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped == "non_finite" else 0
        self._version = batch.step
        seconds = time.perf_counter() - started
        metrics = meter.result(batch, lr, seconds)
        metrics["learner/non_finite_in_a_row"] = float(self._skipped_in_a_row)
        return StepResult(batch.step, self._version, self.weights_hash(), metrics, skipped)

    def _minibatches(
        self, batch: TrainBatch
    ) -> list[tuple[list[Microbatch], list[torch.Tensor] | None]]:
        """Optimizer steps of the batch, each with its proximal log-probs.

        With one optimizer step per batch the proximal policy is the current one: its log-probs are
        the detached forward, and None is returned for them.
        """
        algo = self._recipe.algo
        cuts = [
            pack(part, self._recipe.learner.max_tokens_per_microbatch)
            for part in _split_by_group(batch.samples, algo.num_minibatches)
        ]
        if algo.num_epochs * algo.num_minibatches == 1:
            return [(cut, None) for cut in cuts]
        return [(cut, [self._scores_without_grad(micro) for micro in cut]) for cut in cuts]

    def _scores_without_grad(self, micro: Microbatch) -> torch.Tensor:
        with torch.no_grad():
            return score_tokens(
                self._policy, micro, self._recipe.sampler.temperature
            ).policy_logprobs_N

    def _update(
        self,
        microbatches: Sequence[Microbatch],
        prox: Sequence[torch.Tensor] | None,
        lr: float,
        meter: _Meter,
    ) -> bool:
        """One optimizer step. False when loss or gradient was not finite and nothing moved."""
        num_loss_tokens, num_sequences = _global_counts(microbatches)
        if not num_loss_tokens:
            return False  # a mini-batch of dropped groups
        self._optimizer.zero_grad()
        loss_sum = 0.0
        for index, micro in enumerate(microbatches):
            scores = score_tokens(self._policy, micro, self._recipe.sampler.temperature)
            prox_N = scores.policy_logprobs_N.detach() if prox is None else prox[index]
            owner_N = torch.from_numpy(micro.sample_index)
            lengths_S = torch.bincount(owner_N, minlength=len(micro.paths))
            output = self._algorithm.loss(
                scores.policy_logprobs_N,
                prox_N,
                torch.from_numpy(micro.sampler_logprobs),
                torch.from_numpy(micro.advantages),
                owner_N,
                Denominators(num_loss_tokens, num_sequences, lengths_S),
            )
            output.loss.backward()
            loss_sum += float(output.loss.detach())
            meter.add(micro, scores.entropy_N, output.stats)
        norm = self._optimizer.grad_norm()
        meter.optimizer_step(loss_sum, norm)
        if not (math.isfinite(loss_sum) and math.isfinite(norm)):
            self._optimizer.zero_grad()
            meter.non_finite_updates += 1
            return False
        self._optimizer.update(lr, norm)
        return True

    @property
    def masters(self) -> Mapping[str, torch.Tensor]:
        """fp32 weights by parameter name."""
        return self._optimizer.masters

    def weights_hash(self) -> str:
        return self._optimizer.weights_hash()

    def save(self, folder: Path) -> None:
        self._optimizer.save(folder)
        state = {"policy_version": self._version, "skipped_in_a_row": self._skipped_in_a_row}
        (folder / "learner.json").write_text(json.dumps(state))

    def restore(self, folder: Path) -> None:
        self._optimizer.restore(folder)
        state = json.loads((folder / "learner.json").read_text())
        self._version = state["policy_version"]
        self._skipped_in_a_row = state["skipped_in_a_row"]


def _split_by_group(
    samples: Sequence[TrainSample], num_parts: int
) -> Iterator[Sequence[TrainSample]]:
    """Cut into parts without splitting the siblings of a draw."""
    draws = list(dict.fromkeys(s.draw_id for s in samples))
    for part in np.array_split(np.asarray(draws, dtype=np.int64), num_parts):
        chosen = set(part.tolist())
        yield [s for s in samples if s.draw_id in chosen]


def _global_counts(microbatches: Sequence[Microbatch]) -> tuple[int, int]:
    """Loss tokens and sequences of the whole optimizer step, fixed before the first backward."""
    tokens = sum(m.num_loss_tokens for m in microbatches)
    sequences = sum(len(np.unique(m.sample_index)) for m in microbatches)
    return tokens, sequences


class _Meter:
    """Collects the metrics of a step over its micro-batches."""

    def __init__(self) -> None:
        self._entropy_sum = 0.0
        self.non_finite_updates = 0
        self._tokens = 0
        self._rows = 0
        self._microbatches = 0
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._stats = TokenStats(0, {}, {})

    def add(self, micro: Microbatch, entropy_N: torch.Tensor, stats: TokenStats) -> None:
        self._entropy_sum += float(entropy_N.sum())
        self._tokens += micro.num_tokens
        self._rows += micro.num_rows
        self._microbatches += 1
        self._stats = self._stats.merge(stats)

    def optimizer_step(self, loss: float, norm: float) -> None:
        self._losses.append(loss)
        self._norms.append(norm)

    def result(self, batch: TrainBatch, lr: float, seconds: float) -> dict[str, float]:
        """Means are over the trained tokens of all passes; the gradient norm is the largest."""
        metrics = {
            "learner/lr": lr,
            "learner/step_s": seconds,
            "learner/tokens": float(self._tokens),
            "learner/loss_tokens": float(batch.num_loss_tokens),
            "learner/microbatches": float(self._microbatches),
            "learner/non_finite_updates": float(self.non_finite_updates),
            "learner/tok_per_s": self._tokens / seconds if seconds else 0.0,
        }
        if self._stats.num_tokens:
            metrics["learner/shared_frac"] = 1 - self._rows / self._tokens
            metrics["learner/loss"] = sum(self._losses) / len(self._losses)
            metrics["learner/grad_norm"] = float(np.max(self._norms))  # a NaN stays one
            metrics["policy/entropy_mean"] = self._entropy_sum / self._stats.num_tokens
            metrics.update(self._stats.metrics())
            oldest = min(int(s.policy_versions[s.loss_mask].min()) for s in batch.samples)
            metrics["policy/lag_max"] = float(batch.step - 1 - oldest)
        return metrics
