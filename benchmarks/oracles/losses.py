"""Our losses over a batch: per token, and aggregated to the scalar that a trainer minimises."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from batches import Batch
from comparison import CONTROL, Record, call, function
from torch import Tensor

from posttrain.algo.aggregation import AggregationMode, Denominators


class TokenLoss(NamedTuple):
    """per_token_N: the loss of each token before aggregation; gradient_N: of their sum."""

    per_token_N: Tensor
    gradient_N: Tensor


class Loss(NamedTuple):
    """The scalar that a trainer minimises, and its gradient at the loss tokens."""

    value: Tensor
    gradient_N: Tensor


def token_loss(name: str, batch: Batch, **settings: Any) -> TokenLoss:
    """Our loss of each token."""
    policy_N = batch.flat(batch.tokens_BT["policy_logprobs"]).clone().requires_grad_()
    columns = batch.columns(policy_logprobs_N=policy_N)
    per_token_N = call(f"losses.{name}", columns, **settings).per_token_N
    (gradient_N,) = torch.autograd.grad(per_token_N.sum(), policy_N)
    return TokenLoss(per_token_N.detach(), gradient_N)


def whole_loss(
    name: str,
    batch: Batch,
    mode: AggregationMode,
    *,
    fixed_length: int | None = None,
    weight_N: Tensor | float = 1.0,
    extra: Any = None,
    **settings: Any,
) -> Loss:
    """Our loss, weighed by corrections, plus `extra(policy_logprobs_N)`, aggregated."""
    policy_N = batch.flat(batch.tokens_BT["policy_logprobs"]).clone().requires_grad_()
    columns = batch.columns(policy_logprobs_N=policy_N)
    per_token_N = call(f"losses.{name}", columns, **settings).per_token_N * weight_N
    if extra is not None:
        per_token_N = per_token_N + extra(policy_N)
    value = function("aggregation:aggregate")(
        per_token_N, batch.sequence_index_N, mode, batch.denominators, fixed_length
    )
    (gradient_N,) = torch.autograd.grad(value, policy_N)
    return Loss(value.detach(), gradient_N)


def imitation_loss(policy_BT: Tensor, mask_BT: Tensor, mode: AggregationMode) -> Tensor:
    """Our negative log-likelihood of the tokens under the mask, all with weight 1."""
    policy_N = policy_BT[mask_BT]
    lengths_B = mask_BT.sum(dim=1)
    columns = {
        "policy_logprobs_N": policy_N,
        "weights_N": torch.ones_like(policy_N),
        "sequence_index_N": mask_BT.nonzero()[:, 0],
    }
    denominators = Denominators(len(policy_N), int((lengths_B > 0).sum()), lengths_B)
    component = function("supervised:Imitation")(aggregation=mode)
    return CONTROL.spoiled(component.loss(columns, denominators, {}).loss)


def same_tokens(record: Record, ours: TokenLoss, theirs: TokenLoss) -> None:
    """Loss and gradient of every token."""
    record.same(ours.per_token_N, theirs.per_token_N)
    record.same_gradient(ours.gradient_N, theirs.gradient_N)


def same_loss(record: Record, ours: Loss, theirs: Loss, scale: float = 1.0) -> None:
    """The scalar and its gradient; theirs times `scale`."""
    record.same(ours.value, theirs.value * scale)
    record.same_gradient(ours.gradient_N, theirs.gradient_N * scale)
