"""posttrain eval."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from posttrain.commands.display import observer_for
from posttrain.config import Recipe
from posttrain.errors import ConfigError
from posttrain.recipe_files import load_recipe, resolve
from posttrain.telemetry.files import to_json
from posttrain.telemetry.observer import Observer


def evaluate_command(
    target: str, overrides: list[str], step: int | None, show: int, as_json: bool
) -> None:
    """Evaluate a run's policy or a recipe's base model."""
    run = Path(target)
    is_run = (run / "journal.sqlite").exists()
    with observer_for(as_json, 0) as observer:
        if is_run:
            report, answers = _evaluate_run(run, overrides, step, observer)
        else:
            if step is not None:
                raise ConfigError(f"--step goes with a run directory; {target} is a recipe")
            recipe, base_dir = load_recipe(target, overrides)
            report, answers = asyncio.run(_evaluate_base(recipe, base_dir, observer))
        if not as_json:
            observer.evaluation(report["policy_version"], report)
    if as_json:
        print(to_json(report))
        return
    for name in ("pass_at_k", "response_len_mean", "truncated_frac", "unparsed_frac", "sampling"):
        print(f"{name}: {report.get(name)}")
    for question, answer, correct in answers[:show]:
        print(f"  {'right' if correct else 'wrong'}: {question!r} -> {answer!r}")


def _evaluate_run(
    run: Path, overrides: list[str], step: int | None, observer: Observer
) -> tuple[dict[str, Any], list[tuple[str, str, bool]]]:
    from posttrain.replay import rebuild

    trainable, recorded = rebuild(run, step, observer)
    recipe = resolve(recorded.model_dump(mode="json"), overrides, "of the run")
    if recipe.model != recorded.model:
        raise ConfigError(
            "eval of a run uses the run's own model: leave model.* out, or give a recipe instead"
        )
    return asyncio.run(_evaluate(recipe, Path.cwd(), trainable, observer))


async def _evaluate_base(
    recipe: Recipe, base_dir: Path, observer: Observer
) -> tuple[dict[str, Any], list[tuple[str, str, bool]]]:
    from posttrain.build import build_trainable, set_threads

    set_threads(recipe)
    return await _evaluate(recipe, base_dir, build_trainable(recipe, observer), observer)


async def _evaluate(
    recipe: Recipe, base_dir: Path, trainable: Any, observer: Observer
) -> tuple[dict[str, Any], list[tuple[str, str, bool]]]:
    from posttrain.build import build_evaluator, build_rollable, build_spec

    version = trainable.learner.policy_version
    spec = build_spec(recipe, base_dir)
    rollable = await build_rollable(recipe, spec, trainable.policy, base_dir, version)
    try:
        report, groups = await build_evaluator(recipe, rollable, trainable.learner).evaluate(
            version, lambda done, total: observer.progress("evaluation", done, total)
        )
    finally:
        await rollable.close()
    answers = []
    for group in groups:
        member = group.trajectories[0]
        observation = member.turns[0].observation if member.turns else None
        question = observation.messages[-1].plain_text() if observation else group.draw.task_id
        text = " | ".join(turn.completion.text for turn in member.turns)
        answers.append((question, text, bool(getattr(member.verdict, "correct", False))))
    return report, answers
