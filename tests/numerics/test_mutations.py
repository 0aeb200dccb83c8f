"""Every loss against its closed-form gradient, and mutants of it that the same check must catch.

The closed forms are written from the equations in plain Python, one sequence at a time, and share
no code with the losses. p, q, a: policy, anchor and advantage of a token; every form returns the
gradient of the sum of the sequence's losses, and which tokens a lower and an upper bound hold.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import exp, prod
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch

from posttrain.algo.columns import Rule, rule
from posttrain.algo.losses.terms import LossTerms
from posttrain.config.losses import LossConfig, LossSection

Token = tuple[float, float, float]
Row = tuple[float, bool, bool]  # gradient, held by a lower bound, by an upper bound
Columns = dict[str, torch.Tensor]

LOSSES: dict[str, LossSection] = {
    config.model_fields["type"].default: config() for config in get_args(get_args(LossConfig)[0])
}
# Settings with which the tokens below fall on both sides of every bound.
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo_clip": {"dual_clip": 1.4},
    "gspo": {"clip_low": 0.05, "clip_high": 0.1},
    "gspo_token": {"clip_low": 0.05, "clip_high": 0.1},
    "cispo": {"cap": 1.2},
    "is_reinforce": {"cap": 1.2},
    "sapo": {"tau_pos": 1.1, "tau_neg": 2.1},  # no float32 holds them exactly
    "gmpo": {"clip_low": 0.15, "clip_high": 0.25},
    "dppo": {"mask_low": 0.03, "mask_high": 0.06, "kl_tau": 0.05},
    "aspo": {"clip_high": 0.28, "cap": 1.15},
    "vespo": {"k_pos": 2.1, "lambda_pos": 3.1, "k_neg": 3.3, "lambda_neg": 2.2},
    "kimi": {"tau": 0.1},
}


def make_columns() -> Columns:
    """8 sequences; the advantages of the last four differ from token to token. prox is not the
    sampler, so that a loss that reads the wrong one is caught."""
    generator = torch.Generator().manual_seed(5)
    lengths_S = torch.tensor([3, 1, 6, 4, 5, 2, 7, 4])
    index_N = torch.arange(8).repeat_interleave(lengths_S)
    total = len(index_N)

    def noise(scale: float, size: int = total) -> torch.Tensor:
        return scale * torch.randn(size, generator=generator, dtype=torch.float64)

    policy_N = -2 * torch.rand(total, generator=generator, dtype=torch.float64) - 0.3
    advantages_N = torch.tensor([1.0, -1.0, 0.5, -0.7, 0.4, -0.6, 0.9, 0.0]).double()[index_N]
    return {
        "policy_logprobs_N": policy_N,
        "prox_logprobs_N": policy_N + noise(0.3),
        "sampler_logprobs_N": policy_N + noise(0.3),
        "advantages_N": advantages_N + torch.where(index_N < 4, 0.0, noise(0.8)),
        "sequence_index_N": index_N,
    }


# --- closed forms -------------------------------------------------------------------------------


def clip(ratio: float, a: float, s: SimpleNamespace) -> tuple[bool, bool]:
    return a < 0 and ratio < 1 - s.clip_low, a > 0 and ratio > 1 + s.clip_high


def ppo_clip(tokens: Sequence[Token], s: SimpleNamespace) -> list[Row]:
    rows = []
    for p, q, a in tokens:
        low, high = clip(exp(p - q), a, s)
        high = high or (a < 0 and exp(p - q) > s.dual_clip)
        rows.append((0.0 if low or high else -a * exp(p - q), low, high))
    return rows


def gspo(tokens: Sequence[Token], s: SimpleNamespace) -> list[Row]:
    ratio = exp(sum(p - q for p, q, _ in tokens) / len(tokens))
    held = [clip(ratio, a, s) for _, _, a in tokens]
    free = [a for (_, _, a), bounds in zip(tokens, held, strict=True) if not any(bounds)]
    return [(-sum(free) * ratio / len(tokens), low, high) for low, high in held]


def gspo_token(tokens: Sequence[Token], s: SimpleNamespace) -> list[Row]:
    ratio = exp(sum(p - q for p, q, _ in tokens) / len(tokens))
    held = [clip(ratio, a, s) for _, _, a in tokens]
    return [
        (0.0 if low or high else -a * ratio, low, high)
        for (_, _, a), (low, high) in zip(tokens, held, strict=True)
    ]


def cispo(tokens: Sequence[Token], s: SimpleNamespace) -> list[Row]:
    return [(-min(exp(p - q), s.cap) * a, False, exp(p - q) > s.cap) for p, q, a in tokens]


def sapo(tokens: Sequence[Token], s: SimpleNamespace) -> list[Row]:
    rows = []
    for p, q, a in tokens:
        gate = 1 / (1 + exp(-(s.tau_pos if a > 0 else s.tau_neg) * (exp(p - q) - 1)))
        rows.append((-4 * gate * (1 - gate) * exp(p - q) * a, False, False))
    return rows


def topr(tokens: Sequence[Token], s: SimpleNamespace) -> list[Row]:
    product = prod(exp(p - q) for p, q, _ in tokens)
    return [
        (-a * (min(product, 1) if a < 0 else 1), False, a < 0 < product - 1) for *_, a in tokens
    ]


def gmpo(tokens: Sequence[Token], s: SimpleNamespace) -> list[Row]:
    held = [(a < 0 and p - q < -s.clip_low, a > 0 and p - q > s.clip_high) for p, q, a in tokens]
    logs = [
        -s.clip_low if low else s.clip_high if high else p - q
        for (p, q, _), (low, high) in zip(tokens, held, strict=True)
    ]
    gradient = -sum(a for *_, a in tokens) * exp(sum(logs) / len(logs)) / len(logs)
    return [(0.0 if low or high else gradient, low, high) for low, high in held]


def dppo(tokens: Sequence[Token], s: SimpleNamespace) -> list[Row]:
    rows = []
    for p, q, a in tokens:
        low = a < 0 and exp(p) - exp(q) < -s.mask_low
        high = a > 0 and exp(p) - exp(q) > s.mask_high
        surrogate = 0.0 if low or high else -a * exp(p - q)
        rows.append((surrogate + 2 * s.kl_tau * (p - q), low, high))
    return rows


def gpg(tokens: Sequence[Token], s: SimpleNamespace) -> list[Row]:
    return [(-a, False, False) for *_, a in tokens]


def aspo(tokens: Sequence[Token], s: SimpleNamespace) -> list[Row]:
    rows = []
    for p, q, a in tokens:
        low, high = clip(exp(p - q), a, s)
        weight = exp(q - p) if a > 0 else exp(p - q)
        is_capped = weight > s.cap
        rows.append((0.0 if low or high else -a * min(weight, s.cap), low, high or is_capped))
    return rows


def vespo(tokens: Sequence[Token], s: SimpleNamespace) -> list[Row]:
    w = prod(exp(p - q) for p, q, _ in tokens)
    bad, good = (s.k_neg, s.lambda_neg), (s.k_pos, s.lambda_pos)
    shapes = [bad if a < 0 else good for *_, a in tokens]
    return [
        (-(w**k) * exp(rate * (1 - w)) * a, False, False)
        for (*_, a), (k, rate) in zip(tokens, shapes, strict=True)
    ]


def kimi(tokens: Sequence[Token], s: SimpleNamespace) -> list[Row]:
    return [(-a + 2 * s.tau * (p - q), False, False) for p, q, a in tokens]


CLOSED_FORMS: dict[str, Callable[[Sequence[Token], SimpleNamespace], list[Row]]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "is_reinforce": cispo,
    "sapo": sapo,
    "topr": topr,
    "gmpo": gmpo,
    "dppo": dppo,
    "gpg": gpg,
    "aspo": aspo,
    "vespo": vespo,
    "kimi": kimi,
}


def settings_of(name: str) -> dict[str, Any]:
    return LOSSES[name].model_dump(exclude={"type"}) | SETTINGS.get(name, {})


def real_loss(name: str, **changed: Any) -> Rule:
    return rule("losses", LOSSES[name].model_copy(update=settings_of(name) | changed))


def check(name: str, loss: Callable[[Columns], LossTerms], *, flags: bool = True) -> None:
    """The gradient is the closed form's, and so are the bounds' flags unless left out."""
    columns = make_columns()
    leaf = columns["policy_logprobs_N"].clone().requires_grad_(True)
    terms = loss({**columns, "policy_logprobs_N": leaf})
    (gradient,) = torch.autograd.grad(terms.per_token_N.sum(), leaf)
    anchor = "sampler_logprobs_N" if LOSSES[name].anchor_is_sampler else "prox_logprobs_N"
    index, settings = columns["sequence_index_N"], SimpleNamespace(**settings_of(name))
    rows: list[Row] = []
    for s in range(int(index.max()) + 1):
        parts = [columns[k][index == s].tolist() for k in ("policy_logprobs_N", anchor)]
        advantages = columns["advantages_N"][index == s].tolist()
        rows += CLOSED_FORMS[name](list(zip(*parts, advantages, strict=True)), settings)
    expected, low, high = zip(*rows, strict=True)
    assert gradient.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    bounds = ((terms.clipped_low_N, low), (terms.clipped_high_N, high)) if flags else ()
    for held, wanted in bounds:
        if held is None:
            assert not any(wanted)
        else:
            assert held.tolist() == list(wanted)
            assert any(wanted) and not all(wanted), "the tokens don't reach both sides of a bound"


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_the_gradient_and_the_flags_of_its_closed_form(name):
    check(name, real_loss(name))


# --- mutants ------------------------------------------------------------------------------------

Mutant = Callable[[str, Columns], LossTerms]


def flipped_sign(name: str, columns: Columns) -> LossTerms:
    return real_loss(name)({**columns, "advantages_N": -columns["advantages_N"]})


def size_of_the_advantage_only(name: str, columns: Columns) -> LossTerms:
    return real_loss(name)({**columns, "advantages_N": columns["advantages_N"].abs()})


def with_anchor(name: str, columns: Columns, anchor: Callable[[torch.Tensor], torch.Tensor]):
    keys = ("prox_logprobs_N", "sampler_logprobs_N")
    return real_loss(name)({**columns, **{key: anchor(columns[key]) for key in keys}})


def shifted_anchor(name: str, columns: Columns) -> LossTerms:
    """Off by one."""
    return with_anchor(name, columns, lambda anchor_N: anchor_N.roll(1))


def anchor_shifted_the_other_way(name: str, columns: Columns) -> LossTerms:
    return with_anchor(name, columns, lambda anchor_N: anchor_N.roll(-1))


def anchor_of_the_current_weights(name: str, columns: Columns) -> LossTerms:
    """Report e09: ratio 1 everywhere, so that no bound ever does anything."""
    policy_N = columns["policy_logprobs_N"].detach()
    return with_anchor(name, columns, lambda _: policy_N)


def anchor_of_the_other_policy(name: str, columns: Columns) -> LossTerms:
    prox_N, sampler_N = columns["prox_logprobs_N"], columns["sampler_logprobs_N"]
    return real_loss(name)({**columns, "prox_logprobs_N": sampler_N, "sampler_logprobs_N": prox_N})


def inverted_ratio(name: str, columns: Columns) -> LossTerms:
    """anchor / policy, with the gradient still pointing the right way."""
    policy_N = columns["policy_logprobs_N"]
    key = "sampler_logprobs_N" if LOSSES[name].anchor_is_sampler else "prox_logprobs_N"
    moved_N = columns[key] + (policy_N - policy_N.detach())
    return real_loss(name)({**columns, "policy_logprobs_N": moved_N, key: policy_N.detach()})


def missing_stop_gradient(name: str, columns: Columns) -> LossTerms:
    with patch.object(torch.Tensor, "detach", lambda tensor: tensor):
        return real_loss(name)(columns)


def gradient_of_the_weight_stopped(name: str, columns: Columns) -> LossTerms:
    """A whole ratio as a constant weight on policy_logprobs: no gradient where it belongs."""
    terms = real_loss(name)({**columns, "policy_logprobs_N": columns["policy_logprobs_N"].detach()})
    per_token_N = terms.per_token_N * columns["policy_logprobs_N"]
    return LossTerms(per_token_N, terms.clipped_low_N, terms.clipped_high_N)


def one_sequence_for_all(name: str, columns: Columns) -> LossTerms:
    index_N = torch.zeros_like(columns["sequence_index_N"])
    return real_loss(name)({**columns, "sequence_index_N": index_N})


def a_sequence_for_each_token(name: str, columns: Columns) -> LossTerms:
    index_N = torch.arange(len(columns["sequence_index_N"]))
    return real_loss(name)({**columns, "sequence_index_N": index_N})


def with_reduction(
    name: str, columns: Columns, right: str, wrong: Callable[..., torch.Tensor]
) -> LossTerms:
    loss = real_loss(name)
    with patch.object(sys.modules[loss.function.__module__], right, wrong):
        return loss(columns)


def product_for_mean(name: str, columns: Columns) -> LossTerms:
    """Report a11."""
    from posttrain.algo.segments import segment_sum

    return with_reduction(name, columns, "segment_mean", segment_sum)


def mean_for_product(name: str, columns: Columns) -> LossTerms:
    from posttrain.algo.segments import segment_mean

    return with_reduction(name, columns, "segment_sum", segment_mean)


def swapped(one: str, other: str) -> Mutant:
    """Two settings exchanged: bounds of the wrong side, temperatures of the wrong sign."""

    def mutant(name: str, columns: Columns) -> LossTerms:
        values = settings_of(name)
        return real_loss(name, **{one: values[other], other: values[one]})(columns)

    mutant.__name__ = f"swapped_{one}_{other}"
    return mutant


def changed(setting: str, value: float) -> Mutant:
    """A bound that isn't there, a term that is missing or has the wrong sign."""

    def mutant(name: str, columns: Columns) -> LossTerms:
        return real_loss(name, **{setting: value})(columns)

    mutant.__name__ = f"{setting}_{value}"
    return mutant


def smaller_branch(name: str, columns: Columns) -> LossTerms:
    """The optimistic clip: min of the losses instead of max."""
    with patch.object(torch, "maximum", torch.minimum):
        return real_loss(name)(columns)


def mask_by_ratio(name: str, columns: Columns) -> LossTerms:
    """DPPO with PPO's test: log-probs compared where probabilities should be."""
    policy_N, sampler_N = columns["policy_logprobs_N"], columns["sampler_logprobs_N"]
    settings, advantages_N = SimpleNamespace(**settings_of(name)), columns["advantages_N"]
    is_high_N = (advantages_N > 0) & (policy_N - sampler_N > settings.mask_high)
    is_low_N = (advantages_N < 0) & (policy_N - sampler_N < -settings.mask_low)
    free = real_loss(name, mask_low=1.0, mask_high=1.0, kl_tau=0.0)(columns).per_token_N
    penalty_N = settings.kl_tau * (policy_N - sampler_N).square()
    kept_N = free.masked_fill(is_low_N | is_high_N, 0)
    return LossTerms(kept_N + penalty_N, is_low_N, is_high_N)


def shaped_like_a_probability(name: str, columns: Columns) -> LossTerms:
    """exp(policy_logprobs) in place of policy_logprobs."""
    return real_loss(name)({**columns, "policy_logprobs_N": columns["policy_logprobs_N"].exp()})


HUGE = 1e3
EVERY = list(LOSSES)
ANCHORED = [name for name in EVERY if name != "gpg"]
WEIGHTED = ["cispo", "is_reinforce", "topr", "vespo", "aspo", "gspo_token"]
RATIOS = ["ppo_clip", "gspo", "gspo_token", "sapo", "gmpo", "dppo", "aspo"]
CLIPPED = ["ppo_clip", "gspo", "gspo_token"]
MUTANTS: list[tuple[Mutant, list[str]]] = [
    (flipped_sign, EVERY),
    (size_of_the_advantage_only, EVERY),
    (shaped_like_a_probability, EVERY),
    (shifted_anchor, ANCHORED),
    (anchor_shifted_the_other_way, ANCHORED),
    (anchor_of_the_current_weights, ANCHORED),
    (anchor_of_the_other_policy, ANCHORED),
    (inverted_ratio, ANCHORED),
    (missing_stop_gradient, WEIGHTED),
    (gradient_of_the_weight_stopped, RATIOS),
    (one_sequence_for_all, ["gspo", "gspo_token", "gmpo", "topr", "vespo"]),
    (a_sequence_for_each_token, ["gspo", "gspo_token", "gmpo", "topr", "vespo"]),
    (product_for_mean, ["gspo", "gspo_token", "gmpo"]),
    (mean_for_product, ["topr", "vespo"]),
    (smaller_branch, CLIPPED),
    (swapped("clip_low", "clip_high"), [*CLIPPED, "gmpo", "aspo"]),
    (changed("clip_low", HUGE), [*CLIPPED, "gmpo", "aspo"]),
    (changed("clip_high", HUGE), [*CLIPPED, "gmpo", "aspo"]),
    (changed("dual_clip", HUGE), ["ppo_clip"]),
    (changed("cap", HUGE), ["cispo", "is_reinforce", "aspo"]),
    (changed("cap", 2.2), ["cispo", "is_reinforce"]),  # 1 + the cap: verl's number in TRL's place
    (swapped("tau_pos", "tau_neg"), ["sapo"]),
    (swapped("k_pos", "k_neg"), ["vespo"]),
    (swapped("lambda_pos", "lambda_neg"), ["vespo"]),
    (swapped("mask_low", "mask_high"), ["dppo"]),
    (changed("mask_low", 1.0), ["dppo"]),
    (changed("mask_high", 1.0), ["dppo"]),
    (changed("kl_tau", 0.0), ["dppo"]),
    (changed("kl_tau", -0.05), ["dppo"]),
    (mask_by_ratio, ["dppo"]),
    (changed("tau", 0.0), ["kimi"]),
    (changed("tau", -0.1), ["kimi"]),
    (changed("tau", 0.05), ["kimi"]),  # tau / 2: the other convention
]
PAIRS = [(mutant, name) for mutant, names in MUTANTS for name in names]


@pytest.mark.parametrize(
    ("mutant", "name"), PAIRS, ids=[f"{name}-{mutant.__name__}" for mutant, name in PAIRS]
)
def test_a_mutant_of_a_loss_fails_its_closed_form(mutant, name):
    """By its gradient alone: the flags would give some of them away, but don't train anything."""
    with pytest.raises(AssertionError):
        check(name, lambda columns: mutant(name, columns), flags=False)


def test_every_loss_has_a_closed_form_and_mutants():
    assert set(CLOSED_FORMS) == set(LOSSES)
    assert all(sum(name == other for _, other in PAIRS) >= 3 for name in LOSSES)
