"""Preference, distillation and flow objectives reach optima that are known beforehand.

Every check has three seeds and a negative control: the same code with labels turned, a teacher of
other tokens or shuffled rewards must miss the same bound.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posttrain.algo.distillation import opd_advantages, opd_value_baseline, reverse_kl
from posttrain.algo.flow import FlowStep, flow_grpo_step, step_kl, step_logprob
from posttrain.algo.groups import centred
from posttrain.algo.preferences.bradley_terry import bayes_accuracy, bradley_terry, pair_accuracy
from posttrain.algo.preferences.dpo import dpo

SEEDS = pytest.mark.parametrize("seed", [0, 1, 2])


# --- a reward model -----------------------------------------------------------------------------


def gap_to_bayes(seed: int, *, turned: bool = False) -> float:
    """Bayes accuracy - accuracy on unseen noisy labels of a linear reward model."""
    generator = torch.Generator().manual_seed(seed)
    truth_D = torch.randn(6, generator=generator)

    def labelled(num_pairs: int, turned: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Features of chosen and rejected, and true gaps, with labels from Bradley-Terry."""
        first, second = torch.randn(2, num_pairs, 6, generator=generator)
        gaps_P = (first - second) @ truth_D
        first_wins_P = torch.rand(num_pairs, generator=generator) < gaps_P.sigmoid()
        swap_P1 = (first_wins_P == turned)[:, None]
        return torch.where(swap_P1, second, first), torch.where(swap_P1, first, second), gaps_P

    chosen, rejected, _ = labelled(2000, turned)
    weights_D = torch.zeros(6, requires_grad=True)
    optimizer = torch.optim.Adam([weights_D], lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        bradley_terry(chosen @ weights_D, rejected @ weights_D, centre_coef=0.01).mean().backward()
        optimizer.step()
    chosen, rejected, gaps_P = labelled(20_000, False)
    weights_D = weights_D.detach()
    accuracy = pair_accuracy(chosen @ weights_D, rejected @ weights_D)
    return (bayes_accuracy(gaps_P) - accuracy).item()


@SEEDS
def test_a_reward_model_reaches_bayes_accuracy(seed):
    assert abs(gap_to_bayes(seed)) < 0.02


@SEEDS
def test_a_reward_model_of_turned_labels_does_not(seed):
    assert gap_to_bayes(seed, turned=True) > 0.2


# --- dpo ----------------------------------------------------------------------------------------


def distance_to_tilt(seed: int, *, turned: bool = False) -> float:
    """Total variation to ref * exp(r / beta), three arms, every pair with its soft label."""
    generator = torch.Generator().manual_seed(seed)
    beta = 0.5
    ref_A = torch.randn(3, generator=generator).log_softmax(0)
    rewards_A = torch.rand(3, generator=generator)
    optimum_A = (ref_A + rewards_A / beta).softmax(0)
    i_P, j_P = torch.tensor([(i, j) for i in range(3) for j in range(3) if i != j]).T
    prefer_P = (rewards_A[i_P] - rewards_A[j_P]).sigmoid()
    weights_P = 1 - prefer_P if turned else prefer_P
    one_token_P = torch.ones_like(i_P)
    logits_A = ref_A.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits_A], lr=0.05)
    for _ in range(200):
        policy_A = logits_A.log_softmax(0)
        sides = (policy_A[i_P], policy_A[j_P], ref_A[i_P], ref_A[j_P])
        optimizer.zero_grad()
        (weights_P * dpo(*sides, one_token_P, one_token_P, beta=beta)).sum().backward()
        optimizer.step()
    return (logits_A.detach().softmax(0) - optimum_A).abs().sum().item() / 2


@SEEDS
def test_dpo_reaches_the_tilted_reference(seed):
    assert distance_to_tilt(seed) < 0.02


@SEEDS
def test_dpo_on_turned_labels_does_not(seed):
    assert distance_to_tilt(seed, turned=True) > 0.05


# --- on-policy distillation ---------------------------------------------------------------------


def divergence_after_distilling(seed: int, *, shuffled: bool = False) -> float:
    """KL(student || teacher) of 12 tokens after three contexts, trained on samples alone."""
    generator = torch.Generator().manual_seed(seed)
    teacher_CV = torch.randn(3, 12, generator=generator) * 1.5
    read_CV = teacher_CV[:, torch.randperm(12, generator=generator)] if shuffled else teacher_CV
    student_CV = torch.zeros(3, 12, requires_grad=True)
    optimizer = torch.optim.Adam([student_CV], lr=0.05)
    for _ in range(200):
        probs_CV = student_CV.detach().softmax(-1)
        tokens_CN = probs_CV.multinomial(64, replacement=True, generator=generator)
        student_CN = student_CV.log_softmax(-1).gather(-1, tokens_CN)
        teacher_CN = read_CV.log_softmax(-1).gather(-1, tokens_CN)
        advantages_CN = opd_advantages(student_CN, teacher_CN)
        advantages_CN = advantages_CN - opd_value_baseline(student_CV, read_CV)[:, None]
        optimizer.zero_grad()
        (-advantages_CN * student_CN).mean().backward()
        optimizer.step()
    return reverse_kl(student_CV, teacher_CV).max().item()


@SEEDS
def test_on_policy_distillation_reaches_the_teacher(seed):
    assert divergence_after_distilling(seed) < 0.01


@SEEDS
def test_distilling_a_teacher_of_other_token_ids_does_not(seed):
    assert divergence_after_distilling(seed, shuffled=True) > 0.1


# --- a Gaussian flow ----------------------------------------------------------------------------

NUM_STEPS, TARGET, BETA = 10, 2.0, 1.0


def velocity(x: Tensor, sigma: Tensor) -> Tensor:
    """The exact velocity of x_0 ~ N(0, 1): E[noise - x_0 | x]."""
    return x * (2 * sigma - 1) / (sigma.square() + (1 - sigma).square())


def sde_step(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> FlowStep:
    # With this noise the end forgets the start; only then is the tilt the optimum of the chain.
    return flow_grpo_step(x, v, sigma, sigma_next, noise_level=2**0.5)


def mean_after_flow_rl(seed: int, *, shuffled: bool = False) -> float:
    """Mean of x_0 after maximising E[-(x - m)^2 / 2] - beta KL, by the policy gradient.

    Shapes: K steps, B samples, one dimension. The policy adds a_k + b_k x to the velocity.
    """
    generator = torch.Generator().manual_seed(seed)
    grid = torch.linspace(1, 0, NUM_STEPS + 1)
    sigma_K11, next_K11 = grid[:-1, None, None], grid[1:, None, None]
    a_K11 = torch.zeros(NUM_STEPS, 1, 1, requires_grad=True)
    b_K11 = torch.zeros(NUM_STEPS, 1, 1, requires_grad=True)
    optimizer = torch.optim.Adam([a_K11, b_K11], lr=0.05)
    ends = []
    for update in range(200):
        noise = torch.randn(NUM_STEPS + 1, 256, 1, generator=generator)
        x, states = noise[-1], []
        with torch.no_grad():
            for k in range(NUM_STEPS):
                v = velocity(x, grid[k]) + a_K11[k] + b_K11[k] * x
                states.append(x)
                x = sde_step(x, v, grid[k], grid[k + 1]).at(noise[k])
        states_KB1 = torch.stack(states)
        ref_v = velocity(states_KB1, sigma_K11)
        policy = sde_step(states_KB1, ref_v + a_K11 + b_K11 * states_KB1, sigma_K11, next_K11)
        kl_B = step_kl(policy, sde_step(states_KB1, ref_v, sigma_K11, next_K11).mean_BD).sum(0)
        logprob_B = step_logprob(policy, torch.stack([*states[1:], x]), reduction="sum").sum(0)
        rewards_B = -(x[:, 0] - TARGET).square() / 2
        if shuffled:
            rewards_B = rewards_B[torch.randperm(len(rewards_B), generator=generator)]
        advantages_B = centred(rewards_B - BETA * kl_B)
        optimizer.zero_grad()
        (BETA * kl_B - advantages_B * logprob_B).mean().backward()
        optimizer.step()
        if update >= 150:
            ends.append(x.mean().item())
    return sum(ends) / len(ends)


@SEEDS
def test_a_flow_moves_to_the_tilted_gaussian(seed, vector):
    assert mean_after_flow_rl(seed) == pytest.approx(
        vector("gaussian_tilt_optimum")["expected"]["mean"], abs=0.1
    )


@SEEDS
def test_a_flow_with_shuffled_rewards_stays(seed):
    assert abs(mean_after_flow_rl(seed, shuffled=True)) < 0.5
