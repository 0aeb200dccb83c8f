"""posttrain replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.commands.display import observer_for
from posttrain.commands.export import refuse_used, write_folder
from posttrain.errors import ConfigError
from posttrain.journal import Journal
from posttrain.telemetry.files import to_json

_COMPARED = {
    "grad norm": "learner/grad_norm",
    "loss": "learner/loss",
    "advantage": "advantage/mean",
    "mismatch k3": "mismatch/k3",
}


def replay_command(
    run: Path, overrides: list[str], verify: bool, to: Path | None, as_json: bool
) -> None:
    """Verify, or train again under other settings."""
    if verify and (overrides or to):
        raise ConfigError(
            "replay --verify re-trains exactly what was recorded: leave out the settings and --to"
        )
    if to is not None:
        refuse_used(to)
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
                write_folder(result.trainable, to, None)
            outcome = {"steps": result.steps, "overrides": overrides}
    if as_json:
        print(to_json(outcome))
    elif verify:
        print(
            f"verified: {outcome['steps']} steps re-trained from the journal, every hash equal; "
            f"weights {outcome['weights_hash'][:16]}"
        )
    else:
        _print_comparison(outcome["steps"], to)


def _print_comparison(steps: list[dict[str, Any]], to: Path | None) -> None:
    print("step: recorded -> replayed")
    for row in steps[:: max(1, len(steps) // 20)]:
        cells = [
            f"{label} {row['recorded'][name]:.4g} -> {row['replayed'][name]:.4g}"
            for label, name in _COMPARED.items()
            if name in row["recorded"] and name in row["replayed"]
        ]
        same = "same weights" if row["same_weights"] else "other weights"
        print(f"{row['step']}: {', '.join(cells)}; {same}")
    where = f"is in {to}" if to is not None else "was not kept: add --to FOLDER"
    print(f"the re-trained policy {where}")
