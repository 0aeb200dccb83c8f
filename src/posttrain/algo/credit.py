"""Who gets credit: from scored groups to weights of streams.

Groups are told apart by draw id alone, never by position and never by task id, which may repeat.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from posttrain.algo.advantages.rae import rae_step
from posttrain.algo.columns import Rule
from posttrain.algo.filters import dynamic_sampling_keep
from posttrain.algo.group_columns import greedy_verdict, group_columns, term_values, terms_of
from posttrain.algo.groups import enough_survivors, is_zero_variance
from posttrain.errors import ConfigError
from posttrain.types import Group, Scored, Trajectory

DropReason = Literal["invalid", "all_truncated", "zero_variance", "unscored", "no_pair", "rejected"]


@dataclass(frozen=True, slots=True)
class TurnWeights:
    """Weights of one trajectory in one stream: per_turn has one number for all turns or one each.

    placed: "tokens", each token gets its turn's weight; "turn_ends", only the last token of each
    turn does and the others get 0, as rewards arrive; "last", the trajectory's last token alone is
    trained.

    Example:
        >>> TurnWeights((0.5,)).placed
        'tokens'
    """

    per_turn: tuple[float, ...]
    placed: Literal["tokens", "turn_ends", "last"] = "tokens"


Streams = Mapping[str, TurnWeights]


@dataclass(frozen=True, slots=True)
class Credit:
    """streams: (draw_id, sample_index) -> the streams of a trajectory that trains; dropped:
    draw_id -> reason, for the groups that carry no sample; flat: draw ids whose outcomes are all
    equal, dropped or not; metrics: about all groups given.

    A trajectory in neither was invalid, or truncated and masked, in a group that trains.

    Example:
        >>> Credit({(0, 1): {"policy": TurnWeights((0.5,))}}, {7: "zero_variance"}).dropped[7]
        'zero_variance'
    """

    streams: Mapping[tuple[int, int], Streams]
    dropped: Mapping[int, DropReason]
    flat: frozenset[int] = frozenset()
    metrics: Mapping[str, float] = field(default_factory=dict)


Memory = MutableMapping[str, float]
"""What an algorithm remembers between steps; the learner saves it."""


class CreditRule(Protocol):
    """How groups become streams. Takes all groups of one algorithm and step at once."""

    def __call__(self, groups: Sequence[Group], memory: Memory) -> Credit: ...


@dataclass(frozen=True)
class PolicyCredit:
    """Advantages of whole groups by `estimate`, or the rewards themselves where it is None and a
    token-level estimator reads them in the learner.

    Invalid members are out of the statistics and get no weight. A group is dropped as "invalid"
    when fewer than max(2, G/2) members survive, or the greedy answer that they are compared with
    does not; as "all_truncated" when `truncated` is "mask" and
    no survivor ended by itself; as "zero_variance" when the outcomes of the rest are equal (or
    alone) and `zero_variance` is "drop". With "keep" it trains, with advantages of 0 unless
    shaping made a difference.

    An estimator of groups sees zero-variance groups in either case, so that a batch-wide statistic
    does not depend on whether they train; a token-level one sees what trains. `imitate` puts
    correct trajectories into a second stream, of dropped groups too.
    """

    estimate: Rule | None
    shaping: tuple[Rule, ...] = ()
    zero_variance: Literal["drop", "drop_same_correct", "keep"] = "drop"
    truncated: Literal["score", "mask"] = "score"
    stream: str = "policy"
    imitate: str | None = None
    hindsight: bool = False

    def __call__(self, groups: Sequence[Group], memory: Memory) -> Credit:
        dropped: dict[int, DropReason] = {}
        kept: dict[int, _Members] = {}
        for group in groups:
            members = self._members(group)
            if isinstance(members, str):
                dropped[group.draw.draw_id] = members
            else:
                kept[group.draw.draw_id] = members
        flat = {draw_id for draw_id, members in kept.items() if self._is_flat(members)}
        batch = self._batch_columns(list(kept.values()))
        streams: dict[tuple[int, int], Streams] = {}
        for draw_id, members in kept.items():
            if draw_id in flat and self.zero_variance != "keep":
                beside = self._beside(members)
                streams |= beside
                if not beside:
                    dropped[draw_id] = "zero_variance"
            else:
                streams |= self._streams(members, batch, memory)
        return Credit(streams, dropped, frozenset(flat))

    def _members(self, group: Group) -> _Members | DropReason:
        survivors = group.valid
        if not enough_survivors(len(survivors), len(group.siblings)) or not self._baseline(group):
            return "invalid"
        if self.truncated == "mask":
            survivors = tuple(t for t in survivors if not t.truncated)
        if not survivors:
            return "all_truncated"
        rules = [*self.shaping, *([self.estimate] if self.estimate else [])]
        names = {name for rule in rules for name in rule.columns}
        names |= {"outcomes_G", "rewards_G", "correct_G"}
        if self.estimate is not None and "turn_rewards" not in names:
            refuse_turn_rewards(survivors)
        columns = group_columns(group, survivors, frozenset(names))
        if is_zero_variance(columns["outcomes_G"]):
            # Equal up to rounding is equal: AdamW would make a full step of the rounding.
            columns["rewards_G"] = columns["rewards_G"].min().expand(len(survivors))
        for shaping in self.shaping:
            columns["rewards_G"] = columns["rewards_G"] + shaping(columns)
        return _Members(group, survivors, columns)

    def _baseline(self, group: Group) -> bool:
        """Whether the greedy answer, where members are compared with one, has a reward."""
        if self.estimate is None or "greedy_reward" not in self.estimate.columns:
            return True
        return isinstance(greedy_verdict(group), Scored)

    def _is_flat(self, members: _Members) -> bool:
        if self.zero_variance == "drop_same_correct":
            return not dynamic_sampling_keep(members.columns["correct_G"])
        return is_zero_variance(members.columns["outcomes_G"])

    def _batch_columns(self, kept: Sequence[_Members]) -> dict[str, Any]:
        """Columns that the whole batch has in common."""
        columns: dict[str, Any] = {"batch_rewards": [m.columns["rewards_G"] for m in kept]}
        if self.estimate is not None and "terms_GR" in self.estimate.columns:
            names, columns["term_weights_R"] = terms_of([m.trajectories for m in kept])
            for members in kept:
                members.columns["terms_GR"] = term_values(members.trajectories, names)
            columns["batch_terms"] = [m.columns["terms_GR"] for m in kept]
        return columns

    def _streams(
        self, members: _Members, batch: dict[str, Any], memory: Memory
    ) -> dict[tuple[int, int], Streams]:
        if self.estimate is None:
            pairs = zip(members.trajectories, members.rewards, strict=True)
            weights = [_rewards(trajectory, reward) for trajectory, reward in pairs]
        elif "role_baseline" in self.estimate.columns:
            weights = _against_roles(members, self.estimate.settings["decay"], memory)
        else:
            columns = {**members.columns, **batch}
            weights = [TurnWeights(tuple(row)) for row in _rows(self.estimate(columns))]
        streams: dict[tuple[int, int], Streams] = {}
        for trajectory, weight in zip(members.trajectories, weights, strict=True):
            streams[trajectory.draw_id, trajectory.sample_index] = {self.stream: weight}
        for key, imitated in self._beside(members).items():
            streams[key] = {**streams.get(key, {}), **imitated}
        return streams

    def _beside(self, members: _Members) -> dict[tuple[int, int], Streams]:
        """What a group teaches whatever its advantages are: correct answers that are imitated, and
        answers under the tasks that they solve."""
        streams: dict[tuple[int, int], Streams] = {}
        if self.imitate:
            for t in members.trajectories:
                if t.verdict.correct:  # type: ignore[union-attr]
                    streams[t.draw_id, t.sample_index] = {self.imitate: TurnWeights((1.0,))}
        return streams | (_hindsight(members.group) if self.hindsight else {})


@dataclass(frozen=True)
class ImitationCredit:
    """Every demonstration, and every trajectory that `select` gives a weight, is imitated.

    Without `select` a group trains all its valid members. A group in which nothing is selected is
    dropped as "rejected".
    """

    select: Rule | None = None
    stream: str = "imitation"

    def __call__(self, groups: Sequence[Group], memory: Memory) -> Credit:
        dropped: dict[int, DropReason] = {}
        streams: dict[tuple[int, int], Streams] = {}
        for group in groups:
            members = group.valid
            if not members:
                dropped[group.draw.draw_id] = "unscored"
                continue
            refuse_turn_rewards(members)
            weights_G = [1.0] * len(members)
            if self.select is not None:
                weights_G = self.select(
                    group_columns(group, members, frozenset(self.select.columns))
                ).tolist()
            chosen = {
                (t.draw_id, t.sample_index): {self.stream: TurnWeights((weight,))}
                for t, weight in zip(members, weights_G, strict=True)
                if weight > 0
            }
            if chosen:
                streams |= chosen
            else:
                dropped[group.draw.draw_id] = "rejected"
        return Credit(streams, dropped)


@dataclass(frozen=True)
class PreferenceCredit:
    """The best and the worst valid member of each group are its pair, the first of equal ones.

    Given pairs are groups of two with rewards 1 and 0. A group whose rewards are all equal is
    dropped as "no_pair".
    """

    stream: str = "preference"
    placed: Literal["tokens", "last"] = "tokens"

    def __call__(self, groups: Sequence[Group], memory: Memory) -> Credit:
        dropped: dict[int, DropReason] = {}
        streams: dict[tuple[int, int], Streams] = {}
        for group in groups:
            refuse_turn_rewards(group.valid)
            ranked = sorted(group.valid, key=lambda t: -t.reward)
            if not ranked or ranked[0].reward == ranked[-1].reward:
                dropped[group.draw.draw_id] = "no_pair" if ranked else "unscored"
                continue
            worst = next(t for t in ranked if t.reward == ranked[-1].reward)
            for member, sign in ((ranked[0], 1.0), (worst, -1.0)):
                key = (member.draw_id, member.sample_index)
                streams[key] = {self.stream: TurnWeights((sign,), self.placed)}
        return Credit(streams, dropped)


@dataclass(frozen=True)
class LabelCredit:
    """Every valid member is wanted (weight 1) when it is correct, else unwanted (-1)."""

    stream: str = "preference"

    def __call__(self, groups: Sequence[Group], memory: Memory) -> Credit:
        dropped: dict[int, DropReason] = {
            group.draw.draw_id: "unscored" for group in groups if not group.valid
        }
        streams: dict[tuple[int, int], Streams] = {}
        for member in (member for group in groups for member in group.valid):
            sign = 1.0 if member.verdict.correct else -1.0  # type: ignore[union-attr]
            streams[member.draw_id, member.sample_index] = {self.stream: TurnWeights((sign,))}
        return Credit(streams, dropped)


@dataclass(frozen=True)
class _Members:
    """A group, its members that enter the statistics, and their columns."""

    group: Group
    trajectories: Sequence[Trajectory]
    columns: dict[str, Any] = field(default_factory=dict)

    @property
    def rewards(self) -> list[float]:
        return self.columns["rewards_G"].tolist()


def refuse_turn_rewards(members: Sequence[Trajectory]) -> None:
    """Raise ConfigError for rewards of single turns, for an algorithm that would ignore them."""
    if any(turn.reward for t in members for turn in t.turns):
        raise ConfigError(
            "the environment gives rewards for single turns, and the algorithm reads the outcome "
            "alone; use one that reads them (gae, reinforce_pp, turn_ppo, gigpo, mt_grpo, process, "
            "pure_min; docs/algorithms/README.md has all), or switch them off in the environment"
        )


def _rewards(trajectory: Trajectory, outcome: float) -> TurnWeights:
    """Rewards as they arrive: each turn's own at its end, the outcome at the last one's."""
    per_turn = [turn.reward for turn in trajectory.turns] or [0.0]
    per_turn[-1] += outcome
    return TurnWeights(tuple(per_turn), "turn_ends")


def _against_roles(members: _Members, decay: float, memory: Memory) -> list[TurnWeights]:
    """Each member against the moving average of its environment and role, which then follows."""
    weights = []
    for trajectory, reward in zip(members.trajectories, members.rewards, strict=True):
        key = f"baseline/{members.group.draw.environment}/{trajectory.role}"
        reward_1 = torch.tensor([reward], dtype=torch.float64)
        advantage_1, memory[key] = rae_step(reward_1, memory.get(key, 0.0), decay)
        weights.append(TurnWeights((float(advantage_1),)))
    return weights


def _rows(advantages: Tensor | Sequence[Tensor]) -> list[list[float]]:
    if isinstance(advantages, Tensor):
        return advantages.unsqueeze(-1).tolist()
    return [torch.atleast_1d(row).tolist() for row in advantages]


def _hindsight(group: Group) -> dict[tuple[int, int], Streams]:
    relabelled = [t for t in group if t.role == "hindsight"]
    return {
        (t.draw_id, t.sample_index): {"hindsight": TurnWeights((t.reward,))} for t in relabelled
    }


def check_keys(groups: Sequence[Group]) -> None:
    """Raise ValueError when a draw or a member is given twice."""
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
