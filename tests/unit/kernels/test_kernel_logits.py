"""Statistics of logits and sampling against torch in float64."""

from __future__ import annotations

import pytest
import torch

from posttrain.kernels.logits import logit_stats, logit_stats_backward, sample

V = 1003  # ends inside a vector and inside a block


def random_logits(rows: int, scale: float = 3.0) -> torch.Tensor:
    drawn = scale * torch.randn(rows, V, generator=torch.Generator().manual_seed(0))
    return drawn.to(torch.bfloat16)


LABELS = torch.tensor([0, 5, V - 1, 400, 17, 999, 16, 255])


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_log_probs_and_entropy_are_those_of_the_softmax(temperature: float) -> None:
    logits = random_logits(8)
    logprob, normaliser, entropy = logit_stats(logits, LABELS, temperature)
    exact = (logits.double() / temperature).log_softmax(-1)
    assert torch.allclose(logprob.double(), exact.gather(1, LABELS[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(entropy.double(), -(exact.exp() * exact).sum(-1), atol=1e-5)
    assert torch.allclose(
        normaliser.double(), (logits.double() / temperature).logsumexp(-1), atol=1e-5
    )


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_in_the_logits_is_that_of_the_formula(
    temperature: float, with_entropy: bool
) -> None:
    logits = random_logits(8)
    slope, bonus = torch.linspace(-1, 1, 8), torch.linspace(0.5, -0.5, 8)
    leaf = logits.double().requires_grad_()
    exact = (leaf / temperature).log_softmax(-1)
    objective = exact.gather(1, LABELS[:, None])[:, 0] @ slope.double()
    if with_entropy:
        objective = objective - (exact.exp() * exact).sum(-1) @ bonus.double()
    (expected,) = torch.autograd.grad(objective, leaf)
    _, normaliser, entropy = logit_stats(logits, LABELS, temperature)
    found = logit_stats_backward(
        logits.clone(), LABELS, temperature, normaliser, entropy, slope,
        bonus if with_entropy else None,
    )  # fmt: skip
    error = (found.double() - expected).abs()
    assert bool((error <= expected.abs() * 2**-8 + 1e-7).all())


def test_impossible_tokens_add_nothing_and_get_no_gradient() -> None:
    logits = random_logits(2)
    logits[:, 100:] = float("-inf")
    labels = torch.tensor([3, 99])
    logprob, normaliser, entropy = logit_stats(logits, labels, 1.0)
    kept = logits[:, :100].double().log_softmax(-1)
    assert torch.allclose(logprob.double(), kept.gather(1, labels[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(entropy.double(), -(kept.exp() * kept).sum(-1), atol=1e-5)
    slopes = logit_stats_backward(
        logits.clone(), labels, 1.0, normaliser, entropy, torch.ones(2), torch.ones(2)
    )
    assert bool((slopes[:, 100:] == 0).all())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_sampled_token_inverts_the_distribution_and_has_the_log_prob_that_training_gives(
    temperature: float,
) -> None:
    logits = random_logits(200, scale=1.0)
    uniform = torch.rand(200, generator=torch.Generator().manual_seed(1))
    ids, logprobs = sample(logits, torch.full((200,), temperature), uniform)
    below = (logits.double() / temperature).softmax(-1).cumsum(-1)
    rows = torch.arange(200)
    assert bool((below[rows, ids] > uniform.double() - 1e-5).all())
    before = torch.where(ids > 0, below[rows, (ids - 1).clamp_min(0)], 0.0)
    assert bool((before <= uniform.double() + 1e-5).all())
    assert torch.equal(logprobs, logit_stats(logits, ids, temperature)[0])


def test_sampled_tokens_follow_the_distribution() -> None:
    """A chi-square statistic of 20,000 draws from ten tokens, far below its 1e-6 quantile."""
    logits = torch.full((1, V), float("-inf"), dtype=torch.bfloat16)
    places = torch.tensor([0, 15, 16, 255, 256, 300, 512, 768, 1001, 1002])
    logits[0, places] = torch.linspace(-2, 2, 10).to(torch.bfloat16)
    uniform = (torch.arange(20000) + 0.5) / 20000
    ids, _ = sample(logits.expand(20000, -1).contiguous(), torch.ones(20000), uniform)
    expected = logits[0].double().softmax(-1) * 20000
    counts = torch.bincount(ids, minlength=V).double()
    assert bool((counts[expected == 0] == 0).all())
    drawn = expected > 0
    assert float(((counts - expected)[drawn] ** 2 / expected[drawn]).sum()) < 1


def test_the_ends_of_the_uniform_range_give_possible_tokens() -> None:
    logits = random_logits(2)
    logits[:, :3] = logits[:, -3:] = float("-inf")
    ids, _ = sample(logits, torch.ones(2), torch.tensor([0.0, 1.0]))
    assert ids[0] == 3 and ids[1] <= V - 4


def test_temperature_zero_takes_the_first_largest_with_log_prob_zero() -> None:
    logits = random_logits(3)
    logits[1, [70, 900]] = 50.0
    ids, logprobs = sample(logits, torch.zeros(3), torch.rand(3))
    assert ids.tolist() == logits.float().argmax(-1).tolist() and ids[1] == 70
    assert logprobs.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_give_no_token(bad: float) -> None:
    logits = random_logits(3)
    logits[1, 500] = bad
    ids, _ = sample(logits, torch.tensor([1.0, 1.0, 0.0]), torch.rand(3))
    assert ids[1] == -1 and min(ids[0], ids[2]) >= 0


def test_a_row_has_the_same_bits_alone_and_among_many() -> None:
    logits = random_logits(50)
    labels = torch.arange(50)
    many = logit_stats(logits, labels, 1.0)
    for row in (0, 17, 49):
        alone = logit_stats(logits[row : row + 1], labels[row : row + 1], 1.0)
        assert all(torch.equal(a[0], m[row]) for a, m in zip(alone, many, strict=True))


def test_tokens_far_below_the_largest_are_drawn_as_often_as_they_should() -> None:
    """A flat tail of 2^17 tokens of 1e-8 each: all places of a block, with the chance stated."""
    size = 1 << 17
    logits = torch.full((1, size), -18.5, dtype=torch.bfloat16)
    logits[0, 0] = 0
    total = 1 + (size - 1) * float(torch.tensor(-18.5).exp())
    uniform = torch.linspace(1 / total + 1e-6, 1 - 1e-9, 2000, dtype=torch.float64)
    ids, logprobs = sample(logits.expand(2000, -1).contiguous(), torch.ones(2000), uniform)
    assert len(set(ids.tolist())) > 1900 and len(set((ids % 256).tolist())) > 250
    below = 1 + (ids.double() - 1) * float(torch.tensor(-18.5).exp())
    assert float((below / total - uniform).abs().max()) < 1e-6
    assert torch.allclose(logprobs, torch.tensor(-18.5) - torch.tensor(total).log(), atol=1e-4)


def test_what_does_not_fit_is_refused_before_c_reads_it() -> None:
    logits = random_logits(2)
    for call in (
        lambda: logit_stats(logits, torch.tensor([0, V]), 1.0),
        lambda: logit_stats(logits, torch.tensor([0]), 1.0),
        lambda: logit_stats(logits.float(), torch.tensor([0, 1]), 1.0),
        lambda: sample(logits, torch.ones(3), torch.rand(2)),
    ):
        with pytest.raises(ValueError, match="kernel argument|labels span"):
            call()
