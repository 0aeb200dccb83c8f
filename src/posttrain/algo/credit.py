"""Who gets credit: from scored groups to one advantage per trajectory.

Shapes: G members of a group that enter the statistics. Groups are told apart by draw id alone,
never by position and never by task id, which may repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttrain.algo.advantages import enough_survivors, is_zero_variance
from posttrain.algo.group_metrics import group_metrics
from posttrain.types import Group

# Rewards of whole groups in, advantages of the same groups in the same order out.
Estimator = Callable[[Sequence[Tensor]], list[Tensor]]

DropReason = Literal["invalid", "all_truncated", "zero_variance"]


@dataclass(frozen=True, slots=True)
class Credit:
    """advantage: (draw_id, sample_index) -> advantage, for the trajectories that train; dropped:
    draw_id -> reason, for the groups that carry no sample; metrics: about all groups given.

    A trajectory in neither was invalid, or truncated and masked, in a group that trains.

    Example:
        >>> Credit({(0, 1): 0.5}, {7: "zero_variance"}, {}).dropped[7]
        'zero_variance'
    """

    advantage: Mapping[tuple[int, int], float]
    dropped: Mapping[int, DropReason]
    metrics: Mapping[str, float]


def assign_credit(
    groups: Sequence[Group],
    estimate: Estimator,
    *,
    zero_variance: Literal["drop", "keep"],
    truncated: Literal["score", "mask"],
) -> Credit:
    """Advantages of the groups, and which groups are dropped and why.

    Invalid members are out of the statistics and get no advantage. A group is dropped as
    "invalid" when fewer than max(2, G/2) members survive; as "all_truncated" when `truncated` is
    "mask" and no survivor ended by itself; as "zero_variance" when the rest are equal (or alone)
    and `zero_variance` is "drop". With "keep" those get exactly 0.

    The estimator sees zero-variance groups in either case, so that a batch-wide statistic does
    not depend on whether they train. Raises ValueError when a draw or a member is given twice.
    """
    _check_keys(groups)
    dropped: dict[int, DropReason] = {}
    members: dict[int, list[int]] = {}
    rewards: dict[int, Tensor] = {}
    for group in groups:
        draw_id = group.draw.draw_id
        survivors = group.valid
        if not enough_survivors(len(survivors), len(group)):
            dropped[draw_id] = "invalid"
            continue
        if truncated == "mask":
            survivors = tuple(t for t in survivors if not t.truncated)
        if not survivors:
            dropped[draw_id] = "all_truncated"
            continue
        members[draw_id] = [t.sample_index for t in survivors]
        rewards[draw_id] = torch.tensor([t.reward for t in survivors], dtype=torch.float64)

    flat = {draw_id for draw_id, rewards_G in rewards.items() if is_zero_variance(rewards_G)}
    estimates = dict(zip(rewards, estimate(list(rewards.values())), strict=True))
    advantage: dict[tuple[int, int], float] = {}
    for draw_id, advantages_G in estimates.items():
        if draw_id in flat and zero_variance == "drop":
            dropped[draw_id] = "zero_variance"
            continue
        values = [0.0] * len(advantages_G) if draw_id in flat else advantages_G.tolist()
        for sample_index, value in zip(members[draw_id], values, strict=True):
            advantage[draw_id, sample_index] = value
    invalid = {draw_id for draw_id, reason in dropped.items() if reason == "invalid"}
    return Credit(advantage, dropped, group_metrics(groups, zero_variance=flat, invalid=invalid))


def _check_keys(groups: Sequence[Group]) -> None:
    draw_ids: set[int] = set()
    for group in groups:
        if group.draw.draw_id in draw_ids:
            raise ValueError(
                f"draw {group.draw.draw_id} comes twice in one batch; every draw trains once"
            )
        draw_ids.add(group.draw.draw_id)
        indices = {t.sample_index for t in group}
        if len(indices) != len(group):
            raise ValueError(
                f"group of draw {group.draw.draw_id} has {len(group)} trajectories but "
                f"{len(indices)} sample indices; number the members apart"
            )
