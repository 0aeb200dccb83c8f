"""Estimators over tokens against verl: returns to go, generalised advantages, values, control."""

from __future__ import annotations

from typing import Any

import torch
from batches import EMPTY, EXTREME, ORDINARY, SINGLETON, Batch, batches
from comparison import COMPARISONS, Record, call, function
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl_calls import group_ids

CORE = "verl:trainer.ppo.core_algos"
WHITENED: Any = {"floor": 1.0}  # verl's mean and variance divide by n + 1e-8


def turn_rewards_BT(batch: Batch) -> Tensor:
    """The outcome, and a reward at every third position that is a loss token."""
    extra_BT = 0.3 * batch.tokens_BT["values"] * batch.mask_BT
    extra_BT[:, 1::3] = 0.0
    return batch.outcome_BT + extra_BT


@COMPARISONS.add(
    "advantages.reinforce_pp",
    f"{CORE}.compute_reinforce_plus_plus_outcome_advantage",
    page="reinforce_pp",
    **WHITENED,
)
def reinforce_pp(record: Record) -> None:
    for batch in batches(ORDINARY, EMPTY):
        for gamma in (1.0, 0.9):
            rewards_BT = turn_rewards_BT(batch)
            columns = batch.columns(rewards_N=batch.flat(rewards_BT))
            ours_N = call("advantages.reinforce_pp", columns, gamma=gamma, variance="unbiased")
            theirs_BT, returns_BT = core_algos.compute_reinforce_plus_plus_outcome_advantage(
                token_level_rewards=rewards_BT,
                response_mask=batch.mask_BT.double(),
                config=AlgoConfig(gamma=gamma),
            )
            record.same(ours_N, batch.flat(theirs_BT))
            returns_N = function("segments:discounted_to_go")(
                batch.flat(rewards_BT), batch.sequence_index_N, gamma
            )
            record.same(returns_N, batch.flat(returns_BT))


@COMPARISONS.add(
    "advantages.reinforce_pp_baseline",
    f"{CORE}.compute_reinforce_plus_plus_baseline_outcome_advantage",
    difference="a group of one: verl takes its raw reward into the whitening, ours 0; equal once "
    "its reward is 0",
    page="reinforce_pp_baseline",
    **WHITENED,
)
def reinforce_pp_baseline(record: Record) -> None:
    for batch in batches(ORDINARY, EMPTY, SINGLETON):
        ours_N = call("advantages.reinforce_pp_baseline", batch.columns(), variance="unbiased")
        alone_B = torch.bincount(batch.group_B)[batch.group_B] == 1
        empty_B = batch.lengths_B == 0
        for rewards_BT, hand_over in (
            (batch.outcome_BT.masked_fill(alone_B[:, None], 0.0), record.same),
            (batch.outcome_BT, record.apart),
        ):
            theirs_BT, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
                token_level_rewards=rewards_BT[~empty_B],
                response_mask=batch.mask_BT[~empty_B].double(),
                index=group_ids(batch)[(~empty_B).numpy()],
            )
            hand_over(ours_N, theirs_BT[batch.mask_BT[~empty_B]])


@COMPARISONS.add(
    "advantages.gae (whitened) and gae_targets",
    f"{CORE}.compute_gae_advantage_return",
    page="gae",
    **WHITENED,
)
def gae(record: Record) -> None:
    for batch in batches(ORDINARY, EMPTY):
        rewards_BT = turn_rewards_BT(batch)
        columns = batch.columns(rewards_N=batch.flat(rewards_BT))
        for gamma, lam in ((1.0, 0.95), (0.9, 0.8), (1.0, 1.0)):
            advantages_BT, returns_BT = core_algos.compute_gae_advantage_return(
                token_level_rewards=rewards_BT,
                values=batch.tokens_BT["values"],
                response_mask=batch.mask_BT.double(),
                gamma=torch.tensor(gamma, dtype=torch.float64),
                lam=torch.tensor(lam, dtype=torch.float64),
            )
            settings = {"gamma": gamma, "lam": lam, "length_alpha": None}
            ours_N = call("advantages.gae", columns, whitening="unbiased", **settings)
            record.same(ours_N, batch.flat(advantages_BT))
            targets_N = call("advantages.gae:gae_targets", columns, gamma=gamma, lam_critic=lam)
            record.same(targets_N, batch.flat(returns_BT))


@COMPARISONS.add("value:value_loss", f"{CORE}.compute_value_loss", page="value_loss")
def value_loss(record: Record) -> None:
    for batch in batches(ORDINARY, EMPTY, EXTREME):
        values_BT = batch.leaf("values")
        prox_BT = batch.tokens_BT["values"] + batch.tokens_BT["ref_logprobs"] / 3
        returns_BT = batch.tokens_BT["teacher_logprobs"]
        theirs, _ = core_algos.compute_value_loss(
            vpreds=values_BT,
            returns=returns_BT,
            values=prox_BT,
            response_mask=batch.mask_BT.double(),
            cliprange_value=0.5,
        )
        per_token_N = function("value:value_loss")(
            batch.flat(values_BT), batch.flat(prox_BT), batch.flat(returns_BT), clip=0.5
        )
        ours = function("aggregation:aggregate")(
            per_token_N, batch.sequence_index_N, "token_mean", batch.denominators
        )
        record.same(ours, theirs)
        record.same_gradient(
            torch.autograd.grad(ours, values_BT)[0], torch.autograd.grad(theirs, values_BT)[0]
        )


@COMPARISONS.add(
    "controllers:adapted_kl_coef",
    f"{CORE}.AdaptiveKLController",
    difference="a step of more sequences than the horizon counts as one of the horizon here",
    page="kl",
)
def adapted_kl_coef(record: Record) -> None:
    adapted = function("controllers:adapted_kl_coef")
    for batch in batches(ORDINARY):
        kls = batch.tokens_BT["values"].abs().flatten().tolist()
        theirs = core_algos.AdaptiveKLController(0.1, target_kl=0.6, horizon=1000)
        ours = 0.1
        for observed in kls:
            theirs.update(observed, n_steps=128)
            ours = adapted(ours, observed, 128, target=0.6, horizon=1000)
            record.same(ours, float(theirs.value))
    theirs = core_algos.AdaptiveKLController(0.1, target_kl=0.6, horizon=1000)
    theirs.update(0.0, n_steps=6000)  # 0.1 (1 - 0.2 * 6): below 0
    ours = adapted(0.1, 0.0, 6000, target=0.6, horizon=1000)
    record.apart(ours, float(theirs.value))
    record.same(ours, 0.1 * (1 - 0.2))
