"""Groups to a batch: what is credited trains once, and a fingerprint sees every change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algo.builder import build_algorithm
from posttrain.algo.credit import Credit, TurnWeights
from posttrain.config import RewardModelConfig, RlooConfig, SftConfig
from posttrain.config.estimators import RaeConfig
from posttrain.data.samples import build_batch, fingerprint
from posttrain.types import (
    Completion,
    Draw,
    FinishReason,
    Group,
    Invalid,
    InvalidKind,
    Scored,
    StopReason,
    TokenKind,
    TokenSequence,
    Trajectory,
    Turn,
    Verdict,
)


@pytest.fixture
def group(make: SimpleNamespace):
    """A group of one-turn trajectories with these verdicts; forked members have two sequences."""

    def build(draw_id: int, verdicts: list[Verdict], forked: bool = False) -> Group:
        members = []
        for i, verdict in enumerate(verdicts):
            prompt = [1, 5, 6]
            turns = [Turn(np.array(prompt, np.int32), make.completion([10 + i, 2]))]
            sequences = [make.sequence(prompt, turns[0].completion)]
            if forked:
                again = [1, 5, 6, 10, 7]
                turns.append(Turn(np.array(again, np.int32), make.completion([20 + i])))
                sequences.append(make.sequence(again, turns[1].completion))
            members.append(
                Trajectory(
                    draw_id,
                    i,
                    i,
                    tuple(turns),
                    tuple(sequences),
                    verdict,
                    StopReason.TERMINATED,
                )
            )
        return Group(Draw(draw_id, f"t{draw_id}", 0, draw_id), tuple(members))

    return build


BAD = Invalid(InvalidKind.REWARD_ERROR, "boom")


def test_a_failure_is_never_trained_as_zero(group) -> None:
    batch = build_batch(
        3, [group(7, [Scored(1.0), BAD, Scored(0.0)])], build_algorithm(RlooConfig())
    )
    assert [s.sample_index for s in batch.samples] == [0, 2]
    assert [float(s.streams["policy"][-1]) for s in batch.samples] == [1.0, -1.0]
    assert (batch.step, batch.draw_ids) == (3, (7,))


def test_groups_that_teach_nothing_are_dropped_with_a_reason_and_leave_the_denominators(
    group,
) -> None:
    groups = [group(0, [Scored(1.0), Scored(1.0)]), group(1, [Scored(1.0), Scored(0.0)])]
    batch = build_batch(1, groups, build_algorithm(RlooConfig()))
    assert set(batch.dropped) == {0} and batch.draw_ids == (0, 1)
    assert (batch.num_loss_tokens, batch.num_sequences) == (4, 2)


def test_every_sequence_of_a_fork_carries_the_advantage_on_its_own_sampled_tokens(group) -> None:
    batch = build_batch(
        1, [group(0, [Scored(1.0), Scored(0.0)], forked=True)], build_algorithm(RlooConfig())
    )
    trained = [
        (s.sample_index, s.token_ids[s.loss_mask].tolist(), s.streams["policy"].tolist())
        for s in batch.samples
    ]
    assert trained == [
        (0, [10, 2], [0, 0, 0, 1, 1]),
        (0, [20], [0, 0, 0, 0, 0, 1]),
        (1, [11, 2], [0, 0, 0, -1, -1]),
        (1, [21], [0, 0, 0, 0, 0, -1]),
    ]


def test_an_empty_completion_trains_nothing_and_touches_nothing(make: SimpleNamespace) -> None:
    """a25: no value is written where there is no token."""
    empty = make.completion([])
    sequence = TokenSequence.build([1, 5], [2, 2], [0, 0], [-1, -1])
    turn = Turn(np.array([1, 5], np.int32), empty)
    member = Trajectory(0, 0, 0, (turn,), (sequence,), Scored(1.0), StopReason.TERMINATED)

    class Everything:
        def credit(self, groups: object, memory: object = None) -> Credit:
            return Credit({(0, 0): {"policy": TurnWeights((1.0,))}}, {})

    batch = build_batch(1, [Group(Draw(0, "t", 0, 0), (member,))], Everything())
    assert batch.samples == () and batch.num_loss_tokens == 0


@dataclass(frozen=True)
class Given:
    """An algorithm that gives these streams to every trajectory."""

    streams: dict[str, TurnWeights]

    def credit(self, groups: Sequence[Group], memory: object = None) -> Credit:
        keys = [(t.draw_id, t.sample_index) for group in groups for t in group]
        return Credit(dict.fromkeys(keys, self.streams), {})


def test_each_turn_has_its_own_weight_and_rewards_arrive_at_its_last_token(group) -> None:
    """Two turns: [10, 2] in the first sequence, [20] in the second, behind its replayed history."""
    groups = [group(0, [Scored(1.0)], forked=True)]
    per_turn = {
        "everywhere": TurnWeights((3.0, 5.0)),
        "at_ends": TurnWeights((3.0, 5.0), "turn_ends"),
        "one": TurnWeights((7.0,)),
    }
    first, second = build_batch(1, groups, Given(per_turn)).samples
    assert first.turn_index.tolist() == [-1, -1, -1, 0, 0]
    assert second.turn_index.tolist() == [-1] * 5 + [1]
    assert first.streams["everywhere"].tolist() == [0, 0, 0, 3, 3]
    assert first.streams["at_ends"].tolist() == [0, 0, 0, 0, 3]
    assert first.streams["one"].tolist() == [0, 0, 0, 7, 7]
    assert [second.streams[n].tolist() for n in per_turn] == [
        [0, 0, 0, 0, 0, 5],
        [0, 0, 0, 0, 0, 5],
        [0, 0, 0, 0, 0, 7],
    ]


def test_turns_of_one_sequence_are_told_apart(make: SimpleNamespace) -> None:
    """Turns [7, 8] and [9, 2] with the environment's [5, 6] between them; an empty turn first."""
    completions = [make.completion(ids) for ids in ([], [7, 8], [9, 2])]
    turns = tuple(Turn(np.array([1], np.int32), c) for c in completions)
    sequence = TokenSequence.build(
        [1, 7, 8, 5, 6, 9, 2], [2, 0, 0, 2, 2, 0, 0], [0.0] * 7, [-1, 0, 0, -1, -1, 0, 0]
    )
    member = Trajectory(0, 0, 0, turns, (sequence,), Scored(1.0), StopReason.TERMINATED)
    groups = [Group(Draw(0, "t", 0, 0), (member,))]
    streams = {
        "everywhere": TurnWeights((1.0, 3.0, 5.0)),
        "at_ends": TurnWeights((1.0, 3.0, 5.0), "turn_ends"),
    }
    (sample,) = build_batch(1, groups, Given(streams)).samples
    assert sample.turn_index.tolist() == [-1, 1, 1, -1, -1, 2, 2]
    assert sample.streams["everywhere"].tolist() == [0, 3, 3, 0, 0, 5, 5]
    assert sample.streams["at_ends"].tolist() == [0, 0, 3, 0, 0, 0, 5]


def test_a_demonstration_trains_what_was_given_and_not_its_prompt() -> None:
    sequence = TokenSequence.build([1, 5, 8, 9, 2], [2, 1, 3, 3, 3], [0.0] * 5, [-1] * 5)
    member = Trajectory(
        0, 0, 0, (), (sequence,), Scored(1.0), StopReason.TERMINATED, role="demonstration"
    )
    groups = [Group(Draw(0, "t", 0, 0), (member,))]
    (sample,) = build_batch(1, groups, build_algorithm(SftConfig())).samples
    assert sample.loss_mask.tolist() == [False, False, True, True, True]
    assert sample.streams["imitation"].tolist() == [0, 0, 1, 1, 1]
    assert sample.turn_index.tolist() == [-1, -1, 0, 0, 0]


def test_a_score_is_read_at_the_last_token_alone(group) -> None:
    groups = [group(0, [Scored(0.0), Scored(1.0)])]
    worse, better = build_batch(1, groups, build_algorithm(RewardModelConfig())).samples
    for sample, sign in ((worse, -1), (better, 1)):
        assert sample.loss_mask.tolist() == [False] * 4 + [True]
        assert sample.streams["score"].tolist() == [0, 0, 0, 0, sign]


def test_the_memory_reaches_the_algorithm_and_follows_it(group) -> None:
    memory = {}
    algorithm = build_algorithm(RaeConfig(decay=0.5))
    for _ in range(2):
        batch = build_batch(1, [group(0, [Scored(1.0)])], algorithm, memory)
    assert memory == {"baseline//": 0.75}
    assert batch.samples[0].streams["policy"][-1] == 0.5  # against the baseline before it


def test_the_fingerprint_sees_everything_the_optimizer_sees(group) -> None:
    rule = build_algorithm(RlooConfig())
    groups = [group(i, [Scored(1.0), Scored(0.0)]) for i in range(2)]
    batch = build_batch(1, groups, rule)
    assert fingerprint(batch) == fingerprint(build_batch(1, groups, rule))
    sample = batch.samples[0]
    changed = [
        replace(sample, token_ids=sample.token_ids + 1),
        replace(sample, streams={"policy": -sample.streams["policy"]}),
        replace(sample, streams={"imitation": sample.streams["policy"]}),
        replace(sample, streams={}),
        replace(sample, turn_index=sample.turn_index + 1),
        replace(sample, sampler_logprobs=np.nextafter(sample.sampler_logprobs, np.float32(1))),
        replace(sample, policy_versions=sample.policy_versions + 1),
        replace(sample, loss_mask=np.array([False, False, False, False, True])),
        replace(sample, sample_index=9),
    ]
    others = [replace(batch, samples=(s, *batch.samples[1:])) for s in changed]
    others += [
        replace(batch, samples=batch.samples[::-1]),
        replace(batch, samples=batch.samples[1:]),
        replace(batch, step=2),
        replace(batch, draw_ids=(1, 0)),
        replace(batch, dropped={9: "stale"}),
    ]
    assert len({fingerprint(b) for b in [batch, *others]}) == len(others) + 1


# --- end to end and token by token ----------------------------------------------------------------


@dataclass
class GivenByMember:
    """Streams as they are."""

    streams: dict[tuple[int, int], dict[str, TurnWeights]]

    def credit(self, groups: Sequence[Group], memory: object = None) -> Credit:
        return Credit(self.streams, {})


def one_member(index: int, sequences: list[list[tuple[int, int]]]) -> Trajectory:
    """A trajectory whose sequences are runs of (shown, sampled) tokens, one turn a run."""
    turns, records = [], []
    for runs in sequences:
        kinds: list[int] = []
        for shown, sampled in runs:
            kinds += [TokenKind.OBSERVATION] * shown + [TokenKind.SAMPLED] * sampled
            completion = Completion.build(
                range(sampled), [-0.5] * sampled, [0] * sampled, FinishReason.EOS, ""
            )
            turns.append(Turn(np.zeros(1, np.int32), completion))
        versions = [0 if k == TokenKind.SAMPLED else -1 for k in kinds]
        records.append(TokenSequence.build(range(len(kinds)), kinds, [0.0] * len(kinds), versions))
    return Trajectory(0, index, index, tuple(turns), tuple(records), Scored(1.0), StopReason.LENGTH)


def token_by_token(
    trajectory: Trajectory, streams: dict[str, TurnWeights]
) -> list[tuple[list[bool], list[int], dict[str, list[float]]]]:
    """Mask, turns and weights of each sequence that trains, by walking through its tokens."""
    turn_of = [n for n, turn in enumerate(trajectory.turns) for _ in turn.completion.token_ids]
    trained = [
        (s, i)
        for s, q in enumerate(trajectory.sequences)
        for i in np.flatnonzero(q.kinds == 0).tolist()
    ]
    turns = dict(zip(trained, turn_of, strict=True))
    if any(w.placed == "last" for w in streams.values()):
        last = len(trajectory.sequences) - 1
        trained = [at for at in trained if at[0] == last][-1:]
    found = []
    for s, sequence in enumerate(trajectory.sequences):
        own = [i for t, i in trained if t == s]
        weights = {name: [0.0] * len(sequence) for name in streams}
        for name, w in streams.items():
            for n, i in enumerate(own):
                turn = turns[s, i]
                ends = n + 1 == len(own) or turns[s, own[n + 1]] != turn
                if w.placed != "turn_ends" or ends:
                    weights[name][i] = w.per_turn[0 if len(w.per_turn) == 1 else turn]
        mask = [i in own for i in range(len(sequence))]
        turn_index = [turns[s, i] if i in own else -1 for i in range(len(sequence))]
        if own:
            found.append((mask, turn_index, weights))
    return found


runs = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3)
members = st.lists(st.lists(runs, min_size=1, max_size=3), min_size=1, max_size=4)


@given(
    shapes=members,
    placed=st.lists(st.sampled_from(["tokens", "turn_ends", "last", "none"]), min_size=4),
)
@settings(max_examples=150, deadline=None)
def test_batches_of_many_sequences_are_what_a_walk_through_the_tokens_gives(
    shapes: list[list[list[tuple[int, int]]]], placed: list[str]
) -> None:
    trajectories = [one_member(i, shape) for i, shape in enumerate(shapes)]
    streams: dict[tuple[int, int], dict[str, TurnWeights]] = {}
    for i, trajectory in enumerate(trajectories):
        rule = placed[i]
        if rule == "none":
            continue
        per_turn = tuple(0.25 + n for n in range(len(trajectory.turns)))
        own = {"policy": TurnWeights(per_turn, rule)}  # type: ignore[arg-type]
        if i % 2:
            own["imitation"] = TurnWeights((1.5,))
        streams[0, i] = own
    group = Group(Draw(0, "t", 0, 0), tuple(trajectories))
    batch = build_batch(1, [group], GivenByMember(streams))
    expected = [
        (i, *row)
        for i, trajectory in enumerate(trajectories)
        if (0, i) in streams
        for row in token_by_token(trajectory, streams[0, i])
    ]
    got = [
        (
            s.sample_index,
            s.loss_mask.tolist(),
            s.turn_index.tolist(),
            {name: w.tolist() for name, w in s.streams.items()},
        )
        for s in batch.samples
    ]
    assert got == expected
