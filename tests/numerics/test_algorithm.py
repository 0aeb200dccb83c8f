"""The whole algorithm: from rewards and logits to a gradient, for every recipe and split."""

from __future__ import annotations

import pytest
import torch

from posttrain.algo.aggregation import Denominators
from posttrain.algo.algorithm import build_algorithm
from posttrain.algo.logprobs import token_logprobs
from posttrain.config import GrpoConfig, RlooConfig

AGGREGATIONS = [
    {"aggregation": "token_mean"},
    {"aggregation": "seq_mean_token_mean"},
    {"aggregation": "seq_mean_token_sum"},
    {"aggregation": "fixed_length", "fixed_length": 16},
]


def test_a_step_from_logits_and_rewards_to_the_gradient(group, vector, dtype, matches):
    case = vector("e2e_grpo_step")
    inputs, expected, tolerance = case["inputs"], case["expected"], case["tolerance"]
    config = GrpoConfig(
        clip_low=inputs["eps"], clip_high=inputs["eps"], std="group", std_eps=inputs["eps_std"]
    )
    algorithm = build_algorithm(config)
    credit = algorithm.advantages([group(0, inputs["rewards"], lengths=[2, 1])])
    advantages_B = torch.tensor([credit.advantage[0, i] for i in range(2)], dtype=torch.float64)
    matches(advantages_B, expected["adv"], tolerance)

    logits = torch.tensor(inputs["logits"], dtype=dtype).requires_grad_(True)
    mask = torch.tensor(inputs["mask"]).bool()
    logprobs = token_logprobs(logits.flatten(0, 1), torch.tensor(inputs["tokens"]).flatten())
    matches(logprobs.view(2, 2), expected["logp"], tolerance)
    policy = logprobs[mask.flatten()]
    sequence = torch.tensor([0, 0, 1])
    output = algorithm.loss(
        policy,
        policy.detach(),
        policy.detach(),
        advantages_B.to(dtype)[sequence],
        sequence,
        Denominators(3, 2, torch.tensor([2, 1])),
    )
    matches(output.loss, expected["loss"], tolerance)
    (gradient,) = torch.autograd.grad(output.loss, logits)
    matches(gradient, expected["grad_logits"], tolerance)


def batch(dtype=torch.float64):
    """Eight sequences of uneven length over one table of logits; advantages differ in sign."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.tensor([3, 1, 6, 2, 5, 4, 1, 7])
    index = torch.arange(8).repeat_interleave(lengths)
    total = int(lengths.sum())
    return {
        "lengths": lengths,
        "index": index,
        "rows": torch.randint(0, 10, (total,), generator=generator),
        "labels": torch.randint(0, 6, (total,), generator=generator),
        "drift": 0.3 * torch.randn(total, generator=generator, dtype=dtype),
        "advantages": torch.randn(8, generator=generator, dtype=dtype)[index],
        "table": torch.randn(10, 6, generator=generator, dtype=dtype),
    }


def step_gradient(algorithm, data, micros, table=None):
    """Value and gradient of the step, summed over micro-batches of whole sequences."""
    table = (data["table"] if table is None else table).clone().requires_grad_(True)
    value, stats = 0.0, None
    for sequences in micros:
        keep = torch.isin(data["index"], torch.tensor(sequences, dtype=torch.int64))
        local = {s: i for i, s in enumerate(sequences)}
        index = torch.tensor([local[int(s)] for s in data["index"][keep]], dtype=torch.int64)
        policy = token_logprobs(table[data["rows"][keep]], data["labels"][keep])
        fixed = token_logprobs(data["table"][data["rows"][keep]], data["labels"][keep])
        output = algorithm.loss(
            policy,
            fixed + data["drift"][keep],
            fixed,
            data["advantages"][keep],
            index,
            Denominators(
                len(data["index"]), 8, data["lengths"][torch.tensor(sequences, dtype=torch.int64)]
            ),
        )
        output.loss.backward()
        value += output.loss.item()
        stats = output.stats if stats is None else stats.merge(output.stats)
    return value, table.grad, stats.metrics()


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: a["aggregation"])
def test_gradients_and_metrics_do_not_depend_on_the_split_or_the_order(aggregation):
    """Reports a01 and a07: for each loss and aggregation, accumulation 1, 2, 4, 8 are one step."""
    algorithm = build_algorithm(RlooConfig(**aggregation))
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        data = batch(dtype)
        value, gradient, metrics = step_gradient(algorithm, data, [list(range(8))])
        assert gradient.abs().max() > 1e-3
        for order in (list(range(8)), [6, 1, 7, 0, 3, 2, 5, 4]):
            for size in (1, 2, 4):
                micros = [order[i : i + size] for i in range(0, 8, size)]
                micros.insert(1, [])  # a rank that got nothing
                other = step_gradient(algorithm, data, micros)
                assert other[0] == pytest.approx(value, abs=tolerance)
                assert torch.allclose(other[1], gradient, atol=tolerance)
                assert other[2] == pytest.approx(metrics, abs=tolerance)


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: a["aggregation"])
def test_the_gradient_on_logits_agrees_with_finite_differences(aggregation):
    algorithm, data = build_algorithm(RlooConfig(**aggregation)), batch()
    micros = [list(range(8))]
    _, gradient, _ = step_gradient(algorithm, data, micros)
    h = 1e-6
    for row, column in ((0, 0), (3, 5), (9, 2)):
        nudge = torch.zeros_like(data["table"])
        nudge[row, column] = h
        ahead = step_gradient(algorithm, data, micros, data["table"] + nudge)[0]
        behind = step_gradient(algorithm, data, micros, data["table"] - nudge)[0]
        assert (ahead - behind) / (2 * h) == pytest.approx(float(gradient[row, column]), abs=1e-7)


def test_a_step_of_zero_advantages_moves_nothing():
    data = batch() | {"advantages": torch.zeros(29, dtype=torch.float64)}
    value, gradient, metrics = step_gradient(build_algorithm(RlooConfig()), data, [list(range(8))])
    assert value == 0.0 and not gradient.any()
    assert metrics["advantage/nonzero_frac"] == 0.0


def test_kept_flat_groups_only_rescale_the_others():
    data = batch()
    flat = data["index"] >= 6
    data["advantages"] = data["advantages"].masked_fill(flat, 0.0)
    algorithm = build_algorithm(RlooConfig())
    _, kept, _ = step_gradient(algorithm, data, [list(range(8))])
    _, without, _ = step_gradient(algorithm, data, [list(range(6))])
    assert torch.allclose(kept, without, atol=1e-15)


def test_the_loss_goes_down_when_good_tokens_become_likelier():
    algorithm = build_algorithm(RlooConfig())
    old = torch.full((2,), -1.0)
    advantages = torch.tensor([1.0, -1.0])

    def loss(policy: torch.Tensor) -> float:
        counts = Denominators(2, 2, torch.tensor([1, 1]))
        return float(
            algorithm.loss(policy, old, old, advantages, torch.tensor([0, 1]), counts).loss
        )

    assert loss(torch.tensor([-0.9, -1.1])) < loss(old) < loss(torch.tensor([-1.1, -0.9]))


def test_half_precision_and_ragged_inputs_are_refused():
    algorithm, counts = build_algorithm(RlooConfig()), Denominators(2, 1, torch.tensor([2]))
    ones, index = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"policy is torch\.bfloat16"):
        algorithm.loss(ones.bfloat16(), ones, ones, ones, index, counts)
    with pytest.raises(ValueError, match="one entry per loss token"):
        algorithm.loss(ones, ones, torch.ones(3), ones, index, counts)
