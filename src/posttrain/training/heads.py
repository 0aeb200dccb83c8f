"""Scalars read from hidden states: a critic's values, a reward model's scores."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from posttrain.config import OptimConfig
from posttrain.errors import ModelError
from posttrain.training.optimizer import MasterOptimizer
from posttrain.training.policy import Policy
from posttrain.types import Microbatch


class ScalarHead(torch.nn.Module):
    """A linear read-out in fp32 that begins at 0, so that it says nothing before it has learned."""

    def __init__(self, hidden_size: int, bias: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(())) if bias else None

    def forward(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """[M, hidden] of any dtype to [M] float32."""
        scalar_M = hidden_MH.float() @ self.weight
        return scalar_M if self.bias is None else scalar_M + self.bias


class Scorer:
    """A head with its optimizer, on the policy's trunk or on a trunk of its own."""

    def __init__(
        self,
        policy: Policy,
        config: OptimConfig,
        own_trunk: Policy | None = None,
        *,
        bias: bool = True,
        pretrain_steps: int = 0,
        bootstraps: bool = False,
    ) -> None:
        """`pretrain_steps`: first steps in which it alone learns; `bootstraps`: whether the value
        after a limit counts for what was cut."""
        self.pretrain_steps = pretrain_steps
        self.bootstraps = bootstraps
        self.own_trunk = own_trunk
        trunk = own_trunk or policy
        hidden_size = int(trunk.model.config.get_text_config().hidden_size)
        self.head = ScalarHead(hidden_size, bias)
        self.model = torch.nn.ModuleDict({"head": self.head})
        if own_trunk is not None:
            own_trunk.model.requires_grad_(True)
            self.model["trunk"] = own_trunk.model.base_model
        self.optimizer = MasterOptimizer(self, config)

    def read(self, hidden_TH: torch.Tensor | None, micro: Microbatch, at: str) -> torch.Tensor:
        """[N] float32 with gradient. `at`: "predict_rows", the state in which a token is chosen, or
        "own_rows", the state after it. `hidden_TH` is the policy's, unused with an own trunk."""
        if self.own_trunk is not None:
            hidden_TH = self.own_trunk.tree_hidden(micro)
        assert hidden_TH is not None
        return self.head(hidden_TH[torch.from_numpy(getattr(micro, at))])

    def save(self, folder: Path) -> None:
        folder.mkdir()
        self.optimizer.save(folder)

    def restore(self, folder: Path) -> None:
        self.optimizer.restore(folder)


def export_reward_model(
    policy: Policy,
    scorer: Scorer,
    folder: Path,
    dtype: torch.dtype,
    masters: Mapping[str, torch.Tensor],
) -> None:
    """Write a folder for transformers' AutoModelForSequenceClassification with one label.

    transformers reads the score at the last token that is not padding, so padding must be another
    token than the end of a turn. Raises ModelError when the tokenizer has none, or when the
    architecture has no such class.
    """
    config = copy.deepcopy(policy.model.config)
    config.num_labels, config.pad_token_id = 1, _padding(policy)
    config._attn_implementation = "sdpa"
    try:
        model = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
    except ValueError as error:
        raise ModelError(
            f"model {type(policy.model).__name__} has no sequence classifier in transformers "
            f"({error}); export the reward model from another architecture"
        ) from error
    prefix = f"{policy.model.base_model_prefix}."
    state = policy.exact_state(dtype, masters)
    trunk = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    model.base_model.load_state_dict(trunk)
    with torch.no_grad():
        model.score.weight.copy_(scorer.head.weight[None])
    policy.tokenizer.pad_token = policy.tokenizer.convert_ids_to_tokens(config.pad_token_id)
    model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def _padding(policy: Policy) -> int:
    special = [policy.tokenizer.pad_token_id, *policy.tokenizer.all_special_ids]
    for token in special:
        if token is not None and token not in policy.eos_token_ids:
            return int(token)
    raise ModelError(
        f"tokenizer of {policy.folder} has no special token besides its ends of turn, and a reward "
        "model needs one for padding; add a pad token to the model folder"
    )
