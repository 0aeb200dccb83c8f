"""How verl's functions are called here, and what is read from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from batches import Batch
from losses import Loss, TokenLoss
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig, PolicyLossConfig


def actor_config(policy_loss: dict[str, Any] | None = None, **actor: Any) -> ActorConfig:
    """Its defaults, but for what is given."""
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        policy_loss=PolicyLossConfig(**(policy_loss or {})),
        **actor,
    )


def policy_loss(
    name: str, batch: Batch, policy_loss: dict[str, Any] | None = None, **actor: Any
) -> TokenLoss:
    """A registered policy loss of each token.

    verl returns a sum over tokens that is linear in `rollout_is_weights`: its derivative by the
    weights, taken where all are 1, is the loss of each token.
    """
    policy_BT = batch.leaf()
    weights_BT = torch.ones_like(policy_BT, requires_grad=True)
    loss, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=batch.tokens_BT["prox_logprobs"],
        log_prob=policy_BT,
        advantages=batch.tokens_BT["advantages"],
        response_mask=batch.mask_BT.double(),
        loss_agg_mode="token-sum",
        config=actor_config(policy_loss, **actor),
        rollout_is_weights=weights_BT,
    )
    loss.backward()
    assert policy_BT.grad is not None and weights_BT.grad is not None
    return TokenLoss(batch.flat(weights_BT.grad), batch.flat(policy_BT.grad))


def aggregated_loss(
    name: str,
    batch: Batch,
    mode: str,
    policy_loss: dict[str, Any] | None = None,
    weights_BT: Tensor | None = None,
    **actor: Any,
) -> Loss:
    """A registered policy loss, aggregated by verl with the counts of the whole batch."""
    policy_BT = batch.leaf()
    counts = {
        "batch_num_tokens": batch.denominators.num_loss_tokens,
        "global_batch_size": batch.denominators.num_sequences,
    }
    loss, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=batch.tokens_BT["prox_logprobs"],
        log_prob=policy_BT,
        advantages=batch.tokens_BT["advantages"],
        response_mask=batch.mask_BT.double(),
        loss_agg_mode=mode,
        config=actor_config(policy_loss, global_batch_info=counts, **actor),
        rollout_is_weights=weights_BT,
    )
    (gradient_BT,) = torch.autograd.grad(loss, policy_BT)
    return Loss(loss.detach(), batch.flat(gradient_BT))


def group_ids(batch: Batch) -> np.ndarray:
    """verl's `index`: a name for each group, as an object array of strings."""
    return np.array([f"uid-{int(group)}" for group in batch.group_B], dtype=object)


def outcome_advantage(function: Callable[..., Any], batch: Batch, **settings: Any) -> Tensor:
    """[B] from a function over outcome rewards; verl repeats it over the tokens of a sequence."""
    advantages_BT, _ = function(
        token_level_rewards=batch.outcome_BT,
        response_mask=batch.mask_BT.double(),
        index=group_ids(batch),
        **settings,
    )
    return (advantages_BT * batch.last_BT).sum(dim=1)
