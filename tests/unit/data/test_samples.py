"""Groups to a batch: what is credited trains once, and a fingerprint sees every change."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from posttrain.algo.algorithm import build_algorithm
from posttrain.algo.credit import Credit
from posttrain.config import RlooConfig
from posttrain.data.samples import build_batch, fingerprint
from posttrain.types import (
    Draw,
    Group,
    Invalid,
    InvalidKind,
    Scored,
    StopReason,
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
    assert [float(s.advantages[-1]) for s in batch.samples] == [1.0, -1.0]
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
        (s.sample_index, s.token_ids[s.loss_mask].tolist(), s.advantages.tolist())
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
        def advantages(self, groups: object) -> Credit:
            return Credit({(0, 0): 1.0}, {}, {})

    batch = build_batch(1, [Group(Draw(0, "t", 0, 0), (member,))], Everything())
    assert batch.samples == () and batch.num_loss_tokens == 0


def test_the_fingerprint_sees_everything_the_optimizer_sees(group) -> None:
    rule = build_algorithm(RlooConfig())
    groups = [group(i, [Scored(1.0), Scored(0.0)]) for i in range(2)]
    batch = build_batch(1, groups, rule)
    assert fingerprint(batch) == fingerprint(build_batch(1, groups, rule))
    sample = batch.samples[0]
    changed = [
        replace(sample, token_ids=sample.token_ids + 1),
        replace(sample, advantages=-sample.advantages),
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
