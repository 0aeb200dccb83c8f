"""Collects the metrics of a step over its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from posttrain.algo.component import Component
from posttrain.algo.token_stats import TokenStats
from posttrain.training.token_columns import key_of
from posttrain.types import Microbatch, TrainBatch


class Meter:
    """Sums of one step."""

    def __init__(self) -> None:
        self._entropy_sum = 0.0
        self._entropy_tokens = 0
        self.non_finite_updates = 0
        self._tokens = 0
        self._rows = self._computed_rows = self._distinct_rows = 0
        self._microbatches = 0
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._stats: dict[str, TokenStats] = {}

    def add(self, micro: Microbatch, computed_rows: int, entropy_N: torch.Tensor | None) -> None:
        """One forward pass for training."""
        if entropy_N is not None:
            self._entropy_sum += float(entropy_N.sum())
            self._entropy_tokens += len(entropy_N)
        self._tokens += micro.num_tokens
        self._rows += micro.num_rows
        self._computed_rows += computed_rows
        self._distinct_rows += micro.num_rows - micro.num_repeated_rows
        self._microbatches += 1

    def add_stats(self, key: str, stats: TokenStats) -> None:
        """What a component saw."""
        self._stats[key] = self.stats(key).merge(stats)

    def stats(self, key: str) -> TokenStats:
        """What a component saw in the step so far."""
        return self._stats.get(key, TokenStats(0))

    def optimizer_step(self, loss: float, norm: float) -> None:
        self._losses.append(loss)
        self._norms.append(norm)

    def result(
        self, components: Sequence[Component], batch: TrainBatch, lr: float, seconds: float
    ) -> dict[str, float]:
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
        if not self._losses:
            return metrics
        metrics["learner/shared_frac"] = 1 - self._rows / self._tokens
        metrics["learner/padding_frac"] = 1 - self._distinct_rows / self._computed_rows
        metrics["learner/loss"] = sum(self._losses) / len(self._losses)
        metrics["learner/grad_norm"] = float(np.max(self._norms))  # a NaN stays one
        if self._entropy_tokens:
            metrics["policy/entropy_mean"] = self._entropy_sum / self._entropy_tokens
        metrics |= self.component_metrics(components)
        versions = [s.policy_versions[s.policy_versions >= 0] for s in batch.samples]
        oldest = min((int(v.min()) for v in versions if len(v)), default=-1)
        if oldest >= 0:
            metrics["policy/lag_max"] = float(batch.step - 1 - oldest)
        return metrics

    def component_metrics(self, components: Sequence[Component]) -> dict[str, float]:
        """What the components say of all that they saw; those of one kind together."""
        metrics: dict[str, float] = {}
        for kind in dict.fromkeys(c.kind for c in components):
            metrics |= self._of_kind([c for c in components if c.kind == kind])
        return metrics

    def _of_kind(self, components: Sequence[Component]) -> dict[str, float]:
        merged = TokenStats(0)
        for component in components:
            merged = merged.merge(self.stats(key_of(component)))
        return components[0].metrics(merged)
