"""Components that imitate, compare or regress: everything beside a policy gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algo.aggregation import AggregationMode, Denominators, aggregate
from posttrain.algo.columns import Rule
from posttrain.algo.component import Columns, LossOutput, State, check_tokens
from posttrain.algo.preferences.kto import kto_kl_baseline
from posttrain.algo.segments import segment_mean, segment_sum
from posttrain.algo.token_stats import TokenStats, summed


class _Stateless:
    """A component that prepares nothing and remembers nothing."""

    whole_step = False
    needs_prox = False

    def prepare(self, columns: Columns, state: State) -> dict[str, Tensor]:
        return {}

    def after_step(self, stats: TokenStats, num_sequences: int, state: State) -> None:
        return None


@dataclass(frozen=True)
class Imitation(_Stateless):
    """Weighted negative log-likelihood: SFT, expert iteration, hindsight, positive examples.

    Tokens are counted over this stream alone, so that the loss is a mean over what is imitated.
    """

    coef: float = 1.0
    aggregation: AggregationMode = "token_mean"
    stream: str = "imitation"
    kind: str = "imitation"

    @property
    def columns(self) -> frozenset[str]:
        return frozenset({"policy_logprobs_N"})

    def loss(self, columns: Columns, denominators: Denominators, state: State) -> LossOutput:
        """-w * policy_logprobs of each token, aggregated."""
        check_tokens(columns, ("policy_logprobs_N", "weights_N"))
        nll_N = -columns["policy_logprobs_N"]
        loss = aggregate(
            columns["weights_N"] * nll_N,
            columns["sequence_index_N"],
            self.aggregation,
            denominators,
        )
        return LossOutput(self.coef * loss, summed(len(nll_N), nll=nll_N))

    def metrics(self, stats: TokenStats) -> dict[str, float]:
        return {f"{self.kind}/nll": stats.mean("nll")} if stats.num_tokens else {}

    def judge(self, columns: Columns) -> Tensor:
        """For each group whether every token has a probability above one half: greedy decoding
        then says the whole of it."""
        unsure_N = (columns["policy_logprobs_N"] <= math.log(0.5)).double()
        return segment_sum(unsure_N, columns["group_index_N"]) == 0


@dataclass(frozen=True)
class Divergence(_Stateless):
    """The distance of the student's whole next-token distribution from the teacher's, at every
    token that the student sampled (GKD, arXiv:2306.13649)."""

    compare: Rule
    aggregation: AggregationMode = "token_mean"
    fixed_length: int | None = None
    stream: str = "policy"
    kind: str = "distill"

    @property
    def columns(self) -> frozenset[str]:
        return frozenset({"policy_logprobs_N", "divergence_N"})

    def loss(self, columns: Columns, denominators: Denominators, state: State) -> LossOutput:
        """The divergence of each position, aggregated."""
        check_tokens(columns, ("divergence_N", "weights_N"))
        divergence_N = columns["divergence_N"]
        loss = aggregate(
            divergence_N,
            columns["sequence_index_N"],
            self.aggregation,
            denominators,
            self.fixed_length,
        )
        return LossOutput(loss, summed(len(divergence_N), divergence=divergence_N))

    def metrics(self, stats: TokenStats) -> dict[str, float]:
        return {"distill/divergence": stats.mean("divergence")} if stats.num_tokens else {}

    def judge(self, columns: Columns) -> Tensor:
        """A student has no given answer to be judged by."""
        raise NotImplementedError("distillation has no given answer to be judged by")


@dataclass(frozen=True)
class Preference(_Stateless):
    """A loss over pairs: the stream's weight is +1 on tokens of the chosen side, -1 on those of
    the rejected one; both sides of a group are in one micro-batch."""

    rule: Rule
    stream: str = "preference"
    kind: str = "preference"

    @property
    def columns(self) -> frozenset[str]:
        reference = {"ref_chosen_P", "ref_rejected_P"} & set(self.rule.columns)
        return frozenset({"policy_logprobs_N"} | ({"ref_logprobs_N"} if reference else set()))

    def loss(self, columns: Columns, denominators: Denominators, state: State) -> LossOutput:
        """Mean over the pairs of the step. Sums over tokens are in float64."""
        sides = _sides(columns)
        loss_P = self.rule(sides)
        margin_P = _margin(sides)
        stats = summed(
            len(loss_P),
            loss=loss_P,
            margin=margin_P,
            right=margin_P > 0,
            chosen=sides["policy_chosen_P"],
            rejected=sides["policy_rejected_P"],
        )
        return LossOutput(_mean_over_groups(loss_P, columns, denominators), stats)

    def metrics(self, stats: TokenStats) -> dict[str, float]:
        sides = {"chosen_logprob": "chosen", "rejected_logprob": "rejected"}
        return _preference_metrics(stats, **sides)

    def judge(self, columns: Columns) -> Tensor:
        """For each pair whether its margin is above 0."""
        return _margin(_sides(columns)) > 0


@dataclass(frozen=True)
class LabelledPreference(_Stateless):
    """A loss over single answers, each wanted (weight +1) or not (-1): KTO.

    Its baseline, KL(policy || reference) of an answer, is the mean log-ratio of the step's own
    answers at the start of the step, at least 0: on the policy's own samples that is the KL.
    """

    rule: Rule
    stream: str = "preference"
    kind: str = "labelled"
    whole_step = True
    needs_prox = True

    @property
    def columns(self) -> frozenset[str]:
        return frozenset({"policy_logprobs_N", "ref_logprobs_N"})

    def prepare(self, columns: Columns, state: State) -> dict[str, Tensor]:
        """kl_baseline_N: the same number for every token."""
        index_N = columns["sequence_index_N"]
        prox_S = segment_sum(columns["prox_logprobs_N"].double(), index_N)
        ref_S = segment_sum(columns["ref_logprobs_N"].double(), index_N)
        return {"kl_baseline_N": kto_kl_baseline(prox_S, ref_S).expand(len(index_N))}

    def loss(self, columns: Columns, denominators: Denominators, state: State) -> LossOutput:
        """Mean over the answers of the step. Sums over tokens are in float64."""
        index_N = columns["sequence_index_N"]
        policy_S = segment_sum(columns["policy_logprobs_N"].double(), index_N)
        ref_S = segment_sum(columns["ref_logprobs_N"].double(), index_N)
        wanted_S = segment_mean(columns["weights_N"].double(), index_N) > 0
        loss_S = self.rule(
            {
                "policy_sum_S": policy_S,
                "ref_sum_S": ref_S,
                "desirable_S": wanted_S,
                "kl_baseline": columns["kl_baseline_N"][:1].sum(),  # 0 without tokens
            }
        )
        right_S = (policy_S - ref_S > 0) == wanted_S
        stats = summed(len(loss_S), loss=loss_S, margin=policy_S - ref_S, right=right_S)
        return LossOutput(loss_S.sum() / denominators.num_sequences, stats)

    def metrics(self, stats: TokenStats) -> dict[str, float]:
        return _preference_metrics(stats)

    def judge(self, columns: Columns) -> Tensor:
        """For each group whether every answer got likelier or less likely as it should."""
        index_N, group_N = columns["sequence_index_N"], columns["group_index_N"]
        gap_N = columns["policy_logprobs_N"].double() - columns["ref_logprobs_N"].double()
        rose_N = (segment_sum(gap_N, index_N) > 0)[index_N]
        wrong_N = (rose_N != (columns["weights_N"] > 0)).double()
        return segment_sum(wrong_N, group_N) == 0


@dataclass(frozen=True)
class ScorePreference(_Stateless):
    """Bradley-Terry on the scores that a reward head reads at the last token of each side."""

    rule: Rule
    stream: str = "score"
    kind: str = "score"

    @property
    def columns(self) -> frozenset[str]:
        return frozenset({"scores_N"})

    def loss(self, columns: Columns, denominators: Denominators, state: State) -> LossOutput:
        """Mean over the pairs of the step."""
        chosen_P, rejected_P = _scores(columns)
        loss_P = self.rule({"scores_chosen_P": chosen_P, "scores_rejected_P": rejected_P})
        stats = summed(
            len(loss_P),
            loss=loss_P,
            margin=chosen_P - rejected_P,
            right=chosen_P > rejected_P,
            score=(chosen_P + rejected_P) / 2,
        )
        return LossOutput(_mean_over_groups(loss_P, columns, denominators), stats)

    def metrics(self, stats: TokenStats) -> dict[str, float]:
        return _preference_metrics(stats, score_mean="score")

    def judge(self, columns: Columns) -> Tensor:
        """For each pair whether the chosen side has the higher score."""
        chosen_P, rejected_P = _scores(columns)
        return chosen_P > rejected_P


def _preference_metrics(stats: TokenStats, **more: str) -> dict[str, float]:
    """Of pairs or labelled answers; `more` names further sums by the metric's last part."""
    if not stats.num_tokens:
        return {}
    sums = {"loss": "loss", "margin": "margin", "accuracy": "right", **more}
    return {f"preference/{name}": stats.mean(key) for name, key in sums.items()}


def _margin(sides: dict[str, Tensor]) -> Tensor:
    policy_P = sides["policy_chosen_P"] - sides["policy_rejected_P"]
    return policy_P - (sides["ref_chosen_P"] - sides["ref_rejected_P"])


def _scores(columns: Columns) -> tuple[Tensor, Tensor]:
    """Scores of both sides of each pair [P], float64."""
    chosen_N, pair_N = columns["weights_N"] > 0, columns["group_index_N"]
    scores_N = columns["scores_N"].double()
    chosen_P = segment_sum(torch.where(chosen_N, scores_N, 0.0), pair_N)
    return chosen_P, segment_sum(torch.where(chosen_N, 0.0, scores_N), pair_N)


def _sides(columns: Columns) -> dict[str, Tensor]:
    """Sums of each side of each pair [P], float64; log-probs of no reference are 0."""
    chosen_N, pair_N = columns["weights_N"] > 0, columns["group_index_N"]
    policy_N = columns["policy_logprobs_N"].double()
    ref_N = columns.get("ref_logprobs_N", torch.zeros_like(policy_N)).double()
    one_N = torch.ones_like(policy_N)
    sides = {}
    for name, values_N in (("policy", policy_N), ("ref", ref_N), ("lengths", one_N)):
        for side, mask_N in (("chosen", chosen_N), ("rejected", ~chosen_N)):
            key = f"{side}_lengths_P" if name == "lengths" else f"{name}_{side}_P"
            sides[key] = segment_sum(torch.where(mask_N, values_N, 0.0), pair_N)
    return sides


def _mean_over_groups(loss_P: Tensor, columns: Columns, denominators: Denominators) -> Tensor:
    if not len(loss_P):
        return loss_P.sum()  # a 0 of the graph, as `aggregate` gives
    if denominators.num_groups < len(loss_P):
        raise ValueError(
            f"micro-batch holds {len(loss_P)} pairs but the step's denominator is "
            f"{denominators.num_groups}; pass the count of the whole step"
        )
    return loss_P.sum() / denominators.num_groups
