"""Negative controls: runs of checks 3 and 5 in which one thing is broken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from checks.trial import Spoil
from posttrain.algo.advantages.whitening import Variance, whiten
from posttrain.algo.segments import discounted_to_go
from posttrain.types import Bool, Group, Scored, TrainBatch, TrainSample, Trajectory


def _paid(trajectory: Trajectory, value: float) -> Trajectory:
    assert isinstance(trajectory.verdict, Scored)
    return replace(trajectory, verdict=replace(trajectory.verdict, value=value))


def _repaid(groups: Sequence[Group], values: Sequence[float]) -> list[Group]:
    left = iter(values)
    return [
        replace(g, trajectories=tuple(_paid(t, next(left)) for t in g.trajectories)) for g in groups
    ]


def shuffled_rewards(groups: Sequence[Group], step: int) -> list[Group]:
    """Rewards change hands at random within the batch."""
    values = [t.reward for g in groups for t in g.trajectories]
    return _repaid(groups, np.random.default_rng(step).permutation(values).tolist())


def ten_more(groups: Sequence[Group], step: int) -> list[Group]:
    """10 on top of every reward."""
    return _repaid(groups, [t.reward + 10 for g in groups for t in g.trajectories])


def negated(batch: TrainBatch) -> TrainBatch:
    """Advantages with the other sign."""

    def turned(sample: TrainSample) -> TrainSample:
        return replace(sample, streams={name: -w for name, w in sample.streams.items()})

    return replace(batch, samples=tuple(map(turned, batch.samples)))


def inverted_mask(batch: TrainBatch) -> TrainBatch:
    """What the policy did not choose is trained, and what it chose is not."""
    return _masked_anew(batch, lambda mask_L: ~mask_L)


def shifted_mask(batch: TrainBatch) -> TrainBatch:
    """The token before each chosen one is trained."""
    return _masked_anew(batch, lambda mask_L: np.append(mask_L[1:], False))


def _masked_anew(batch: TrainBatch, change: Callable[[Bool], Bool]) -> TrainBatch:
    def masked(sample: TrainSample) -> TrainSample:
        mask_L = change(sample.loss_mask)
        mask_L[0] = False
        # Of one turn: its advantage is that of any of its tokens.
        of_turn = {name: w[sample.loss_mask][0] for name, w in sample.streams.items()}
        return replace(
            sample,
            loss_mask=mask_L,
            turn_index=np.where(mask_L, 0, -1).astype(np.int32),
            streams={n: np.where(mask_L, w, 0).astype(np.float32) for n, w in of_turn.items()},
        )

    return replace(batch, samples=tuple(map(masked, batch.samples)))


# Runs of these must stay near chance.
BROKEN: Mapping[str, Spoil] = {
    "shuffled_rewards": Spoil(groups=shuffled_rewards),
    "inverted_mask": Spoil(batch=inverted_mask),
    "shifted_mask": Spoil(batch=shifted_mask),
    "negated_advantages": Spoil(batch=negated),
    "weight_sync_disabled": Spoil(frozen_sampler=True),
}
BROKEN_STEPS = 30
"""A sound run is far above chance by then."""


def reinforce_pp_restarting(
    rewards_N: Tensor,
    trajectory_index_N: Tensor,
    turn_index_N: Tensor,
    *,
    gamma: float,
    variance: Variance,
) -> Tensor:
    """`reinforce_pp` with the error that check 5 is made for: returns to go that end with the turn,
    so that the outcome never reaches the turns before the last."""
    starts_N = torch.ones_like(turn_index_N)
    same_N = (trajectory_index_N.diff() == 0) & (turn_index_N.diff() == 0)
    starts_N[1:] = (~same_N).long()
    return whiten(discounted_to_go(rewards_N, starts_N.cumsum(0) - 1, gamma), variance)
