"""The columns of a group (see `columns.py`), out of its records."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.errors import ConfigError
from posttrain.types import Group, Scored, Trajectory, Verdict

Make = Callable[[Group, Sequence[Trajectory]], Any]


def group_columns(
    group: Group, members: Sequence[Trajectory], names: Sequence[str] | frozenset[str]
) -> dict[str, Any]:
    """The columns of these names, for the members that enter the statistics (all scored).

    `rewards_G` are the verdicts' rewards: who shapes them replaces the column. Names that are not
    a group's own (`batch_rewards`) are left out. Raises ConfigError for a group that was generated
    without what a rule needs.
    """
    return {name: _MAKERS[name](group, members) for name in sorted(names) if name in _MAKERS}


def terms_of(groups: Sequence[Sequence[Trajectory]]) -> tuple[list[str], Tensor]:
    """Names of the reward terms of all verdicts, in order, and their weights [R] float64.

    A verdict without terms is one term, "reward". Raises ConfigError when a term has several
    weights.
    """
    weights: dict[str, float] = {}
    for member in (member for members in groups for member in members):
        for name, _, weight in _term_rows(member):
            if weights.setdefault(name, weight) != weight:
                raise ConfigError(
                    f"reward term {name!r} has weights {weights[name]:g} and {weight:g} in one "
                    "batch; give a term one weight"
                )
    names = sorted(weights)
    return names, torch.tensor([weights[name] for name in names], dtype=torch.float64)


def term_values(members: Sequence[Trajectory], names: Sequence[str]) -> Tensor:
    """Values of the terms before their weights, [G, R] float64; 0 where a verdict lacks one."""
    rows = [{name: value for name, value, _ in _term_rows(member)} for member in members]
    values = [[row.get(name, 0.0) for name in names] for row in rows]
    return torch.tensor(values, dtype=torch.float64).reshape(len(members), len(names))


def _term_rows(member: Trajectory) -> list[tuple[str, float, float]]:
    verdict = _verdict(member)
    if not verdict.terms:
        return [("reward", verdict.value, 1.0)]
    return [(term.name, term.value, term.weight) for term in verdict.terms]


def _verdict(member: Trajectory) -> Scored:
    assert isinstance(member.verdict, Scored)
    return member.verdict


def _outcomes(_: Group, members: Sequence[Trajectory]) -> Tensor:
    return torch.tensor([t.reward for t in members], dtype=torch.float64)


def _correct(_: Group, members: Sequence[Trajectory]) -> Tensor:
    return torch.tensor([_verdict(t).correct for t in members], dtype=torch.bool)


def _lengths(_: Group, members: Sequence[Trajectory]) -> Tensor:
    return torch.tensor([t.num_sampled_tokens for t in members], dtype=torch.float64)


def greedy_verdict(group: Group) -> Verdict:
    """What became of the greedy answer. Raises ConfigError for a group generated without one."""
    for member in group:
        if member.role == "greedy":
            return member.verdict
    raise ConfigError(
        f"group of draw {group.draw.draw_id} was generated without a greedy answer, which remax "
        "compares with; train a new run with remax"
    )


def _greedy(group: Group, _: Sequence[Trajectory]) -> Tensor:
    verdict = greedy_verdict(group)
    assert isinstance(verdict, Scored), "a group without a scored greedy answer is dropped"
    return torch.tensor(verdict.value, dtype=torch.float64)


def _num_turns(_: Group, members: Sequence[Trajectory]) -> Tensor:
    return torch.tensor([max(1, len(t.turns)) for t in members], dtype=torch.int64)


def _turn_rewards(_: Group, members: Sequence[Trajectory]) -> list[Tensor]:
    return [torch.tensor([turn.reward for turn in t.turns], dtype=torch.float64) for t in members]


def _turn_states(_: Group, members: Sequence[Trajectory]) -> list[list[str]]:
    """A turn's state is the whole prompt it answered: task, history and all that was shown."""
    return [[_hash(turn.prompt_token_ids) for turn in t.turns] for t in members]


def _hash(ids: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(ids).tobytes()).hexdigest()


def _token_ids(_: Group, members: Sequence[Trajectory]) -> list[Tensor]:
    return [
        torch.from_numpy(
            np.concatenate([s.token_ids[s.loss_mask] for s in t.sequences]).astype(np.int64)
        )
        for t in members
    ]


_MAKERS: dict[str, Make] = {
    "rewards_G": _outcomes,
    "outcomes_G": _outcomes,
    "correct_G": _correct,
    "lengths_G": _lengths,
    "greedy_reward": _greedy,
    "num_turns_G": _num_turns,
    "turn_rewards": _turn_rewards,
    "turn_states": _turn_states,
    "token_ids": _token_ids,
}
