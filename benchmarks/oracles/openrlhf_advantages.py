"""Advantages and control against openrlhf.trainer.ppo_utils."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from batches import GROUP_SIZE, SINGLE_TURN, equal_groups
from comparison import COMPARISONS, Record, call, function
from openrlhf_calls import kl_controller, length_penalty, score

SCORE = "openrlhf:trainer.ppo_utils.experience_maker.RemoteExperienceMaker"
OUTCOME = f"{SCORE}.compute_advantages_and_returns"
WHITENED: Any = {"tolerance": 1e-5, "floor": 1.0}  # moments in float32 there


def compare_outcome(record: Record, ours: str, theirs: str, **settings: Any) -> None:
    """Every token has its sequence's advantage."""
    for batch in equal_groups():
        by_row_B = torch.empty_like(batch.rewards_B)
        for rows in batch.members():
            by_row_B[rows] = function(ours)(batch.rewards_B[rows], **settings)
        published = score(batch, theirs, GROUP_SIZE)
        record.same(by_row_B[batch.sequence_index_N], published.advantages_N)


@COMPARISONS.add("advantages.rloo", f"{OUTCOME} (rloo)", page="rloo")
def rloo(record: Record) -> None:
    compare_outcome(record, "advantages.rloo", "rloo")


@COMPARISONS.add("advantages.dr_grpo", f"{OUTCOME} (dr_grpo)", page="dr_grpo")
def dr_grpo(record: Record) -> None:
    compare_outcome(record, "advantages.dr_grpo", "dr_grpo")


@COMPARISONS.add("advantages.grpo (std_eps = 1e-9)", f"{OUTCOME} (group_norm)", page="grpo")
def group_norm(record: Record) -> None:
    compare_outcome(record, "advantages.grpo", "group_norm", std_eps=1e-9)


@COMPARISONS.add(
    "advantages.reinforce_pp_baseline (population)",
    f"{OUTCOME} (reinforce_baseline)",
    difference="OpenRLHF takes moments in float32 and clamps the variance at 1e-8, ours adds 1e-8",
    page="reinforce_pp_baseline",
    **WHITENED,
)
def reinforce_baseline(record: Record) -> None:
    for drawn in equal_groups():
        for scale in (1.0, 1e-4):  # of the rewards: their variance is then about 1e-8
            batch = drawn.with_rewards(drawn.rewards_B * scale)
            ours_N = call(
                "advantages.reinforce_pp_baseline", batch.columns(), variance="population"
            )
            theirs_N = score(batch, "reinforce_baseline", GROUP_SIZE).advantages_N
            record.apart(ours_N, theirs_N)
            centred = [
                function("advantages.dr_grpo")(batch.rewards_B[rows]) for rows in batch.members()
            ]
            variance = torch.cat(centred)[batch.sequence_index_N].var(correction=0)
            of_eps = ((variance + 1e-8) / variance.clamp_min(1e-8)).sqrt()
            record.same(ours_N * of_eps, theirs_N)


def compare_scan(
    record: Record, ours: str, theirs: str, gamma: float, trace: float, **settings: Any
) -> None:
    """OpenRLHF on the loss tokens alone, and, not converted, with observations between them;
    `trace` is its lambda."""
    for batch in (*equal_groups(), *equal_groups(SINGLE_TURN)):
        ours_N = call(ours, batch.columns(), gamma=gamma, **settings)
        compact = score(batch.compacted(), theirs, GROUP_SIZE, gamma=gamma, lam=trace)
        record.same(ours_N, compact.advantages_N)
        with_gaps = score(batch, theirs, GROUP_SIZE, gamma=gamma, lam=trace)
        record.apart(ours_N, with_gaps.advantages_N)


@COMPARISONS.add(
    "advantages.reinforce_pp (population, gamma 0.9)",
    f"{OUTCOME} (reinforce)",
    difference="OpenRLHF's discount counts positions, observations included, ours action tokens; "
    "equal without observations",
    page="reinforce_pp",
    **WHITENED,
)
def reinforce(record: Record) -> None:
    compare_scan(
        record, "advantages.reinforce_pp", "reinforce", gamma=0.9, trace=1.0, variance="population"
    )


@COMPARISONS.add(
    "advantages.gae (population)",
    f"{OUTCOME} (gae)",
    difference="OpenRLHF sets values of observations to 0, so V = 0 follows every turn; equal "
    "without observations",
    page="gae",
    **WHITENED,
)
def gae(record: Record) -> None:
    compare_scan(
        record,
        "advantages.gae",
        "gae",
        gamma=1.0,
        trace=0.95,
        **{"lam": 0.95, "length_alpha": None, "whitening": "population"},
    )


@COMPARISONS.add("advantages.gae:gae_targets", f"{SCORE}.get_advantages_and_returns", page="gae")
def gae_targets(record: Record) -> None:
    for batch in equal_groups(SINGLE_TURN):
        ours_N = call("advantages.gae:gae_targets", batch.columns(), gamma=0.9, lam_critic=0.8)
        theirs = score(batch, "gae", GROUP_SIZE, gamma=0.9, lam=0.8)
        record.same(ours_N, theirs.returns_N)


@COMPARISONS.add(
    "shaping.soft_overlong",
    "openrlhf:trainer.ppo_utils.length_penalty.apply_overlong_penalty",
    page="soft_overlong",
)
def soft_overlong(record: Record) -> None:
    lengths_G = torch.arange(0.0, 40.0, dtype=torch.float64)
    experience = SimpleNamespace(response_length=lengths_G, rewards=torch.zeros_like(lengths_G))
    length_penalty.apply_overlong_penalty([experience], 30, 8)
    record.same(
        function("shaping.soft_overlong")(lengths_G, max_length=30, cache_length=8),
        experience.rewards,
    )


@COMPARISONS.add(
    "controllers:adapted_kl_coef",
    "openrlhf:trainer.ppo_utils.kl_controller.AdaptiveKLController",
    page="kl",
)
def adapted_kl_coef(record: Record) -> None:
    for batch in equal_groups():
        theirs = kl_controller.AdaptiveKLController(0.1, target=0.6, horizon=1000)
        ours = 0.1
        for observed in batch.tokens_BT["values"].abs().flatten().tolist():
            theirs.update(observed, 128)
            ours = function("controllers:adapted_kl_coef")(
                ours, observed, 128, target=0.6, horizon=1000
            )
            record.same(ours, float(theirs.value))


@COMPARISONS.add(
    "advantages.rloo - regularised:kl_to_go",
    f"{OUTCOME} (rloo, kl_ctl)",
    difference="ours also subtracts, from the KL to go, the mean of the siblings' whole sums: a "
    "baseline that OpenRLHF does not have",
    page="kl",
)
def kl_in_reward(record: Record) -> None:
    for batch in equal_groups():
        gap_BT = batch.tokens_BT["prox_logprobs"] - batch.tokens_BT["ref_logprobs"]
        theirs_N = score(batch, "rloo", GROUP_SIZE, kl_coef=0.1, kl_BT=gap_BT).advantages_N
        columns = batch.columns()
        to_go_N = function("regularised:kl_to_go")(
            0.1 * batch.flat(gap_BT), batch.sequence_index_N, columns["group_index_N"]
        )
        by_row_B = torch.cat(
            [function("advantages.rloo")(batch.rewards_B[rows]) for rows in batch.members()]
        )
        ours_N = by_row_B[batch.sequence_index_N] - to_go_N
        record.apart(ours_N, theirs_N)
        sums_B = 0.1 * (gap_BT * batch.mask_BT).sum(dim=1)
        of_siblings = [
            (sums_B[rows].sum() - sums_B[rows]) / (len(rows) - 1) for rows in batch.members()
        ]
        record.same(ours_N, theirs_N + torch.cat(of_siblings)[batch.sequence_index_N])
