"""Credit: which trajectories train, with which advantage, and what is reported of the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from posttrain.algo.builder import build_algorithm
from posttrain.algo.credit import Credit, TurnWeights
from posttrain.config import (
    GrpoConfig,
    PreferenceConfig,
    RaftConfig,
    RewardModelConfig,
    RlooConfig,
    SftConfig,
)
from posttrain.config.estimators import DrGrpoConfig, RaeConfig, ReinforcePpConfig, RemaxConfig
from posttrain.config.objectives import KtoConfig
from posttrain.config.regularisers import KlConfig
from posttrain.data.samples import build_batch
from posttrain.errors import ConfigError
from posttrain.types import Draw, Group, RewardTerm, Scored, StopReason

RLOO = build_algorithm(RlooConfig())


def advantages(credit: Credit) -> dict[tuple[int, int], float]:
    """The one weight of each trajectory in the policy's stream."""
    found = {}
    for key, streams in credit.streams.items():
        (found[key],) = streams["policy"].per_turn
        assert set(streams) == {"policy"} and streams["policy"].placed == "tokens"
    return found


def test_an_invalid_member_leaves_the_statistics_and_gets_no_sample(group):
    """Report c21: a reward that raises on one of eight leaves seven, with statistics of seven."""
    rewards = [1.0, 0.0, 0.0, None, 1.0, 0.0, 0.0, 0.0]
    credit = RLOO.credit([group(5, rewards)])
    assert (5, 3) not in advantages(credit)
    assert len(advantages(credit)) == 7
    assert advantages(credit)[5, 0] == pytest.approx(1 - 1 / 6)
    assert advantages(credit)[5, 1] == pytest.approx(-2 / 6)
    assert credit.metrics["reward/mean"] == pytest.approx(2 / 7)
    assert credit.metrics["trajectories/invalid_frac"] == pytest.approx(1 / 8)


def test_a_group_with_too_few_survivors_is_dropped_as_invalid(group):
    credit = RLOO.credit([group(0, [1.0, 0.0, 1.0, *[None] * 5]), group(1, [1.0, None])])
    assert advantages(credit) == {}
    assert credit.dropped == {0: "invalid", 1: "invalid"}
    assert credit.metrics["groups/invalid_frac"] == 1.0


def test_when_nothing_is_valid_no_mean_is_invented(group):
    credit = RLOO.credit([group(0, [None, None])])
    assert credit.dropped == {0: "invalid"}
    assert not [name for name in credit.metrics if name.startswith(("reward/", "response/"))]
    assert "accuracy/train" not in credit.metrics
    assert credit.metrics["trajectories/invalid_frac"] == 1.0


def test_zero_variance_is_dropped_or_kept_with_exactly_zero(group):
    groups = [group(0, [0.1, 0.1, 0.1]), group(1, [1.0, 0.0, 0.0])]
    dropped = RLOO.credit(groups)
    assert dropped.dropped == {0: "zero_variance"}
    assert {key[0] for key in advantages(dropped)} == {1}
    kept = build_algorithm(RlooConfig(zero_variance="keep")).credit(groups)
    assert kept.dropped == {}
    assert [advantages(kept)[0, i] for i in range(3)] == [0.0, 0.0, 0.0]
    assert {k: v for k, v in advantages(kept).items() if k[0] == 1} == advantages(dropped)
    assert kept.metrics == dropped.metrics


def test_reward_noise_counts_as_zero_variance_for_every_algorithm(group):
    groups = [group(0, [0.3, 0.3 + 1e-8, 0.3])]
    configs = [RlooConfig(zero_variance="keep")]
    configs += [GrpoConfig(std=std, zero_variance="keep") for std in ("group", "batch", "none")]
    for config in configs:
        assert set(advantages(build_algorithm(config).credit(groups)).values()) == {0.0}


def test_masked_truncation_leaves_baseline_and_loss(group):
    groups = [group(0, [1.0, 0.0, 0.0, 1.0], truncated=[1]), group(1, [1.0, 0.0], truncated=[0, 1])]
    credit = build_algorithm(RlooConfig(truncated="mask")).credit(groups)
    assert (0, 1) not in advantages(credit)
    assert advantages(credit)[0, 2] == pytest.approx(-1.0)
    assert credit.dropped == {1: "all_truncated"}
    scored = RLOO.credit(groups)
    assert advantages(scored)[0, 2] == pytest.approx(-2 / 3)
    assert scored.dropped == {}
    assert credit.metrics["response/truncated_frac"] == pytest.approx(0.5)


def test_a_survivor_that_masking_left_alone_teaches_nothing(group):
    groups = [group(0, [1.0, 0.0], truncated=[1])]
    dropped = build_algorithm(RlooConfig(truncated="mask")).credit(groups)
    assert dropped.dropped == {0: "zero_variance"}
    keep = RlooConfig(truncated="mask", zero_variance="keep")
    assert advantages(build_algorithm(keep).credit(groups)) == {(0, 0): 0.0}


def test_groups_are_told_apart_by_draw_and_never_by_task_or_place(group):
    """Report l06: the same task drawn twice, and two tasks with one id, are separate groups."""
    groups = [group(4, [1.0, 0.0], task_id="7"), group(9, [5.0, 3.0], task_id="7")]
    forward = RLOO.credit(groups)
    assert advantages(forward) == {(4, 0): 1.0, (4, 1): -1.0, (9, 0): 2.0, (9, 1): -2.0}
    assert advantages(RLOO.credit(groups[::-1])) == advantages(forward)
    shuffled = Group(groups[1].draw, groups[1].trajectories[::-1])
    assert advantages(RLOO.credit([shuffled, groups[0]])) == advantages(forward)


def test_a_draw_or_a_member_given_twice_is_refused(group, member):
    with pytest.raises(ValueError, match="draw 3 comes twice"):
        RLOO.credit([group(3, [1.0, 0.0]), group(3, [1.0, 0.0])])
    twins = Group(Draw(3, "t", 0, 0), (member(3, 0, 1.0), member(3, 0, 0.0)))
    with pytest.raises(ValueError, match="number the members apart"):
        RLOO.credit([twins])


@pytest.mark.parametrize(
    "config", [RlooConfig(), *(GrpoConfig(std=std) for std in ("group", "batch", "none"))]
)
def test_rewards_shifted_by_ten_train_the_same(config, group):
    algorithm = build_algorithm(config)
    rewards = {0: [1.0, 0.0, 0.5, None], 1: [1.0, 1.0, 1.0, 1.0], 2: [0.25, 0.0, 0.0, 1.0]}
    plain = algorithm.credit([group(i, r) for i, r in rewards.items()])
    shifted = algorithm.credit(
        [group(i, [x if x is None else x + 10 for x in r]) for i, r in rewards.items()]
    )
    assert advantages(shifted) == advantages(plain)
    assert shifted.dropped == plain.dropped


def test_batch_std_does_not_depend_on_whether_flat_groups_train(group):
    groups = [group(0, [1.0, 0.0]), group(1, [3.0, 3.0])]
    drop = build_algorithm(GrpoConfig(std="batch")).credit(groups)
    keep = build_algorithm(GrpoConfig(std="batch", zero_variance="keep")).credit(groups)
    assert advantages(drop)[0, 0] == advantages(keep)[0, 0]


def test_metrics_describe_all_groups_before_anything_is_dropped(group):
    shaped = Scored(0.5, (RewardTerm("exact", 0.0), RewardTerm("format", 1.0)), correct=False)
    unparsed = Scored(0.0, (RewardTerm("exact", 0.0),), parsed=False)
    groups = [
        group(0, [1.0, 1.0], lengths=[2, 4]),
        group(1, [0.0, 0.0], lengths=[6, 8], truncated=[0]),
        group(2, [shaped, unparsed], lengths=[10, 12]),
        group(3, [None, 1.0], lengths=[1, 14]),
    ]
    credit = RLOO.credit(groups)
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
    credit = RLOO.credit([])
    assert (advantages(credit), credit.dropped, credit.metrics) == ({}, {}, {})


def test_running_out_of_turns_counts_as_truncated(member):
    members = (
        member(0, 0, 1.0),
        member(0, 1, 0.0, stop_reason=StopReason.MAX_TURNS),
        member(0, 2, 0.0),
    )
    credit = build_algorithm(RlooConfig(truncated="mask")).credit(
        [Group(Draw(0, "t", 0, 0), members)]
    )
    assert advantages(credit) == {(0, 0): 1.0, (0, 2): -1.0}


# --- roles, other streams and other rules ---------------------------------------------------------


def with_role(group: Group, role: str, *indices: int) -> Group:
    members = [replace(t, role=role) if t.sample_index in indices else t for t in group]
    return Group(group.draw, tuple(members))


def in_stream(credit: Credit, stream: str) -> dict[tuple[int, int], tuple[float, ...]]:
    return {k: own[stream].per_turn for k, own in credit.streams.items() if stream in own}


def test_a_greedy_member_is_compared_with_and_neither_counted_nor_trained(group):
    """Three siblings and a greedy answer, with which ReMax compares and RLOO does not."""
    groups = [with_role(group(0, [1.0, 0.0, 0.0, 0.5]), "greedy", 3)]
    assert advantages(RLOO.credit(groups)) == {(0, 0): 1.0, (0, 1): -0.5, (0, 2): -0.5}
    remax = build_algorithm(RemaxConfig()).credit(groups)
    assert advantages(remax) == {(0, 0): 0.5, (0, 1): -0.5, (0, 2): -0.5}
    assert remax.metrics["reward/mean"] == pytest.approx(1 / 3)


def test_without_a_scored_greedy_answer_a_comparison_with_it_is_invalid(group):
    credit = build_algorithm(RemaxConfig()).credit(
        [with_role(group(0, [1.0, 0.0, None]), "greedy", 2)]
    )
    assert (credit.streams, credit.dropped) == ({}, {0: "invalid"})


def test_a_hindsight_member_is_imitated_and_no_sibling(group):
    groups = [with_role(group(0, [1.0, 0.0, 1.0]), "hindsight", 2)]
    credit = build_algorithm(RlooConfig(hindsight_coef=0.1)).credit(groups)
    assert in_stream(credit, "policy") == {(0, 0): (1.0,), (0, 1): (-1.0,)}
    assert in_stream(credit, "hindsight") == {(0, 2): (1.0,)}
    assert (0, 2) not in RLOO.credit(groups).streams


def test_correct_members_alone_are_imitated_beside_the_policy_gradient(group):
    shaped = Scored(2.0, correct=False)
    credit = build_algorithm(RlooConfig(positive_nll_coef=0.1)).credit(
        [group(0, [1.0, 0.0, shaped])]
    )
    assert set(in_stream(credit, "policy")) == {(0, 0), (0, 1), (0, 2)}
    assert in_stream(credit, "imitation") == {(0, 0): (1.0,)}


def test_moving_baselines_are_kept_by_environment_and_role(group):
    """A win as first player says nothing of what a second player can expect."""
    algorithm, memory = build_algorithm(RaeConfig(decay=0.5)), {}
    game = Draw(0, "t", 0, 0, environment="chess")
    members = with_role(with_role(group(0, [1.0, -1.0]), "first", 0), "second", 1).trajectories
    assert advantages(algorithm.credit([Group(game, members)], memory)) == {(0, 0): 1, (0, 1): -1}
    assert memory == {"baseline/chess/first": 0.5, "baseline/chess/second": -0.5}
    other = Group(replace(game, environment="go"), members)
    assert advantages(algorithm.credit([other], memory)) == {(0, 0): 1, (0, 1): -1}
    assert advantages(algorithm.credit([Group(game, members)], memory)) == {
        (0, 0): 0.5,
        (0, 1): -0.5,
    }


def test_rewards_arrive_at_the_turns_that_earned_them(member):
    """A token-level estimator gets rewards, not advantages: each turn's own, the outcome last."""
    single = member(0, 0, 1.0, length=2)
    turn, (sequence,) = single.turns[0], single.sequences
    twice = replace(
        single,
        turns=(replace(turn, reward=0.25), replace(turn, reward=-0.5)),
        sequences=(sequence, sequence),
    )
    credit = build_algorithm(ReinforcePpConfig()).credit([Group(Draw(0, "t", 0, 0), (twice,))])
    assert credit.streams[0, 0]["policy"] == TurnWeights((0.25, 0.5), "turn_ends")


def test_turn_rewards_that_an_estimator_would_not_read_are_refused(member):
    """They would be lost without a word."""
    members = [member(0, i, float(i)) for i in range(2)]
    paid = replace(members[0], turns=(replace(members[0].turns[0], reward=0.5),))
    with pytest.raises(ConfigError, match="reads the outcome alone; use one that reads them"):
        RLOO.credit([Group(Draw(0, "t", 0, 0), (paid, members[1]))])


@pytest.mark.parametrize("config", [RaftConfig(), PreferenceConfig()])
def test_turn_rewards_are_not_lost_on_imitation_and_preferences_either(config, member):
    members = [member(0, i, float(i)) for i in range(2)]
    paid = replace(members[0], turns=(replace(members[0].turns[0], reward=0.5),))
    with pytest.raises(ConfigError, match="reads the outcome alone"):
        build_algorithm(config).credit([Group(Draw(0, "t", 0, 0), (paid, members[1]))])


def test_with_kl_in_the_reward_a_group_of_equal_rewards_still_trains(group):
    """Its members differ in their KL: else nothing would pull back once all tasks are solved."""
    with_kl = build_algorithm(RlooConfig(kl=KlConfig()))
    assert advantages(with_kl.credit([group(0, [1.0, 1.0])])) == {(0, 0): 0.0, (0, 1): 0.0}
    in_loss = build_algorithm(RlooConfig(kl=KlConfig(place="loss", estimator="k2")))
    assert in_loss.credit([group(0, [1.0, 1.0])]).dropped == {0: "zero_variance"}


def test_correct_members_of_a_flat_group_are_imitated_although_it_has_no_advantage(group):
    credit = build_algorithm(RlooConfig(positive_nll_coef=0.1)).credit(
        [group(0, [1.0, 1.0]), group(1, [0.0, 0.0])]
    )
    assert in_stream(credit, "imitation") == {(0, 0): (1.0,), (0, 1): (1.0,)}
    assert in_stream(credit, "policy") == {}
    assert credit.dropped == {1: "zero_variance"}


def test_a_reward_model_reads_a_forked_trajectory_once(member):
    """The score is that of the trajectory's last token, not one for each sequence of it."""
    chosen, rejected = member(0, 0, 1.0, length=2), member(0, 1, 0.0, length=2)
    (turn,), (sequence,) = chosen.turns, chosen.sequences
    forked = replace(chosen, turns=(turn, turn), sequences=(sequence, sequence))
    batch = build_batch(
        1, [Group(Draw(0, "t", 0, 0), (forked, rejected))], build_algorithm(RewardModelConfig())
    )
    assert [(s.sample_index, s.num_loss_tokens) for s in batch.samples] == [(0, 1), (1, 1)]


def test_everything_valid_is_imitated_and_nothing_else(group):
    credit = build_algorithm(SftConfig()).credit([group(0, [1.0, None]), group(1, [None])])
    assert in_stream(credit, "imitation") == {(0, 0): (1.0,)}
    assert credit.dropped == {1: "unscored"}


def test_expert_iteration_imitates_what_reached_the_threshold(group):
    groups = [group(0, [1.0, 0.4, 0.6], lengths=[1, 2, 3]), group(1, [0.0, 0.0])]
    credit = build_algorithm(RaftConfig(threshold=0.5)).credit(groups)
    assert in_stream(credit, "imitation") == {(0, 0): (1.0,), (0, 2): (1.0,)}
    assert credit.dropped == {1: "rejected"}


def test_a_pair_is_the_first_best_and_the_first_worst_of_a_group(group):
    groups = [group(0, [0.5, 1.0, 0.0, 1.0, 0.0, None]), group(1, [1.0, 1.0]), group(2, [None])]
    credit = build_algorithm(PreferenceConfig()).credit(groups)
    assert in_stream(credit, "preference") == {(0, 1): (1.0,), (0, 2): (-1.0,)}
    assert credit.dropped == {1: "no_pair", 2: "unscored"}


def test_single_answers_are_wanted_when_they_are_correct(group):
    credit = build_algorithm(PreferenceConfig(loss=KtoConfig())).credit(
        [group(0, [1.0, 0.9, None]), group(1, [1.0, 1.0])]
    )
    expected = {(0, 0): (1.0,), (0, 1): (-1.0,), (1, 0): (1.0,), (1, 1): (1.0,)}
    assert in_stream(credit, "preference") == expected


def test_each_environment_has_its_own_algorithm_and_others_the_common_one(group):
    groups = [group(d, [1.0, 0.0, 0.0]) for d in range(3)]
    named = [
        Group(replace(g.draw, environment=e), g.trajectories)
        for g, e in zip(groups, ("a", "b", "c"), strict=True)
    ]
    credit = build_algorithm(RlooConfig(), {"b": DrGrpoConfig()}).credit(named)
    of_b = {key: weights[0] for key, weights in in_stream(credit, "policy@b").items()}
    assert of_b == pytest.approx({(1, 0): 2 / 3, (1, 1): -1 / 3, (1, 2): -1 / 3})
    assert in_stream(credit, "policy")[2, 0] == (1.0,)
    assert {key[0] for key in in_stream(credit, "policy")} == {0, 2}
