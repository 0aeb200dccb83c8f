"""What a finished run shows: accuracy before and after, answers side by side, what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from posttrain.commands.display import duration
from posttrain.journal import Journal
from posttrain.types import Group

SHOWN = 6


def print_report(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Print it to standard output."""
    console = Console(markup=False)  # a path or a task may hold [brackets]
    draws = summary["draws"]
    dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(draws["dropped"].items()))
    console.print()
    console.print(
        f"finished: {summary['steps']} steps, {duration(summary['training_s'])} of training; "
        f"this process took {duration(summary['wall_s'])}"
    )
    console.print(
        f"draws: {draws['drawn']} drawn = {draws['trained']} trained + "
        f"{sum(draws['dropped'].values())} dropped ({dropped or 'none'}) + {draws['open']} open"
    )
    if draws["drawn"] and not draws["trained"]:
        console.print(
            "NOTHING WAS TRAINED: no group had different rewards; the task is too hard or too easy "
            "for this model, or the reward does not read its answers"
        )
    evaluation = summary["evaluation"]
    if evaluation and "after" in evaluation:
        _print_learning(console, evaluation)
        _print_answers(console, run_dir)
    console.print(f"\nrun directory: {run_dir}", soft_wrap=True)
    console.print("next:")
    for command, why in (
        (f"posttrain export {run_dir} --to MODEL_FOLDER", "a folder for transformers and vLLM"),
        (f"posttrain replay {run_dir} --verify", "proves the weights from the journal"),
        (f"posttrain eval {run_dir} eval.num_tasks=50", "evaluates again, other settings on top"),
    ):
        console.print(f"  {command}   # {why}", soft_wrap=True, highlight=False)


def _print_learning(console: Console, evaluation: Mapping[str, Any]) -> None:
    before, after = evaluation["before"], evaluation["after"]
    table = Table(title="held-out tasks", title_justify="left")
    for column in ("", "before", "after"):
        table.add_column(column)
    rows = (
        ("accuracy", "accuracy"),
        ("reward", "reward"),
        ("response tokens", "response_len_mean"),
        ("truncated", "truncated_frac"),
        ("no answer found", "unparsed_frac"),
    )
    for label, key in rows:
        if before.get(key) is not None or after.get(key) is not None:
            table.add_row(label, _number(before.get(key)), _number(after.get(key)))
    for name in before.get("measured", {}).keys() & after.get("measured", {}).keys():
        table.add_row(name, _number(before["measured"][name]), _number(after["measured"][name]))
    console.print(table)
    if comparison := evaluation.get("comparison"):
        interval = comparison["interval"]
        within = f" [{interval['low']:+.3f}, {interval['high']:+.3f}]" if interval else ""
        console.print(
            f"accuracy changed by {comparison['mean_diff']:+.3f}{within}, paired over "
            f"{comparison['num_questions']} tasks: {comparison['num_better']} better, "
            f"{comparison['num_worse']} worse, p = {comparison['p_value']:.2g} "
            f"({comparison['test']})",
            highlight=False,
            soft_wrap=True,
        )


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        interval = value["interval"]
        text = f"{value['mean']:.3f}"
        return f"{text} [{interval['low']:.3f}, {interval['high']:.3f}]" if interval else text
    return f"{value:.3f}"


def _print_answers(console: Console, run_dir: Path) -> None:
    """Some held-out tasks with the first answer before and after, those that changed first."""
    with Journal.open(run_dir, readonly=True) as journal:
        versions = sorted(e.policy_version for e in journal.evaluations())
        first = {g.draw.task_id: g for g in journal.eval_groups(versions[0])}
        last = {g.draw.task_id: g for g in journal.eval_groups(versions[-1])}
    common = [task_id for task_id in first if task_id in last]
    if not common:
        return  # given rows are judged without generating
    common.sort(key=lambda task_id: _answer(first[task_id]) == _answer(last[task_id]))
    table = Table(title="what it says", title_justify="left", show_lines=False)
    for column in ("task", "before", "after"):
        table.add_column(column, max_width=36, overflow="fold")
    for task_id in common[:SHOWN]:
        table.add_row(
            Text(_question(first[task_id])),
            Text(_answer(first[task_id])),
            Text(_answer(last[task_id])),
        )
    console.print(table)


def _question(group: Group) -> str:
    turns = group.trajectories[0].turns  # none when the environment failed at its reset
    observation = turns[0].observation if turns else None
    return observation.messages[-1].plain_text() if observation else group.draw.task_id


def _answer(group: Group) -> str:
    return " | ".join(repr(turn.completion.text)[1:-1] for turn in group.trajectories[0].turns)
