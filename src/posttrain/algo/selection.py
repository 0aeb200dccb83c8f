"""Which answers of a task are imitated: expert iteration, RAFT, STaR, ReST.

Shapes: G answers to one task.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def success_weights(
    outcomes_G: Tensor,
    token_ids: Sequence[Tensor],
    *,
    threshold: float,
    max_per_task: int | None = None,
    normalise: bool = False,
) -> Tensor:
    """1 for outcome >= threshold, at most `max_per_task` answers and no two alike, else 0, [G].

    The best come first, in order among equals. `normalise` makes them sum to 1, so that every
    solved task weighs the same. Sources: arXiv:2304.06767 (RAFT), arXiv:2203.14465 (STaR),
    arXiv:2308.08998 (ReST). It equals REINFORCE with reward 0 or 1 and no baseline: whatever was
    seen to succeed gets likelier, so repeats and easy tasks must be capped. All 0 without success.
    """
    kept: dict[tuple[int, ...], int] = {}
    for index in outcomes_G.argsort(descending=True, stable=True).tolist():
        if outcomes_G[index] >= threshold:
            kept.setdefault(tuple(token_ids[index].tolist()), index)
    weights_G = torch.zeros_like(outcomes_G)
    weights_G[list(kept.values())[:max_per_task]] = 1
    return weights_G / weights_G.sum().clamp_min(1) if normalise else weights_G
