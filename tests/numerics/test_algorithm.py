"""The whole algorithm: from rewards and logits to a gradient, for every recipe and split."""

from __future__ import annotations

import pytest
import torch

from posttrain.algo.aggregation import Denominators
from posttrain.algo.algorithm import Algorithm
from posttrain.algo.builder import build_algorithm
from posttrain.algo.component import LossOutput
from posttrain.algo.logprobs import token_logprobs
from posttrain.config import GrpoConfig, RlooConfig
from posttrain.config.losses import PpoClipConfig

AGGREGATIONS = [
    {"aggregation": "token_mean"},
    {"aggregation": "seq_mean_token_mean"},
    {"aggregation": "seq_mean_token_sum"},
    {"aggregation": "fixed_length", "fixed_length": 16},
    {"aggregation": "prompt_mean"},
]


def loss_of(
    algorithm: Algorithm, denominators: Denominators, **columns: torch.Tensor
) -> LossOutput:
    """The policy loss as the learner makes it: prepared without gradient, then computed."""
    (policy_loss,) = algorithm.components
    columns["weights_N"] = columns.pop("advantages_N")
    columns.setdefault("group_index_N", columns["sequence_index_N"])
    fixed = {name: values.detach() for name, values in columns.items()}
    return policy_loss.loss(columns | policy_loss.prepare(fixed, {}), denominators, {})


def test_a_step_from_logits_and_rewards_to_the_gradient(group, vector, dtype, matches):
    case = vector("e2e_grpo_step")
    inputs, expected, tolerance = case["inputs"], case["expected"], case["tolerance"]
    clip = PpoClipConfig(clip_low=inputs["eps"], clip_high=inputs["eps"])
    config = GrpoConfig(loss=clip, std="group", std_eps=inputs["eps_std"])
    algorithm = build_algorithm(config)
    streams = algorithm.credit([group(0, inputs["rewards"], lengths=[2, 1])]).streams
    per_turn = [streams[0, i]["policy"].per_turn for i in range(2)]
    advantages_B = torch.tensor(per_turn, dtype=torch.float64)[:, 0]
    matches(advantages_B, expected["adv"], tolerance)

    logits = torch.tensor(inputs["logits"], dtype=dtype).requires_grad_(True)
    mask = torch.tensor(inputs["mask"]).bool()
    logprobs = token_logprobs(logits.flatten(0, 1), torch.tensor(inputs["tokens"]).flatten())
    matches(logprobs.view(2, 2), expected["logp"], tolerance)
    policy = logprobs[mask.flatten()]
    sequence = torch.tensor([0, 0, 1])
    output = loss_of(
        algorithm,
        Denominators(3, 2, torch.tensor([2, 1])),
        policy_logprobs_N=policy,
        prox_logprobs_N=policy.detach(),
        sampler_logprobs_N=policy.detach(),
        advantages_N=advantages_B.to(dtype)[sequence],
        sequence_index_N=sequence,
    )
    matches(output.loss, expected["loss"], tolerance)
    (gradient,) = torch.autograd.grad(output.loss, logits)
    matches(gradient, expected["grad_logits"], tolerance)


def batch(dtype=torch.float64):
    """Eight sequences of uneven length in three groups over one table of logits; advantages differ
    in sign."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.tensor([3, 1, 6, 2, 5, 4, 1, 7])
    index = torch.arange(8).repeat_interleave(lengths)
    total = int(lengths.sum())
    return {
        "lengths": lengths,
        "index": index,
        "groups": torch.tensor([0, 0, 0, 1, 1, 2, 2, 2]),
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
    (policy_loss,) = algorithm.components
    group_lengths = torch.zeros(3, dtype=torch.int64)
    group_lengths = group_lengths.index_add(0, data["groups"], data["lengths"])
    for sequences in micros:
        mine = torch.tensor(sequences, dtype=torch.int64)
        keep = torch.isin(data["index"], mine)
        local = {s: i for i, s in enumerate(sequences)}
        index = torch.tensor([local[int(s)] for s in data["index"][keep]], dtype=torch.int64)
        policy = token_logprobs(table[data["rows"][keep]], data["labels"][keep])
        fixed = token_logprobs(data["table"][data["rows"][keep]], data["labels"][keep])
        output = loss_of(
            algorithm,
            Denominators(
                len(data["index"]),
                8,
                data["lengths"][mine],
                3,
                group_lengths[data["groups"][mine]],
            ),
            policy_logprobs_N=policy,
            prox_logprobs_N=fixed + data["drift"][keep],
            sampler_logprobs_N=fixed,
            advantages_N=data["advantages"][keep],
            sequence_index_N=index,
        )
        output.loss.backward()
        value += output.loss.item()
        stats = output.stats if stats is None else stats.merge(output.stats)
    return value, table.grad, policy_loss.metrics(stats)


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
    before = torch.full((2,), -1.0)
    advantages = torch.tensor([1.0, -1.0])

    def loss(policy: torch.Tensor) -> float:
        counts = Denominators(2, 2, torch.tensor([1, 1]))
        output = loss_of(
            algorithm,
            counts,
            policy_logprobs_N=policy,
            prox_logprobs_N=before,
            sampler_logprobs_N=before,
            advantages_N=advantages,
            sequence_index_N=torch.tensor([0, 1]),
        )
        return float(output.loss)

    assert loss(torch.tensor([-0.9, -1.1])) < loss(before) < loss(torch.tensor([-1.1, -0.9]))


def test_half_precision_and_ragged_inputs_are_refused():
    algorithm, counts = build_algorithm(RlooConfig()), Denominators(2, 1, torch.tensor([2]))
    ones, index = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    good = {
        "prox_logprobs_N": ones,
        "sampler_logprobs_N": ones,
        "advantages_N": ones,
        "sequence_index_N": index,
    }
    with pytest.raises(ValueError, match=r"policy_logprobs_N is torch\.bfloat16"):
        loss_of(algorithm, counts, policy_logprobs_N=ones.bfloat16(), **good)
    with pytest.raises(ValueError, match="one entry per loss token"):
        loss_of(algorithm, counts, policy_logprobs_N=torch.ones(3), **good)
