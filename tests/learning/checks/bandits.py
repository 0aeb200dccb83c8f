"""Checks 1, 2 and 7 (a, c): bandits whose gradients and fixed points are known exactly."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checks.table import Bandit
from posttrain.types import Group

_FILE = Path(__file__).parents[2] / "numerics/vectors.json"
VECTORS = {v["name"]: v for v in json.loads(_FILE.read_text())["vectors"]}

# --- check 1: a Bernoulli bandit ----------------------------------------------------------------

CHANCES_A = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.9)
BANDIT_BOUND, BANDIT_STEPS = 0.89, 400


def learn_bandit(seed: int) -> tuple[int | None, float]:
    """Step after which the expected reward is at least .89 (None: never), and that value.
    RLOO, one group of 16 a step."""
    bandit = Bandit(
        {"type": "rloo"},
        torch.zeros(len(CHANCES_A)),
        lambda arm, chance: float(chance.random() < CHANCES_A[arm]),
        seed=seed,
        lr=0.05,
        num_steps=BANDIT_STEPS,
    )
    chances_A = torch.tensor(CHANCES_A, dtype=torch.float64)
    value = 0.0
    for step in range(1, BANDIT_STEPS + 1):
        bandit.step(bandit.groups(1, 16))
        value = float(bandit.policy.logprobs_A.exp() @ chances_A)
        if value >= BANDIT_BOUND:
            return step, value
    return None, value


# --- check 1: estimators against the exact gradient ---------------------------------------------

LOGITS_A = torch.tensor([0.5, 0.1, -0.4], dtype=torch.float64)
PAYS_A = (1.0, 0.4, 0.0)
BINARY_A = (1.0, 0.0, 0.0)
GROUP_SIZE = 4
NUM_PARTS = 50  # of a sample, to tell its standard error
KEEP = {"zero_variance": "keep"}
LOO, MEAN = 1.0, (GROUP_SIZE - 1) / GROUP_SIZE

# Ratio of the expected gradient to that of E[r]. Flat groups are kept: dropping them divides by the
# share of the others.
RATIOS: Mapping[str, tuple[Mapping[str, Any], float]] = {
    "rloo": (KEEP, LOO),
    "turn_discounted": (KEEP, LOO),
    "reinforce": ({}, LOO),
    "remax": ({}, LOO),
    "pure_min": ({}, LOO),
    "dr_grpo": (KEEP, MEAN),
    "grpo": ({**KEEP, "std": "none"}, MEAN),
    "opo": (KEEP, MEAN),
}


def exact_gradient(pays_A: Sequence[float] = PAYS_A) -> Tensor:
    """Gradient of E[r] over the logits: pi (r - E[r])."""
    pi_A = LOGITS_A.softmax(0)
    pays = torch.tensor(pays_A, dtype=torch.float64)
    return pi_A * (pays - pi_A @ pays)


def estimator_bandit(name: str, pays_A: Sequence[float] = PAYS_A, seed: int = 0) -> Bandit:
    """A bandit of three arms for this estimator."""
    settings = RATIOS[name][0] if name in RATIOS else KEEP
    return Bandit({"type": name, **settings}, LOGITS_A, lambda arm, _: pays_A[arm], seed=seed)


def expected_gradient(name: str, pays_A: Sequence[float] = PAYS_A) -> Tensor:
    """Its expectation over every group of `GROUP_SIZE` pulls, by enumeration."""
    bandit = estimator_bandit(name, pays_A)
    logprobs_A = bandit.policy.logprobs_A
    greedy = greedy_arm(name)
    total_A = torch.zeros_like(logprobs_A)
    for arms in product(range(len(pays_A)), repeat=GROUP_SIZE):
        chance = float(logprobs_A[list(arms)].sum().exp())
        group = bandit.group(arms, logprobs_A.numpy(), greedy)
        total_A += chance * bandit.gradient([group])
    return total_A


def greedy_arm(name: str) -> int | None:
    """The greedy answer, for the estimator that compares with it."""
    return int(LOGITS_A.argmax()) if name == "remax" else None


def sampled_gradient(name: str, num_groups: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Mean of the gradients of many drawn groups, and its standard error."""
    bandit = estimator_bandit(name, seed=seed)
    size, greedy = num_groups // NUM_PARTS, greedy_arm(name)
    parts = torch.stack(
        [bandit.gradient(bandit.groups(size, GROUP_SIZE, greedy=greedy)) for _ in range(NUM_PARTS)]
    )
    return parts.mean(0), parts.std(0) / len(parts) ** 0.5


def numeric_gradient(value: Callable[[Tensor], Tensor]) -> Tensor:
    """Gradient over the logits of a function of the probabilities."""
    logits_A = LOGITS_A.clone().requires_grad_()
    (gradient_A,) = torch.autograd.grad(value(logits_A.softmax(0)), logits_A)
    return gradient_A


# --- check 2: KL-regularised --------------------------------------------------------------------

KL_PAYS_A, KL_BETA = (1.0, 0.5, 0.0), 0.5
KL_MODES: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "reward": ({"place": "reward"}, "k1_in_reward_or_k2_loss_or_IS_k3"),
    "k2": ({"place": "loss", "estimator": "k2"}, "k1_in_reward_or_k2_loss_or_IS_k3"),
    "k3_weighted": (
        {"place": "loss", "estimator": "k3_weighted"},
        "k1_in_reward_or_k2_loss_or_IS_k3",
    ),
    "k3": ({"place": "loss", "estimator": "k3"}, "k3_as_loss"),
}
KL_STEPS, KL_GROUPS = 120, 32


def kl_fixed_point(
    mode: str, seed: int, *, estimator: str = "rloo", num_steps: int = KL_STEPS, **kl: Any
) -> tuple[Tensor, Bandit]:
    """Mean policy of the second half of a run, [3], and the bandit.

    Flat groups are kept: dropped, they would leave the KL term's denominator too.
    """
    algo = {
        "type": estimator,
        **KEEP,
        "kl": {"coef": KL_BETA, **KL_MODES[mode][0], **kl},
    }
    bandit = Bandit(
        algo,
        torch.zeros(3),
        lambda arm, _: KL_PAYS_A[arm],
        seed=seed,
        lr=0.05,
        num_steps=num_steps,
        schedule="linear",
    )
    mean_A = torch.zeros(3, dtype=torch.float64)
    for step in range(num_steps):
        bandit.step(bandit.groups(KL_GROUPS, 8))
        if step >= num_steps // 2:
            mean_A += bandit.policy.logprobs_A.exp()
    return mean_A / (num_steps - num_steps // 2), bandit


def target(mode: str, *, other: bool = False) -> Tensor:
    """The fixed point of a mode, or that of the modes of the other kind."""
    own = KL_MODES[mode][1]
    key = next(k for _, k in KL_MODES.values() if k != own) if other else own
    return torch.tensor(VECTORS["bandit_kl_fixed_points"]["expected"][key], dtype=torch.float64)


def total_variation(one_A: Tensor, other_A: Tensor) -> float:
    return float((one_A - other_A).abs().sum()) / 2


# --- check 7 a, c: off-policy -------------------------------------------------------------------

PI_A = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
MU_A = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
OFF_PAYS_A = (0.5, -0.5, 0.0)  # rewards 1, 0, .5 less the baseline .5
WEIGHTS_A = PI_A / MU_A
_K3_A = WEIGHTS_A - 1 - WEIGHTS_A.log()

# For each correction its settings and the factor that an arm's gradient gets, from its definition.
CORRECTIONS: Mapping[str, tuple[Mapping[str, Any] | None, Tensor]] = {
    "none": (None, torch.ones(3, dtype=torch.float64)),
    "tis": ({"type": "tis", "cap": 2.0}, WEIGHTS_A.clamp(max=2.0)),
    "tis_full": ({"type": "tis", "cap": 100.0}, WEIGHTS_A),
    "icepop": (
        {"type": "icepop", "low": 0.5, "high": 2.0},
        WEIGHTS_A * ((WEIGHTS_A >= 0.5) & (WEIGHTS_A <= 2.0)),
    ),
    "token_mask": (
        {"type": "token_mask", "low": 0.5, "high": 2.0},
        ((WEIGHTS_A >= 0.5) & (WEIGHTS_A <= 2.0)).double(),
    ),
    "seq_tis": ({"type": "seq_tis", "cap": 2.0}, WEIGHTS_A.clamp(max=2.0)),
    "seq_mis": ({"type": "seq_mis", "cap": 2.0}, WEIGHTS_A * (WEIGHTS_A <= 2.0)),
    "seq_mask": (
        {"type": "seq_mask", "low": 0.5, "high": 2.0},
        ((WEIGHTS_A >= 0.5) & (WEIGHTS_A <= 2.0)).double(),
    ),
    "geometric_mask": (
        {"type": "geometric_mask", "low": 0.9, "high": 1.6},
        ((WEIGHTS_A >= 0.9) & (WEIGHTS_A <= 1.6)).double(),
    ),
    "k3_mask": ({"type": "k3_mask", "max_k3": 0.2}, (_K3_A <= 0.2).double()),
}


def off_policy_bandit(correction: str, seed: int = 0) -> Bandit:
    """A table at pi with raw rewards as advantages."""
    settings = CORRECTIONS[correction][0]
    algo = {"type": "reinforce", "corrections": [settings] if settings else []}
    return Bandit(algo, PI_A.log(), lambda arm, _: OFF_PAYS_A[arm], seed=seed)


def off_policy_expectation(correction: str) -> tuple[Tensor, Tensor]:
    """Exact mean of the gradient of one pull by mu, and its standard deviation, [3] each."""
    factor_A = CORRECTIONS[correction][1] * torch.tensor(OFF_PAYS_A, dtype=torch.float64)
    per_arm_AA = factor_A[:, None] * (torch.eye(3, dtype=torch.float64) - PI_A)
    mean_A = MU_A @ per_arm_AA
    return mean_A, (MU_A @ per_arm_AA.square() - mean_A.square()).sqrt()


PULLS = 4000


def pulls_of_mu(seed: int) -> list[Group]:
    """Groups that mu drew, and that say so."""
    return off_policy_bandit("none", seed).groups(PULLS // 4, 4, MU_A.log())


def off_policy_errors(correction: str, seed: int) -> tuple[float, float]:
    """In standard errors: the largest distance of the gradient from its exact expectation, and that
    of the mean weight from 1."""
    bandit, groups = off_policy_bandit(correction), pulls_of_mu(seed)
    result = bandit.step(groups)
    assert bandit.policy.model.logits_A.grad is not None
    mean_A, deviation_A = off_policy_expectation(correction)
    away_A = (-bandit.policy.model.logits_A.grad.double() - mean_A).abs() / deviation_A
    spread = float((MU_A @ WEIGHTS_A.square() - 1).sqrt())
    away = abs(result.metrics["mismatch/weight_mean"] - 1) / spread
    return float(away_A.max()) * PULLS**0.5, away * PULLS**0.5
