"""Aggregation, KL estimators, entropy and log-probs against verl."""

from __future__ import annotations

import torch
from batches import EMPTY, EXTREME, ORDINARY, Batch, batches, some_logits
from comparison import COMPARISONS, Record, function
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.utils import torch_functional

from posttrain.algo.aggregation import AggregationMode

CORE = "verl:trainer.ppo.core_algos"
NUM_RANKS = 2


def aggregated(
    batch: Batch,
    per_token_BT: Tensor,
    mode: AggregationMode,
    fixed_length: int | None = None,
    rows: slice = slice(None),
) -> Tensor:
    """Our share of the sequences `rows`, with the denominators of the whole batch."""
    mask_BT = torch.zeros_like(batch.mask_BT)
    mask_BT[rows] = batch.mask_BT[rows]
    return function("aggregation:aggregate")(
        per_token_BT[mask_BT],
        mask_BT.nonzero()[:, 0],
        mode,
        batch.denominators,
        **({} if fixed_length is None else {"fixed_length": fixed_length}),
    )


def compare_aggregation(
    record: Record, mode: AggregationMode, theirs: str, fixed_length: int | None = None
) -> None:
    """One process, and ranks whose gradients are averaged; value and gradient."""
    scale = {} if fixed_length is None else {"loss_scale_factor": fixed_length}
    for batch in batches(ORDINARY, EMPTY):
        mask_BT = batch.mask_BT.double()
        loss_BT = batch.tokens_BT["values"].clone().requires_grad_()
        # verl divides by n + 1e-8 within a sequence
        nudge_B1 = batch.lengths_B.double()[:, None]
        nudge_B1 = nudge_B1 / (nudge_B1 + 1e-8)
        is_nudged = mode == "seq_mean_token_mean"
        nudged_BT = loss_BT * nudge_B1 if is_nudged else loss_BT
        ours = aggregated(batch, nudged_BT, mode, fixed_length)
        whole = core_algos.agg_loss(loss_BT, mask_BT, theirs, **scale)
        if is_nudged:
            record.apart(aggregated(batch, loss_BT, mode), whole)
        record.same(ours, whole)
        record.same_gradient(
            torch.autograd.grad(ours, loss_BT)[0], torch.autograd.grad(whole, loss_BT)[0]
        )
        ranks = torch.zeros((), dtype=torch.float64)
        shares = torch.zeros((), dtype=torch.float64)
        for rows in (slice(0, 5), slice(5, None)):
            shares += aggregated(batch, nudged_BT, mode, fixed_length, rows).detach()
            ranks += core_algos.agg_loss(
                loss_BT[rows],
                mask_BT[rows],
                theirs,
                dp_size=NUM_RANKS,
                batch_num_tokens=batch.denominators.num_loss_tokens,
                global_batch_size=batch.denominators.num_sequences,
                **scale,
            ).detach()
        record.same(shares, ranks / NUM_RANKS)


@COMPARISONS.add("aggregation:aggregate (token_mean)", f"{CORE}.agg_loss (token-mean)")
def token_mean(record: Record) -> None:
    compare_aggregation(record, "token_mean", "token-mean")


@COMPARISONS.add(
    "aggregation:aggregate (seq_mean_token_sum)", f"{CORE}.agg_loss (seq-mean-token-sum)"
)
def seq_mean_token_sum(record: Record) -> None:
    compare_aggregation(record, "seq_mean_token_sum", "seq-mean-token-sum")


@COMPARISONS.add(
    "aggregation:aggregate (seq_mean_token_mean)",
    f"{CORE}.agg_loss (seq-mean-token-mean)",
    difference="verl divides a sequence of n tokens by n + 1e-8",
    tolerance=1e-10,
)
def seq_mean_token_mean(record: Record) -> None:
    compare_aggregation(record, "seq_mean_token_mean", "seq-mean-token-mean")


@COMPARISONS.add(
    "aggregation:aggregate (fixed_length)", f"{CORE}.agg_loss (seq-mean-token-sum-norm)"
)
def fixed_length(record: Record) -> None:
    compare_aggregation(record, "fixed_length", "seq-mean-token-sum-norm", fixed_length=16)


@COMPARISONS.add(
    "aggregation:aggregate (token_mean x num_loss_tokens)", f"{CORE}.agg_loss (token-sum)"
)
def token_sum(record: Record) -> None:
    for batch in batches(ORDINARY, EMPTY):
        loss_BT = batch.tokens_BT["values"]
        ours = aggregated(batch, loss_BT, "token_mean") * batch.denominators.num_loss_tokens
        record.same(ours, core_algos.agg_loss(loss_BT, batch.mask_BT.double(), "token-sum"))


def compare_kl(record: Record, ours: str, theirs: str, *, max_k3: float | None = None) -> None:
    """An estimator of every token; `max_k3` cuts ours as verl cuts its own."""
    for batch in batches(ORDINARY, EXTREME):
        policy_BT = batch.leaf()
        ref_BT = batch.tokens_BT["ref_logprobs"]
        if max_k3 is not None:  # far apart, or the cut never acts
            ref_BT = 12 * ref_BT
        published = core_algos.kl_penalty(policy_BT, ref_BT, theirs)
        if max_k3 is None:
            estimate = function(f"kl:{ours}")(policy_BT - ref_BT)
        else:
            clamped = function("ratios:log_ratio")(policy_BT, ref_BT)
            whole = function(f"kl:{ours}")(clamped)
            record.apart(whole, published)
            estimate = whole.clamp(max=max_k3)
        record.same(estimate, published)
        record.same_gradient(
            torch.autograd.grad(estimate.sum(), policy_BT)[0],
            torch.autograd.grad(published.sum(), policy_BT)[0],
        )


@COMPARISONS.add("kl:k1", f"{CORE}.kl_penalty (k1)")
def k1(record: Record) -> None:
    compare_kl(record, "k1", "k1")


@COMPARISONS.add("kl:k2", f"{CORE}.kl_penalty (k2)")
def k2(record: Record) -> None:
    compare_kl(record, "k2", "k2")


@COMPARISONS.add(
    "kl:k3",
    f"{CORE}.kl_penalty (low_var_kl)",
    difference="verl cuts k3 at 10, which also stops its gradient there; equal once ours is cut",
)
def k3(record: Record) -> None:
    compare_kl(record, "k3", "low_var_kl", max_k3=10.0)


@COMPARISONS.add(
    "kl:k3",
    f"{CORE}.kl_penalty (k3+)",
    difference="straight through: verl's k3+ has the value of k3 and the gradient of k2; ours are "
    "separate estimators, and each half is equal",
)
def k3_straight_through(record: Record) -> None:
    for batch in batches(ORDINARY):
        policy_BT = batch.leaf()
        log_ratio_BT = policy_BT - batch.tokens_BT["ref_logprobs"]
        k3_BT = function("kl:k3")(log_ratio_BT)
        k2_BT = function("kl:k2")(log_ratio_BT)
        published = core_algos.kl_penalty(policy_BT, batch.tokens_BT["ref_logprobs"], "k3+")
        gradients = [
            torch.autograd.grad(x.sum(), policy_BT, retain_graph=True)[0]
            for x in (k3_BT, k2_BT, published)
        ]
        record.same(k3_BT, published)
        record.same_gradient(gradients[1], gradients[2])
        record.apart(gradients[0], gradients[2])


@COMPARISONS.add("entropy:entropy", f"{CORE}.compute_entropy_loss")
def entropy(record: Record) -> None:
    for batch in batches(ORDINARY, EMPTY):
        logits_BTV = some_logits(batch)
        entropy_BT = function("entropy:entropy")(logits_BTV.flatten(0, 1)).view_as(batch.mask_BT)
        ours = aggregated(batch, entropy_BT, "token_mean")
        theirs = core_algos.compute_entropy_loss(logits_BTV, batch.mask_BT.double())
        record.same(ours, theirs)
        record.same_gradient(
            torch.autograd.grad(ours, logits_BTV)[0], torch.autograd.grad(theirs, logits_BTV)[0]
        )


@COMPARISONS.add("logprobs:token_logprobs", "verl:utils.torch_functional.logprobs_from_logits_v2")
def token_logprobs(record: Record) -> None:
    for batch in batches(ORDINARY):
        logits_BTV = some_logits(batch)
        labels_BT = torch.randint(logits_BTV.shape[-1], batch.mask_BT.shape)
        ours = function("logprobs:token_logprobs")(logits_BTV.flatten(0, 1), labels_BT.flatten())
        theirs = torch_functional.logprobs_from_logits_v2(logits_BTV, labels_BT).flatten()
        record.same(ours, theirs)
        record.same_gradient(
            torch.autograd.grad(ours.sum(), logits_BTV)[0],
            torch.autograd.grad(theirs.sum(), logits_BTV)[0],
        )
