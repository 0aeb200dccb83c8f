"""Check 3: a map of ten digits to ten answers of one token, for every loss and every estimator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from checks.tasks import digit_map
from checks.trial import Curve, Spoil, learn, recipe
from posttrain.build import train_params
from posttrain.config import Recipe
from posttrain.data.prefix_tree import build_prefix_tree
from posttrain.rollout.recorder import Renderer
from posttrain.training.policy import Policy

BOUND, NUM_STEPS = 0.95, 150
SMALL, LARGE = 30, 4096
"""Rows of a micro-batch: about one group, and the whole step."""

# Two passes over each batch, so that the second one has ratios that are not 1 and bounds that bind.
TWICE = {"num_epochs": 2}

# The bounds of GSPO are made for means over long answers: one token moves a thousand times further,
# and a second pass would clip nearly everything. It gets one update a batch, where its ratio is 1.
LOSSES: Mapping[str, Mapping[str, Any]] = {
    "ppo_clip": TWICE,
    "gspo": {},
    "gspo_token": {},
    "cispo": TWICE,
    "sapo": TWICE,
    "topr": TWICE,
    "gmpo": TWICE,
    "dppo": TWICE,
    "gpg": {},
    "is_reinforce": TWICE,
    "aspo": TWICE,
    "vespo": TWICE,
    "kimi": TWICE,
}

# A digit on which all answers are wrong alike has no advantage to leave that answer, but entropy to
# gain: so it keeps its place in the loss, and the bonus is large.
KEEP = {"zero_variance": "keep"}
ENTROPY = {"entropy": {"coef": 0.05}}
CRITIC = {"critic": {"lr": 1e-2}}
PLAIN = {"type": "rloo", **KEEP}
ESTIMATORS: Mapping[str, Mapping[str, Any]] = {
    "rloo": KEEP,
    "grpo": KEEP,
    "dr_grpo": KEEP,
    "opo": KEEP,
    "gpg": {},
    "max_rl": KEEP,
    # The surer the answer, the rarer one sibling alone is right: a large bonus would hold it back.
    "pass_at_k": {"entropy": {"coef": 0.01}},
    "reinforce": {},
    "remax": {},
    "rae": {},
    "gdpo": {},
    "optimal_token_baseline": KEEP,
    "gigpo": {},
    "mt_grpo": {},
    "turn_discounted": KEEP,
    "process": {},
    "pure_min": {},
    "reinforce_pp": {},
    "reinforce_pp_baseline": KEEP,
    "gae": CRITIC,
    "turn_ppo": CRITIC,
    "vtrace": CRITIC,
}

# 240 answers a step.
GROUPS, GROUP_SIZE = 10, 24


def map_recipe(
    algo: Mapping[str, Any],
    seed: int,
    *,
    max_tokens: int = LARGE,
    lr: float | None = None,
    group_size: int = GROUP_SIZE,
    **sections: Any,
) -> Recipe:
    """Every digit once a step. Two passes over a batch go with half the learning rate."""
    passes = algo.get("num_epochs", 1) * algo.get("num_minibatches", 1)
    return recipe(
        {**ENTROPY, **algo},
        seed=seed,
        num_steps=NUM_STEPS,
        rollout={"groups_per_step": GROUPS * GROUP_SIZE // group_size, "group_size": group_size},
        # Room for every group in flight, so that a producer that runs ahead lags by its bound.
        sampler={"max_tokens": 1, "max_batch": 256 * (1 + sections.get("max_policy_lag", 0))},
        optim={"lr": lr or 2e-3 / passes},
        learner={"max_tokens_per_microbatch": max_tokens},
        **sections,
    )


def with_loss(name: str, **more: Any) -> dict[str, Any]:
    """`rloo` with this loss."""
    return {**PLAIN, "loss": {"type": name}, **LOSSES[name], **more}


def with_estimator(name: str) -> dict[str, Any]:
    """This estimator with PPO's clip."""
    return {"type": name, **ESTIMATORS[name]}


def learn_with_loss(name: str, seed: int, **settings: Any) -> Curve:
    """The map with this loss."""
    return learn_map(with_loss(name), seed, **settings)


def learn_with_estimator(name: str, seed: int) -> Curve:
    """The map with this estimator, in groups of two for pass_at_k."""
    # It pays the best of a group for being alone: among many it is content with one right answer.
    group_size = 2 if name == "pass_at_k" else GROUP_SIZE
    return learn_map(with_estimator(name), seed, group_size=group_size)


def learn_map(
    algo: Mapping[str, Any],
    seed: int,
    *,
    num_steps: int | None = None,
    whole: bool = False,
    spoil: Spoil | None = None,
    exact: bool = False,
    **settings: Any,
) -> Curve:
    """Train on the map. `exact`: the curve is the expected reward of the policy, not what was
    drawn."""
    return learn(
        map_recipe(algo, seed, **settings),
        digit_map(),
        bound=BOUND,
        num_steps=num_steps,
        spoil=spoil,
        whole=whole,
        measure=expected_reward if exact else None,
    )


@torch.no_grad()
def expected_reward(policy: Policy) -> float:
    """Mean probability of the right answer, at temperature 1."""
    renderer = Renderer(policy.tokenizer, policy.eos_token_ids)
    tasks = digit_map().tasks
    tree = build_prefix_tree([renderer.prompt_ids(task.prompt) for task in tasks])
    last = torch.from_numpy(np.asarray([path[-1] for path in tree.paths]))
    logprobs_DV = policy.logits(policy.tree_hidden(tree)[last]).log_softmax(-1)
    answers = [renderer.encode(task.hidden.reveal()["answer"])[0] for task in tasks]
    return float(logprobs_DV.exp()[torch.arange(len(tasks)), torch.tensor(answers)].mean())


# --- check 7b: off-policy -----------------------------------------------------------------------

NO_CORRECTION = {"corrections": []}


def learn_off_policy(
    seed: int, *, lag: int = 0, temperature: float = 1.0, corrected: bool = True
) -> Curve:
    """The map with a producer that runs `lag` steps ahead, and a sampler that is hotter than the
    learner believes. Records say the versions and the log-probs that were drawn with."""
    algo = PLAIN if corrected else {**PLAIN, **NO_CORRECTION}
    settings = train_params(map_recipe(algo, seed))
    return learn_map(
        algo,
        seed,
        spoil=Spoil(sampling=replace(settings, temperature=temperature)),
        exact=True,
        max_policy_lag=lag,
    )
