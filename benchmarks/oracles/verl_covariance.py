"""Clip-Cov and KL-Cov against verl: selections by covariance.

Both select once a step here, with the log-probs at its start and over all its tokens; verl selects
within each micro-batch, with the current ones. On the first update of a step that is one
micro-batch the two are the same selection.
"""

from __future__ import annotations

import torch
from batches import ORDINARY, Batch, batches
from comparison import COMPARISONS, Record, call, function
from losses import TokenLoss, same_tokens, token_loss
from verl_calls import policy_loss

CORE = "verl:trainer.ppo.core_algos"
BAND = {"low": 0.05, "high": 0.6}
LATER = "verl selects in each micro-batch, with the current log-probs and not among clipped tokens"


def first_update(batch: Batch) -> Batch:
    """The same before the policy has moved."""
    return batch.with_tokens(policy_logprobs=batch.tokens_BT["prox_logprobs"])


def our_clip_cov(batch: Batch, frac: float) -> TokenLoss:
    """Clipped surrogate without what Clip-Cov drops."""
    weight_N = call("corrections.clip_cov", batch.columns(), frac=frac, **BAND)
    loss = token_loss("ppo_clip", batch, clip_low=0.2, clip_high=0.2)
    return TokenLoss(loss.per_token_N * weight_N, loss.gradient_N * weight_N)


def verl_clip_cov(batch: Batch, frac: float) -> TokenLoss:
    """The same of verl."""
    settings = {"clip_cov_ratio": frac, "clip_cov_lb": BAND["low"], "clip_cov_ub": BAND["high"]}
    return policy_loss("clip_cov", batch, settings)


@COMPARISONS.add(
    "corrections.clip_cov",
    f"{CORE}.compute_policy_loss_clip_cov",
    difference=f"{LATER}; equal on the first update",
    page="clip_cov",
)
def clip_cov(record: Record) -> None:
    for drawn in batches(ORDINARY):
        batch = first_update(drawn)
        same_tokens(record, our_clip_cov(batch, 1.0), verl_clip_cov(batch, 1.0))
        record.apart(our_clip_cov(drawn, 1.0).per_token_N, verl_clip_cov(drawn, 1.0).per_token_N)
        # Which ones is chance, how many is not; a loss of 0 must come from the selection alone
        shifted = batch.with_tokens(advantages=batch.tokens_BT["advantages"] + 0.013)
        for frac in (0.0002, 0.05, 0.2):
            ours, theirs = our_clip_cov(shifted, frac), verl_clip_cov(shifted, frac)
            record.same((ours.per_token_N == 0).sum(), (theirs.per_token_N == 0).sum())


@COMPARISONS.add(
    "covariance:kl_cov",
    f"{CORE}.compute_policy_loss_kl_cov",
    difference=f"{LATER}, and takes int(frac n) of n tokens where ours rounds; the selection is "
    "equal on the first update when frac n is whole. verl's penalty is |policy - prox|, ours a KL "
    "to the reference: not compared",
    page="kl_cov",
)
def kl_cov(record: Record) -> None:
    for drawn in batches(ORDINARY):
        batch = first_update(drawn)
        for count in (1, 3, 10):
            record.same(*_chosen(batch, (count + 1e-3) / batch.denominators.num_loss_tokens))
        record.apart(*_chosen(batch, 3.6 / batch.denominators.num_loss_tokens))


def _chosen(batch: Batch, frac: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] each: 1 where the KL term is added. verl's is where the coefficient acts."""
    # |policy - prox| has no gradient at 0, so that the policy is moved by a hair
    moved = batch.with_tokens(policy_logprobs=batch.tokens_BT["policy_logprobs"] + 1e-9)
    with_term = policy_loss("kl_cov", moved, {"kl_cov_ratio": frac, "ppo_kl_coef": 5.0})
    without = policy_loss("kl_cov", moved, {"kl_cov_ratio": frac, "ppo_kl_coef": 0.0})
    theirs_N = (with_term.gradient_N - without.gradient_N).abs() > 1
    columns = batch.columns()
    ours_N = function("covariance:kl_cov")(
        columns["prox_logprobs_N"], columns["advantages_N"], frac=frac
    )
    return ours_N.double(), theirs_N.double()
