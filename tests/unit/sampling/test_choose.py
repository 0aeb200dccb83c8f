"""Choosing tokens: the right distribution, the right log-prob, one row at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from posttrain.algo.logprobs import token_logprobs
from posttrain.errors import EngineError
from posttrain.sampling.choose import BLOCK, choose_tokens, truncate
from posttrain.types import SamplingParams

PLAIN = SamplingParams(1)
ABC = torch.tensor([0.5, 0.3, 0.2]).log()
INF = float("inf")


def choose(
    logits: torch.Tensor, params: SamplingParams, uniforms: list[float] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Many draws from one row."""
    count = len(uniforms)
    ids, logprobs = choose_tokens(logits.repeat(count, 1), [params] * count, list(uniforms))
    return np.array(ids), np.array(logprobs)


def exact(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """Probabilities in float64, by the definition: temperature, then top-k, then top-p."""
    p = np.exp(logits.double().numpy() / params.temperature)
    order = np.argsort(-p, kind="stable")
    keep = order[: params.top_k or len(p)]
    kept = p[keep] / p[keep].sum()
    keep = keep[: int(np.searchsorted(np.cumsum(kept), params.top_p - 1e-9)) + 1]
    out = np.zeros_like(p)
    out[keep] = p[keep]
    return out / out.sum()


@pytest.mark.parametrize(
    "params",
    [
        PLAIN,
        replace(PLAIN, temperature=0.6),
        replace(PLAIN, temperature=1.3),
        replace(PLAIN, top_k=7),
        replace(PLAIN, top_p=0.8),
        replace(PLAIN, temperature=1.7, top_k=9, top_p=0.7),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [20, 2 * BLOCK + 3])
def test_tokens_come_as_often_as_their_probability_says(vocab: int, params: SamplingParams) -> None:
    """Chi-square over 6,000 draws with a fixed seed, and the log-prob of each is the exact one."""
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 1.5, vocab)).float()
    draws = 6_000
    ids, logprobs = choose(logits, params, np.random.default_rng(2).random(draws))
    p = exact(logits, params)
    np.testing.assert_allclose(logprobs, np.log(p[ids]), atol=2e-6)
    counts = np.bincount(ids, minlength=vocab)
    assert counts[p == 0].sum() == 0
    expected = p[p > 0] * draws
    observed = counts[p > 0]
    rare = expected < 10  # pooled, as the test asks for
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        observed = np.append(observed[~rare], observed[rare].sum())
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4, "4 sigma"


def test_top_p_renormalises_over_what_it_keeps() -> None:
    """a10: probabilities .5/.3/.2, top_p .75: token 0 has ln(.625), not ln(.5)."""
    ids, logprobs = choose(ABC, replace(PLAIN, top_p=0.75), [0.1, 0.9, 0.999])
    assert ids.tolist() == [0, 1, 1]
    assert logprobs[:2] == pytest.approx([math.log(0.625), math.log(0.375)], abs=1e-6)


def test_temperature_divides_logits_before_the_log() -> None:
    """a08: logits [2, 0], T = 0.5: -0.01815."""
    _, logprobs = choose(torch.tensor([2.0, 0.0]), replace(PLAIN, temperature=0.5), [0.0])
    assert logprobs[0] == pytest.approx(-0.0181499, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("vocab", [89, 1001])
def test_sampler_and_learner_compute_the_same_bits(vocab: int, temperature: float) -> None:
    """a09: the ratio of an on-policy token is exactly 1 at every temperature."""
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 3, (33, vocab))).float()
    params = [replace(PLAIN, temperature=temperature)] * 33
    ids, logprobs = choose_tokens(logits, params, np.random.default_rng(4).random(33).tolist())
    assert token_logprobs(logits, torch.tensor(ids), temperature).tolist() == logprobs


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53, 0.5, float(np.float32(1) - 2**-24)])
@pytest.mark.parametrize("vocab", [3, BLOCK, BLOCK + 1, 5 * BLOCK])
def test_a_token_of_probability_zero_is_never_chosen(vocab: int, uniform: float) -> None:
    """Impossible tokens at both ends, around the block borders, and whole impossible blocks."""
    for possible in ({1}, {vocab - 2}, {0, vocab - 1}, {vocab // 2}):
        logits = torch.full((vocab,), -INF)
        logits[list(possible)] = 0.0
        ids, logprobs = choose(logits, PLAIN, [uniform])
        assert int(ids[0]) in possible
        assert logprobs[0] == pytest.approx(-math.log(len(possible)))


def test_an_underflowing_probability_counts_as_zero() -> None:
    ids, _ = choose(torch.tensor([-200.0, 0.0, -200.0]), PLAIN, [0.0, 1 - 2**-53])
    assert ids.tolist() == [1, 1]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_exactly_k_tokens_survive_ties_the_lower_id_first(k: int) -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    survivors = torch.isfinite(truncate(logits, k, 1.0)).nonzero().flatten().tolist()
    assert survivors == sorted([1, 2, 3, 0, 4][:k])


def test_top_k_beyond_the_vocabulary_keeps_everything() -> None:
    assert torch.equal(truncate(ABC, 50, 1.0), ABC)


def test_a_tiny_top_p_keeps_the_likeliest_token() -> None:
    ids, logprobs = choose(ABC, replace(PLAIN, top_p=1e-6), [0.0, 0.999])
    assert ids.tolist() == [0, 0] and logprobs.tolist() == [0.0, 0.0]


def test_greedy_is_certain_and_takes_the_first_of_equals() -> None:
    greedy = SamplingParams(1, temperature=0, top_k=2, top_p=0.5)
    ids, logprobs = choose(torch.tensor([0.0, 3.0, 3.0]), greedy, [0.0, 0.999])
    assert ids.tolist() == [1, 1] and logprobs.tolist() == [0.0, 0.0]


def test_each_row_is_a_function_of_itself_alone() -> None:
    """Mixed params in one batch; every row again alone, in pairs and backwards, bit for bit."""
    rng = np.random.default_rng(5)
    kinds = [PLAIN, replace(PLAIN, temperature=0.6), replace(PLAIN, temperature=0)]
    kinds += [replace(PLAIN, top_k=3), replace(PLAIN, top_p=0.5, temperature=1.3)]
    params = [kinds[i % 5] for i in range(25)]
    logits = torch.from_numpy(rng.normal(0, 2, (25, 2 * BLOCK + 5))).float()
    uniforms = rng.random(25).tolist()
    ids, logprobs = choose_tokens(logits, params, uniforms)
    for rows in (
        [[i] for i in range(25)] + [[i, i - 1] for i in range(25)] + [list(range(24, -1, -1))]
    ):
        some = choose_tokens(logits[rows], [params[i] for i in rows], [uniforms[i] for i in rows])
        assert some == ([ids[i] for i in rows], [logprobs[i] for i in rows])


def test_the_logits_given_are_not_changed() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    choose_tokens(logits, [replace(PLAIN, top_k=2)] * 4, [0.5] * 4)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [float("nan"), INF])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_refused(bad: float, temperature: float) -> None:
    with pytest.raises(EngineError, match="weights are damaged"):
        choose(torch.tensor([0.0, bad, 1.0]), replace(PLAIN, temperature=temperature), [0.5])
