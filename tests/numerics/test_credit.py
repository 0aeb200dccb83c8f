"""Credit: which trajectories train, with which advantage, and what is reported of the rest."""

from __future__ import annotations

import pytest

from posttrain.algo.algorithm import build_algorithm
from posttrain.config import GrpoConfig, RlooConfig
from posttrain.types import Draw, Group, RewardTerm, Scored, StopReason

RLOO = build_algorithm(RlooConfig())


def test_an_invalid_member_leaves_the_statistics_and_gets_no_sample(group):
    """Report c21: a reward that raises on one of eight leaves seven, with statistics of seven."""
    rewards = [1.0, 0.0, 0.0, None, 1.0, 0.0, 0.0, 0.0]
    credit = RLOO.advantages([group(5, rewards)])
    assert (5, 3) not in credit.advantage
    assert len(credit.advantage) == 7
    assert credit.advantage[5, 0] == pytest.approx(1 - 1 / 6)
    assert credit.advantage[5, 1] == pytest.approx(-2 / 6)
    assert credit.metrics["reward/mean"] == pytest.approx(2 / 7)
    assert credit.metrics["trajectories/invalid_frac"] == pytest.approx(1 / 8)


def test_a_group_with_too_few_survivors_is_dropped_as_invalid(group):
    credit = RLOO.advantages([group(0, [1.0, 0.0, 1.0, *[None] * 5]), group(1, [1.0, None])])
    assert credit.advantage == {}
    assert credit.dropped == {0: "invalid", 1: "invalid"}
    assert credit.metrics["groups/invalid_frac"] == 1.0


def test_when_nothing_is_valid_no_mean_is_invented(group):
    credit = RLOO.advantages([group(0, [None, None])])
    assert credit.dropped == {0: "invalid"}
    assert not [name for name in credit.metrics if name.startswith(("reward/", "response/"))]
    assert "accuracy/train" not in credit.metrics
    assert credit.metrics["trajectories/invalid_frac"] == 1.0


def test_zero_variance_is_dropped_or_kept_with_exactly_zero(group):
    groups = [group(0, [0.1, 0.1, 0.1]), group(1, [1.0, 0.0, 0.0])]
    dropped = RLOO.advantages(groups)
    assert dropped.dropped == {0: "zero_variance"}
    assert {key[0] for key in dropped.advantage} == {1}
    kept = build_algorithm(RlooConfig(zero_variance="keep")).advantages(groups)
    assert kept.dropped == {}
    assert [kept.advantage[0, i] for i in range(3)] == [0.0, 0.0, 0.0]
    assert {k: v for k, v in kept.advantage.items() if k[0] == 1} == dropped.advantage
    assert kept.metrics == dropped.metrics


def test_reward_noise_counts_as_zero_variance_for_every_algorithm(group):
    groups = [group(0, [0.3, 0.3 + 1e-8, 0.3])]
    configs = [RlooConfig(zero_variance="keep")]
    configs += [GrpoConfig(std=std, zero_variance="keep") for std in ("group", "batch", "none")]
    for config in configs:
        assert set(build_algorithm(config).advantages(groups).advantage.values()) == {0.0}


def test_masked_truncation_leaves_baseline_and_loss(group):
    groups = [group(0, [1.0, 0.0, 0.0, 1.0], truncated=[1]), group(1, [1.0, 0.0], truncated=[0, 1])]
    credit = build_algorithm(RlooConfig(truncated="mask")).advantages(groups)
    assert (0, 1) not in credit.advantage
    assert credit.advantage[0, 2] == pytest.approx(-1.0)
    assert credit.dropped == {1: "all_truncated"}
    scored = RLOO.advantages(groups)
    assert scored.advantage[0, 2] == pytest.approx(-2 / 3)
    assert scored.dropped == {}
    assert credit.metrics["response/truncated_frac"] == pytest.approx(0.5)


def test_a_survivor_that_masking_left_alone_teaches_nothing(group):
    groups = [group(0, [1.0, 0.0], truncated=[1])]
    dropped = build_algorithm(RlooConfig(truncated="mask")).advantages(groups)
    assert dropped.dropped == {0: "zero_variance"}
    keep = RlooConfig(truncated="mask", zero_variance="keep")
    assert build_algorithm(keep).advantages(groups).advantage == {(0, 0): 0.0}


def test_groups_are_told_apart_by_draw_and_never_by_task_or_place(group):
    """Report l06: the same task drawn twice, and two tasks with one id, are separate groups."""
    groups = [group(4, [1.0, 0.0], task_id="7"), group(9, [5.0, 3.0], task_id="7")]
    forward = RLOO.advantages(groups)
    assert forward.advantage == {(4, 0): 1.0, (4, 1): -1.0, (9, 0): 2.0, (9, 1): -2.0}
    assert RLOO.advantages(groups[::-1]).advantage == forward.advantage
    shuffled = Group(groups[1].draw, groups[1].trajectories[::-1])
    assert RLOO.advantages([shuffled, groups[0]]).advantage == forward.advantage


def test_a_draw_or_a_member_given_twice_is_refused(group, member):
    with pytest.raises(ValueError, match="draw 3 comes twice"):
        RLOO.advantages([group(3, [1.0, 0.0]), group(3, [1.0, 0.0])])
    twins = Group(Draw(3, "t", 0, 0), (member(3, 0, 1.0), member(3, 0, 0.0)))
    with pytest.raises(ValueError, match="number the members apart"):
        RLOO.advantages([twins])


@pytest.mark.parametrize(
    "config", [RlooConfig(), *(GrpoConfig(std=std) for std in ("group", "batch", "none"))]
)
def test_rewards_shifted_by_ten_train_the_same(config, group):
    algorithm = build_algorithm(config)
    rewards = {0: [1.0, 0.0, 0.5, None], 1: [1.0, 1.0, 1.0, 1.0], 2: [0.25, 0.0, 0.0, 1.0]}
    plain = algorithm.advantages([group(i, r) for i, r in rewards.items()])
    shifted = algorithm.advantages(
        [group(i, [x if x is None else x + 10 for x in r]) for i, r in rewards.items()]
    )
    assert shifted.advantage == plain.advantage
    assert shifted.dropped == plain.dropped


def test_batch_std_does_not_depend_on_whether_flat_groups_train(group):
    groups = [group(0, [1.0, 0.0]), group(1, [3.0, 3.0])]
    drop = build_algorithm(GrpoConfig(std="batch")).advantages(groups)
    keep = build_algorithm(GrpoConfig(std="batch", zero_variance="keep")).advantages(groups)
    assert drop.advantage[0, 0] == keep.advantage[0, 0]


def test_metrics_describe_all_groups_before_anything_is_dropped(group):
    shaped = Scored(0.5, (RewardTerm("exact", 0.0), RewardTerm("format", 1.0)), correct=False)
    unparsed = Scored(0.0, (RewardTerm("exact", 0.0),), parsed=False)
    groups = [
        group(0, [1.0, 1.0], lengths=[2, 4]),
        group(1, [0.0, 0.0], lengths=[6, 8], truncated=[0]),
        group(2, [shaped, unparsed], lengths=[10, 12]),
        group(3, [None, 1.0], lengths=[1, 14]),
    ]
    credit = RLOO.advantages(groups)
    expected = {
        "reward/mean": 3.5 / 7,
        "reward/std": 0.5,
        "groups/zero_variance_frac": 0.5,
        "groups/all_low_frac": 0.25,
        "groups/all_high_frac": 0.25,
        "groups/invalid_frac": 0.25,
        "trajectories/invalid_frac": 1 / 8,
        "trajectories/invalid/reward_error": 1.0,
        "response/len_mean": 8.0,
        "response/len_p95": 13.4,
        "response/truncated_frac": 1 / 7,
        "response/unparsed_frac": 1 / 7,
        "reward/term/exact": 0.0,
        "reward/term/format": 1.0,
        "accuracy/train": 3 / 7,
    }
    assert credit.metrics == pytest.approx(expected)
    assert credit.dropped == {0: "zero_variance", 1: "zero_variance", 3: "invalid"}


def test_an_empty_step_has_no_credit_and_no_metrics():
    credit = RLOO.advantages([])
    assert (credit.advantage, credit.dropped, credit.metrics) == ({}, {}, {})


def test_running_out_of_turns_counts_as_truncated(member):
    members = (
        member(0, 0, 1.0),
        member(0, 1, 0.0, stop_reason=StopReason.MAX_TURNS),
        member(0, 2, 0.0),
    )
    credit = build_algorithm(RlooConfig(truncated="mask")).advantages(
        [Group(Draw(0, "t", 0, 0), members)]
    )
    assert credit.advantage == {(0, 0): 1.0, (0, 2): -1.0}
