"""What the losses of pairs share: log-ratios to the reference, and means over tokens.

Shapes: P pairs, sums of log-probs over the tokens of a side.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def log_ratio_margin(
    policy_chosen_P: Tensor, policy_rejected_P: Tensor, ref_chosen_P: Tensor, ref_rejected_P: Tensor
) -> Tensor:
    """h = (policy - ref of the chosen) - (policy - ref of the rejected), [P].

    Times beta it is the implicit reward margin of arXiv:2305.18290 eq. 5; h > 0 is an answer
    ordered as the label says.
    """
    # Side by side: two sums of one answer are close, so their difference keeps its digits.
    return (policy_chosen_P - ref_chosen_P) - (policy_rejected_P - ref_rejected_P)


def log_ratio_margin_per_token(
    policy_chosen_P: Tensor,
    policy_rejected_P: Tensor,
    ref_chosen_P: Tensor,
    ref_rejected_P: Tensor,
    chosen_lengths_P: Tensor,
    rejected_lengths_P: Tensor,
) -> Tensor:
    """The margin of mean log-ratios per token, [P]: a long answer does not have more to move."""
    chosen_P = per_token(policy_chosen_P - ref_chosen_P, chosen_lengths_P)
    return chosen_P - per_token(policy_rejected_P - ref_rejected_P, rejected_lengths_P)


def per_token(sums_P: Tensor, lengths_P: Tensor) -> Tensor:
    """Sums over lengths; 0 for a side without tokens, whose sum is 0."""
    return sums_P / lengths_P.clamp_min(1)


def smoothed_logistic(logits_P: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - e) log sigmoid(x) - e log sigmoid(-x): the label is taken as wrong with chance e.

    Example:
        >>> round(smoothed_logistic(torch.tensor([0.0]), 0.3).item(), 4)
        0.6931
    """
    right_P, wrong_P = logsigmoid(logits_P), logsigmoid(-logits_P)
    return -torch.lerp(right_P, wrong_P, label_smoothing)
