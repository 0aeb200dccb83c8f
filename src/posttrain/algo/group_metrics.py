"""What the groups of a step looked like, before anything was dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from statistics import fmean

import torch

from posttrain.types import GIVEN_ROLES, Group, Invalid, Scored, Trajectory


def group_metrics(
    groups: Sequence[Group], *, zero_variance: Set[int], invalid: Set[int]
) -> dict[str, float]:
    """Metrics of all groups given: `zero_variance` and `invalid` are draw ids.

    Rewards, lengths and accuracy are over all valid trajectories, kept or not: after filtering
    they would be drawn towards the middle whatever the policy does. A mean over nothing is left
    out, never NaN and never 0.

    reward/std is unbiased and over the batch. A zero-variance group is all_high when every valid
    member is correct, all_low when none is. A reward term is averaged over those that carry it.
    """
    if not groups:
        return {}
    flat = [group for group in groups if group.draw.draw_id in zero_variance]
    trajectories = sum(len(group.siblings) for group in groups)
    valid = [t for group in groups for t in group.valid]
    if valid and all(t.role in GIVEN_ROLES for t in valid):
        return {}  # given answers have no reward of their own, and nothing was sampled
    metrics = {
        "groups/zero_variance_frac": len(flat) / len(groups),
        "groups/all_low_frac": sum(not any(_correct(group)) for group in flat) / len(groups),
        "groups/all_high_frac": sum(all(_correct(group)) for group in flat) / len(groups),
        "groups/invalid_frac": sum(g.draw.draw_id in invalid for g in groups) / len(groups),
    }
    if trajectories:
        metrics["trajectories/invalid_frac"] = (trajectories - len(valid)) / trajectories
    verdicts = [t.verdict for group in groups for t in group.siblings]
    kinds = Counter(v.kind.value for v in verdicts if isinstance(v, Invalid))
    metrics |= {f"trajectories/invalid/{kind}": float(kinds[kind]) for kind in sorted(kinds)}
    return metrics | _valid_metrics(valid) | _by_environment(groups)


def _by_environment(groups: Sequence[Group]) -> dict[str, float]:
    """Reward and accuracy of each member of a mixture."""
    verdicts: dict[str, list[Scored]] = {}
    for group in groups:
        scored = [t.verdict for t in group.valid if isinstance(t.verdict, Scored)]
        verdicts.setdefault(group.draw.environment, []).extend(scored)
    verdicts.pop("", None)
    metrics = {}
    for name, scored in verdicts.items():
        if scored:
            metrics[f"env/{name}/reward_mean"] = fmean(v.value for v in scored)
            metrics[f"env/{name}/accuracy"] = fmean(v.correct for v in scored)
    return metrics


def _valid_metrics(valid: Sequence[Trajectory]) -> dict[str, float]:
    if not valid:
        return {}
    verdicts = [t.verdict for t in valid if isinstance(t.verdict, Scored)]
    rewards = torch.tensor([v.value for v in verdicts], dtype=torch.float64)
    lengths = torch.tensor([t.num_sampled_tokens for t in valid], dtype=torch.float64)
    metrics = {
        "reward/mean": float(rewards.mean()),
        "accuracy/train": fmean(v.correct for v in verdicts),
        "response/len_mean": float(lengths.mean()),
        "response/len_p95": float(lengths.quantile(0.95)),
        "response/truncated_frac": fmean(t.truncated for t in valid),
        "response/unparsed_frac": fmean(not v.parsed for v in verdicts),
    }
    if len(verdicts) > 1:
        metrics["reward/std"] = float(rewards.std(correction=1))
    terms: dict[str, list[float]] = {}
    for verdict in verdicts:
        for term in verdict.terms:
            terms.setdefault(term.name, []).append(term.value)
    return metrics | {f"reward/term/{name}": fmean(values) for name, values in terms.items()}


def _correct(group: Group) -> list[bool]:
    return [t.verdict.correct for t in group.valid if isinstance(t.verdict, Scored)]
