"""posttrain replay."""

from __future__ import annotations

import json
from pathlib import Path

from posttrain.commands.display import observer_for
from posttrain.commands.export import write_folder
from posttrain.errors import ConfigError
from posttrain.journal import Journal

_COMPARED = (
    "learner/loss",
    "learner/grad_norm",
    "policy/kl_k3",
    "mismatch/k3",
    "groups/zero_variance_frac",
)


def replay_command(
    run: Path, overrides: list[str], verify: bool, to: Path | None, as_json: bool
) -> None:
    """Verify, or train again under other settings."""
    if verify and (overrides or to):
        raise ConfigError(
            "replay --verify re-trains exactly what was recorded: leave out the settings and --to"
        )
    from posttrain import replay

    with Journal.open(run, readonly=True) as journal:
        num_steps = journal.last_finished_step()
    with observer_for(as_json, num_steps) as observer:
        if verify:
            outcome = replay.verify(
                run, observer, lambda r: observer.progress("verified step", r.step, num_steps)
            )
        else:
            result = replay.what_if(
                run, overrides, observer, lambda r: observer.progress("step", r.step, num_steps)
            )
            if to is not None:
                write_folder(result.trainable.policy, to, None)
            outcome = {"steps": result.steps, "overrides": overrides}
    if as_json:
        print(json.dumps(outcome))
    elif verify:
        print(
            f"verified: {outcome['steps']} steps re-trained from the journal, every hash equal; "
            f"weights {outcome['weights_hash'][:16]}"
        )
    else:
        _print_comparison(outcome["steps"], to)


def _print_comparison(steps: list[dict], to: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="recorded -> replayed", title_justify="left")
    table.add_column("step")
    for name in _COMPARED:
        table.add_column(name)
    table.add_column("same weights")
    for row in steps[:: max(1, len(steps) // 20)]:
        cells = [
            f"{row['recorded'].get(n, float('nan')):.4g} -> {row['replayed'].get(n, float('nan')):.4g}"
            for n in _COMPARED
        ]
        table.add_row(str(row["step"]), *cells, "yes" if row["same_weights"] else "no")
    Console().print(table)
    if to is not None:
        print(f"the re-trained policy is in {to}")
    else:
        print("add --to FOLDER to keep the re-trained policy")
