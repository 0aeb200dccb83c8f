"""One loss over one stream of weights: what an algorithm is made of.

A stream is a weight for each trained token of some samples. A component reads one stream, makes
advantages of it (`prepare`, once a step), and turns log-probs into a loss (`loss`, for each
micro-batch). The learner runs components and knows none of them by name; what it must compute for
them (reference log-probs, values, entropy) it reads from `columns`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from posttrain.algo.aggregation import AggregationMode, Denominators, aggregate
from posttrain.algo.columns import Rule
from posttrain.algo.controllers import adapted_kl_coef, entropy_coef
from posttrain.algo.covariance import kl_cov
from posttrain.algo.credit import Memory
from posttrain.algo.kl import kl_loss
from posttrain.algo.losses.terms import LossTerms
from posttrain.algo.ratios import log_mismatch, log_ratio, prox_loglinear
from posttrain.algo.regularised import kl_to_go
from posttrain.algo.token_stats import TokenStats, policy_metrics, token_stats
from posttrain.config.regularisers import EntropyConfig, KlConfig

Columns = Mapping[str, Any]
State = Memory


@dataclass(frozen=True, slots=True)
class LossOutput:
    """loss: scalar with gradient, this micro-batch's share of the step's loss; stats: detached.

    Example:
        >>> LossOutput(torch.zeros(()), TokenStats(0)).stats.num_tokens
        0
    """

    loss: Tensor
    stats: TokenStats


class Component(Protocol):
    """The interface; `PolicyLoss` is the one that most algorithms have."""

    @property
    def stream(self) -> str:
        """The stream it reads."""
        ...

    @property
    def kind(self) -> str:
        """Components of one kind share their denominators and their metrics."""
        ...

    @property
    def columns(self) -> frozenset[str]:
        """The columns it reads."""
        ...

    @property
    def whole_step(self) -> bool:
        """Whether `prepare` must see all tokens of the step at once."""
        ...

    @property
    def needs_prox(self) -> bool:
        """Whether it compares with the policy as it was at the start of the step."""
        ...

    def prepare(self, columns: Columns, state: State) -> dict[str, Tensor]:
        """Further columns, without gradient, from those of the stream's tokens."""
        ...

    def loss(self, columns: Columns, denominators: Denominators, state: State) -> LossOutput:
        """This micro-batch's share of the loss."""
        ...

    def metrics(self, stats: TokenStats) -> dict[str, float]:
        """Metrics of a step's merged stats."""
        ...

    def after_step(self, stats: TokenStats, num_sequences: int, state: State) -> None:
        """Adapt what adapts."""
        ...

    def judge(self, columns: Columns) -> Tensor:
        """For each group of the stream whether the model does what was given, bool."""
        ...


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss with its estimator, corrections and regularisers.

    `estimate` is None where the stream already holds advantages.
    """

    rule: Rule
    aggregation: AggregationMode
    fixed_length: int | None = None
    estimate: Rule | None = None
    weights: tuple[Rule, ...] = ()
    masks: tuple[Rule, ...] = ()
    kl_weight: Rule | None = None
    batch_corrections: bool = False
    anchor: Literal["prox", "sampler", "loglinear"] = "prox"
    kl: KlConfig | None = None
    entropy: EntropyConfig | None = None
    stream: str = "policy"
    kind: str = "policy"

    @property
    def columns(self) -> frozenset[str]:
        rules = [self.rule, *self.weights, *self.masks]
        rules += [self.estimate] if self.estimate else []
        names = {name for rule in rules for name in rule.columns}
        if self.kl is not None:
            names.add("ref_logprobs_N")
        if self.entropy is not None:
            names.add("entropy_N")
        return frozenset(names)

    @property
    def whole_step(self) -> bool:
        over_siblings = self.kl is not None and (
            self.kl.place == "reward" or self.kl.only == "top_covariance"
        )
        return self.estimate is not None or self.batch_corrections or over_siblings

    @property
    def needs_prox(self) -> bool:
        return self.anchor == "prox"

    def prepare(self, columns: Columns, state: State) -> dict[str, Tensor]:
        """advantages_N, correction_N, kl_weight_N, and the anchor as prox_logprobs_N. float64
        inside. A KL term in the loss is weighted like the policy's and not masked with it; where
        the policy's loss has the sampler's ratio itself, by `kl_weight`.

        KL in the reward is paid token by token and summed to go; siblings' sums are its baseline.
        A token-level estimator gets it in its rewards instead.
        """
        wide = {k: widened(v) for k, v in columns.items()}
        if self.anchor == "loglinear":
            wide["prox_logprobs_N"] = _loglinear(wide)
        trainer_N, sampler_N = wide["prox_logprobs_N"], wide["sampler_logprobs_N"]
        wide["log_mismatch_N"] = log_mismatch(trainer_N, sampler_N)
        wide["advantages_N"] = self._advantages(wide, state)
        weight_N = mask_N = torch.ones_like(trainer_N)
        for rule in self.weights:
            weight_N = weight_N * rule(wide)
        for rule in self.masks:
            mask_N = mask_N * rule(wide)
        kl_weight_N = weight_N if self.kl_weight is None else self.kl_weight(wide)
        if self.kl is not None and self.kl.only == "top_covariance":
            selected_N = kl_cov(trainer_N, wide["advantages_N"], frac=self.kl.top_frac)
            kl_weight_N = kl_weight_N * selected_N
        prepared = {
            "advantages_N": wide["advantages_N"],
            "correction_N": weight_N * mask_N,
            "kl_weight_N": kl_weight_N,
        }
        anchor_N = sampler_N if self.anchor == "sampler" else trainer_N
        prepared |= {"prox_logprobs_N": anchor_N, "trainer_logprobs_N": trainer_N}
        dtype = columns["prox_logprobs_N"].dtype
        return {name: values.to(dtype) for name, values in prepared.items()}

    def _advantages(self, wide: dict[str, Any], state: State) -> Tensor:
        if self.estimate is not None:
            wide["rewards_N"] = rewards_with_kl(wide, self.kl, self.stream, state)
            return self.estimate(wide)
        penalty_N = kl_penalty(wide, self.kl, self.stream, state)
        if penalty_N is None:
            return wide["weights_N"]
        return wide["weights_N"] - kl_to_go(
            penalty_N, wide["trajectory_index_N"], wide["group_index_N"]
        )

    def loss(self, columns: Columns, denominators: Denominators, state: State) -> LossOutput:
        """All [N], loss tokens only, log-probs float32 or float64. Only policy_logprobs_N and
        entropy_N carry a gradient. Raises ValueError for half precision or unequal lengths."""
        check_tokens(columns, ("policy_logprobs_N", "prox_logprobs_N", "advantages_N"))
        terms: LossTerms = self.rule(columns)
        per_token_N = terms.per_token_N * columns["correction_N"]
        if self.kl is not None and self.kl.place == "loss":
            gap_N = kl_loss(
                columns["policy_logprobs_N"],
                columns["ref_logprobs_N"],
                self.kl.estimator,
                columns["trainer_logprobs_N"],
            )
            coef = kl_coef(self.kl, self.stream, state) * columns["kl_weight_N"]
            per_token_N = per_token_N + coef * gap_N
        if self.entropy is not None:
            last = state.get(f"{self.stream}.entropy", 0.0)
            bonus = entropy_coef(last, coef=self.entropy.coef, target=self.entropy.target)
            per_token_N = per_token_N - bonus * columns["entropy_N"]
        loss = aggregate(
            per_token_N,
            columns["sequence_index_N"],
            self.aggregation,
            denominators,
            self.fixed_length,
        )
        return LossOutput(loss, token_stats(columns, terms))

    def metrics(self, stats: TokenStats) -> dict[str, float]:
        return policy_metrics(stats)

    def judge(self, columns: Columns) -> Tensor:
        """A policy loss is judged by its rewards, not by given answers."""
        raise NotImplementedError("a policy gradient has no given answer to be judged by")

    def after_step(self, stats: TokenStats, num_sequences: int, state: State) -> None:
        if self.kl is not None and self.kl.target is not None and "ref_k1" in stats.sums:
            state[f"{self.stream}.kl_coef"] = adapted_kl_coef(
                kl_coef(self.kl, self.stream, state),
                stats.mean("ref_k1"),
                num_sequences,
                target=self.kl.target,
                horizon=self.kl.horizon,
            )
        if self.entropy is not None and "entropy" in stats.sums:
            state[f"{self.stream}.entropy"] = stats.mean("entropy")


def kl_coef(kl: KlConfig, stream: str, state: State) -> float:
    """The coefficient in force."""
    return state.get(f"{stream}.kl_coef", kl.coef)


def kl_penalty(columns: Columns, kl: KlConfig | None, stream: str, state: State) -> Tensor | None:
    """coef * (prox - reference) of each sampled token [N], if KL is part of the reward."""
    if kl is None or kl.place != "reward":
        return None
    gap_N = log_ratio(columns["prox_logprobs_N"], columns["ref_logprobs_N"])
    return kl_coef(kl, stream, state) * gap_N


def rewards_with_kl(columns: Columns, kl: KlConfig | None, stream: str, state: State) -> Tensor:
    """What a token-level estimator reads: the stream's rewards less the KL penalty [N]."""
    penalty_N = kl_penalty(columns, kl, stream, state)
    return columns["weights_N"] if penalty_N is None else columns["weights_N"] - penalty_N


def widened(values: Any) -> Any:
    """Floating tensors as float64; all else as it is."""
    floating = isinstance(values, Tensor) and values.is_floating_point()
    return values.double() if floating else values


def _loglinear(columns: Columns) -> Tensor:
    return prox_loglinear(
        columns["sampler_logprobs_N"],
        columns["policy_logprobs_N"],
        columns["policy_versions_N"],
        columns["step"] - 1,
        columns["version"],
    )


def check_tokens(columns: Columns, names: tuple[str, ...]) -> None:
    """Raise ValueError for half precision or unequal lengths."""
    shapes = {name: tuple(columns[name].shape) for name in names}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"loss needs one entry per loss token everywhere, got shapes {shapes}")
    for name in names:
        if columns[name].dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} is {columns[name].dtype}: log-probs and advantages need float32 or "
                "float64; take log_softmax of float32 logits"
            )
