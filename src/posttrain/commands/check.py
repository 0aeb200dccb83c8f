"""posttrain check: what a recipe would do, need and take."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.commands.display import JsonObserver, Terminal, duration, observer_for
from posttrain.commands.memory import full_length, largest_pass, most_at_peak, watched
from posttrain.config import Recipe
from posttrain.memory import peak_bytes
from posttrain.recipe_files import load_recipe, to_toml

BYTES_PER_PARAMETER = {"bfloat16": 18, "float32": 16}
"""bf16: 2 weights, 4 master, 4 gradient, 8 AdamW. fp32: 4 weights, 4 gradient, 8 AdamW."""
BYTES_PER_FROZEN = {"bfloat16": 2, "float32": 4}
CHECKPOINT_BYTES_PER_PARAMETER = 12


@dataclass(frozen=True)
class DryStep:
    """One real step in memory: rollouts of a whole batch and the optimizer step on it.
    `peak_bytes` is what the whole run is expected to need, `most_bytes` what it would need if
    every answer had its full length."""

    rollout_s: float
    learner_s: float
    learner_tokens: float
    num_samples: int
    invalid: int
    reward_mean: float | None
    peak_bytes: int
    most_bytes: int
    skipped: str | None


def check_command(name: str, overrides: list[str], measure: bool, as_json: bool) -> None:
    """Resolve, look at model, data and reward, and time one step unless told not to."""
    recipe, base_dir = load_recipe(name, overrides)
    with observer_for(as_json, recipe.num_steps) as observer:
        facts = asyncio.run(_facts(recipe, base_dir, measure, observer))
    if as_json:
        print(json.dumps({"recipe": recipe.model_dump(mode="json"), **facts}))
        return
    print(to_toml(recipe))
    for key, value in facts.items():
        print(f"{key}: {value}")
    print(f"\nno conflict found. Next: posttrain train {' '.join([name, *overrides])}")


async def _facts(
    recipe: Recipe, base_dir: Path, measure: bool, observer: Terminal | JsonObserver
) -> dict[str, Any]:
    from posttrain.build import build_rollable, build_spec, build_trainable, set_threads
    from posttrain.stages import prepare

    await prepare(recipe, observer)
    threads = set_threads(recipe)
    spec = build_spec(recipe, base_dir)
    trainable = build_trainable(recipe, observer)
    rollable = await build_rollable(recipe, spec, trainable.policy, base_dir)
    try:
        facts = _sizes(recipe, trainable, rollable, threads)
        if measure:
            observer.message("timing one whole step in memory; --no-measure leaves it out")
            step = await _dry_step(recipe, trainable, rollable)
            facts |= _estimates(recipe, step, len(rollable.eval_tasks))
        return facts
    finally:
        await rollable.close()


def _sizes(recipe: Recipe, trainable: Any, rollable: Any, threads: int) -> dict[str, Any]:
    from posttrain.training.models import model_info

    info = model_info(trainable.policy.folder)
    params = list(trainable.policy.model.parameters())
    total = sum(p.numel() for p in params)
    trained = sum(p.numel() for p in params if p.requires_grad)
    frozen = total - trained
    dtype = recipe.model.dtype
    learner = trainable.learner
    size = 2 if recipe.data and recipe.data.type == "pairs" else 1
    per_draw = size if recipe.data else recipe.rollout.group_size
    learning = f", {trained / 1e6:.1f} M of them trained" if frozen else ""
    facts: dict[str, Any] = {
        "model": f"{info.name}: {total / 1e6:.1f} M parameters{learning}, {dtype}",
        "threads": threads,
        "training tasks": len(rollable.train_tasks),
        "held-out tasks": len(rollable.eval_tasks),
        "trajectories a step": recipe.rollout.groups_per_step * per_draw,
        "epochs": recipe.num_steps * recipe.rollout.groups_per_step / len(rollable.train_tasks),
        "weights and optimizer": _gb(
            trained * BYTES_PER_PARAMETER[dtype] + frozen * BYTES_PER_FROZEN[dtype]
        ),
        "checkpoints on disk": _gb(
            trained * CHECKPOINT_BYTES_PER_PARAMETER * (recipe.checkpoint.keep + 1)
        ),
    }
    copies = learner.frozen_parameters
    if copies:
        facts["reference and teacher"] = _gb(copies * BYTES_PER_FROZEN[dtype])
    return facts


async def _dry_step(recipe: Recipe, trainable: Any, rollable: Any) -> DryStep:
    from posttrain.build import rollout_extras, train_params
    from posttrain.data.mixture import curriculum_of
    from posttrain.data.samples import build_batch
    from posttrain.rollout.given import given_group

    curriculum = curriculum_of(rollable.train_tasks, recipe.seed)
    draws = [curriculum.draw(i) for i in range(recipe.rollout.groups_per_step)]
    started = time.perf_counter()
    if recipe.data is not None:
        groups = [
            given_group(rollable.renderer, curriculum.task(d), d, rollable.max_context)
            for d in draws
        ]
    else:
        params, size = train_params(recipe), recipe.rollout.group_size
        extras = rollout_extras(recipe)
        run = rollable.runner.group
        groups = await asyncio.gather(
            *(run(curriculum.task(d), d, size, params, extras(d.environment)) for d in draws)
        )
    rolled = time.perf_counter()
    kv_used = rollable.sampler.stats()["sampler/kv_frac"]
    batch = build_batch(1, groups, trainable.algorithm, trainable.learner.memory)
    result = trainable.learner.step(batch)
    learned = time.perf_counter()
    with watched() as second:  # the first one made the optimizer's states at its end
        trainable.learner.step(replace(batch, step=2))
    rows = largest_pass(batch.samples, recipe, trainable.algorithm)
    keys = _keys_of_evaluation(recipe, rollable, trainable.policy, kv_used)
    expected = max(second.peak + keys, peak_bytes())
    return DryStep(
        rollout_s=rolled - started,
        learner_s=learned - rolled,
        learner_tokens=result.metrics["learner/tokens"],
        num_samples=sum(len(g) for g in groups),
        invalid=sum(len(g.siblings) - len(g.valid) for g in groups),
        reward_mean=batch.metrics.get("reward/mean"),
        skipped=result.skipped,
        peak_bytes=expected,
        most_bytes=max(most_at_peak(second, rows, full_length(batch, recipe)) + keys, expected),
    )


def _keys_of_evaluation(recipe: Recipe, rollable: Any, policy: Any, kv_used: float) -> int:
    """Bytes of keys that an evaluation holds beyond those of the step: the distinct beginnings of
    its prompts, a started block and a whole answer for each sequence."""
    if recipe.env is None:
        return 0
    from posttrain.data.prefix_tree import build_prefix_tree
    from posttrain.training.paged import BLOCK

    tasks = rollable.eval_tasks
    count = min(recipe.eval.num_tasks, len(tasks))
    prompts = [rollable.renderer.prompt_ids(tasks[i].prompt) for i in range(count)]
    # What ended stays as cache until the room is full, so every sequence counts.
    own = count * recipe.eval.samples_per_task * (BLOCK + recipe.eval_max_tokens)
    tokens = build_prefix_tree(prompts).num_rows + own
    room = rollable.sampler.kv_tokens
    return int(max(0.0, min(tokens, room) - kv_used * room) * policy.kv_bytes_per_token)


def _estimates(recipe: Recipe, step: DryStep, num_held_out: int) -> dict[str, Any]:
    evaluations = int(recipe.eval.before) + int(recipe.eval.after)
    if recipe.eval.every:
        evaluations += (recipe.num_steps - 1) // recipe.eval.every
    samples = min(recipe.eval.num_tasks, num_held_out) * recipe.eval.samples_per_task
    eval_s = evaluations * samples * step.rollout_s / step.num_samples
    total_s = recipe.num_steps * (step.rollout_s + step.learner_s) + eval_s
    return {
        "first step": f"rollouts {step.rollout_s:.1f} s, learner {step.learner_s:.1f} s "
        f"({step.learner_tokens:.0f} tokens), reward {_or_none(step.reward_mean)}, "
        f"{step.invalid} of {step.num_samples} invalid",
        **(
            {"WARNING": f"the step trained nothing ({step.skipped}): times and memory are too low"}
            if step.skipped
            else {}
        ),
        "whole run, at the first step's pace": duration(total_s),
        "of it evaluation": duration(eval_s),
        "peak memory of the run": f"{_gb(step.peak_bytes)}; {_gb(step.most_bytes)} if every answer "
        "had its full length",
    }


def _or_none(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB"
