"""Models that are read and not trained: the reference of a KL term, the teacher of a student."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file

from posttrain.training.forward import score_tokens
from posttrain.training.policy import Policy
from posttrain.types import Microbatch

REFERENCE_FILE = "reference.safetensors"


class FrozenModel:
    """Scores of a model whose weights stay."""

    def __init__(self, policy: Policy) -> None:
        policy.model.requires_grad_(False)
        self.policy = policy

    @torch.no_grad()
    def logprobs(self, micro: Microbatch, temperature: float) -> torch.Tensor:
        """Log-probs of the trained tokens [N] float32, at the temperature of the policy's own."""
        return score_tokens(self.policy, micro, temperature).policy_logprobs_N


class Reference(Protocol):
    """What a KL term is taken against."""

    def logprobs(self, micro: Microbatch, temperature: float) -> torch.Tensor: ...

    def follow(self, policy: Policy, mix: float) -> None:
        """Move to mix * policy + (1 - mix) * reference; 1 replaces it."""
        ...

    def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...


class CopiedReference(FrozenModel):
    """A second copy of the weights, in the policy's dtype."""

    def __init__(self, policy: Policy, moves: bool) -> None:
        """`moves`: whether it ever leaves the initial weights, and so belongs into checkpoints."""
        super().__init__(policy)
        self._moves = moves

    @torch.no_grad()
    def follow(self, policy: Policy, mix: float) -> None:
        for mine, theirs in zip(
            self.policy.model.parameters(), policy.model.parameters(), strict=True
        ):
            mine.copy_(theirs if mix == 1 else torch.lerp(mine.float(), theirs.float(), mix))

    def save(self, folder: Path) -> None:
        if self._moves:
            named = dict(self.policy.model.named_parameters())
            save_file({k: v.detach() for k, v in named.items()}, folder / REFERENCE_FILE)

    def restore(self, folder: Path) -> None:
        if self._moves:
            saved = load_file(folder / REFERENCE_FILE)
            with torch.no_grad():
                for name, param in self.policy.model.named_parameters():
                    param.copy_(saved[name])


class BaseReference:
    """The policy itself with its adapter switched off: no second copy, and it cannot move."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @torch.no_grad()
    def logprobs(self, micro: Microbatch, temperature: float) -> torch.Tensor:
        """Log-probs of the trained tokens [N] float32 under the base model."""
        with self._policy.adapter_disabled():
            return score_tokens(self._policy, micro, temperature).policy_logprobs_N

    def follow(self, policy: Policy, mix: float) -> None:
        raise ValueError("a reference that is the base model of an adapter cannot move")

    def save(self, folder: Path) -> None:
        return None

    def restore(self, folder: Path) -> None:
        return None
