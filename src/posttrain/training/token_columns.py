"""From micro-batches to the columns that an algorithm's components read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.algo.aggregation import Denominators
from posttrain.algo.component import Component
from posttrain.algo.segments import is_last_of_segment, segment_sum
from posttrain.types import Microbatch, Stream

Columns = dict[str, Any]

_SEGMENTS = ("sequence_index_N", "trajectory_index_N", "group_index_N")
_MEMBERS = 1 << 20  # more than a group ever has
_NO_STREAM = Stream(np.zeros(0, np.int64), np.zeros(0, np.float32))


@dataclass
class Work:
    """A micro-batch, the columns of its N trained tokens that are known before the update, and
    what each component prepared of its stream when it had to see the whole step."""

    micro: Microbatch
    known: Columns
    prepared: dict[str, Columns] = field(default_factory=dict)


def known_columns(micro: Microbatch) -> Columns:
    """What the records say of the trained tokens, [N]. A group is named by its draw."""
    owners_S2 = torch.tensor(micro.owners, dtype=torch.int64).reshape(-1, 2)
    sequence_index_N = torch.from_numpy(micro.sample_index)
    return {
        "sampler_logprobs_N": torch.from_numpy(micro.sampler_logprobs),
        "policy_versions_N": torch.from_numpy(micro.policy_versions),
        "turn_index_N": torch.from_numpy(micro.turn_index),
        "sequence_index_N": sequence_index_N,
        "group_index_N": owners_S2[sequence_index_N, 0],
        "trajectory_index_N": (owners_S2[:, 0] * _MEMBERS + owners_S2[:, 1])[sequence_index_N],
    }


def cut_ends(micro: Microbatch) -> Tensor:
    """True at the last trained token of each sample that a limit cut, [N]."""
    ends_N = is_last_of_segment(torch.from_numpy(micro.sample_index))
    return ends_N & torch.tensor(micro.cut, dtype=torch.bool)[torch.from_numpy(micro.sample_index)]


def of_stream(columns: Mapping[str, Any], stream: Stream) -> Columns:
    """The columns of a stream's tokens and their weights; sequences and groups are numbered anew,
    from 0 in order of appearance."""
    index_M = torch.from_numpy(stream.index)
    everything = len(index_M) == len(columns["sequence_index_N"])
    chosen = {
        name: values
        if everything or not isinstance(values, Tensor) or values.ndim == 0
        else values[index_M]
        for name, values in columns.items()
    }
    return _numbered_anew({**chosen, "weights_N": torch.from_numpy(stream.weights)})


def _numbered_anew(columns: Columns) -> Columns:
    for name in _SEGMENTS:
        columns[name] = _in_order(columns[name])
    return columns


def _in_order(index_N: Tensor) -> Tensor:
    """0, 1, 2... in order of first appearance."""
    values, inverse_N = torch.unique(index_N, return_inverse=True)
    first = torch.full((len(values),), len(index_N), dtype=torch.int64)
    first = first.scatter_reduce(0, inverse_N, torch.arange(len(index_N)), "amin")
    rank = torch.empty_like(first)
    rank[first.argsort()] = torch.arange(len(values))
    return rank[inverse_N]


def prepare_whole_step(
    component: Component, works: Sequence[Work], constants: Columns, state: Any
) -> None:
    """Let a component see its stream over all micro-batches, and keep its columns with each."""
    pieces, lengths, sequences = [], [], 0
    for work in works:
        stream = work.micro.streams.get(component.stream, _NO_STREAM)
        piece = dict(work.known)
        piece["sequence_index_N"] = piece["sequence_index_N"] + sequences
        sequences += len(work.micro.paths)
        index_M = torch.from_numpy(stream.index)
        piece = {name: values[index_M] for name, values in piece.items()}
        piece["weights_N"] = torch.from_numpy(stream.weights)
        pieces.append(piece)
        lengths.append(len(stream))
    if not sum(lengths):
        return
    joined = _numbered_anew({n: torch.cat([piece[n] for piece in pieces]) for n in pieces[0]})
    ends_N = joined.pop("bootstrap_N", torch.zeros(len(joined["weights_N"])))
    joined["bootstrap_S"] = segment_sum(ends_N, joined["trajectory_index_N"])
    prepared = component.prepare({**joined, **constants}, state)
    split = {name: values.split(lengths) for name, values in prepared.items()}
    for i, work in enumerate(works):
        work.prepared[key_of(component)] = {name: values[i] for name, values in split.items()}


def key_of(component: Component) -> str:
    """Names a component: two of different kinds may read one stream."""
    return f"{component.kind}:{component.stream}"


def stream_of(component: Component, micro: Microbatch) -> Stream:
    """The tokens that a component reads; none where no sample carries its stream."""
    return micro.streams.get(component.stream, _NO_STREAM)


class GlobalCounts:
    """Denominators of one optimizer step, counted over all its micro-batches before any is cut or
    rejected. Components of one kind count together."""

    def __init__(self, components: Sequence[Component], micros: Sequence[Microbatch]) -> None:
        self._tokens: Counter[str] = Counter()
        self._sequences: Counter[str] = Counter()
        self._of_draw: dict[str, Counter[int]] = {}
        for kind, names in _streams_by_kind(components).items():
            of_draw = self._of_draw.setdefault(kind, Counter())
            for micro in micros:
                for name in names & micro.streams.keys():
                    owners = micro.sample_index[micro.streams[name].index]
                    self._tokens[kind] += len(owners)
                    for sample, count in zip(*np.unique(owners, return_counts=True), strict=True):
                        self._sequences[kind] += 1
                        of_draw[micro.owners[sample][0]] += int(count)

    def __bool__(self) -> bool:
        return any(self._tokens.values())

    def denominators(self, component: Component, micro: Microbatch) -> Denominators:
        """For a component's loss on one of the micro-batches."""
        kind = component.kind
        owners = micro.sample_index[stream_of(component, micro).index]
        samples, lengths = np.unique(owners, return_counts=True)
        of_draw = self._of_draw[kind]
        return Denominators(
            self._tokens[kind],
            self._sequences[kind],
            torch.from_numpy(lengths.astype(np.int64)),
            len(of_draw),
            torch.tensor([of_draw[micro.owners[s][0]] for s in samples], dtype=torch.int64),
        )


def _streams_by_kind(components: Sequence[Component]) -> dict[str, set[str]]:
    names: dict[str, set[str]] = {}
    for component in components:
        names.setdefault(component.kind, set()).add(component.stream)
    return names
