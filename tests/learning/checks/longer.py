"""Checks 4 to 6: several tokens, several turns, several stages."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checks.tasks import length_target
from checks.trial import Curve, learn, recipe
from posttrain.config import BinarySearchConfig
from posttrain.envs.binary_search import BinarySearchSpec

# --- check 4: a length --------------------------------------------------------------------------

LENGTH_BOUND, LENGTH_STEPS = 0.95, 120


def learn_length(seed: int, algo: Mapping[str, Any] | None = None, **sections: Any) -> Curve:
    """Eight tokens and then the end of the turn."""
    run = recipe(
        algo or {"type": "rloo"},
        seed=seed,
        num_steps=LENGTH_STEPS,
        rollout={"groups_per_step": 8, "group_size": 16},
        sampler={"max_tokens": 16, "max_batch": 128},
        optim={"lr": 2e-3},
        **sections,
    )
    return learn(run, length_target(), bound=LENGTH_BOUND)


# --- check 5: binary search ---------------------------------------------------------------------

SEARCH_BOUND, SEARCH_STEPS = 0.9, 120
WITHOUT_FEEDBACK = 3 / 7  # the best that can be done without reading the answers

SEARCH_UPDATES = {"num_epochs": 4, "loss": {"type": "ppo_clip", "clip_low": 0.1, "clip_high": 0.2}}
SEARCHERS: Mapping[str, Mapping[str, Any]] = {
    "rloo": {"type": "rloo"},
    "reinforce_pp": {"type": "reinforce_pp"},
    "gigpo": {"type": "gigpo"},
    "mt_grpo": {"type": "mt_grpo"},
    "turn_ppo": {"type": "turn_ppo", "critic": {"lr": 1e-3}},
}
BY_TURNS = ("gigpo", "mt_grpo", "turn_ppo")  # these get rewards for turns as well


def learn_search(name: str, seed: int, num_steps: int = SEARCH_STEPS) -> Curve:
    """1 to 7 in three guesses, as the shipped recipe has it, to step `num_steps` of its schedule.

    The curve is the share found."""
    run = recipe(
        {**SEARCH_UPDATES, **SEARCHERS[name]},
        seed=seed,
        num_steps=SEARCH_STEPS,
        rollout={"groups_per_step": 28, "group_size": 16, "max_turns": 3},
        sampler={"max_tokens": 1, "max_batch": 448},
        optim={"lr": 1e-3, "schedule": "linear", "warmup_steps": 5, "min_lr_frac": 0.1},
    )
    turn_reward = 0.1 if name in BY_TURNS else 0.0
    game = BinarySearchConfig(low=1, high=7, max_guesses=3, terse=True, turn_reward=turn_reward)
    return learn(run, BinarySearchSpec(game), bound=SEARCH_BOUND, num_steps=num_steps)


# --- check 6: supervised, then reinforced -------------------------------------------------------


def sft_then_rl(seed: int, folder: Path) -> tuple[float, float]:
    """Held-out greedy accuracy after the supervised stage and after the reinforced one, of the
    recipes as they are shipped."""
    command = [sys.executable, "-m", "posttrain.cli", "train", "sft-then-rl", f"seed={seed}"]
    done = subprocess.run(
        [*command, "--run-dir", str(folder / "run"), "--json"], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(
            f"posttrain train sft-then-rl ended with {done.returncode}: {done.stderr}"
        )
    report = json.loads((folder / "run" / "summary.json").read_text())["evaluation"]
    return report["before"]["accuracy"]["mean"], report["after"]["accuracy"]["mean"]
