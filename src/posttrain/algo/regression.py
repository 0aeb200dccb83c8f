"""The critic's component: values fitted to targets that are made of the policy's own rewards."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from posttrain.algo.aggregation import Denominators, aggregate
from posttrain.algo.columns import Rule
from posttrain.algo.component import (
    Columns,
    LossOutput,
    State,
    check_tokens,
    rewards_with_kl,
    widened,
)
from posttrain.algo.ratios import log_mismatch
from posttrain.algo.token_stats import TokenStats, summed
from posttrain.algo.value import value_loss
from posttrain.config.regularisers import KlConfig


@dataclass(frozen=True)
class ValueRegression:
    """Reads the policy's stream of rewards. `targets` are made once a step, of the values the
    critic had at its start."""

    targets: Rule
    clip: float | None
    coef: float
    kl: KlConfig | None = None
    stream: str = "policy"
    kind: str = "value"
    whole_step: bool = True
    needs_prox: bool = False

    @property
    def columns(self) -> frozenset[str]:
        reference = {"ref_logprobs_N"} if self.kl and self.kl.place == "reward" else set()
        return frozenset({"values_N", *self.targets.columns} | reference)

    def prepare(self, columns: Columns, state: State) -> dict[str, Tensor]:
        """returns_N, and the values of the start of the step as prox_values_N."""
        wide = {k: widened(v) for k, v in columns.items()}
        wide["rewards_N"] = rewards_with_kl(wide, self.kl, self.stream, state)
        wide["log_mismatch_N"] = log_mismatch(wide["prox_logprobs_N"], wide["sampler_logprobs_N"])
        returns_N = self.targets(wide)
        return {
            "returns_N": returns_N.to(columns["values_N"].dtype),
            "prox_values_N": columns["values_N"],
        }

    def loss(self, columns: Columns, denominators: Denominators, state: State) -> LossOutput:
        """Mean over the tokens of the step, times `coef`."""
        check_tokens(columns, ("values_N", "returns_N"))
        values_N, returns_N = columns["values_N"], columns["returns_N"]
        per_token_N = value_loss(values_N, columns["prox_values_N"], returns_N, clip=self.clip)
        loss = aggregate(per_token_N, columns["sequence_index_N"], "token_mean", denominators)
        before_N = columns["prox_values_N"]
        stats = summed(
            len(values_N),
            loss=per_token_N,
            returns=returns_N,
            returns_square=returns_N.double().square(),
            error=returns_N - before_N,
            error_square=(returns_N - before_N).double().square(),
        )
        return LossOutput(self.coef * loss, stats)

    def metrics(self, stats: TokenStats) -> dict[str, float]:
        """The explained variance is that of the values the advantages were made with."""
        if not stats.num_tokens:
            return {}
        variance = stats.mean("returns_square") - stats.mean("returns") ** 2
        unexplained = stats.mean("error_square") - stats.mean("error") ** 2
        metrics = {"value/loss": stats.mean("loss"), "value/return_mean": stats.mean("returns")}
        if variance > 1e-12:
            metrics["value/explained_variance"] = 1 - unexplained / variance
        return metrics

    def judge(self, columns: Columns) -> Tensor:
        """A critic has no given answer to be judged by."""
        raise NotImplementedError("a critic has no given answer to be judged by")

    def after_step(self, stats: TokenStats, num_sequences: int, state: State) -> None:
        return None
