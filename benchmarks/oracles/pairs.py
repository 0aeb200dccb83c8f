"""Pairs of answers, made of a batch: its first half is chosen, its second half rejected.

Shapes: P pairs; the log-probs of all 2P answers are padded, [2P, T].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from batches import SINGLE_TURN, Batch, batches
from comparison import Record, call
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """policy_BT collects the gradient."""

    batch: Batch
    policy_BT: Tensor

    @cached_property
    def columns(self) -> dict[str, Any]:
        """The columns that our preference losses read."""
        mask_BT = self.batch.mask_BT
        sums = {
            "policy": (self.policy_BT * mask_BT).sum(dim=1),
            "ref": (self.batch.tokens_BT["ref_logprobs"] * mask_BT).sum(dim=1),
        }
        columns = {}
        for name, sums_B in sums.items():
            columns[f"{name}_chosen_P"], columns[f"{name}_rejected_P"] = sums_B.chunk(2)
        columns["chosen_lengths_P"], columns["rejected_lengths_P"] = self.batch.lengths_B.chunk(2)
        return columns

    def means(self, side: str) -> Tensor:
        """[P]: mean log-prob of a side's tokens."""
        return self.columns[f"policy_{side}_P"] / self.columns[f"{side}_lengths_P"]

    def same(self, record: Record, ours: Tensor, theirs: Tensor) -> None:
        """Losses, or a scalar, and the gradient of every token of their sum."""
        gradients = [
            torch.autograd.grad(loss.sum(), self.policy_BT, retain_graph=True)[0]
            for loss in (ours, theirs)
        ]
        record.same(ours, theirs)
        mask_BT = self.batch.mask_BT
        record.same_gradient(gradients[0][mask_BT], gradients[1][mask_BT])


def some_pairs() -> list[Pairs]:
    """Pairs of every seed."""
    return [Pairs(batch, batch.leaf()) for batch in batches(SINGLE_TURN)]


def preference(name: str, pairs: Pairs, **settings: Any) -> Tensor:
    """[P]: our loss of each pair."""
    return call(f"preferences.{name}", pairs.columns, **settings)
