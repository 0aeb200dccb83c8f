"""Random batches in both layouts: padded [B, T] as the published functions take them, flat as ours.

Shapes: B sequences, T positions of the longest, N loss tokens end to end. Everything is float64.
Each batch has ragged lengths and turns (runs of loss tokens with observations between them), a
group without variance, and tokens on both sides of every clip bound; the scenario adds the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from posttrain.algo import ratios
from posttrain.algo.aggregation import Denominators

NUM_SEEDS = 8
WIDTH = 11
GROUP_SIZE = 4  # where all groups have the same


@dataclass(frozen=True)
class Scenario:
    """What a batch contains beyond the ordinary.

    gaps: observations between turns; empty: a sequence without a loss token; singleton: a group of
    one; extreme: log-ratios up to +-30, where clamps and overflow are.
    """

    gaps: bool = True
    empty: bool = False
    singleton: bool = False
    extreme: bool = False


ORDINARY = Scenario()
SINGLE_TURN = Scenario(gaps=False)
EMPTY = Scenario(empty=True)
SINGLETON = Scenario(singleton=True)
EXTREME = Scenario(extreme=True)


@dataclass(frozen=True)
class Batch:
    """One random batch. Padding and observations hold random numbers too: nobody may read them."""

    mask_BT: Tensor
    group_B: Tensor
    rewards_B: Tensor
    tokens_BT: Mapping[str, Tensor]
    seed: int

    def flat(self, tokens_BT: Tensor) -> Tensor:
        """[N]: the loss tokens."""
        return tokens_BT[self.mask_BT]

    def padded(self, values_N: Tensor) -> Tensor:
        """[B, T] with 0 where the mask is False."""
        padded_BT = values_N.new_zeros(self.mask_BT.shape)
        padded_BT[self.mask_BT] = values_N
        return padded_BT

    def leaf(self, name: str = "policy_logprobs") -> Tensor:
        """A fresh copy of a padded tensor that collects its gradient."""
        return self.tokens_BT[name].clone().requires_grad_()

    @cached_property
    def lengths_B(self) -> Tensor:
        """Loss tokens of each sequence."""
        return self.mask_BT.sum(dim=1)

    @cached_property
    def last_BT(self) -> Tensor:
        """True at each sequence's last loss token."""
        after_BT = self.mask_BT.flip(1).cumsum(1).flip(1)
        return self.mask_BT & (after_BT == 1)

    @cached_property
    def outcome_BT(self) -> Tensor:
        """The reward, at the last loss token of its sequence."""
        return self.rewards_B[:, None] * self.last_BT

    @cached_property
    def sequence_index_N(self) -> Tensor:
        rows_B1 = torch.arange(len(self.mask_BT))[:, None]
        return self.flat(rows_B1.expand(self.mask_BT.shape))

    @cached_property
    def turn_index_N(self) -> Tensor:
        before_BT = torch.cat([torch.zeros_like(self.mask_BT[:, :1]), self.mask_BT[:, :-1]], 1)
        starts_N = self.flat(self.mask_BT & ~before_BT)
        return starts_N.long().cumsum(0) - 1

    @cached_property
    def denominators(self) -> Denominators:
        """Of this batch as a whole step."""
        group_lengths = torch.bincount(self.group_B, weights=self.lengths_B.double()).long()
        return Denominators(
            num_loss_tokens=int(self.lengths_B.sum()),
            num_sequences=int((self.lengths_B > 0).sum()),
            sequence_lengths_S=self.lengths_B,
            num_groups=int((group_lengths > 0).sum()),
            group_lengths_S=group_lengths[self.group_B],
        )

    def with_tokens(self, **changed: Tensor) -> Batch:
        """The same with other padded tensors under these names."""
        return replace(self, tokens_BT={**self.tokens_BT, **changed})

    def with_rewards(self, rewards_B: Tensor, group_B: Tensor | None = None) -> Batch:
        """The same with other rewards, and other groups if given."""
        group_B = self.group_B if group_B is None else group_B
        return replace(self, rewards_B=rewards_B, group_B=group_B)

    def compacted(self) -> Batch:
        """The same loss tokens without the observations between them."""
        kept_BT = torch.arange(self.mask_BT.shape[1]) < self.lengths_B[:, None]
        order_BT = torch.argsort((~self.mask_BT).long(), dim=1, stable=True)
        tokens_BT = {name: x_BT.gather(1, order_BT) for name, x_BT in self.tokens_BT.items()}
        return replace(self, mask_BT=kept_BT, tokens_BT=tokens_BT)

    def members(self) -> Iterator[Tensor]:
        """Row numbers of each group."""
        for group in self.group_B.unique():
            yield (self.group_B == group).nonzero()[:, 0]

    def columns(self, **changed: Any) -> dict[str, Any]:
        """The token columns that our rules read (posttrain/algo/columns.py); `changed` wins."""
        columns: dict[str, Any] = {
            f"{name}_N": self.flat(tokens_BT) for name, tokens_BT in self.tokens_BT.items()
        }
        columns["rewards_N"] = self.flat(self.outcome_BT)
        columns["log_mismatch_N"] = ratios.log_mismatch(
            columns["prox_logprobs_N"], columns["sampler_logprobs_N"]
        )
        columns["sequence_index_N"] = self.sequence_index_N
        columns["trajectory_index_N"] = self.sequence_index_N
        columns["bootstrap_S"] = torch.zeros(len(self.mask_BT), dtype=torch.float64)
        columns["turn_index_N"] = self.turn_index_N
        columns["group_index_N"] = self.group_B[self.sequence_index_N]
        columns["seed"] = self.seed
        return columns | changed


def batches(*scenarios: Scenario) -> Iterator[Batch]:
    """NUM_SEEDS batches of each scenario."""
    for scenario in scenarios:
        for seed in range(NUM_SEEDS):
            yield random_batch(seed, scenario)


def equal_groups(scenario: Scenario = ORDINARY) -> list[Batch]:
    """Batches whose rows are groups of four; the second has no variance."""
    regrouped = []
    for batch in batches(scenario):
        group_B = torch.arange(len(batch.mask_BT)) // GROUP_SIZE
        rewards_B = batch.rewards_B.clone()
        rewards_B[group_B == 1] = 0.5
        regrouped.append(batch.with_rewards(rewards_B, group_B))
    return regrouped


def random_batch(seed: int, scenario: Scenario = ORDINARY) -> Batch:
    """The same batch for the same seed and scenario."""
    draw = torch.Generator().manual_seed(seed)
    sizes = [4, 3, 5] + ([1, 1] if scenario.singleton else [])
    group_B = torch.cat([torch.full((size,), i) for i, size in enumerate(sizes)])
    mask_BT = _mask(len(group_B), scenario, draw)
    rewards_B = _normal(draw, len(group_B))
    rewards_B[group_B == 0] = _uniform(draw, 4).round()
    rewards_B[group_B == 1] = 0.5  # no variance

    prox_BT = -2.5 * _uniform(draw, *mask_BT.shape) - 0.05
    chosen_BT = prox_BT.exp()
    drift_BT = 0.3 * _normal(draw, *mask_BT.shape)
    if scenario.extreme:
        is_far_BT = _uniform(draw, *mask_BT.shape) < 0.3
        drift_BT = torch.where(is_far_BT, 10 * _normal(draw, *mask_BT.shape), drift_BT)
        drift_BT.clamp_(-30, 30)
    advantages_B = rewards_B - rewards_B.mean()
    advantages_B[group_B == 1] = 0.0
    tokens_BT = {
        "prox_logprobs": prox_BT,
        "policy_logprobs": prox_BT + drift_BT,
        "sampler_logprobs": prox_BT - 0.4 * _normal(draw, *mask_BT.shape),
        "ref_logprobs": prox_BT + drift_BT + 0.5 * _normal(draw, *mask_BT.shape),
        "teacher_logprobs": prox_BT + 0.5 * _normal(draw, *mask_BT.shape),
        "entropy": 2 * _uniform(draw, *mask_BT.shape),
        "values": _normal(draw, *mask_BT.shape),
        # At least the chosen token's share, at most with all the rest on one other token
        "sum_pi_squared": chosen_BT**2 + _uniform(draw, *mask_BT.shape) * (1 - chosen_BT) ** 2,
        "advantages": advantages_B[:, None].expand(mask_BT.shape).clone(),
    }
    return Batch(mask_BT, group_B, rewards_B, tokens_BT, seed)


def some_logits(batch: Batch, vocabulary: int = 13) -> Tensor:
    """[B, T, V] with gradient."""
    draw = torch.Generator().manual_seed(batch.seed)
    shape = (*batch.mask_BT.shape, vocabulary)
    return (3 * torch.randn(shape, generator=draw, dtype=torch.float64)).requires_grad_()


def _mask(num_sequences: int, scenario: Scenario, draw: torch.Generator) -> Tensor:
    lengths_B = torch.randint(1, WIDTH + 1, (num_sequences,), generator=draw)
    mask_BT = torch.arange(WIDTH) < lengths_B[:, None]
    if scenario.gaps:
        mask_BT &= _uniform(draw, num_sequences, WIDTH) < 0.75
        mask_BT[:, 0] = True  # the first turn is the policy's, whatever was drawn
    if scenario.empty:
        mask_BT[2] = False
        mask_BT[-1] = False
    return mask_BT


def _uniform(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=draw, dtype=torch.float64)


def _normal(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=draw, dtype=torch.float64)
