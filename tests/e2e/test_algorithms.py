"""Every algorithm in whole runs: two steps and an exact redo, and what it remembers over a kill."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from posttrain.build import build_trainable
from posttrain.config import Recipe
from posttrain.errors import ConfigError, DataError, RunDirectoryError
from posttrain.journal import Journal
from posttrain.recipe_files import load_recipe, models_in
from posttrain.replay import rebuild, verify, what_if
from posttrain.run import train
from posttrain.telemetry.observer import SilentObserver

LEARNER = "posttrain.training.learner:InlineLearner"
JOURNAL = "posttrain.journal:Journal"
TYPES = [m.model_fields["type"].default for m in models_in(Recipe.model_fields["algo"].annotation)]
LOSSES = (
    *("ppo_clip", "gspo", "gspo_token", "cispo", "sapo", "topr", "gmpo", "dppo", "gpg"),
    *("is_reinforce", "aspo", "vespo", "kimi"),
)
CORRECTIONS = (
    *("tis", "icepop", "token_mask", "seq_tis", "seq_mis", "seq_mask", "geometric_mask"),
    *("k3_mask", "opsm", "m2po", "clip_cov", "top_entropy"),
)
PREFERENCES = (
    *("dpo", "robust_dpo", "ipo", "hinge", "simpo", "cpo", "orpo", "apo_zero", "apo_down", "kto"),
)

# The share of letters in what was written: an untrained model gets all kinds of rewards for it.
ENVIRONMENT = """
from posttrain.data.tasks import TaskList, make_task, user_prompt
from posttrain.types import Message, Observation, Scored, StepOutcome


def task(name):
    return make_task(name, user_prompt(None, name), {}, grader="letters")


class Letters:
    name = "letters"

    def __init__(self, turns=1, turn_reward=0.0):
        self.turns, self.turn_reward = turns, turn_reward

    def train_tasks(self):
        return TaskList(task(name) for name in "abcdefgh")

    def eval_tasks(self):
        return TaskList(task(name) for name in "xyz")

    def make(self, task):
        return Episode(task, self)

    def reward(self):
        return None


class Relabelled(Letters):
    def relabel(self, failed, turns):
        return task(f"solved-{len(turns[-1].completion.text)}")


class Episode:
    def __init__(self, task, spec):
        self.task, self.spec, self.shares = task, spec, []

    async def reset(self, seed):
        return Observation(self.task.prompt)

    async def step(self, turn):
        text = turn.completion.text
        self.shares.append(sum(c.isalpha() for c in text) / max(len(text), 1))
        value = sum(self.shares) / len(self.shares)
        over = len(self.shares) == self.spec.turns
        return StepOutcome(
            None if over else Observation((Message.text("user", "go"),)),
            terminated=over,
            verdict=Scored(value, correct=value >= 0.75),
            reward=self.spec.turn_reward * self.shares[-1],
        )

    async def close(self):
        pass
"""
Write = Callable[..., Path]


def python_env(name: str = "Letters", **params: Any) -> dict[str, Any]:
    return {"type": "python", "target": f"letters.py:{name}", "params": params}


def merged(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`more` over `values`, section by section; an environment is replaced as a whole."""
    whole = {"env", "algo_for", "data"}
    mixed = {
        k: {**values[k], **more[k]}
        for k in values.keys() & more.keys() - whole
        if isinstance(more[k], dict)
    }
    return {**values, **more, **mixed}


@pytest.fixture
def write(tmp_path: Path, model_cache: Path, sharp_folder: Path) -> Write:
    """Write a recipe beside its environment and its rows: write({"type": "rloo"}, num_steps=3)."""
    (tmp_path / "letters.py").write_text(ENVIRONMENT)
    rows = [
        {"prompt": f"{a}{b}", "completion": f"{b}{a}", "chosen": f"{b}{a}", "rejected": f"{a}!"}
        for a in "abcd"
        for b in "efgh"
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def build(algo: dict[str, Any], name: str = "r", **sections: Any) -> Path:
        values: dict[str, Any] = {
            "name": name,
            "threads": 1,
            "num_steps": 2,
            "model": {"path": "tiny-char", "dtype": "float32"},
            "rollout": {"groups_per_step": 2, "group_size": 3},
            "sampler": {"max_tokens": 4},
            "algo": algo,
            "optim": {"lr": 1e-3},
            "eval": {"before": False, "after": False},
            "checkpoint": {"every": 1, "keep": 1},
        }
        if algo["type"] == "distill":
            algo.setdefault("teacher", str(sharp_folder))
        given = {"sft": "demonstrations", "reward_model": "pairs"}.get(algo["type"])
        if given:
            values["data"] = {"type": given, "path": "rows.jsonl"}
        elif "data" not in sections:
            values["env"] = python_env()
        path = tmp_path / f"{name}.toml"
        whole = {k: v for k, v in merged(values, sections).items() if v is not None}
        if "data" in whole:  # rows are given: no group is sampled, and alone nothing is generated
            del whole["rollout"]["group_size"]
            if "env" not in whole:
                del whole["sampler"]
        path.write_text(tomli_w.dumps(whole))
        return path

    return build


@pytest.fixture(autouse=True)
def _threads_stay() -> Any:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def run(path: Path, run_dir: Path, resume: bool = False) -> dict[str, Any]:
    recipe, base_dir = load_recipe(str(path))
    return asyncio.run(train(recipe, base_dir, run_dir, resume=resume, observer=SilentObserver()))


def check_exact(path: Path, run_dir: Path) -> dict[str, Any]:
    """Train, then redo every step from the initial model; something must have moved."""
    summary = run(path, run_dir)
    report = verify(run_dir, SilentObserver())
    assert report["weights_hash"] == summary["weights_hash"]
    with Journal.open(run_dir, readonly=True) as journal:
        hashes = [e.payload["weights_hash"] for e in journal.events("initial_weights")]
        assert hashes != [summary["weights_hash"]], "nothing was trained"
        assert all(step.skipped is None for step in journal.steps())
    return summary


@pytest.mark.parametrize("kind", TYPES)
def test_every_algorithm_trains_with_its_defaults_and_its_redo_is_exact(
    kind: str, write: Write, tmp_path: Path
) -> None:
    summary = check_exact(write({"type": kind}), tmp_path / "run")
    assert summary["steps"] == 2 and summary["draws"]["open"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_every_policy_loss_trains_over_minibatches_and_epochs(
    loss: str, write: Write, tmp_path: Path
) -> None:
    algo = {"type": "rloo", "loss": loss, "num_minibatches": 2, "num_epochs": 2}
    check_exact(write(algo, rollout={"group_size": 4}), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_correction_trains_with_a_lag(correction: str, write: Write, tmp_path: Path) -> None:
    algo = {"type": "rloo", "corrections": [correction]}
    check_exact(write(algo, max_policy_lag=1, num_steps=3), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("loss", PREFERENCES)
@pytest.mark.parametrize("given", [True, False])
def test_every_preference_loss_trains_on_given_and_on_sampled_answers(
    loss: str, given: bool, write: Write, tmp_path: Path
) -> None:
    sections = {"data": {"type": "pairs", "path": "rows.jsonl"}} if given else {}
    check_exact(write({"type": "preference", "loss": loss}, **sections), tmp_path / "run")


TURNS = ("mt_grpo", "process", "pure_min", "gae", "reinforce_pp", "vtrace")


@pytest.mark.parametrize("kind", ["gigpo", "turn_ppo"])
def test_credit_by_turns_reads_what_the_environment_gives_for_turns(
    kind: str, write: Write, tmp_path: Path
) -> None:
    check_exact(
        write(
            {"type": kind},
            env=python_env(turns=2, turn_reward=0.5),
            rollout={"max_turns": 2},
        ),
        tmp_path / "run",
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", TURNS)
def test_every_algorithm_of_turns_takes_turn_rewards(
    kind: str, write: Write, tmp_path: Path
) -> None:
    env = python_env(turns=2, turn_reward=0.5)
    check_exact(write({"type": kind}, env=env, rollout={"max_turns": 2}), tmp_path / "run")


TWO_KINDS = {
    "type": "mixture",
    "members": {"one": python_env(), "turns": python_env(turns=2, turn_reward=0.5)},
}
DISTILL = {"type": "distill", "divergence": "jsd"}
LORA = {"lora": {"rank": 2, "alpha": 4}}
TOGETHER: dict[str, dict[str, Any]] = {
    "a critic for one member only": {
        "algo": {"type": "gae"},
        "env": TWO_KINDS,
        "algo_for": {"one": {"type": "rloo"}},
    },
    "one critic for two estimators": {
        "algo": {"type": "gae"},
        "env": TWO_KINDS,
        "algo_for": {"turns": {"type": "turn_ppo"}},
    },
    "distillation beside expert iteration": {
        "algo": DISTILL,
        "env": {
            "type": "mixture",
            "members": {"one": python_env(), "turns": python_env(turns=2)},
        },
        "algo_for": {"one": {"type": "raft"}},
    },
    "pairs beside turns": {
        "algo": {"type": "mt_grpo"},
        "env": TWO_KINDS,
        "algo_for": {"one": {"type": "preference"}},
    },
    "an adapter and a critic's own trunk": {
        "algo": {"type": "gae", "critic": {"trunk": "own"}},
        "model": LORA,
    },
    "an adapter and a reward model": {
        "algo": {"type": "reward_model"},
        "model": LORA,
        "rollout": {"groups_per_step": 2},
    },
    "an adapter and given pairs": {
        "algo": {"type": "preference"},
        "model": LORA,
        "data": {"type": "pairs", "path": "rows.jsonl"},
        "rollout": {"groups_per_step": 2},
    },
    "an adapter and distributions": {"algo": DISTILL, "model": LORA},
    "a reward model of sampled groups": {
        "algo": {"type": "reward_model"},
        "env": python_env(),
        "data": None,
    },
    "micro-batches of one row": {
        "algo": {"type": "gae", "num_minibatches": 2, "num_epochs": 2},
        "learner": {"max_tokens_per_microbatch": 1},
    },
    "selected tokens with KL": {
        "algo": {
            "type": "grpo",
            "kl": {"place": "loss", "estimator": "k2", "only": "top_covariance"},
        },
    },
    "a lag without a second forward pass": {
        "algo": {"type": "rloo", "anchor": "loglinear"},
        "max_policy_lag": 1,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("what", TOGETHER)
def test_parts_that_go_together_do_so_exactly(what: str, write: Write, tmp_path: Path) -> None:
    sections = {"rollout": {"max_turns": 2}, **copy.deepcopy(TOGETHER[what])}
    check_exact(write(sections.pop("algo"), **sections), tmp_path / "run")


# --- what an algorithm remembers ----------------------------------------------------------------

ADAPTIVE = {"coef": 0.2, "target": 0.001, "horizon": 20}
MIXTURE = {
    "type": "mixture",
    "members": {"one": python_env(), "two": python_env("Relabelled")},
    "weights": {"two": 2},
}
QUICK: dict[str, dict[str, Any]] = {
    "adaptive KL in the reward, a reference that is reset": {
        "algo": {"type": "rloo", "kl": {**ADAPTIVE, "reset_every": 2}},
    },
    "moving averages of roles": {"algo": {"type": "rae"}},
    "a critic with a trunk of its own, trained alone at first": {
        "algo": {"type": "gae", "critic": {"trunk": "own", "pretrain_steps": 2}},
    },
    "a mixture with two algorithms and refill": {
        "algo": {"type": "rae"},
        "env": MIXTURE,
        "algo_for": {
            "two": {
                "type": "rloo",
                "hindsight_coef": 0.1,
                "kl": {"place": "loss", "estimator": "k2", **ADAPTIVE},
            }
        },
        "rollout": {"refill": True, "groups_per_step": 3},
    },
}
SLOW: dict[str, dict[str, Any]] = {
    "adaptive KL in the loss, a reference that follows": {
        "algo": {
            "type": "grpo",
            "kl": {"place": "loss", "estimator": "k2", **ADAPTIVE, "sync_every": 2},
        },
    },
    "entropy control": {"algo": {"type": "rloo", "entropy": {"coef": 0.01, "target": 4.0}}},
    "a critic on the policy's trunk": {"algo": {"type": "gae", "num_epochs": 2}},
    "a reward model": {"algo": {"type": "reward_model"}},
    "given pairs": {
        "algo": {"type": "preference"},
        "data": {"type": "pairs", "path": "rows.jsonl"},
    },
    "demonstrations": {"algo": {"type": "sft", "num_minibatches": 2}},
    "greedy baselines": {"algo": {"type": "remax"}},
    "distillation of distributions": {"algo": {"type": "distill", "divergence": "jsd"}},
    "an adapter with KL": {
        "algo": {"type": "rloo", "kl": ADAPTIVE},
        "model": {"lora": {"rank": 2, "alpha": 4}},
    },
    "bfloat16 with a moving reference": {
        "algo": {"type": "rloo", "kl": {**ADAPTIVE, "sync_every": 1}},
        "model": {"dtype": "bfloat16"},
    },
}


def check_kills(
    zygote: Any, outcome: Any, write: Write, folder: Path, fields: dict[str, Any], seed: int
) -> None:
    """Killed at random calls, the same command ends as the uninterrupted one, and verifies."""
    path = write(
        dict(fields["algo"]), num_steps=5, **{k: v for k, v in fields.items() if k != "algo"}
    )
    whole = ["train", path, "--run-dir", folder / "whole", "--json"]
    assert (done := zygote.run(*whole, cwd=folder)).status == 0, done.err
    rng = random.Random(seed)
    command = ["train", path, "--run-dir", folder / "run", "--resume", "--json"]
    for at in (f"{LEARNER}.step", rng.choice([f"{JOURNAL}.record_group", f"{LEARNER}.save"])):
        fatal = {"at": at, "nth": rng.randint(1, 3), "after": rng.random() < 0.5}
        killed = zygote.run(*command, cwd=folder, deaths=[{**fatal, "signal": signal.SIGKILL}])
        assert killed.status in (0, -signal.SIGKILL), killed.err
    assert (done := zygote.run(*command, cwd=folder)).status == 0, done.err
    assert outcome(folder / "run") == outcome(folder / "whole")
    assert verify(folder / "run", SilentObserver())["steps"] == 5


@pytest.mark.parametrize("state", QUICK)
def test_a_killed_run_remembers_all_that_its_algorithm_knew(
    state: str, zygote: Any, outcome: Any, write: Write, tmp_path: Path
) -> None:
    check_kills(zygote, outcome, write, tmp_path, QUICK[state], seed=len(state))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("state", [*QUICK, *SLOW])
def test_every_state_survives_kills_at_random_moments(
    state: str, seed: int, zygote: Any, outcome: Any, write: Write, tmp_path: Path
) -> None:
    check_kills(zygote, outcome, write, tmp_path, {**QUICK, **SLOW}[state], seed)


@pytest.mark.parametrize(
    ("algo", "sections"),
    [
        ({"type": "rloo", "kl": {**ADAPTIVE, "sync_every": 1}}, {}),
        ({"type": "rloo", "kl": {**ADAPTIVE, "reset_every": 2}}, {}),
        ({"type": "gae", "critic": {"trunk": "own"}}, {}),
        ({"type": "gae"}, {}),
        ({"type": "reward_model"}, {}),
        ({"type": "rae"}, {}),
    ],
    ids=["sync", "reset", "own critic", "shared critic", "reward model", "rae"],
)
def test_a_restored_learner_is_the_saved_one_bit_for_bit(
    algo: dict[str, Any], sections: dict[str, Any], write: Write, tmp_path: Path
) -> None:
    path = write(algo, **sections)
    run(path, tmp_path / "run")
    saved = tmp_path / "run" / "checkpoints" / "step-000002"
    recipe, _ = load_recipe(str(path))
    fresh = build_trainable(recipe, SilentObserver()).learner
    fresh.restore(saved)
    again = tmp_path / "again"
    again.mkdir()
    fresh.save(again)
    files = sorted(p.relative_to(saved) for p in saved.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(again) for p in again.rglob("*") if p.is_file())
    for file in files:
        assert (saved / file).read_bytes() == (again / file).read_bytes(), file


def test_a_policy_rebuilt_at_any_step_has_the_recorded_weights(
    write: Write, tmp_path: Path
) -> None:
    path = write({"type": "rloo", "kl": {**ADAPTIVE, "sync_every": 1}}, num_steps=3)
    run(path, tmp_path / "run")
    with Journal.open(tmp_path / "run", readonly=True) as journal:
        recorded = [step.weights_hash for step in journal.steps()]
    for step in (1, 3):
        trainable, _ = rebuild(tmp_path / "run", step, SilentObserver())
        assert trainable.learner.weights_hash() == recorded[step - 1]


# --- what a run is refused for, before it begins --------------------------------------------------


def test_hindsight_is_refused_before_the_run_where_no_task_can_be_named(
    write: Write, tmp_path: Path
) -> None:
    path = write({"type": "rloo", "hindsight_coef": 0.1})
    with pytest.raises(ConfigError, match=r"letters has no relabel.*leave out algo.hindsight_coef"):
        run(path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_hindsight_of_one_member_asks_nothing_of_the_others(write: Write, tmp_path: Path) -> None:
    algo_for = {"two": {"type": "rloo", "hindsight_coef": 0.1}}
    path = write({"type": "rloo"}, env=MIXTURE, algo_for=algo_for, num_steps=3)
    check_exact(path, tmp_path / "run")
    with Journal.open(tmp_path / "run", readonly=True) as journal:
        roles = {}
        for record in journal.draws():
            group = journal.group(record.draw.draw_id)
            roles.setdefault(group.draw.environment, set()).update(t.role for t in group)
    assert roles == {"one": {""}, "two": {"", "hindsight"}}
    wrong = {"one": {"type": "rloo", "hindsight_coef": 0.1}}
    path = write({"type": "rloo"}, env=MIXTURE, algo_for=wrong)
    with pytest.raises(ConfigError, match=r"leave out algo_for.one.hindsight_coef"):
        run(path, tmp_path / "refused")


def test_a_reward_function_of_a_member_is_looked_at_before_the_run(
    write: Write, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text("def grade(completion, gold): return 1.0")
    own = {"type": "dataset", "path": "rows.jsonl", "reward": "reward.py:grade"}
    env = {"type": "mixture", "members": {"one": python_env(), "own": own}}
    path = write({"type": "rloo"}, env=env)
    with pytest.raises(DataError, match=r"has a parameter 'gold', but the data has no such column"):
        run(path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_check_counts_answers_and_not_what_serves_them(
    write: Write, tmp_path: Path, cli: Any
) -> None:
    for kind, count in (("sft", 2), ("reward_model", 4), ("remax", 6)):
        done = cli("check", write({"type": kind}))
        assert done.status == 0, done.err
        assert f"trajectories a step: {count}\n" in done.out
        assert "0 of" in done.out and "no conflict found" in done.out


def test_a_teacher_of_another_vocabulary_is_refused(
    write: Write, tmp_path: Path, tiny_folder: Path
) -> None:
    shutil.copytree(tiny_folder, tmp_path / "other")
    tokenizer = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    path = write({"type": "distill", "teacher": str(tmp_path / "other")})
    with pytest.raises(ConfigError, match=r"algo.teacher .* another vocabulary .* same tokenizer"):
        run(path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_rows_that_do_not_fit_are_refused_before_the_run_all_at_once(
    write: Write, tmp_path: Path
) -> None:
    path = write({"type": "sft"}, model={"max_context": 20})
    rows = ["short", "x" * 30, "y" * 40, "fine"]
    lines = [json.dumps({"prompt": f"p{i}", "completion": text}) for i, text in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError) as refused:
        run(path, tmp_path / "run")
    for part in ("2 of 4 rows", "line 2", "line 3", "longer than the context", "is 20"):
        assert part in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_resume_refuses_rows_that_changed_under_their_numbers(
    write: Write, tmp_path: Path
) -> None:
    """The remaining steps would train other rows than the run began with."""
    path = write({"type": "sft"})
    run(path, tmp_path / "run")
    run(path, tmp_path / "run", resume=True)
    rows = (tmp_path / "rows.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join(reversed(rows)))
    with pytest.raises(RunDirectoryError, match="training rows are not those"):
        run(path, tmp_path / "run", resume=True)


def test_a_run_without_greedy_answers_is_not_replayed_with_remax(
    write: Write, tmp_path: Path
) -> None:
    run(write({"type": "rloo"}), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"without a greedy answer.*train a new run"):
        what_if(tmp_path / "run", ["algo.type=remax"], SilentObserver())


def test_an_outcome_algorithm_refuses_an_environment_that_rewards_turns(
    write: Write, tmp_path: Path
) -> None:
    path = write(
        {"type": "rloo"}, env=python_env(turns=2, turn_reward=0.5), rollout={"max_turns": 2}
    )
    with pytest.raises(ConfigError, match=r"rewards for single turns.*use one that reads them"):
        run(path, tmp_path / "run")


def test_a_run_of_given_rows_is_evaluated_from_any_folder(
    write: Write, tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows lie beside the recipe, not in the working directory."""
    path = write({"type": "sft"}, eval={"after": True})
    summary = run(path, tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = cli("eval", tmp_path / "run", "--json")
    assert done.status == 0, done.err
    report = done.events[-1]
    assert report["accuracy"]["mean"] == summary["evaluation"]["before"]["accuracy"]["mean"]
