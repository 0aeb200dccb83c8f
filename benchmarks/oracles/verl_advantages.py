"""Advantage estimators against verl.trainer.ppo.core_algos."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from batches import ORDINARY, SINGLE_TURN, SINGLETON, Batch, batches
from comparison import COMPARISONS, Record, call, function
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl_calls import group_ids, outcome_advantage

CORE = "verl:trainer.ppo.core_algos"
ALONE = "a group of one: verl takes its reward as advantage, ours is 0; equal once those rows are 0"

FLOAT32: Any = {"tolerance": 1e-5, "floor": 1.0}  # where the published function goes through it


def by_group(path: str, batch: Batch, **settings: Any) -> Tensor:
    """[B]: our estimator over the columns of each group."""
    every_group = list(batch.members())
    advantages_B = torch.empty_like(batch.rewards_B)
    for rows in every_group:
        columns = {
            "rewards_G": batch.rewards_B[rows],
            "lengths_G": batch.lengths_B[rows].double(),
            "batch_rewards": [batch.rewards_B[members] for members in every_group],
        }
        advantages_B[rows] = call(path, columns, **settings)
    return advantages_B


def is_alone(batch: Batch) -> Tensor:
    """[B]: True in groups of one."""
    return torch.bincount(batch.group_B)[batch.group_B] == 1


def compare_groups(
    record: Record,
    path: str,
    published: Callable[..., Any],
    *,
    keep: bool = True,
    ours: dict[str, Any] | None = None,
    **theirs: Any,
) -> None:
    """Groups of several members. With `keep`, single members too: theirs set to our 0."""
    for batch in batches(ORDINARY, *([SINGLETON] if keep else [])):
        advantages_B = by_group(path, batch, **(ours or {}))
        published_B = outcome_advantage(published, batch, **theirs)
        record.same(advantages_B, published_B.masked_fill(is_alone(batch), 0.0))
        if keep:
            record.apart(advantages_B, published_B)


@COMPARISONS.add(
    "advantages.grpo (group)",
    f"{CORE}.compute_grpo_outcome_advantage",
    difference=ALONE,
    page="grpo",
)
def grpo(record: Record) -> None:
    compare_groups(record, "advantages.grpo", core_algos.compute_grpo_outcome_advantage)


@COMPARISONS.add(
    "advantages.grpo (none)",
    f"{CORE}.compute_grpo_outcome_advantage (norm_adv_by_std_in_grpo=False)",
    difference=ALONE,
    page="grpo",
)
def grpo_none(record: Record) -> None:
    compare_groups(
        record,
        "advantages.grpo",
        core_algos.compute_grpo_outcome_advantage,
        ours={"std": "none"},
        norm_adv_by_std_in_grpo=False,
    )


@COMPARISONS.add(
    "advantages.dr_grpo",
    f"{CORE}.compute_grpo_outcome_advantage (norm_adv_by_std_in_grpo=False)",
    difference=ALONE,
    page="dr_grpo",
)
def dr_grpo(record: Record) -> None:
    compare_groups(
        record,
        "advantages.dr_grpo",
        core_algos.compute_grpo_outcome_advantage,
        norm_adv_by_std_in_grpo=False,
    )


@COMPARISONS.add(
    "advantages.grpo (group)",
    f"{CORE}.compute_grpo_vectorized_outcome_advantage",
    difference=f"{ALONE}; verl computes in float32",
    page="grpo",
    **FLOAT32,
)
def grpo_vectorized(record: Record) -> None:
    compare_groups(record, "advantages.grpo", core_algos.compute_grpo_vectorized_outcome_advantage)


@COMPARISONS.add(
    "advantages.grpo (group, spread below 1e-6)",
    f"{CORE}.compute_grpo_outcome_advantage",
    difference="rewards that differ by float noise: ours is 0 where the std is below 1e-6; verl "
    "divides by std + 1e-6",
    page="grpo",
)
def grpo_noise(record: Record) -> None:
    published = core_algos.compute_grpo_outcome_advantage
    for batch in batches(ORDINARY):
        noise_B = 1e-7 * torch.sign(batch.rewards_B - batch.rewards_B.median())
        noisy = batch.with_rewards(0.5 + noise_B)
        ours_B, theirs_B = by_group("advantages.grpo", noisy), outcome_advantage(published, noisy)
        record.apart(ours_B, theirs_B)
        record.same(ours_B, torch.zeros_like(ours_B))
        for rows in batch.members():  # what verl's would be without our threshold
            of_group = noisy.rewards_B[rows]
            record.same((of_group - of_group.mean()) / (of_group.std() + 1e-6), theirs_B[rows])


@COMPARISONS.add(
    "advantages.rloo", f"{CORE}.compute_rloo_outcome_advantage", difference=ALONE, page="rloo"
)
def rloo(record: Record) -> None:
    compare_groups(record, "advantages.rloo", core_algos.compute_rloo_outcome_advantage)


@COMPARISONS.add(
    "advantages.rloo", f"{CORE}.compute_rloo_vectorized_outcome_advantage", page="rloo"
)
def rloo_vectorized(record: Record) -> None:
    published = core_algos.compute_rloo_vectorized_outcome_advantage
    for batch in batches(ORDINARY, SINGLETON):
        record.same(by_group("advantages.rloo", batch), outcome_advantage(published, batch))


@COMPARISONS.add(
    "advantages.opo", f"{CORE}.compute_opo_outcome_advantage", difference=ALONE, page="opo"
)
def opo(record: Record) -> None:
    compare_groups(record, "advantages.opo", core_algos.compute_opo_outcome_advantage)


@COMPARISONS.add(
    "advantages.pass_at_k",
    f"{CORE}.compute_grpo_passk_outcome_advantage",
    difference="verl's default divides by the std of the group, ours never",
    page="pass_at_k",
)
def pass_at_k(record: Record) -> None:
    published = core_algos.compute_grpo_passk_outcome_advantage
    for batch in batches(ORDINARY):
        ours_B = by_group("advantages.pass_at_k", batch)
        plain = AlgoConfig(norm_adv_by_std_in_grpo=False)
        record.same(ours_B, outcome_advantage(published, batch, config=plain))
        record.apart(ours_B, outcome_advantage(published, batch, config=AlgoConfig()))


@COMPARISONS.add(
    "advantages.gpg (verl)",
    f"{CORE}.compute_gpg_outcome_advantage",
    difference=f"{ALONE}; verl's alpha is float32",
    page="gpg_advantages",
    **FLOAT32,
)
def gpg(record: Record) -> None:
    compare_groups(
        record,
        "advantages.gpg",
        core_algos.compute_gpg_outcome_advantage,
        ours={"scale": "verl", "f_norm": 2.0},
        f_norm=2.0,
    )


@COMPARISONS.add(
    "advantages.gpg (paper)",
    f"{CORE}.compute_gpg_outcome_advantage",
    difference="the paper's alpha is B / (B - M), M members of groups without variance; verl's "
    "B / #(R != 0), in float32",
    page="gpg_advantages",
    **FLOAT32,
)
def gpg_paper(record: Record) -> None:
    published = core_algos.compute_gpg_outcome_advantage
    for batch in batches(ORDINARY):
        ours_B, theirs_B = by_group("advantages.gpg", batch), outcome_advantage(published, batch)
        is_flat_B = (
            torch.stack([batch.rewards_B[batch.group_B == g].std() for g in range(3)]) < 1e-6
        )
        num_counted = int((~is_flat_B[batch.group_B]).sum())
        record.apart(ours_B, theirs_B)
        record.same(ours_B, theirs_B * int(batch.rewards_B.count_nonzero()) / num_counted)


@COMPARISONS.add("advantages.remax", f"{CORE}.compute_remax_outcome_advantage", page="remax")
def remax(record: Record) -> None:
    for batch in batches(ORDINARY, SINGLETON):
        greedy_B = batch.group_B * 0.3 - 0.2
        advantages_BT, _ = core_algos.compute_remax_outcome_advantage(
            token_level_rewards=batch.outcome_BT,
            reward_baselines=greedy_B,
            response_mask=batch.mask_BT.double(),
        )
        ours_B = torch.empty_like(batch.rewards_B)
        for rows in batch.members():
            ours_B[rows] = function("advantages.remax")(batch.rewards_B[rows], greedy_B[rows][0])
        record.same(ours_B[batch.sequence_index_N], batch.flat(advantages_BT))


@COMPARISONS.add(
    "advantages.optimal_token_baseline",
    f"{CORE}.compute_multi_turn_optimal_token_baseline_advantage",
    difference="verl adds 1e-8 to the denominator, and gives a token that no other trajectory is "
    "long enough to be compared with (or a group of one) its whole return; ours gives it 0",
    page="optimal_token_baseline",
    tolerance=1e-7,
    floor=1.0,
)
def optimal_token_baseline(record: Record) -> None:
    compare_token_baseline(
        record, core_algos.compute_multi_turn_optimal_token_baseline_advantage, ORDINARY, SINGLETON
    )


@COMPARISONS.add(
    "advantages.optimal_token_baseline (one turn)",
    f"{CORE}.compute_optimal_token_baseline_advantage",
    difference="as in the multi-turn form; with observations verl aligns positions by place in the "
    "padded row, not by the number of action tokens before",
    page="optimal_token_baseline",
    tolerance=1e-7,
    floor=1.0,
)
def optimal_token_baseline_one_turn(record: Record) -> None:
    compare_token_baseline(record, core_algos.compute_optimal_token_baseline_advantage, SINGLE_TURN)


def compare_token_baseline(record: Record, published: Callable[..., Any], *scenarios: Any) -> None:
    """Advantages of every token; where a token is alone at its position, their return is our 0."""
    for batch in batches(*scenarios):
        advantages_BT, returns_BT = published(
            token_level_rewards=batch.outcome_BT,
            response_mask=batch.mask_BT.double(),
            index=group_ids(batch),
            old_log_probs=batch.tokens_BT["prox_logprobs"],
            sum_pi_squared=batch.tokens_BT["sum_pi_squared"],
        )
        ours_N = call("advantages.optimal_token_baseline", batch.columns())
        theirs_N = batch.flat(advantages_BT)
        record.apart(ours_N, theirs_N)
        position_N = batch.flat(batch.mask_BT.cumsum(dim=1))
        cell_N = batch.group_B[batch.sequence_index_N] * 100 + position_N
        is_alone_N = torch.bincount(cell_N)[cell_N] == 1
        record.same(theirs_N[is_alone_N], batch.flat(returns_BT)[is_alone_N])
        record.same(ours_N, theirs_N.masked_fill(is_alone_N, 0.0))


@COMPARISONS.add(
    "advantages.gdpo",
    f"{CORE}.compute_gdpo_outcome_advantage",
    difference="verl whitens over tokens (a long trajectory counts more, and a shift is "
    "subtracted), ours divides by the std over trajectories plus 1e-6; verl's terms are float32",
    page="gdpo",
    **FLOAT32,
)
def gdpo(record: Record) -> None:
    weights_R = torch.tensor([1.0, 0.5], dtype=torch.float64)
    for batch in batches(ORDINARY, SINGLE_TURN):
        terms_BR = torch.stack([batch.rewards_B, batch.tokens_BT["values"][:, 0]], dim=1)
        ours_B = torch.empty_like(batch.rewards_B)
        for rows in batch.members():
            ours_B[rows] = function("advantages.gdpo")(
                terms_BR[rows],
                [terms_BR[members] for members in batch.members()],
                weights_R,
            )
        width = batch.mask_BT.shape[1]
        theirs_BT, _ = core_algos.compute_gdpo_outcome_advantage(
            token_level_rewards=batch.outcome_BT,
            response_mask=batch.mask_BT.double(),
            index=group_ids(batch),
            config=AlgoConfig(gdpo_reward_keys=["a", "b"], gdpo_reward_weights=[1.0, 0.5]),
            non_tensor_batch={"a": terms_BR[:, 0].numpy(), "b": terms_BR[:, 1].numpy()},
            batch={
                "prompts": torch.zeros(len(ours_B), 1),
                "attention_mask": torch.ones(len(ours_B), 1 + width, dtype=torch.long),
            },
        )
        theirs_N, ours_N = batch.flat(theirs_BT), ours_B[batch.sequence_index_N]
        record.apart(ours_N, theirs_N)
        whiten = function("advantages.whitening:whiten")
        record.same(whiten(ours_N, "unbiased"), theirs_N)
