"""Log-probs of sampled tokens: temperature on logits, and row i against its own label."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from posttrain.algo.logprobs import token_logprobs
from posttrain.algo.ratios import log_ratio


def test_the_temperature_divides_logits_and_not_logprobs(vector, dtype, matches):
    case = vector("logprob_temperature")
    expected, tolerance = case["expected"], case["tolerance"]
    logits = torch.tensor([case["inputs"]["logits"]], dtype=dtype)
    label = torch.tensor([case["inputs"]["action"]])
    temperature = case["inputs"]["T"]
    raw, processed = token_logprobs(logits, label), token_logprobs(logits, label, temperature)
    matches(raw, [expected["raw"]], tolerance)
    matches(processed, [expected["processed"]], tolerance)
    matches(log_ratio(raw, processed).exp(), [expected["ratio_if_trainer_forgets_T"]], tolerance)
    assert abs(float(processed) - expected["wrong_raw_over_T"]) > 0.1


def test_logprobs_at_half_temperature_of_two_tokens():
    """Report a08: -0.01815, where untempered logits give -0.12693."""
    logits, label = torch.tensor([[2.0, 0.0]], dtype=torch.float64), torch.tensor([0])
    assert float(token_logprobs(logits, label, 0.5)) == pytest.approx(-0.01815, abs=1e-5)
    assert float(token_logprobs(logits, label)) == pytest.approx(-0.12693, abs=1e-5)


def test_full_vocabulary_logprobs_are_off_by_the_mass_that_top_p_kept(vector, dtype, matches):
    """Report a10: the sampler renormalises over kept tokens; without the same mask in the trainer
    the ratio is the kept mass, with it 1."""
    case = vector("logprob_top_p_mass")
    expected, tolerance = case["expected"], case["tolerance"]
    probabilities = torch.tensor([case["inputs"]["p"]], dtype=dtype)
    kept = torch.tensor([case["inputs"]["top_p_keep"]]).bool()
    matches(probabilities[kept].sum(), expected["surviving_mass"], tolerance)
    label, logits = torch.tensor([case["inputs"]["action"]]), probabilities.log()
    trainer = token_logprobs(logits, label)
    sampler = token_logprobs(logits.masked_fill(~kept, -torch.inf), label)
    matches(sampler.exp(), [expected["processed_p"]], tolerance)
    spurious = expected["spurious_ratio_if_trainer_uses_full_vocab"]
    matches(log_ratio(trainer, sampler).exp(), [spurious], tolerance)


def shifted(logits_LV: torch.Tensor, tokens_L: torch.Tensor) -> torch.Tensor:
    return token_logprobs(logits_LV[:-1], tokens_L[1:])


def unshifted(logits_LV: torch.Tensor, tokens_L: torch.Tensor) -> torch.Tensor:
    return token_logprobs(logits_LV[:-1], tokens_L[:-1])


def shifted_the_wrong_way(logits_LV: torch.Tensor, tokens_L: torch.Tensor) -> torch.Tensor:
    return token_logprobs(logits_LV[1:], tokens_L[:-1])


def check_alignment(implementation: Callable, case, dtype, matches) -> None:
    logits = torch.tensor(case["inputs"]["logits"], dtype=dtype)
    tokens = torch.tensor(case["inputs"]["tokens"])
    expected = case["expected"]["logp_tokens_1_2"]
    matches(implementation(logits, tokens), expected, case["tolerance"])


def test_row_t_is_scored_against_token_t_plus_one(vector, dtype, matches):
    check_alignment(shifted, vector("logprob_alignment"), dtype, matches)


@pytest.mark.parametrize("mutant", [unshifted, shifted_the_wrong_way])
def test_an_off_by_one_shift_fails_the_alignment_vector(mutant, vector, matches):
    """Report a13: the negative control must fail."""
    with pytest.raises(AssertionError):
        check_alignment(mutant, vector("logprob_alignment"), torch.float64, matches)


def test_half_precision_logits_are_widened_before_the_softmax():
    logits = 5 * torch.randn(8, 5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(8)
    exact = logits.double().log_softmax(-1)[torch.arange(8), labels]
    result = token_logprobs(logits, labels)
    assert result.dtype == torch.float32
    assert torch.allclose(result.double(), exact, atol=1e-5)


def test_a_temperature_of_zero_is_refused():
    """Report a26: probabilities are never driven to 0 in silence."""
    with pytest.raises(ValueError, match="temperature is 0"):
        token_logprobs(torch.zeros(1, 2), torch.tensor([0]), 0.0)
