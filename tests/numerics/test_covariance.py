"""Covariance of log-prob and advantage, and who is selected by it."""

from __future__ import annotations

import pytest
import torch

from posttrain.algo.covariance import covariance, kl_cov
from posttrain.algo.entropy import entropy


def tokens(case: dict, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = torch.tensor(case["inputs"]["p"], dtype=dtype).log()
    return logprobs, torch.tensor(case["inputs"]["A"], dtype=dtype)


def test_each_tokens_share_of_the_covariance(vector, dtype, matches):
    case = vector("cov_clip")
    matches(covariance(*tokens(case, dtype)), case["expected"]["token_cov"], case["tolerance"])


def test_kl_cov_selects_the_largest(vector):
    case = vector("cov_clip")
    logprobs, advantages = tokens(case, torch.float64)
    selected = kl_cov(logprobs, advantages, frac=2e-4).nonzero().flatten().tolist()
    assert selected and set(selected) <= set(case["expected"]["kl_cov_top1_index"])
    assert kl_cov(logprobs, advantages, frac=1.0).all()
    shifted = kl_cov(logprobs + torch.tensor([0.1, 0, 0, 0]), advantages, frac=0.25)
    assert shifted.tolist() == [True, False, False, False]


def test_its_mean_tells_how_the_entropy_will_change():
    """dH = -eta Cov(log pi, A) of a natural-gradient step, from a batch that is its expectation."""
    pi = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    actions = torch.repeat_interleave(torch.tensor([5, 3, 2]))
    advantages = torch.tensor([1.0, -0.2, 0.3], dtype=torch.float64)
    advantages = advantages - (pi * advantages).sum()
    mean = float(covariance(pi.log()[actions], advantages[actions]).mean())
    eta = 1e-5
    after = entropy((pi.log() + eta * advantages)[None])
    change = float(after - entropy(pi.log()[None])) / eta
    assert mean > 0 and change == pytest.approx(-mean, rel=1e-3)


def test_the_same_advantage_everywhere_has_no_covariance(dtype):
    logprobs = -torch.rand(7, dtype=dtype)
    assert covariance(logprobs, torch.full((7,), 0.5, dtype=dtype)).tolist() == [0.0] * 7


@pytest.mark.parametrize("count", [0, 1])
def test_no_token_and_one_token_have_none_either(count, dtype):
    found = covariance(-torch.ones(count, dtype=dtype), torch.ones(count, dtype=dtype))
    assert found.tolist() == [0.0] * count
    assert len(kl_cov(found, found, frac=0.5)) == count


def test_the_centre_is_that_of_the_whole_step():
    """AReaL #1730 chose within micro-batches: halves centred alone select other tokens."""
    generator = torch.Generator().manual_seed(1)
    logprobs = -torch.rand(40, generator=generator, dtype=torch.float64)
    advantages = torch.randn(40, generator=generator, dtype=torch.float64)
    whole = covariance(logprobs, advantages)
    halves = torch.cat([covariance(logprobs[i : i + 20], advantages[i : i + 20]) for i in (0, 20)])
    assert not torch.allclose(whole, halves, atol=1e-3)
    assert float(whole.sum()) == pytest.approx(
        40 * float(torch.cov(torch.stack([logprobs, advantages]), correction=0)[0, 1])
    )
