"""One object that is the whole algorithm: groups to streams of weights, log-probs to a loss.

The learner and the sample builder know this object and no algorithm by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from posttrain.algo.columns import Rule
from posttrain.algo.component import Component
from posttrain.algo.credit import Credit, CreditRule, DropReason, Memory, Streams, check_keys
from posttrain.algo.group_metrics import group_metrics
from posttrain.types import Group


@dataclass(frozen=True)
class Part:
    """One algorithm: how groups become streams, and the losses that read them."""

    credit: CreditRule
    components: tuple[Component, ...]


@dataclass(frozen=True)
class Algorithm:
    """One part for each environment that has an algorithm of its own, and "" for all others.

    Parts of one kind share their denominators. Statistics over the batch (a standard deviation,
    whitening, selections) are each part's own.
    """

    parts: Mapping[str, Part]

    def credit(self, groups: Sequence[Group], memory: Memory | None = None) -> Credit:
        """The streams of every trajectory that trains. Takes all groups of the step at once.

        `memory` is what the algorithm remembers between steps, and is brought up to date.

        Raises ValueError when a draw or a member is given twice.
        """
        check_keys(groups)
        memory = {} if memory is None else memory
        streams: dict[tuple[int, int], Streams] = {}
        dropped: dict[int, DropReason] = {}
        flat: set[int] = set()
        for name, part in self.parts.items():
            credit = part.credit([g for g in groups if self._part_of(g) == name], memory)
            streams |= credit.streams
            dropped |= credit.dropped
            flat |= credit.flat
        draw_ids = [group.draw.draw_id for group in groups]
        in_order: dict[int, DropReason] = {
            draw_id: dropped[draw_id] for draw_id in draw_ids if draw_id in dropped
        }
        invalid = {draw_id for draw_id, reason in dropped.items() if reason == "invalid"}
        metrics = group_metrics(groups, zero_variance=flat, invalid=invalid)
        return Credit(streams, in_order, frozenset(flat), metrics)

    def _part_of(self, group: Group) -> str:
        return group.draw.environment if group.draw.environment in self.parts else ""

    @cached_property
    def components(self) -> tuple[Component, ...]:
        """The losses of all parts."""
        return tuple(c for part in self.parts.values() for c in part.components)

    @cached_property
    def columns(self) -> frozenset[str]:
        """What the learner must compute."""
        return frozenset().union(*(c.columns for c in self.components))

    @property
    def divergence(self) -> Rule | None:
        """What compares the policy's whole distribution with the teacher's, if anything does."""
        compared = (getattr(c, "compare", None) for c in self.components)
        return next((rule for rule in compared if rule is not None), None)

    @property
    def whole_groups(self) -> bool:
        """Whether a loss compares members of a group, which must then share a micro-batch."""
        return any(c.kind in ("preference", "score") for c in self.components)


def mixed(parts: Mapping[str, Part]) -> Algorithm:
    """An algorithm of several parts; their streams are told apart by the environment's name."""
    return Algorithm({name: _renamed(part, name) for name, part in parts.items()})


def _renamed(part: Part, environment: str) -> Part:
    if not environment:
        return part
    names = {c.stream: f"{c.stream}@{environment}" for c in part.components}
    components = tuple(
        replace(c, stream=names[c.stream])  # type: ignore[type-var]  # all are frozen dataclasses
        for c in part.components
    )
    return Part(_Renamed(part.credit, names), components)


@dataclass(frozen=True)
class _Renamed:
    """A credit rule whose streams have other names."""

    inner: CreditRule
    names: Mapping[str, str]

    def __call__(self, groups: Sequence[Group], memory: Memory) -> Credit:
        credit = self.inner(groups, memory)
        streams = {
            key: {self.names[name]: weights for name, weights in own.items()}
            for key, own in credit.streams.items()
        }
        return replace(credit, streams=streams)
