"""Scores from comparisons: a judge's verdicts on pairs, or games between policies.

Shapes: C contestants; wins_CC[i, j] says how often i beat j, a draw half a win for each. Both
orders of a pair are asked for by the caller, against position bias.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_ROUNDS = 10_000  # of the fixed-point iteration; a few dozen are usual
_TOLERANCE = 1e-12


def win_rates(wins_CC: Tensor) -> Tensor:
    """Copeland's score as a rate: the mean over met opponents of the share of games won, [C].

    A pair that met more often does not weigh more. 1/2 for who met nobody.
    """
    wins_CC = _off_diagonal(wins_CC)
    games_CC = wins_CC + wins_CC.T
    met_CC = games_CC > 0
    shares_CC = torch.where(met_CC, wins_CC / games_CC.clamp_min(1e-30), 0)
    num_met_C = met_CC.sum(dim=1)
    return torch.where(num_met_C > 0, shares_CC.sum(dim=1) / num_met_C.clamp_min(1), 0.5)


def bradley_terry_scores(wins_CC: Tensor, *, pseudo_wins: float = 0.0) -> Tensor:
    """Scores s of mean 0 with the largest likelihood under P(i beats j) = sigmoid(s_i - s_j), [C].

    Hunter's MM iteration, doi:10.1214/aos/1079120141 eq. 3, in float64 until nothing moves.
    `pseudo_wins` (1/2 is usual) go to each side of every pair: then every score is finite. Raises
    ValueError without them where some contestants never lost to the rest or never met them: the
    likelihood then grows without end.
    """
    dtype = wins_CC.dtype  # the iteration converges slowly: it needs digits
    wins_CC = _off_diagonal(wins_CC.double() + pseudo_wins)
    if not _all_reach_all(wins_CC):
        raise ValueError(
            f"{len(wins_CC)} contestants: some never lost to the others (or never met them), so "
            "their scores are infinite; set pseudo_wins = 0.5"
        )
    games_CC, num_wins_C = wins_CC + wins_CC.T, wins_CC.sum(dim=1)
    scores_C = torch.zeros_like(num_wins_C)
    for _ in range(_MAX_ROUNDS if len(wins_CC) > 1 else 0):
        strength_C = scores_C.exp()
        expected_C = (games_CC / (strength_C[:, None] + strength_C)).sum(dim=1)
        moved_C = (num_wins_C / expected_C).log()
        moved_C = moved_C - moved_C.mean()
        change = float((moved_C - scores_C).abs().max())
        scores_C = moved_C
        if change < _TOLERANCE:
            break
    return scores_C.to(dtype)


def _off_diagonal(wins_CC: Tensor) -> Tensor:
    return wins_CC - wins_CC.diagonal().diag()


def _all_reach_all(wins_CC: Tensor) -> bool:
    """Ford's condition: a chain of wins leads from each contestant to each other one."""
    reach_CC = (wins_CC > 0) | torch.eye(len(wins_CC), dtype=torch.bool)
    for _ in range(max(1, len(wins_CC)).bit_length()):
        reach_CC = (reach_CC.to(wins_CC.dtype) @ reach_CC.to(wins_CC.dtype)) > 0
    return bool(reach_CC.all())
