"""Advantages and importance weights against TRL's GRPOTrainer, log-probs against its helpers."""

from __future__ import annotations

from typing import Any

import torch
from batches import EMPTY, GROUP_SIZE, ORDINARY, Batch, batches, equal_groups, some_logits
from comparison import COMPARISONS, Record, call, function
from torch import Tensor
from trl.trainer.utils import selective_log_softmax
from trl_calls import score

SCORE = "trl:trainer.grpo_trainer.GRPOTrainer._generate_and_score_completions"
EPS = 1e-4  # what TRL adds to a std


def grpo(batch: Batch, **settings: Any) -> Tensor:
    """[B]: ours."""
    rewards = [batch.rewards_B[rows] for rows in batch.members()]
    estimate = function("advantages.grpo")
    return torch.cat(
        [estimate(rewards_G, rewards, std_eps=EPS, **settings) for rewards_G in rewards]
    )


@COMPARISONS.add("advantages.grpo (group, batch, none)", f"{SCORE} (scale_rewards)", page="grpo")
def scale_rewards(record: Record) -> None:
    for batch in equal_groups():
        for std in ("group", "batch", "none"):
            theirs = score(batch, batch.rewards_B[:, None], GROUP_SIZE, scale_rewards=std)
            record.same(grpo(batch, std=std), theirs.advantages_B)


@COMPARISONS.add("advantages.grpo (survivors)", f"{SCORE} (unscorable completions)", page="grpo")
def survivors(record: Record) -> None:
    for batch in equal_groups():
        rewards_BR = batch.rewards_B[:, None].clone()
        rewards_BR[[0, 5, 9]] = torch.nan
        theirs = score(batch, rewards_BR, GROUP_SIZE).advantages_B
        ours_B = torch.zeros_like(batch.rewards_B)  # who has no reward has no advantage
        for rows in batch.members():
            alive = rows[~rewards_BR[rows, 0].isnan()]
            ours_B[alive] = function("advantages.grpo")(batch.rewards_B[alive], std_eps=EPS)
        record.same(ours_B, theirs)


@COMPARISONS.add("advantages.grpo (a group of one)", f"{SCORE} (num_generations=1)", page="grpo")
def singleton(record: Record) -> None:
    for batch in batches(ORDINARY):
        theirs = score(batch, batch.rewards_B[:, None], 1).advantages_B
        ours = [function("advantages.grpo")(reward_G) for reward_G in batch.rewards_B.split(1)]
        record.same(torch.cat(ours), theirs)


@COMPARISONS.add(
    "advantages.gdpo",
    f"{SCORE} (normalize_then_sum)",
)
def gdpo(record: Record) -> None:
    for batch in equal_groups():
        terms_BR = torch.stack([batch.rewards_B, batch.tokens_BT["values"][:, 0]], dim=1)
        for weights_R in (torch.ones(2).double(), torch.tensor([1.0, 0.25]).double()):
            theirs_B = score(
                batch,
                terms_BR,
                GROUP_SIZE,
                multi_objective_aggregation="normalize_then_sum",
                reward_weights=weights_R,
            ).advantages_B
            record.same(our_gdpo(terms_BR, weights_R), theirs_B)


def our_gdpo(terms_BR: Tensor, weights_R: Tensor) -> Tensor:
    """[B]"""
    groups = list(terms_BR.split(GROUP_SIZE))
    estimate = function("advantages.gdpo")
    return torch.cat([estimate(terms, groups, weights_R, std_eps=EPS) for terms in groups])


def compare_weights(
    record: Record,
    ours: str,
    mode: str,
    bounds: tuple[float | None, float],
    **settings: float,
) -> None:
    """Weights of every loss token."""
    for batch in (*equal_groups(), *equal_groups(EMPTY)):
        weights = score(
            batch,
            batch.rewards_B[:, None],
            GROUP_SIZE,
            mode=mode,
            clip_min=bounds[0],
            clip_max=bounds[1],
        ).weights
        theirs_N = batch.flat(weights.expand(batch.mask_BT.shape))
        record.same(call(ours, batch.columns(), **settings), theirs_N)


@COMPARISONS.add("corrections.tis", f"{SCORE} (token_truncate)", page="tis")
def tis(record: Record) -> None:
    compare_weights(record, "corrections.tis", "token_truncate", (None, 1.5), cap=1.5)
    compare_weights(record, "corrections.tis", "token_truncate", (0.8, 1.5), cap=1.5, floor=0.8)


@COMPARISONS.add("corrections.icepop", f"{SCORE} (token_mask)", page="icepop")
def icepop(record: Record) -> None:
    compare_weights(record, "corrections.icepop", "token_mask", (0.7, 1.5), low=0.7, high=1.5)


@COMPARISONS.add("corrections.seq_tis", f"{SCORE} (sequence_truncate)", page="seq_tis")
def seq_tis(record: Record) -> None:
    compare_weights(record, "corrections.seq_tis", "sequence_truncate", (None, 1.5), cap=1.5)


@COMPARISONS.add("corrections.seq_mis", f"{SCORE} (sequence_mask)", page="seq_mis")
def seq_mis(record: Record) -> None:
    compare_weights(record, "corrections.seq_mis", "sequence_mask", (None, 3.0), cap=3.0)


@COMPARISONS.add("logprobs:token_logprobs", "trl:trainer.utils.selective_log_softmax")
def token_logprobs(record: Record) -> None:
    for batch in batches(ORDINARY):
        logits_BTV = some_logits(batch)
        labels_BT = torch.randint(logits_BTV.shape[-1], batch.mask_BT.shape)
        for temperature in (1.0, 0.7):
            ours_N = function("logprobs:token_logprobs")(
                logits_BTV.flatten(0, 1), labels_BT.flatten(), temperature
            )
            theirs_N = selective_log_softmax(logits_BTV, labels_BT, temperature).flatten()
            record.same(ours_N, theirs_N)
            record.same_gradient(
                torch.autograd.grad(ours_N.sum(), logits_BTV)[0],
                torch.autograd.grad(theirs_N.sum(), logits_BTV)[0],
            )
