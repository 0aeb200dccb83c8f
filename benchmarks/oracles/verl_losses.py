"""Policy losses against verl.trainer.ppo.core_algos."""

from __future__ import annotations

from typing import Any

import torch
from batches import EMPTY, EXTREME, ORDINARY, Batch, batches
from comparison import COMPARISONS, Record, call, function
from losses import Loss, TokenLoss, same_loss, same_tokens, token_loss, whole_loss
from verl.trainer.ppo import core_algos
from verl_calls import actor_config, aggregated_loss, policy_loss

CORE = "verl:trainer.ppo.core_algos"
PLAIN = (ORDINARY, EMPTY)
EVERYWHERE = (ORDINARY, EMPTY, EXTREME)
CLIP: Any = {"clip_low": 0.2, "clip_high": 0.28}
VERL_CLIP: Any = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
GSPO_CLAMP = torch.tensor(10.0, dtype=torch.float64)  # of the mean log-ratio, in verl
MAX_RATIO = 20.0  # the cap of verl's dppo


@COMPARISONS.add("losses.ppo_clip", f"{CORE}.compute_policy_loss_vanilla", page="ppo_clip")
def ppo_clip(record: Record) -> None:
    for batch in batches(*EVERYWHERE):
        ours = token_loss("ppo_clip", batch, **CLIP, dual_clip=3.0)
        same_tokens(record, ours, policy_loss("vanilla", batch, **VERL_CLIP, clip_ratio_c=3.0))


@COMPARISONS.add(
    "losses.ppo_clip x corrections.tis",
    f"{CORE}.compute_policy_loss_vanilla (rollout_is_weights)",
    page="ppo_clip",
)
def decoupled_ppo(record: Record) -> None:
    for batch in batches(*PLAIN):
        weight_N = call("corrections.tis", batch.columns(), cap=2.0)
        ours = whole_loss("ppo_clip", batch, "token_mean", weight_N=weight_N, **CLIP, dual_clip=3.0)
        weights_BT = batch.padded(weight_N)
        theirs = aggregated_loss("vanilla", batch, "token-mean", weights_BT=weights_BT, **VERL_CLIP)
        same_loss(record, ours, theirs)


@COMPARISONS.add("losses.gspo", f"{CORE}.compute_policy_loss_gspo", page="gspo")
def gspo(record: Record) -> None:
    for batch in batches(*PLAIN):
        same_tokens(
            record, token_loss("gspo", batch, **CLIP), policy_loss("gspo", batch, **VERL_CLIP)
        )


@COMPARISONS.add("losses.gspo_token", f"{CORE}.compute_policy_loss_gspo", page="gspo_token")
def gspo_token(record: Record) -> None:
    for batch in batches(*PLAIN):
        same_tokens(
            record,
            token_loss("gspo_token", batch, **CLIP),
            policy_loss("gspo", batch, **VERL_CLIP),
        )


@COMPARISONS.add(
    "losses.gspo_token (log-ratios up to 30)",
    f"{CORE}.compute_policy_loss_gspo",
    difference="ours clamps the log-ratio of a token at +-20, verl that of the sequence at 10",
    page="gspo_token",
)
def gspo_token_far(record: Record) -> None:
    for batch in batches(EXTREME):
        ours = token_loss("gspo_token", batch, **CLIP)
        record.apart(ours.per_token_N, policy_loss("gspo", batch, **VERL_CLIP).per_token_N)
        prox_BT = batch.tokens_BT["prox_logprobs"]
        drift_BT = (batch.tokens_BT["policy_logprobs"] - prox_BT).clamp(-20, 20)
        clamped = batch.with_tokens(policy_logprobs=prox_BT + drift_BT)
        theirs = policy_loss("gspo", clamped, **VERL_CLIP)
        advantages_N = batch.flat(batch.tokens_BT["advantages"])
        mean_S = function("segments:segment_mean")(batch.flat(drift_BT), batch.sequence_index_N)
        is_cut_N = (mean_S[batch.sequence_index_N] > GSPO_CLAMP) & (advantages_N < 0)
        cut = TokenLoss(
            torch.where(is_cut_N, -advantages_N * GSPO_CLAMP.exp(), ours.per_token_N),
            ours.gradient_N.masked_fill(is_cut_N, 0),
        )
        same_tokens(record, cut, theirs)


@COMPARISONS.add(
    "losses.cispo",
    f"{CORE}.compute_policy_loss_cispo",
    difference="verl's cap is 1 + clip_ratio_high, ours absolute; verl's default clip_ratio_low "
    "also bounds the weight from below, which 1 turns off",
    page="cispo",
)
def cispo(record: Record) -> None:
    for batch in batches(*EVERYWHERE):
        theirs = policy_loss("cispo", batch, clip_ratio_low=1.0, clip_ratio_high=0.8)
        same_tokens(record, token_loss("cispo", batch, cap=1.8), theirs)
        defaults = policy_loss("cispo", batch, clip_ratio_high=0.8)
        record.apart(token_loss("cispo", batch, cap=1.8).per_token_N, defaults.per_token_N)
        record.apart(token_loss("cispo", batch, cap=0.8).per_token_N, theirs.per_token_N)


@COMPARISONS.add(
    "losses.sapo",
    f"{CORE}.compute_policy_loss_sapo",
    difference="verl aggregates by seq-mean-token-mean whatever is asked for; equal per token",
    page="sapo",
)
def sapo(record: Record) -> None:
    for batch in batches(*EVERYWHERE):
        ours = token_loss("sapo", batch, tau_pos=1.0, tau_neg=1.05)
        theirs = policy_loss("sapo", batch, tau_pos=1.0, tau_neg=1.05)
        record.apart(ours.per_token_N, theirs.per_token_N)
        lengths_N = batch.lengths_B[batch.sequence_index_N].double() + 1e-8
        scale_N = lengths_N * batch.denominators.num_sequences
        unscaled = TokenLoss(theirs.per_token_N * scale_N, theirs.gradient_N * scale_N)
        same_tokens(record, ours, unscaled)


@COMPARISONS.add("losses.gpg", f"{CORE}.compute_policy_loss_gpg", page="gpg")
def gpg(record: Record) -> None:
    for batch in batches(*EVERYWHERE):
        same_tokens(record, token_loss("gpg", batch), policy_loss("gpg", batch))


@COMPARISONS.add(
    "losses.kimi",
    f"{CORE}.compute_policy_loss_dro",
    difference="dro_beta is twice our tau",
    page="kimi",
)
def kimi(record: Record) -> None:
    for batch in batches(*EVERYWHERE):
        theirs = policy_loss("dro", batch, {"dro_beta": 0.06})
        same_tokens(record, token_loss("kimi", batch, tau=0.03), theirs)
        record.apart(token_loss("kimi", batch, tau=0.06).per_token_N, theirs.per_token_N)


def dppo_pair(batch: Batch) -> tuple[TokenLoss, TokenLoss]:
    """Ours anchored where verl's is and without its quadratic term; verl's."""
    same_anchor = batch.with_tokens(sampler_logprobs=batch.tokens_BT["prox_logprobs"])
    ours = token_loss("dppo", same_anchor, mask_low=0.15, mask_high=0.2, kl_tau=0.0)
    theirs = policy_loss(
        "dppo_tv", batch, clip_ratio_low=0.15, clip_ratio_high=0.2, clip_ratio_c=MAX_RATIO
    )
    return ours, theirs


@COMPARISONS.add(
    "losses.dppo",
    f"{CORE}.compute_policy_loss_dppo_tv",
    difference="ours adds a quadratic term (here 0) and has the value -A ratio; verl weighs the "
    "log-prob by a ratio without gradient, cut at 20: its value is ours times the log-prob, its "
    "gradient ours up to the cut",
    page="dppo",
)
def dppo(record: Record) -> None:
    for batch in batches(*EVERYWHERE):
        ours, theirs = dppo_pair(batch)
        record.apart(ours.per_token_N, theirs.per_token_N)
        ratio_N = function("ratios:log_ratio")(
            batch.flat(batch.tokens_BT["policy_logprobs"]),
            batch.flat(batch.tokens_BT["prox_logprobs"]),
        ).exp()
        cut_N = ratio_N.clamp(max=MAX_RATIO) / ratio_N
        value_N = ours.per_token_N * cut_N * batch.flat(batch.tokens_BT["policy_logprobs"])
        gradient_N = -batch.flat(batch.tokens_BT["advantages"]) * ratio_N * cut_N
        kept_N = ours.per_token_N != 0  # a token without advantage is 0 either way
        record.same(value_N, theirs.per_token_N)
        record.same_gradient(gradient_N * kept_N, theirs.gradient_N)
        is_inside_N = ratio_N < MAX_RATIO
        record.same_gradient(ours.gradient_N[is_inside_N], theirs.gradient_N[is_inside_N])


@COMPARISONS.add(
    "losses.gmpo",
    f"{CORE}.compute_policy_loss_geo_mean",
    difference="verl averages over the rows of the micro-batch, empty ones included, so that its "
    "shares do not add up to the batch's loss, and divides by n + 1e-8 within a sequence",
    page="gmpo",
    tolerance=1e-6,
)
def gmpo(record: Record) -> None:
    for batch in batches(*PLAIN):
        ours = whole_loss("gmpo", batch, "seq_mean_token_mean", clip_low=0.4, clip_high=0.4)
        theirs = aggregated_loss(
            "geo_mean", batch, "token-mean", clip_ratio_low=0.4, clip_ratio_high=0.4
        )
        record.apart(ours.value, theirs.value)
        num_rows, num_sequences = len(batch.mask_BT), batch.denominators.num_sequences
        same_loss(record, ours, theirs, scale=num_rows / num_sequences)


@COMPARISONS.add(
    "losses.is_reinforce",
    f"{CORE}.compute_policy_loss_bypass_mode (reinforce)",
    page="is_reinforce",
)
def is_reinforce(record: Record) -> None:
    correction = {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 2.0}
    for batch in batches(*EVERYWHERE):
        for ours, theirs in (
            ("token_mean", "token-mean"),
            ("seq_mean_token_sum", "seq-mean-token-sum"),
        ):
            same_loss(
                record,
                whole_loss("is_reinforce", batch, ours, cap=2.0),
                bypass_loss(batch, correction, theirs),
            )


@COMPARISONS.add(
    "losses.ppo_clip (anchor sampler) x corrections.token_mask",
    f"{CORE}.compute_policy_loss_bypass_mode (ppo_clip, token_k1)",
    difference="verl's bounds are on sampler / policy, ours on its reciprocal; verl takes the "
    "current policy where ours takes prox",
    page="token_mask",
)
def bypass_ppo(record: Record) -> None:
    for drawn in batches(*PLAIN):
        # The ratio of the mask and that of the loss are one in verl: prox = policy, anchor sampler
        policy_BT, sampler_BT = (
            drawn.tokens_BT[name] for name in ("policy_logprobs", "sampler_logprobs")
        )
        batch = drawn.with_tokens(prox_logprobs=policy_BT)
        weight_N = call("corrections.token_mask", batch.columns(), low=0.7, high=1.6)
        anchored = drawn.with_tokens(prox_logprobs=sampler_BT)
        ours = whole_loss(
            "ppo_clip", anchored, "token_mean", weight_N=weight_N, **CLIP, dual_clip=3.0
        )
        rejection = {"loss_type": "ppo_clip", "rollout_rs": "token_k1"}
        inverted = {"rollout_rs_threshold": f"{1 / 1.6}_{1 / 0.7}"}
        theirs = bypass_loss(drawn, rejection | inverted, "token-mean")
        same_loss(record, ours, theirs)
        as_given = rejection | {"rollout_rs_threshold": "0.7_1.6"}
        record.apart(ours.value, bypass_loss(drawn, as_given, "token-mean").value)


def bypass_loss(batch: Batch, correction: dict[str, Any], mode: str) -> Loss:
    """verl's loss with the sampler as anchor; denominators are those before any rejection."""
    policy_BT = batch.leaf()
    counts = {
        "batch_num_tokens": batch.denominators.num_loss_tokens,
        "global_batch_size": batch.denominators.num_sequences,
    }
    loss, _ = core_algos.compute_policy_loss_bypass_mode(
        old_log_prob=batch.tokens_BT["sampler_logprobs"],
        log_prob=policy_BT,
        advantages=batch.tokens_BT["advantages"],
        response_mask=batch.mask_BT.double(),
        loss_agg_mode=mode,
        config=actor_config(
            {"rollout_correction": correction}, global_batch_info=counts, **VERL_CLIP
        ),
    )
    (gradient_BT,) = torch.autograd.grad(loss, policy_BT)
    return Loss(loss.detach(), batch.flat(gradient_BT))
