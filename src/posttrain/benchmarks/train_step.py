"""train-step: the learner's step with shared prefixes, without them, and a plain padded step.

One synthetic batch: groups of siblings whose prompts share a common head (system message, worked
examples) and then differ by group. "Without sharing" is the same batch with another first token in
every sample, so that no two samples have a prefix in common: as many tokens, each computed alone.
The plain step is transformers on a padded batch: forward, completion-only loss from the logits of
the completion alone, backward. It has no optimizer, while the learner's step has AdamW, gradient
norm and entropies in it. The learner's hash of the weights is reported apart.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from posttrain.algo.builder import build_algorithm
from posttrain.benchmarks.options import (
    add_model,
    add_threads,
    argument_parser,
    finish,
    parse,
    positive,
    progress,
)
from posttrain.benchmarks.report import Report, this_machine
from posttrain.config import (
    LearnerConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    ReverseConfig,
    RlooConfig,
)
from posttrain.data.packing import pack
from posttrain.errors import BenchmarkError
from posttrain.randomness import stream
from posttrain.training.learner import InlineLearner
from posttrain.training.models import resolve_model
from posttrain.training.policy import Policy, load_policy
from posttrain.types import TrainBatch, TrainSample

FIRST_PLAIN_ID = 20
"""Special tokens of the models used here lie below."""

MAX_NORM_DIFFERENCE = 0.05
"""bf16 rounds: the gradient norms of both agree to this share, or they do not do the same work."""


def shared_samples(args: argparse.Namespace, completion: int, vocab: int) -> list[TrainSample]:
    """Groups x siblings samples: common head, group's own tail, sample's own completion."""
    rng = stream(0, "bench batch", completion)

    def draw(count: int) -> np.ndarray:
        return rng.integers(FIRST_PLAIN_ID, vocab, count).astype(np.int32)

    head = draw(args.shared_tokens)
    samples = []
    for group in range(args.groups):
        prompt = np.concatenate([head, draw(args.prompt_tokens - args.shared_tokens)])
        for index in range(args.group_size):
            ids = np.concatenate([prompt, draw(completion)])
            mask = np.arange(len(ids)) >= len(prompt)
            advantage = np.float32(1.0 if index % 2 else -1.0)
            samples.append(
                TrainSample(
                    token_ids=ids,
                    loss_mask=mask,
                    sampler_logprobs=np.where(mask, np.float32(-1), np.float32(0)),
                    policy_versions=np.where(mask, 0, -1).astype(np.int32),
                    turn_index=np.where(mask, 0, -1).astype(np.int32),
                    streams={"policy": np.where(mask, advantage, np.float32(0))},
                    draw_id=group,
                    sample_index=index,
                )
            )
    return samples


def without_sharing(samples: list[TrainSample], vocab: int) -> list[TrainSample]:
    """The same samples, each with a first token of its own. Raises ValueError when ids run out."""
    if len(samples) > vocab:
        raise ValueError(f"{len(samples)} samples need as many ids, the vocabulary has {vocab}")
    changed = []
    for number, sample in enumerate(samples):
        ids = sample.token_ids.copy()
        ids[0] = number
        changed.append(replace(sample, token_ids=ids))
    return changed


@dataclass(frozen=True)
class LearnerStep:
    """Seconds of the optimizer step and of the hash that follows it; gradient norm."""

    step_s: float
    hash_s: float
    grad_norm: float


def learner_step(learner: InlineLearner, samples: list[TrainSample]) -> LearnerStep:
    """One step of the learner on these samples."""
    step = learner.policy_version + 1
    batch = TrainBatch(step, tuple(samples), tuple({s.draw_id: 0 for s in samples}))
    started = time.perf_counter()
    result = learner.step(batch)
    seconds = time.perf_counter() - started
    assert result.skipped is None, result.skipped
    step_s = result.metrics["learner/step_s"]
    return LearnerStep(step_s, seconds - step_s, result.metrics["learner/grad_norm"])


class PlainTransformers:
    """Padded forward and backward as a trainer without packing does it."""

    def __init__(self, policy: Policy, max_tokens: int) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            policy.folder, dtype=policy.dtype, attn_implementation="sdpa"
        )
        self._model.config.use_cache = False
        self._max_tokens = max_tokens

    def step_s(self, samples: list[TrainSample]) -> float:
        """Seconds of forward and backward over the batch, in cuts of at most `max_tokens`."""
        width = max(len(s) for s in samples)
        rows = max(1, self._max_tokens // width)
        total = sum(s.num_loss_tokens for s in samples)
        started = time.perf_counter()
        self._model.zero_grad(set_to_none=True)
        for start in range(0, len(samples), rows):
            self._backward(samples[start : start + rows], total)
        return time.perf_counter() - started

    def grad_norm(self) -> float:
        """Global L2 norm of the gradients of the last step."""
        grads = [p.grad for p in self._model.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads))

    def _backward(self, samples: list[TrainSample], total: int) -> None:
        """Right-aligned, so that the completions are the last columns and the head sees no more."""
        width = max(len(s) for s in samples)
        kept = max(s.num_loss_tokens for s in samples)
        ids = torch.zeros(len(samples), width, dtype=torch.long)
        mask, weights = torch.zeros_like(ids), torch.zeros(len(samples), width)
        for row, sample in enumerate(samples):
            ids[row, -len(sample) :] = torch.from_numpy(sample.token_ids)
            mask[row, -len(sample) :] = 1
            weights[row, -len(sample) :] = torch.from_numpy(sample.streams["policy"])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            logits_to_keep=kept + 1,
        ).logits[:, :-1]
        logprobs = torch.log_softmax(logits.float(), -1)
        chosen = logprobs.gather(-1, ids[:, -kept:, None])[..., 0]
        (-(chosen * weights[:, -kept:]).sum() / total).backward()


def compare(
    report: Report,
    args: argparse.Namespace,
    policy: Policy,
    learner: InlineLearner,
    plain: PlainTransformers,
    completion: int,
) -> None:
    """All three on completions of one length, alternating; the first round is thrown away."""
    shared = shared_samples(args, completion, policy.vocab_size)
    alone = without_sharing(shared, policy.vocab_size)
    times: dict[str, list[float]] = {"shared": [], "alone": [], "plain": [], "hash": []}
    done: dict[str, LearnerStep] = {}
    for _ in range(args.repeats + 1):
        done = {n: learner_step(learner, s) for n, s in (("alone", alone), ("shared", shared))}
        for name, result in done.items():
            times[name].append(result.step_s)
        times["hash"].append(done["shared"].hash_s)
        times["plain"].append(plain.step_s(shared))
    label = f"{completion}-token completions"
    rows = {n: num_rows(s, args.max_tokens) for n, s in (("shared", shared), ("alone", alone))}
    tree = report.add(f"{label}: prefix tree", "s", times["shared"][1:])
    single = report.add(f"{label}: without sharing", "s", times["alone"][1:])
    padded = report.add(f"{label}: plain transformers", "s", times["plain"][1:])
    report.add_ratio(f"{label}: sharing saves", single, tree)
    report.add_ratio(f"{label}: over plain transformers", padded, tree)
    report.add(f"{label}: weights hash (apart)", "s", times["hash"][1:])
    ours, theirs = done["shared"].grad_norm, plain.grad_norm()
    report.notes.append(
        f"{label}: gradient norm {ours:.4g} with the prefix tree, {theirs:.4g} by plain "
        "transformers"
    )
    if abs(ours - theirs) > MAX_NORM_DIFFERENCE * theirs:
        raise BenchmarkError(
            f"train-step: not the same work, so there is no comparison: {report.notes[-1]}; look "
            "for what changed in either"
        )
    report.notes.append(
        f"{label}: {rows['shared']} rows with the prefix tree, {rows['alone']} without "
        f"({rows['alone'] / rows['shared']:.2f}x), {len(shared)} samples"
    )


def num_rows(samples: list[TrainSample], max_tokens: int) -> int:
    """Rows that forward and backward see."""
    return sum(m.num_rows for m in pack(samples, max_tokens))


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line's."""
    parser = argument_parser("train-step", __doc__)
    add_model(parser)
    parser.add_argument("--groups", type=positive, default=24)
    parser.add_argument("--group-size", type=positive, default=8)
    parser.add_argument("--prompt-tokens", type=positive, default=60)
    parser.add_argument("--shared-tokens", type=positive, default=40, help="of every prompt")
    parser.add_argument("--completion-tokens", type=positive, nargs="+", default=[3, 32])
    parser.add_argument("--max-tokens", type=positive, default=2048, help="of a micro-batch")
    add_threads(parser)
    args = parse(parser, arguments)
    if args.shared_tokens >= args.prompt_tokens:
        parser.error("--shared-tokens must be below --prompt-tokens")
    return args


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    args = options(arguments)
    torch.set_num_threads(args.threads)
    report = Report(
        name="train-step",
        measures_what="one optimizer step on a fixed batch, prefix tree on",
        against="the same batch without sharing; plain transformers forward and backward, padded",
        floor="part of grpo-short: 4x TRL",
        aim="part of grpo-short: 6x TRL",
        machine=this_machine(args.threads),
        settings={
            "model": args.model,
            "dtype": args.dtype,
            "groups": args.groups,
            "group size": args.group_size,
            "prompt tokens": f"{args.prompt_tokens} ({args.shared_tokens} shared by all)",
            "micro-batch tokens": args.max_tokens,
        },
    )
    policy = load_policy(resolve_model(args.model, progress=progress), dtype=args.dtype)
    recipe = Recipe(
        name="train-step",
        num_steps=1_000_000,
        model=ModelConfig(path=args.model, dtype=args.dtype),
        env=ReverseConfig(),
        algo=RlooConfig(corrections=()),  # the plain step has none
        optim=OptimConfig(lr=1e-9),  # the weights stay what they are, every round is the same
        learner=LearnerConfig(max_tokens_per_microbatch=args.max_tokens),
    )
    learner = InlineLearner(policy, build_algorithm(recipe.algo), recipe)
    plain = PlainTransformers(policy, args.max_tokens)
    for completion in args.completion_tokens:
        compare(report, args, policy, learner, plain, completion)
    finish(report, args)
