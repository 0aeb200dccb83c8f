"""Algorithms as settings: what contradicts itself is refused, what is recorded loads again."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from posttrain.algo.builder import build_algorithm
from posttrain.config import Recipe
from posttrain.errors import ConfigError
from posttrain.recipe_files import (
    differences,
    load_recipe,
    models_in,
    resolve,
    shipped_recipes,
    to_toml,
)

TYPES = [m.model_fields["type"].default for m in models_in(Recipe.model_fields["algo"].annotation)]
MIXTURE = {
    "type": "mixture",
    "members": {"a": {"type": "reverse"}, "b": {"type": "reverse", "length": 4}},
}
PAIRS = {"type": "pairs", "path": "rows.jsonl"}
ROWS = {"type": "demonstrations", "path": "rows.jsonl"}
GAME = {"type": "binary_search", "turn_reward": 0.5}


def values(algo: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {"name": "t", "env": {"type": "reverse"}, "algo": algo, **sections}


def refusal(algo: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        resolve(values(algo, **sections), [], "t.toml")
    return str(refused.value)


OVERLONG = {"type": "soft_overlong", "max_length": 8, "cache_length": 4}
# What is set, and the object, the fact and the remedy that its refusal names.
IN_ALGO: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (
        {"type": "rloo", "loss": "gspo", "aggregation": "token_mean"},
        ("algo: aggregation is 'token_mean'", "loss 'gspo'", "use 'seq_mean_token_mean'"),
    ),
    (
        {"type": "rloo", "loss": "gmpo", "aggregation": "prompt_mean"},
        ("loss 'gmpo'", "use 'seq_mean_token_mean'"),
    ),
    (
        {"type": "rloo", "corrections": ["tis", "icepop"]},
        ("corrections ['tis', 'icepop']", "by its square", "keep one"),
    ),
    (
        {"type": "rloo", "corrections": ["seq_mis", "opsm", "seq_tis"]},
        ("corrections ['seq_mis', 'seq_tis']", "keep one"),
    ),
    (
        {"type": "rloo", "anchor": "sampler", "corrections": ["tis"]},
        ('anchor = "sampler" already weighs', "['tis']", "leave out the weights"),
    ),
    (
        {"type": "rloo", "loss": "topr", "corrections": ["icepop"]},
        ("loss 'topr' already weighs", "leave out the weights"),
    ),
    ({"type": "vtrace", "corrections": ["tis"]}, ("vtrace already weighs", "leave out")),
    ({"type": "vtrace", "anchor": "sampler"}, ('anchor is "sampler"', 'use anchor = "prox"')),
    ({"type": "vtrace", "loss": "dppo"}, ("loss 'dppo'", "ppo_clip")),
    (
        {"type": "rloo", "kl": {"place": "loss", "estimator": "k1"}},
        ("algo.kl", "k1 in the loss has an expected gradient of 0", 'place = "reward"'),
    ),
    (
        {"type": "rloo", "kl": {"estimator": "k3"}},
        ("algo.kl", "estimator is 'k3' in the reward", 'use estimator = "k1"'),
    ),
    (
        {"type": "rloo", "kl": {"reset_every": 5, "sync_every": 5}},
        ("algo.kl", "both move the reference", "set one"),
    ),
    ({"type": "rloo", "kl": {"horizon": 5}}, ("horizon has no effect without target",)),
    ({"type": "rloo", "kl": {"sync_mix": 0.5}}, ("sync_mix has no effect without sync_every",)),
    (
        {"type": "rloo", "kl": {"only": "top_covariance"}},
        ("only is 'top_covariance' with the KL in the reward", 'use place = "loss"'),
    ),
    ({"type": "rloo", "entropy": {"coef": 0.0}}, ("algo.entropy", "coef is 0", "leave")),
    (
        {"type": "rloo", "aggregation": "fixed_length"},
        ("aggregation is 'fixed_length' and fixed_length is None", "set both"),
    ),
    (
        {"type": "rloo", "fixed_length": 64},
        ("aggregation is None and fixed_length is 64", "or neither"),
    ),
    (
        {"type": "max_rl", "shaping": [OVERLONG]},
        ("max_rl divides by the mean reward", "soft_overlong", "leave the shaping out"),
    ),
    ({"type": "gpg", "zero_variance": "drop"}, ('zero_variance is "drop"', "gpg", "leave it out")),
    ({"type": "gdpo", "shaping": [OVERLONG]}, ("shaping has no effect with gdpo",)),
    ({"type": "grpo", "std": "none", "std_eps": 0.1}, ("std_eps has no effect", 'std = "none"')),
    ({"type": "gae", "length_alpha": 0.05, "lam": 0.9}, ("lam has no effect with length_alpha",)),
    (
        {"type": "distill", "teacher": "x", "beta": 0.1},
        ('beta has no effect without divergence = "jsd"',),
    ),
    (
        {"type": "distill", "teacher": "x", "divergence": "jsd", "coef": 2.0},
        ('coef has no effect with divergence = "jsd"',),
    ),
    ({"type": "distill", "teacher": "x", "shaping": [OVERLONG]}, ("distill, which reads no",)),
    ({"type": "distill"}, ("algo.teacher is missing", "add it")),
    ({"type": "grop"}, ("algo.type is 'grop'", "grpo")),
    ({"type": "rloo", "loss": "gpso"}, ("algo.loss.type is 'gpso'", "gspo")),
    (
        {"type": "rloo", "loss": {"type": "ppo_clip", "clip_hgih": 1.0}},
        ("algo.loss.clip_hgih is unknown", "did you mean algo.loss.clip_high?"),
    ),
    (
        {"type": "rloo", "corrections": [{"type": "tis", "capp": 3.0}]},
        ("algo.corrections.0.capp is unknown", "did you mean algo.corrections.0.cap?"),
    ),
    (
        {"type": "rloo", "corrections": ["icepopp"]},
        ("algo.corrections.0.type is 'icepopp'", "icepop"),
    ),
    (
        {"type": "rloo", "shaping": [{"type": "soft_overlong", "max_length": 4}]},
        ("algo.shaping.0.cache_length is missing",),
    ),
]


@pytest.mark.parametrize(("algo", "parts"), IN_ALGO)
def test_settings_that_contradict_each_other_are_refused(
    algo: dict[str, Any], parts: tuple[str, ...]
) -> None:
    message = refusal(algo)
    for part in ("recipe t.toml: ", *parts):
        assert part in message, message


EQUAL_REWARDS_TEACH = (
    *("reinforce", "remax", "rae", "gdpo", "gigpo", "mt_grpo", "process", "pure_min"),
    *("reinforce_pp", "gae", "turn_ppo", "vtrace"),
)


@pytest.mark.parametrize("kind", EQUAL_REWARDS_TEACH)
def test_a_filter_that_an_estimator_ignores_is_refused(kind: str) -> None:
    assert "zero_variance has no effect here" in refusal({"type": kind, "zero_variance": "keep"})


WITH_OTHERS: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    *(
        (
            {"type": kind},
            {"rollout": {"group_size": 1}},
            ("group_size is 1", f"'{kind}' compares the members", "use 2 or more"),
        )
        for kind in ("rloo", "grpo", "dr_grpo", "opo", "gpg", "max_rl", "pass_at_k", "gdpo")
    ),
    (
        {"type": "preference"},
        {"rollout": {"group_size": 1}},
        ("'preference' compares", "use 2 or more"),
    ),
    (
        {"type": "sft"},
        {},
        ("algo.type 'sft' learns from demonstrations", "[data] is missing", "give the data"),
    ),
    ({"type": "sft"}, {"data": PAIRS}, ("learns from demonstrations", "[data] is pairs")),
    ({"type": "rloo"}, {"data": PAIRS}, ("'rloo' learns from rollouts", "[data] is pairs")),
    ({"type": "raft"}, {"data": ROWS}, ("'raft' learns from rollouts", "demonstrations")),
    ({"type": "preference"}, {"data": ROWS}, ("learns from pairs", "[data] is demonstrations")),
    ({"type": "reward_model"}, {"data": ROWS}, ("learns from pairs",)),
    ({"type": "rloo"}, {"env": None}, ("a recipe needs [env], or [data]",)),
    (
        {"type": "rloo", "kl": {"reset_every": 5}},
        {"model": {"lora": {}}},
        ("algo.kl moves its reference", "model.lora", "leave out reset_every and sync_every"),
    ),
    (
        {"type": "rloo", "num_minibatches": 3},
        {"rollout": {"groups_per_step": 8}},
        ("groups_per_step 8 does not divide by algo.num_minibatches 3", "change one"),
    ),
    (
        {"type": "sft"},
        {"data": ROWS, "rollout": {"refill": True}},
        ("rollout.refill has no effect with [data]", "leave it out"),
    ),
    ({"type": "rloo"}, {"rollout": {"max_refill": 2.0}}, ("max_refill has no effect",)),
    (
        {"type": "rloo"},
        {"algo_for": {"a": {"type": "rloo"}}},
        ("algo_for names 'a', which is no member of an environment mixture",),
    ),
]
# Algorithms of a mixture's members, and of "b" apart.
OF_MEMBERS: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ({"type": "rloo"}, {"type": "rloo", "num_epochs": 2}, ("algo_for.b.num_epochs is 2", "alike")),
    (
        {"type": "rloo"},
        {"type": "rloo", "num_minibatches": 2},
        ("algo_for.b.num_minibatches is 2 and algo.num_minibatches is 1", "alike"),
    ),
    (
        {"type": "gae"},
        {"type": "gae", "critic": {"lr": 1.0}},
        ("algo.critic and algo_for.b.critic differ", "set them alike"),
    ),
    (
        {"type": "distill", "teacher": "y"},
        {"type": "distill", "teacher": "x"},
        ("algo.teacher and algo_for.b.teacher differ", "a run has one teacher"),
    ),
    (
        {"type": "distill", "teacher": "x", "divergence": "jsd"},
        {"type": "distill", "teacher": "x", "divergence": "reverse_kl"},
        ("jsd and reverse_kl", "one divergence", "set divergence and beta alike"),
    ),
    (
        {"type": "distill", "teacher": "x", "divergence": "jsd"},
        {"type": "distill", "teacher": "x", "divergence": "jsd", "beta": 0.1},
        ("one divergence", "set divergence and beta alike"),
    ),
    (
        {"type": "rloo"},
        {"type": "rloo", "kl": {"sync_every": 5}},
        ("algo_for.b.kl moves the run's one reference", "set it in algo.kl"),
    ),
    ({"type": "rloo"}, {"type": "sft"}, ("algo_for.b.type 'sft' learns from demonstrations",)),
    ({"type": "rloo"}, {"type": "reward_model"}, ("algo_for.b.type is 'reward_model'", "own")),
    ({"type": "reward_model"}, {"type": "rloo"}, ("algo.type is 'reward_model'", "own")),
    ({"type": "rloo"}, {"type": "grpo", "sdt": "none"}, ("algo_for.b.sdt", "algo_for.b.std?")),
    ({"type": "rloo"}, {"type": "gropo"}, ("algo_for.b.type is 'gropo'", "grpo")),
    ({"type": "rloo"}, {"loss": "gspo"}, ("algo_for.b has no type", "set algo_for.b.type")),
]


@pytest.mark.parametrize(("algo", "sections", "parts"), WITH_OTHERS)
def test_an_algorithm_without_what_it_reads_is_refused(
    algo: dict[str, Any], sections: dict[str, Any], parts: tuple[str, ...]
) -> None:
    message = refusal(algo, **sections)
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(("algo", "own", "parts"), OF_MEMBERS)
def test_algorithms_of_members_that_do_not_fit_together_are_refused(
    algo: dict[str, Any], own: dict[str, Any], parts: tuple[str, ...]
) -> None:
    message = refusal(algo, env=MIXTURE, algo_for={"b": own})
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize("own", [{"type": "gae"}, {"type": "distill", "teacher": "x"}])
def test_one_member_alone_may_have_a_critic_or_a_teacher(own: dict[str, Any]) -> None:
    resolve(values({"type": "rloo"}, env=MIXTURE, algo_for={"b": own}), [], "t")


NEVER_READ: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ({"type": "rloo", "loss": "topr", "anchor": "sampler"}, {}, ("anchor has no effect", "topr")),
    ({"type": "rloo", "loss": "gpg", "anchor": "sampler"}, {}, ("anchor has no effect", "gpg")),
    ({"type": "max_rl", "shaping": ["kimi_length"]}, {}, ("shaping kimi_length", "negative")),
    (
        {"type": "gae", "truncated": "mask", "critic": {"bootstrap_truncated": True}},
        {},
        ("bootstrap_truncated has no effect",),
    ),
    (
        {"type": "distill", "teacher": "x", "divergence": "jsd", "hindsight_coef": 1.0},
        {},
        ("hindsight_coef has no effect",),
    ),
    ({"type": "raft", "normalise": True}, {}, ("token_mean", "seq_mean_token_mean")),
    ({"type": "gae"}, {"rollout": {"refill": True}}, ("refill", "uses every group")),
]


@pytest.mark.parametrize(("algo", "sections", "parts"), NEVER_READ)
def test_a_setting_that_nothing_reads_is_refused(
    algo: dict[str, Any], sections: dict[str, Any], parts: tuple[str, ...]
) -> None:
    message = refusal(algo, **sections)
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("rollout", "group_size", 4),
        ("rollout", "max_turns", 2),
        ("sampler", "max_tokens", 9),
        ("sampler", "temperature", 0.5),
        ("eval", "temperature", 0.7),
    ],
)
def test_given_rows_alone_refuse_what_only_episodes_read(
    section: str, key: str, value: float
) -> None:
    recipe = {
        "name": "t",
        "data": {"type": "pairs", "path": "p.jsonl"},
        "algo": {"type": "preference"},
        section: {key: value},
    }
    with pytest.raises(ConfigError, match=f"{key} has no effect"):
        resolve(recipe, [], "t")


def test_members_of_a_mixture_have_errors_with_their_place() -> None:
    wrong = {**MIXTURE, "members": {"a": {"type": "reverse", "lenght": 3}, "b": MIXTURE}}
    message = refusal({"type": "rloo"}, env=wrong)
    assert "env.members.a.lenght is unknown; did you mean env.members.a.length?" in message
    assert "env.members.b.type is 'mixture'; use one of" in message


def test_a_game_in_a_mixture_needs_its_turns_too() -> None:
    mixed = {"type": "mixture", "members": {"a": {"type": "reverse"}, "g": GAME}}
    assert "max_turns 1 is below env.max_guesses 3" in refusal({"type": "rloo"}, env=mixed)


@pytest.mark.parametrize("kind", ["reinforce", "remax", "rae", "gae", "raft", "reinforce_pp"])
def test_what_is_defined_for_one_answer_takes_groups_of_one(kind: str) -> None:
    resolve(values({"type": kind}, rollout={"group_size": 1}), [], "t")


# --- what is recorded loads again -----------------------------------------------------------------


def defaults(kind: str) -> dict[str, Any]:
    algo = {"type": kind, **({"teacher": "x"} if kind == "distill" else {})}
    data = {"sft": ROWS, "reward_model": PAIRS}.get(kind)
    return values(algo, data=data) if data else values(algo)


def check_round_trip(recipe: Recipe) -> None:
    from_file = resolve(tomllib.loads(to_toml(recipe)), [], "recipe.resolved.toml")
    assert from_file == recipe and to_toml(from_file) == to_toml(recipe)
    recorded = json.loads(json.dumps(recipe.model_dump(mode="json")))
    from_journal = resolve(recorded, [], "of the run")
    assert from_journal == recipe
    assert differences(recorded, from_journal.model_dump(mode="json")) == {}


@pytest.mark.parametrize("kind", TYPES)
def test_every_algorithm_with_its_defaults_is_recorded_and_loads_again(kind: str) -> None:
    recipe = resolve(defaults(kind), [], "t")
    check_round_trip(recipe)
    build_algorithm(recipe.algo)


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_is_recorded_and_loads_again(name: str) -> None:
    recipe, _ = load_recipe(name)
    check_round_trip(recipe)
    build_algorithm(recipe.algo, recipe.algo_for)


FULL: dict[str, Any] = {
    "type": "grpo",
    "loss": {"type": "ppo_clip", "dual_clip": 4.0},
    "corrections": ["tis", {"type": "geometric_mask", "low": 0.9}, "m2po"],
    "kl": {"place": "loss", "estimator": "k2", "target": 0.1, "sync_every": 3, "sync_mix": 0.5},
    "entropy": {"coef": 0.01, "target": 0.5},
    "shaping": [OVERLONG, "kimi_length"],
    "aggregation": "fixed_length",
    "fixed_length": 64,
}


def test_every_optional_setting_is_recorded_and_loads_again() -> None:
    check_round_trip(resolve(values(FULL), [], "t"))
    still = {**FULL, "kl": {"target": 0.1}}
    check_round_trip(resolve(values(FULL, env=MIXTURE, algo_for={"b": still}), [], "t"))


def test_no_corrections_at_all_is_not_the_default_ones() -> None:
    """An empty list is a choice, and is recorded as one."""
    none = resolve(values({"type": "rloo", "corrections": []}), [], "t")
    assert none.algo.corrections == () and none.algo != resolve(values({"type": "rloo"}), [], "t")
    check_round_trip(none)


def test_a_name_is_short_for_a_section_with_its_defaults() -> None:
    short = resolve(values({"type": "rloo", "loss": "gspo", "corrections": ["m2po"]}), [], "t")
    algo = {"type": "rloo", "loss": {"type": "gspo"}, "corrections": [{"type": "m2po"}]}
    assert short == resolve(values(algo), [], "t")


def test_overrides_reach_into_losses_and_members() -> None:
    recipe = resolve(
        values({"type": "grpo"}, env=MIXTURE, algo_for={"b": {"type": "grpo"}}),
        ["algo.loss.clip_low=0.1", "algo_for.b.std=none", "env.members.a.length=5", "algo.kl=none"],
        "t",
    )
    assert (recipe.algo.loss.clip_low, recipe.algo.kl) == (0.1, None)  # type: ignore[union-attr]
    assert recipe.algo_for["b"].std == "none"  # type: ignore[union-attr]
    assert recipe.env.members["a"].length == 5  # type: ignore[union-attr]


def test_files_of_data_and_of_members_are_recorded_with_their_folder(tmp_path: Path) -> None:
    """A run is evaluated and replayed from wherever its user happens to be."""
    for name in ("rows.jsonl", "task.jsonl", "reward.py", "own.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "given.toml").write_text(
        '[data]\ntype = "pairs"\npath = "rows.jsonl"\neval_path = "rows.jsonl"\n'
        '[algo]\ntype = "preference"\n'
    )
    data = load_recipe(str(tmp_path / "given.toml"))[0].data
    assert data is not None and data.path == data.eval_path == str(tmp_path / "rows.jsonl")
    (tmp_path / "mixed.toml").write_text(
        '[env]\ntype = "mixture"\n[env.members.d]\ntype = "dataset"\npath = "task.jsonl"\n'
        'reward = "reward.py:f"\n[env.members.p]\ntype = "python"\ntarget = "own.py:Env"\n'
    )
    members = load_recipe(str(tmp_path / "mixed.toml"))[0].env.members  # type: ignore[union-attr]
    assert members["d"].path == str(tmp_path / "task.jsonl")
    assert members["d"].reward == f"{tmp_path / 'reward.py'}:f"
    assert members["p"].target == f"{tmp_path / 'own.py'}:Env"
