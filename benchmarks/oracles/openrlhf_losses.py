"""Losses against openrlhf.models.loss and openrlhf.models.utils."""

from __future__ import annotations

from typing import Any

import torch
from batches import EMPTY, EXTREME, ORDINARY, Batch, batches, some_logits
from comparison import COMPARISONS, Record, call, function
from losses import imitation_loss, same_loss, whole_loss
from openrlhf_calls import loss as published
from openrlhf_calls import policy_loss, utils
from pairs import preference, some_pairs

LOSS = "openrlhf:models.loss"
PLAIN = (ORDINARY, EMPTY)
CLIP: Any = {"clip_low": 0.2, "clip_high": 0.28}
NUDGED = "OpenRLHF divides a sequence of n tokens by n + 1e-8"
FLOAT32: Any = {"tolerance": 1e-4, "floor": 1.0}


@COMPARISONS.add("losses.ppo_clip, token_mean", f"{LOSS}.PolicyLoss (ppo)", page="ppo_clip")
def ppo_clip(record: Record) -> None:
    for batch in batches(*PLAIN, EXTREME):
        for dual_clip in (None, 3.0):
            ours = whole_loss("ppo_clip", batch, "token_mean", **CLIP, dual_clip=dual_clip)
            same_loss(record, ours, policy_loss(batch, dual_clip=dual_clip))


def lengths_ratio(batch: Batch) -> torch.Tensor:
    """[N]: n / (n + 1e-8)."""
    lengths_N = batch.lengths_B[batch.sequence_index_N].double()
    return lengths_N / (lengths_N + 1e-8)


@COMPARISONS.add(
    "losses.ppo_clip, seq_mean_token_mean",
    f"{LOSS}.PolicyLoss (ppo, token_level_loss=False)",
    difference=NUDGED,
    page="ppo_clip",
    tolerance=1e-10,
)
def ppo_clip_per_sequence(record: Record) -> None:
    for batch in batches(*PLAIN):
        theirs = policy_loss(batch, seq=True)
        ours = whole_loss("ppo_clip", batch, "seq_mean_token_mean", **CLIP)
        record.apart(ours.value, theirs.value)
        nudged = whole_loss(
            "ppo_clip", batch, "seq_mean_token_mean", weight_N=lengths_ratio(batch), **CLIP
        )
        same_loss(record, nudged, theirs)


@COMPARISONS.add(
    "losses.gspo", f"{LOSS}.PolicyLoss (gspo)", difference=NUDGED, page="gspo", tolerance=1e-10
)
def gspo(record: Record) -> None:
    for batch in batches(*PLAIN):
        theirs = policy_loss(batch, policy_loss_type="gspo")
        ours = whole_loss("gspo", batch, "seq_mean_token_mean", **CLIP)
        record.apart(ours.value, theirs.value)
        nudged = whole_loss(
            "gspo", batch, "seq_mean_token_mean", weight_N=lengths_ratio(batch), **CLIP
        )
        same_loss(record, nudged, theirs)


@COMPARISONS.add("corrections.tis (floor)", f"{LOSS}.PolicyLoss (token, clip)", page="tis")
def tis(record: Record) -> None:
    for batch in batches(*PLAIN):
        weight_N = call("corrections.tis", batch.columns(), cap=1.5, floor=0.7)
        theirs = policy_loss(
            batch,
            is_correction_level="token",
            is_correction_mode="clip",
            is_correction_threshold=[0.7, 1.5],
        )
        same_loss(
            record, whole_loss("ppo_clip", batch, "token_mean", weight_N=weight_N, **CLIP), theirs
        )


@COMPARISONS.add("corrections.icepop", f"{LOSS}.PolicyLoss (token, mask)", page="icepop")
def icepop(record: Record) -> None:
    for batch in batches(*PLAIN):
        weight_N = call("corrections.icepop", batch.columns(), low=0.7, high=1.5)
        theirs = policy_loss(batch, is_correction_level="token", is_correction_threshold=[0.7, 1.5])
        same_loss(
            record, whole_loss("ppo_clip", batch, "token_mean", weight_N=weight_N, **CLIP), theirs
        )


@COMPARISONS.add(
    "corrections.geometric_mask x tis without cap",
    f"{LOSS}.PolicyLoss (seq, mask)",
    page="geometric_mask",
)
def geometric_mask(record: Record) -> None:
    for batch in batches(ORDINARY):  # an empty sequence is 0/0 in OpenRLHF, and NaN everywhere
        columns = batch.columns()
        weight_N = call("corrections.geometric_mask", columns, low=0.9, high=1.2)
        weight_N = weight_N * call("corrections.tis", columns, cap=float("inf"))
        theirs = policy_loss(batch, is_correction_level="seq", is_correction_threshold=[0.9, 1.2])
        same_loss(
            record, whole_loss("ppo_clip", batch, "token_mean", weight_N=weight_N, **CLIP), theirs
        )


@COMPARISONS.add("value:value_loss", f"{LOSS}.ValueLoss", page="value_loss")
def value_loss(record: Record) -> None:
    for batch in batches(*PLAIN):
        for clip in (0.5, None):
            values_BT = batch.leaf("values")
            prox_BT = batch.tokens_BT["values"] + batch.tokens_BT["ref_logprobs"] / 3
            returns_BT = batch.tokens_BT["teacher_logprobs"]
            theirs = published.ValueLoss(clip)(
                values_BT, prox_BT, returns_BT, batch.mask_BT.double()
            )
            per_token_N = function("value:value_loss")(
                batch.flat(values_BT), batch.flat(prox_BT), batch.flat(returns_BT), clip=clip
            )
            ours = per_token_N.sum() / batch.denominators.num_loss_tokens
            record.same(ours, theirs)
            record.same_gradient(
                torch.autograd.grad(ours, values_BT)[0], torch.autograd.grad(theirs, values_BT)[0]
            )


@COMPARISONS.add("supervised:Imitation", f"{LOSS}.SFTLoss")
def imitation(record: Record) -> None:
    for batch in batches(*PLAIN):
        policy_BT = batch.leaf()
        ours = imitation_loss(policy_BT, batch.mask_BT, "token_mean")
        theirs = published.SFTLoss()(policy_BT, batch.mask_BT.double())
        record.same(ours, theirs)
        record.same_gradient(
            torch.autograd.grad(ours, policy_BT)[0], torch.autograd.grad(theirs, policy_BT)[0]
        )


@COMPARISONS.add("preferences.bradley_terry", f"{LOSS}.PairWiseLoss", page="bradley_terry")
def pairwise(record: Record) -> None:
    for batch in batches(ORDINARY):
        scores_B = batch.tokens_BT["values"][:, 0].clone().requires_grad_()
        chosen_P, rejected_P = scores_B.chunk(2)
        for margin_P in (None, batch.tokens_BT["entropy"][:6, 0]):
            theirs = published.PairWiseLoss()(chosen_P, rejected_P, margin_P)
            settings = {} if margin_P is None else {"margin": margin_P}
            ours = function("preferences.bradley_terry")(chosen_P, rejected_P, **settings).mean()
            record.same(ours, theirs)
            gradients = [
                torch.autograd.grad(x, scores_B, retain_graph=True)[0] for x in (ours, theirs)
            ]
            record.same_gradient(*gradients)


@COMPARISONS.add("preferences.dpo (label_smoothing)", f"{LOSS}.DPOLoss", page="dpo")
def dpo(record: Record) -> None:
    for pairs in some_pairs():
        for smoothing in (0.0, 0.2):
            ours = preference("dpo", pairs, beta=0.3, label_smoothing=smoothing).mean()
            theirs, *_ = published.DPOLoss(0.3, smoothing)(*_sides(pairs.columns))
            pairs.same(record, ours, theirs)


@COMPARISONS.add("preferences.ipo", f"{LOSS}.DPOLoss (ipo)", page="ipo")
def ipo(record: Record) -> None:
    for pairs in some_pairs():
        ours = preference("ipo", pairs, beta=0.3).mean()
        theirs, *_ = published.DPOLoss(0.3, ipo=True)(*_sides(pairs.columns))
        pairs.same(record, ours, theirs)


def _sides(columns: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    names = ("policy_chosen_P", "policy_rejected_P", "ref_chosen_P", "ref_rejected_P")
    return [columns[name] for name in names]


@COMPARISONS.add(
    "kl:k1, k2, k3",
    "openrlhf:models.utils.compute_approx_kl",
    difference="OpenRLHF cuts every estimator at +-10, which stops its gradient there, and "
    "computes in float32; equal once ours is cut",
    page="kl",
    **FLOAT32,
)
def estimators(record: Record) -> None:
    for batch in batches(ORDINARY, EXTREME):
        policy_BT = batch.leaf()
        for spread in (1, 12):  # of the reference: close by, and beyond the cut
            ref_BT = spread * batch.tokens_BT["ref_logprobs"]
            for name in ("k1", "k2", "k3"):
                theirs_BT = utils.compute_approx_kl(policy_BT, ref_BT, kl_estimator=name)
                whole_BT = function(f"kl:{name}")(
                    (policy_BT - ref_BT).clamp(min=-10) if name == "k3" else policy_BT - ref_BT
                )
                record.apart(whole_BT, theirs_BT)
                cut_BT = whole_BT.clamp(-10, 10)
                record.same(cut_BT, theirs_BT)
                record.same_gradient(
                    torch.autograd.grad(cut_BT.sum(), policy_BT)[0],
                    torch.autograd.grad(theirs_BT.sum(), policy_BT)[0],
                )


@COMPARISONS.add(
    "kl:kl_loss (k3_weighted)",
    "openrlhf:models.utils.compute_approx_kl (unbiased_gradient)",
    difference="straight through: OpenRLHF has the value of k3 and the gradient (policy / prox) x, "
    "its weight cut at 10; ours has that gradient too, and the value times policy / prox",
    page="kl",
    **FLOAT32,
)
def weighted(record: Record) -> None:
    for batch in batches(ORDINARY):
        policy_BT = batch.leaf()
        ref_BT, prox_BT = batch.tokens_BT["ref_logprobs"], batch.tokens_BT["prox_logprobs"]
        ours_BT = function("kl:kl_loss")(policy_BT, ref_BT, "k3_weighted", prox_BT)
        theirs_BT = utils.compute_approx_kl(policy_BT, ref_BT, prox_BT, "k3", True)
        record.apart(ours_BT, theirs_BT)
        record.same(ours_BT / (policy_BT - prox_BT).exp(), theirs_BT)
        record.same_gradient(
            torch.autograd.grad(ours_BT.sum(), policy_BT)[0],
            torch.autograd.grad(theirs_BT.sum(), policy_BT)[0],
        )


@COMPARISONS.add("logprobs:token_logprobs", "openrlhf:models.utils.log_probs_from_logits")
def token_logprobs(record: Record) -> None:
    for batch in batches(ORDINARY):
        logits_BTV = some_logits(batch)
        labels_BT = torch.randint(logits_BTV.shape[-1], batch.mask_BT.shape)
        for temperature in (1.0, 0.7):  # theirs divides its argument in place
            theirs_BT = utils.log_probs_from_logits(logits_BTV.clone(), labels_BT, temperature)
            ours_N = function("logprobs:token_logprobs")(
                logits_BTV.flatten(0, 1), labels_BT.flatten(), temperature
            )
            record.same(ours_N, theirs_BT.flatten())
