"""One name for each quantity: what it is not called."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

# What a quantity is called -> names that mean it elsewhere and must not be defined here.
NOT: dict[str, str] = {
    "sampler_logprobs": r"(rollout|behaviou?r|behav)_(log_?probs?|logps?)",
    "sampler_logprobs or prox_logprobs": r"old_(log_?probs?|logps?|policy_logprobs)",
    "prox_logprobs": r"prev_(log_?probs?|logps?)",
    "policy_logprobs": r"logps?|new_(log_?probs?|logps?)",
    "ref_logprobs, teacher_logprobs": r"(ref|teacher)_(log_probs?|logps?)",
    "loss_mask": r"(response|action|completion|loss)_masks|(response|action)_mask",
    "advantages, advantage": r"advs?|adv_.*",
    "prompt_token_ids, completion_token_ids, token_ids": r"input_ids|response_ids|output_ids",
    "Trajectory": r"Sample|Rollout",
    "Episode is reserved for several agents": r"Episode",
    "group_size": r"num_generations|n_samples|num_return_sequences",
    "TrainSample": r"Datum|Experience",
    "step": r"iterations?|global_step|num_iter(ation)?s",
    "policy_version": r"weights?_version|model_version",
    "policy_lag, max_policy_lag": r"off_by_n|(max_)?staleness|off_policy_steps",
    "num_x": r"n_[a-z]\w*",
}

# A name that another library asks for, where it asks for it: "module:name" -> why.
EDGE: dict[str, str] = {}


def _defined(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that a module gives to something: not what it merely reads or passes on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def test_no_quantity_has_a_second_name(source: Any) -> None:
    patterns = {right: re.compile(wrong) for right, wrong in NOT.items()}
    found, edges = [], set()
    for module in source.modules:
        for name, line in _defined(module.tree):
            bare = re.sub(r"_[A-Z]+$", "", name.lstrip("_"))  # without a dimension suffix
            for right, pattern in patterns.items():
                if pattern.fullmatch(bare):
                    key = f"{module.name}:{name}"
                    edges.add(key)
                    if key not in EDGE:
                        found.append(f"{module.where(line)}: {name}; it is called {right}")
    assert not found, "\n".join(found)
    assert set(EDGE) <= edges, "an exception that nothing needs any more must go"


def test_the_rule_itself_catches_what_it_should() -> None:
    patterns = [re.compile(wrong) for wrong in NOT.values()]

    def is_banned(name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern in patterns)

    banned = "old_logprobs old_log_probs rollout_log_probs ref_log_probs response_ids response_mask"
    banned += " action_mask adv n_samples num_generations off_by_n weight_version input_ids Datum"
    assert all(is_banned(name) for name in banned.split())
    good = "sampler_logprobs prox_logprobs loss_mask advantages group_size num_sequences"
    good += " policy_version max_policy_lag token_ids TrainSample wall_s clip_frac step log_ratio"
    assert not any(is_banned(name) for name in good.split())
