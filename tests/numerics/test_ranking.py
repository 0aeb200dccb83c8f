"""Scores from pairwise wins."""

from __future__ import annotations

import pytest
import torch

from posttrain.algo.ranking import bradley_terry_scores, win_rates


def test_scores_and_rates_of_pairwise_wins(vector, matches, dtype):
    case = vector("bt_mle_pairwise_wins")
    wins_CC = torch.tensor(case["inputs"]["wins"], dtype=dtype)
    matches(bradley_terry_scores(wins_CC), case["expected"]["scores"], case["tolerance"])
    matches(win_rates(wins_CC), case["expected"]["winrate_copeland"])


def test_scores_are_where_expected_wins_are_the_observed_ones():
    """The likelihood's gradient is 0: independent of how the maximum was found."""
    wins_CC = torch.randint(1, 9, (6, 6), generator=torch.Generator().manual_seed(0)).double()
    wins_CC.fill_diagonal_(0)
    scores_C = bradley_terry_scores(wins_CC)
    expected_CC = (wins_CC + wins_CC.T) * (scores_C[:, None] - scores_C).sigmoid()
    assert torch.allclose(expected_CC.sum(1), wins_CC.sum(1), atol=1e-8)
    assert scores_C.mean().item() == pytest.approx(0, abs=1e-12)


def test_true_scores_are_found_from_expected_wins():
    true_C = torch.tensor([1.5, 0.2, -0.4, -1.3]).double()
    wins_CC = (true_C[:, None] - true_C).sigmoid().fill_diagonal_(0)
    assert torch.allclose(bradley_terry_scores(wins_CC), true_C, atol=1e-9)


def test_a_perfect_winner_needs_half_a_pseudo_win():
    wins_CC = torch.tensor([[0.0, 4, 4], [0, 0, 2], [0, 2, 0]])
    with pytest.raises(ValueError, match=r"3 contestants.*pseudo_wins = 0\.5"):
        bradley_terry_scores(wins_CC)
    scores_C = bradley_terry_scores(wins_CC, pseudo_wins=0.5)
    assert bool(scores_C.isfinite().all())
    assert scores_C[0] > scores_C[1] and scores_C[1].item() == pytest.approx(scores_C[2].item())


def test_contestants_that_never_met_are_refused_without_pseudo_wins():
    apart = torch.zeros(4, 4)
    apart[0, 1] = apart[1, 0] = apart[2, 3] = apart[3, 2] = 1.0
    with pytest.raises(ValueError, match="never met"):
        bradley_terry_scores(apart)
    assert bradley_terry_scores(apart, pseudo_wins=0.5).tolist() == [0.0] * 4


def test_a_chain_of_wins_is_enough_to_rank():
    """0 beats 1 beats 2 beats 3 beats 0: everyone reaches everyone, all are equal."""
    ring = torch.roll(torch.eye(4), 1, dims=1)
    assert bradley_terry_scores(ring).abs().max().item() < 1e-6


def test_pairs_that_met_more_often_weigh_the_same_in_a_rate(dtype):
    wins_CC = torch.tensor([[0.0, 90, 0], [10, 0, 0], [1, 0, 0]], dtype=dtype)
    assert win_rates(wins_CC)[0].item() == pytest.approx(0.45)  # (.9 + 0) / 2, not 90/101


def test_degenerate_fields(dtype):
    assert win_rates(torch.zeros(2, 2, dtype=dtype)).tolist() == [0.5, 0.5]
    assert bradley_terry_scores(torch.zeros(1, 1, dtype=dtype)).tolist() == [0.0]
    assert bradley_terry_scores(torch.zeros(0, 0, dtype=dtype)).tolist() == []
    assert win_rates(torch.zeros(0, 0, dtype=dtype)).tolist() == []
