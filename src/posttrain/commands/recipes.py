"""posttrain recipes."""

from __future__ import annotations

import json

from posttrain.recipe_files import load_recipe, shipped_recipes


def recipes_command(as_json: bool) -> None:
    """Names, descriptions, files."""
    rows = []
    for name, path in shipped_recipes().items():
        recipe, _ = load_recipe(name)
        rows.append({"name": name, "description": recipe.description, "file": str(path)})
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(f"{row['name']}: {row['description']}\n    {row['file']}")
    print("run one with: posttrain train NAME; its file is a template for your own")
