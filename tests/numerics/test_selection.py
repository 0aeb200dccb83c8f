"""Expert iteration: which answers are imitated."""

from __future__ import annotations

import torch

from posttrain.algo.selection import success_weights

FOUR = [torch.tensor([i, i + 1]) for i in range(4)]


def test_successes_are_imitated(vector, matches, dtype):
    case = vector("raft_star_weights")
    outcomes_G = torch.tensor(case["inputs"]["rewards"], dtype=dtype)
    matches(success_weights(outcomes_G, FOUR, threshold=1.0), case["expected"]["sft_weights"])
    matches(
        success_weights(outcomes_G, FOUR, threshold=1.0, normalise=True),
        case["expected"]["normalised"],
    )


def test_an_answer_is_imitated_once_however_often_it_was_sampled(dtype):
    answers = [torch.tensor([1, 2]), torch.tensor([1]), torch.tensor([1, 2]), torch.tensor([1])]
    outcomes_G = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=dtype)
    assert success_weights(outcomes_G, answers, threshold=0.5).tolist() == [1, 0, 0, 1]


def test_a_cap_keeps_the_best_and_the_first_of_equals(dtype):
    outcomes_G = torch.tensor([0.6, 0.9, 0.6, 0.2], dtype=dtype)
    weights_G = success_weights(outcomes_G, FOUR, threshold=0.5, max_per_task=2, normalise=True)
    assert weights_G.tolist() == [0.5, 0.5, 0, 0]
    assert success_weights(outcomes_G, FOUR, threshold=0.5, max_per_task=1).tolist() == [0, 1, 0, 0]


def test_a_task_without_success_weighs_nothing(dtype):
    outcomes_G = torch.zeros(4, dtype=dtype)
    assert success_weights(outcomes_G, FOUR, threshold=1.0, normalise=True).tolist() == [0.0] * 4
    assert success_weights(outcomes_G[:0], [], threshold=1.0, normalise=True).tolist() == []


def test_inputs_stay_as_they_were(dtype):
    outcomes_G = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=dtype)
    success_weights(outcomes_G, FOUR, threshold=1.0, max_per_task=1)
    assert outcomes_G.tolist() == [1.0, 0.0, 1.0, 1.0]
