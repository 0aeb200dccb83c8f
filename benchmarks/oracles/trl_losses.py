"""Policy losses against TRL's GRPOTrainer and GMPOTrainer."""

from __future__ import annotations

from typing import Any

import torch
from batches import EMPTY, EXTREME, ORDINARY, Batch, batches, some_logits
from comparison import COMPARISONS, Record, call, function
from losses import Loss, same_loss, whole_loss
from trl.trainer.utils import entropy_from_logits
from trl_calls import gmpo_loss, policy_loss

LOSS = "trl:trainer.grpo_trainer.GRPOTrainer._compute_loss"
PLAIN = (ORDINARY, EMPTY)
CLIP: Any = {"clip_low": 0.2, "clip_high": 0.28}
ROWS = (
    "TRL averages over the rows of the micro-batch, sequences without a loss token included; ours "
    "over those that have one"
)


def same_over_sequences(record: Record, batch: Batch, ours: Loss, theirs: Loss) -> None:
    """Equal once TRL's mean over all rows is one over the sequences with a loss token."""
    record.apart(ours.value, theirs.value)
    same_loss(record, ours, theirs, len(batch.mask_BT) / batch.denominators.num_sequences)


@COMPARISONS.add("losses.ppo_clip, token_mean", f"{LOSS} (dapo, bnpo)", page="ppo_clip")
def ppo_token_mean(record: Record) -> None:
    for batch in batches(*PLAIN):
        ours = whole_loss("ppo_clip", batch, "token_mean", **CLIP)
        for loss_type in ("dapo", "bnpo"):
            same_loss(record, ours, policy_loss(batch, loss_type=loss_type))


@COMPARISONS.add(
    "losses.ppo_clip, seq_mean_token_mean", f"{LOSS} (grpo)", difference=ROWS, page="ppo_clip"
)
def ppo_seq_mean(record: Record) -> None:
    for batch in batches(*PLAIN):
        ours = whole_loss("ppo_clip", batch, "seq_mean_token_mean", **CLIP)
        same_over_sequences(record, batch, ours, policy_loss(batch, loss_type="grpo"))


@COMPARISONS.add(
    "losses.ppo_clip, fixed_length", f"{LOSS} (dr_grpo)", difference=ROWS, page="ppo_clip"
)
def ppo_fixed_length(record: Record) -> None:
    for batch in batches(*PLAIN):
        ours = whole_loss("ppo_clip", batch, "fixed_length", fixed_length=16, **CLIP)
        theirs = policy_loss(batch, loss_type="dr_grpo", max_completion_length=16)
        same_over_sequences(record, batch, ours, theirs)


@COMPARISONS.add(
    "losses.ppo_clip (log-ratios up to 30)",
    f"{LOSS} (dapo)",
    difference="ours clamps log-ratios at +-20, TRL does not",
    page="ppo_clip",
)
def ppo_far(record: Record) -> None:
    for batch in batches(EXTREME):
        ours = whole_loss("ppo_clip", batch, "token_mean", **CLIP)
        record.apart(ours.value, policy_loss(batch).value)
        same_loss(record, ours, policy_loss(batch, max_log_ratio=20.0))


@COMPARISONS.add("losses.ppo_clip (dual_clip)", f"{LOSS} (delta)", page="ppo_clip")
def dual_clip(record: Record) -> None:
    for batch in batches(*PLAIN):
        ours = whole_loss("ppo_clip", batch, "token_mean", **CLIP, dual_clip=1.5)
        same_loss(record, ours, policy_loss(batch, args={"delta": 1.5}))


@COMPARISONS.add(
    "losses.gspo",
    f"{LOSS} (grpo, importance_sampling_level=sequence)",
    difference=ROWS,
    page="gspo",
)
def gspo(record: Record) -> None:
    for batch in batches(*PLAIN):
        ours = whole_loss("gspo", batch, "seq_mean_token_mean", **CLIP)
        theirs = policy_loss(batch, loss_type="grpo", importance_sampling_level="sequence")
        same_over_sequences(record, batch, ours, theirs)


@COMPARISONS.add("losses.cispo", f"{LOSS} (cispo)", page="cispo")
def cispo(record: Record) -> None:
    for batch in batches(*PLAIN):
        ours = whole_loss("cispo", batch, "token_mean", cap=1.3)
        same_loss(record, ours, policy_loss(batch, loss_type="cispo", epsilon_high=1.3))


@COMPARISONS.add("losses.sapo", f"{LOSS} (sapo)", difference=ROWS, page="sapo")
def sapo(record: Record) -> None:
    for batch in batches(*PLAIN):
        ours = whole_loss("sapo", batch, "seq_mean_token_mean", tau_pos=1.0, tau_neg=1.05)
        same_over_sequences(record, batch, ours, policy_loss(batch, loss_type="sapo"))


@COMPARISONS.add("losses.vespo", f"{LOSS} (vespo)", page="vespo")
def vespo(record: Record) -> None:
    shape = {"k_pos": 2.1, "lambda_pos": 3.3, "k_neg": 2.9, "lambda_neg": 1.7}
    theirs = {f"vespo_{name}": value for name, value in shape.items()}
    for batch in batches(*PLAIN):
        ours = whole_loss("vespo", batch, "token_mean", **shape)
        mismatch_N = batch.columns()["log_mismatch_N"].exp()
        ratio_BT = batch.padded(mismatch_N).masked_fill(~batch.mask_BT, 1.0)
        same_loss(
            record, ours, policy_loss(batch, loss_type="vespo", mismatch_BT=ratio_BT, args=theirs)
        )
        no_mismatch = batch.with_tokens(sampler_logprobs=batch.tokens_BT["prox_logprobs"])
        ours = whole_loss("vespo", no_mismatch, "token_mean", **shape)
        same_loss(record, ours, policy_loss(batch, loss_type="vespo", args=theirs))


@COMPARISONS.add(
    "losses.gmpo",
    "trl:experimental.gmpo.GMPOTrainer._compute_loss",
    difference=f"{ROWS}, and such a sequence counts with the value -A and no gradient",
    page="gmpo",
)
def gmpo(record: Record) -> None:
    for batch in batches(*PLAIN):
        ours = whole_loss("gmpo", batch, "seq_mean_token_mean", clip_low=0.4, clip_high=0.4)
        theirs = gmpo_loss(batch, epsilon_low=0.4, epsilon_high=0.4)
        of_empty = -batch.tokens_BT["advantages"][batch.lengths_B == 0, 0].sum()
        without_empty = theirs.value - of_empty / len(batch.mask_BT)
        same_over_sequences(record, batch, ours, Loss(without_empty, theirs.gradient_N))


@COMPARISONS.add(
    "losses.ppo_clip x corrections.tis", f"{LOSS} (importance_sampling_ratio)", page="tis"
)
def tis(record: Record) -> None:
    for batch in batches(*PLAIN):
        weight_N = call("corrections.tis", batch.columns(), cap=2.0)
        ours = whole_loss("ppo_clip", batch, "token_mean", weight_N=weight_N, **CLIP)
        same_loss(record, ours, policy_loss(batch, mismatch_BT=batch.padded(weight_N)))


def with_kl(batch: Batch, estimator: str) -> Loss:
    """Ours with 0.3 times the estimator added to each token."""
    ref_N = batch.flat(batch.tokens_BT["ref_logprobs"])
    prox_N = batch.flat(batch.tokens_BT["prox_logprobs"])
    kl_loss = function("kl:kl_loss")
    return whole_loss(
        "ppo_clip",
        batch,
        "token_mean",
        extra=lambda policy_N: 0.3 * kl_loss(policy_N, ref_N, estimator, prox_N),
        **CLIP,
    )


@COMPARISONS.add("kl:kl_loss (k3)", f"{LOSS} (beta)", page="kl")
def k3(record: Record) -> None:
    for batch in batches(*PLAIN):
        same_loss(record, with_kl(batch, "k3"), policy_loss(batch, beta=0.3))


@COMPARISONS.add("kl:kl_loss (k3_weighted)", f"{LOSS} (beta, use_bias_correction_kl)", page="kl")
def k3_weighted(record: Record) -> None:
    for batch in batches(*PLAIN):
        theirs = policy_loss(batch, beta=0.3, args={"use_bias_correction_kl": True})
        same_loss(record, with_kl(batch, "k3_weighted"), theirs)


@COMPARISONS.add(
    "corrections.opsm",
    f"{LOSS} (off_policy_mask_threshold)",
    difference="TRL measures sampler - policy with the current policy, ours with prox, once a "
    "step; equal on the first update",
    page="opsm",
)
def opsm(record: Record) -> None:
    for drawn in batches(*PLAIN):
        first = drawn.with_tokens(policy_logprobs=drawn.tokens_BT["prox_logprobs"])
        for batch, hand_over in ((first, record.same), (drawn, record.apart)):
            weight_N = call("corrections.opsm", batch.columns(), delta=0.05)
            ours = whole_loss("ppo_clip", batch, "token_mean", weight_N=weight_N, **CLIP)
            theirs = policy_loss(batch, off_policy_mask_threshold=0.05)
            hand_over(ours.value, theirs.value)
            hand_over(ours.gradient_N, theirs.gradient_N)


@COMPARISONS.add(
    "corrections.top_entropy",
    f"{LOSS} (top_entropy_quantile)",
    difference="of N tokens TRL keeps those at or above the interpolated quantile, "
    "N - ceil((1 - q) (N - 1)) of them; ours round(q N): at most one token more or less",
    page="top_entropy",
)
def top_entropy(record: Record) -> None:
    for batch in batches(*PLAIN):
        for quantile in (0.2371, 0.5179):  # between two tokens: TRL's threshold is float32
            theirs = policy_loss(batch, top_entropy_quantile=quantile)
            num_tokens = batch.denominators.num_loss_tokens
            num_kept = num_tokens - int(-(-(1 - quantile) * (num_tokens - 1) // 1))
            losses = []
            for frac in (quantile, num_kept / num_tokens):
                weight_N = call("corrections.top_entropy", batch.columns(), frac=frac)
                losses.append(
                    whole_loss("ppo_clip", batch, "token_mean", weight_N=weight_N, **CLIP)
                )
            record.apart(losses[0].value, theirs.value)
            same_loss(record, losses[1], theirs)


@COMPARISONS.add("entropy:entropy", "trl:trainer.utils.entropy_from_logits", page="entropy")
def entropy(record: Record) -> None:
    for batch in batches(ORDINARY):
        logits_BTV = some_logits(batch)
        ours_N = function("entropy:entropy")(logits_BTV.flatten(0, 1))
        theirs_N = entropy_from_logits(logits_BTV).flatten()
        record.same(ours_N, theirs_N)
        record.same_gradient(
            torch.autograd.grad(ours_N.sum(), logits_BTV)[0],
            torch.autograd.grad(theirs_N.sum(), logits_BTV)[0],
        )
