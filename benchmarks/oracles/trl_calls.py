"""How TRL's trainers are called here: their own methods, on an object that has no model.

A trainer is made without its constructor and given the attributes that the method reads. What
would come from a model (log-probs, entropies, rewards, completions) comes from the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from batches import Batch
from losses import Loss
from torch import Tensor
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer

PAD = 0
LOSS_SETTINGS: dict[str, Any] = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "beta": 0.0,
    "epsilon_low": 0.2,
    "epsilon_high": 0.28,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "_entropy_bonus_enabled": False,
    "use_adaptive_entropy": False,
    "current_gradient_accumulation_steps": 1,
}
LOSS_ARGS: dict[str, Any] = {
    "delta": None,
    "use_bias_correction_kl": False,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "steps_per_generation": 1,
}
SCORE_SETTINGS: dict[str, Any] = {
    "environment_factories": None,
    "environments": None,
    "tools": [],
    "_is_vlm": False,
    "_tokenizer": SimpleNamespace(pad_token_id=PAD),
    "pad_to_multiple_of": None,
    "mask_truncated_completions": False,
    "num_iterations": 1,
    "beta": 0.0,
    "use_vllm": True,
    "vllm_importance_sampling_correction": True,
    "multi_objective_aggregation": "sum_then_normalize",
    "scale_rewards": "group",
    "log_multimodal": False,
}


class OneProcess:
    """The part of an accelerator that the methods call: one process gathers what it has."""

    device = torch.device("cpu")
    num_processes = 1
    process_index = 0
    sync_gradients = True

    @staticmethod
    def gather(values: Tensor) -> Tensor:
        return values

    gather_for_metrics = gather

    @staticmethod
    def reduce(values: Tensor, reduction: str = "sum") -> Tensor:
        return values

    @staticmethod
    def pad_across_processes(values: Tensor, **_: Any) -> Tensor:
        return values


@contextmanager
def float64() -> Iterator[None]:
    """Tensors that a trainer makes from lists are float64 inside, as everything else here."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def trainer(cls: type, **attributes: Any) -> Any:
    """An object of the trainer's class with these attributes."""
    made = object.__new__(cls)
    made.accelerator = OneProcess()
    made.model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    made._metrics = {"train": defaultdict(list)}
    made.aux_loss_enabled = False
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def policy_loss(
    batch: Batch,
    *,
    cls: type = GRPOTrainer,
    mismatch_BT: Tensor | None = None,
    max_log_ratio: float | None = None,
    args: dict[str, Any] | None = None,
    **settings: Any,
) -> Loss:
    """`_compute_loss` of a GRPO-like trainer. `mismatch_BT` is its importance_sampling_ratio;
    `max_log_ratio` clamps policy - prox before the trainer sees it."""
    leaf_BT = batch.leaf()
    policy_BT = leaf_BT
    if max_log_ratio is not None:
        prox_BT = batch.tokens_BT["prox_logprobs"]
        policy_BT = prox_BT + (leaf_BT - prox_BT).clamp(-max_log_ratio, max_log_ratio)
    corrected = mismatch_BT is not None
    made = trainer(
        cls,
        **LOSS_SETTINGS | {"max_completion_length": batch.mask_BT.shape[1]} | settings,
        use_vllm=corrected,
        vllm_importance_sampling_correction=corrected,
        args=SimpleNamespace(**LOSS_ARGS | (args or {})),
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            policy_BT,
            batch.tokens_BT["entropy"],
            None,
        ),
    )
    inputs = {
        "prompt_ids": torch.zeros(len(batch.mask_BT), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(batch.mask_BT), 1, dtype=torch.long),
        "completion_ids": torch.zeros(batch.mask_BT.shape, dtype=torch.long),
        "completion_mask": torch.ones(batch.mask_BT.shape, dtype=torch.long),
        "tool_mask": batch.mask_BT.long(),
        "advantages": batch.tokens_BT["advantages"][:, 0],
        "old_per_token_logps": batch.tokens_BT["prox_logprobs"],
        "sampling_per_token_logps": batch.tokens_BT["sampler_logprobs"],
        "ref_per_token_logps": batch.tokens_BT["ref_logprobs"],
        "num_items_in_batch": batch.mask_BT.sum(),
    }
    if mismatch_BT is not None:
        inputs["importance_sampling_ratio"] = mismatch_BT
    with float64():
        loss = made._compute_loss(None, inputs)
    (gradient_BT,) = torch.autograd.grad(loss, leaf_BT)
    return Loss(loss.detach(), batch.flat(gradient_BT))


def gmpo_loss(batch: Batch, **settings: Any) -> Loss:
    """`_compute_loss` of the geometric-mean trainer."""
    return policy_loss(batch, cls=GMPOTrainer, **settings)


class Scored(NamedTuple):
    """advantages_B, and importance weights [B, T] or [B, 1]."""

    advantages_B: Tensor
    weights: Tensor


def score(
    batch: Batch,
    rewards_BR: Tensor,
    group_size: int,
    *,
    mode: str = "token_truncate",
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
    **settings: Any,
) -> Scored:
    """`_generate_and_score_completions`: advantages of groups of `group_size` consecutive rows,
    and the weights that correct for the sampler. NaN in rewards_BR: that function gave none."""
    num_rows, width = batch.mask_BT.shape
    names = [f"reward_{i}" for i in range(rewards_BR.shape[1])]
    generated = (
        [[1]] * num_rows,
        [[1] * width] * num_rows,
        batch.mask_BT.long().tolist(),
        [""] * num_rows,
        batch.tokens_BT["sampler_logprobs"].tolist(),
        {},
        None,
        None,
    )
    weights_R = torch.ones(len(names), dtype=torch.float64)
    made = trainer(
        GRPOTrainer,
        **SCORE_SETTINGS | {"reward_weights": weights_R} | settings,
        num_generations=group_size,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=clip_min,
        vllm_importance_sampling_clip_max=clip_max,
        reward_funcs=names,
        reward_func_names=names,
        args=SimpleNamespace(
            per_device_train_batch_size=num_rows,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            gradient_checkpointing_kwargs=None,
        ),
        _pending_extra_logs={},
        _pending_metrics={},
        _logs=defaultdict(lambda: defaultdict(list), prompt=[], completion=[], advantages=[]),
        _generate=lambda _: generated,
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            batch.tokens_BT["prox_logprobs"],
            None,
            None,
        ),
        _calculate_rewards=lambda *_, **__: rewards_BR.clone(),
    )
    with float64():
        output = made._generate_and_score_completions([{"prompt": ""}] * num_rows)
    return Scored(output["advantages"], output["importance_sampling_ratio"])
