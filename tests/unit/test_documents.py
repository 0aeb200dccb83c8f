"""What the documents show is what the code does: recipes load, settings are current, the example
of a new algorithm runs as pasted."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import typing
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import AlgoConfig, Recipe
from posttrain.config.corrections import CorrectionConfig
from posttrain.config.losses import LossConfig
from posttrain.config.objectives import PreferenceLossConfig
from posttrain.config.shaping import ShapingConfig
from posttrain.recipe_files import models_in, resolve

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = DOCS / "algorithms"
_FENCED = re.compile(r"^```(\w+)( recipe)?\n(.*?)^```", re.MULTILINE | re.DOTALL)

# Pages of algorithms that are named otherwise than in recipes.
PAGE_OF = {"gpg": "gpg_advantages"}
HEADINGS = ["Equation", "Symbols", "In code", "Elsewhere", "Traps", "Here"]


def _blocks(path: Path, language: str) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return [body for kind, _, body in _FENCED.findall(text) if kind == language]


def _documents() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


TOML = [
    pytest.param(body, id=f"{path.relative_to(ROOT)}:{i}")
    for path in _documents()
    for i, body in enumerate(_blocks(path, "toml"))
]


def _names(union: Any) -> list[str]:
    return [model.model_fields["type"].default for model in models_in(union)]


def _completed(part: dict[str, Any]) -> dict[str, Any]:
    """A part of a recipe with what a whole one needs around it."""
    part.setdefault("name", "part")
    algo = part.setdefault("algo", {})
    loss = algo.get("loss", {})
    kind = loss if isinstance(loss, str) else loss.get("type")
    if "critic" in algo:
        algo.setdefault("type", "gae")
    if kind in _names(PreferenceLossConfig):
        algo.setdefault("type", "preference")
    elif "centre_coef" in loss:
        algo.setdefault("type", "reward_model")
    if algo.get("type") == "sft":
        part.setdefault("data", {"type": "demonstrations", "path": "rows.jsonl"})
    if part.get("data", {}).get("type") == "demonstrations":
        algo.setdefault("type", "sft")
    if part.get("data", {}).get("type") == "pairs":
        algo.setdefault("type", "preference")
    if "data" not in part:
        part.setdefault("env", {"type": "reverse"})
    return part


@pytest.mark.parametrize("body", TOML)
def test_every_toml_block_is_a_valid_part_of_a_recipe(body: str) -> None:
    recipe = resolve(_completed(tomllib.loads(body)), [], "of a document")
    assert isinstance(recipe, Recipe)


def test_the_index_names_recipes_of_papers() -> None:
    text = (PAGES / "README.md").read_text(encoding="utf-8")
    recipes = [body for kind, marked, body in _FENCED.findall(text) if marked]
    assert len(recipes) >= 12


@pytest.mark.parametrize(
    "union", [AlgoConfig, LossConfig, CorrectionConfig, ShapingConfig, PreferenceLossConfig]
)
def test_every_algorithm_has_a_page_and_a_line_in_the_index(union: Any) -> None:
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    for name in _names(union):
        page = PAGE_OF.get(name, name) if union is AlgoConfig else name
        assert (PAGES / f"{page}.md").is_file(), f"{name} has no page docs/algorithms/{page}.md"
        assert f"[`{name}`]({page}.md)" in index, f"{name} is not in docs/algorithms/README.md"


def test_every_page_has_the_same_headings_in_the_same_order() -> None:
    for path in sorted(PAGES.glob("*.md")):
        if path.stem in ("README", "conventions"):
            continue
        text = _FENCED.sub("", path.read_text(encoding="utf-8"))
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS, path.name


def test_the_settings_page_is_what_its_script_writes() -> None:
    spec = importlib.util.spec_from_file_location(
        "settings_page", ROOT / "scripts/settings_page.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = module.PAGE.read_text(encoding="utf-8")
    assert module.page() == written, "run python scripts/settings_page.py"


# --- the example of a new algorithm -----------------------------------------------------------


def _pasted(page: str, tree: Path) -> list[str]:
    """The page's code put where it says, into a copy of the source; its commands."""
    commands = []
    place, text = "", ""
    for chunk in re.split(r"(^```.*?^```)", page, flags=re.MULTILINE | re.DOTALL):
        if not chunk.startswith("```"):
            named = re.findall(r"`((?:src|tests)/[\w/]+\.py)`", chunk)
            place, text = (named[-1] if named else place), chunk
            continue
        head, _, body = chunk.removesuffix("```").partition("\n")
        path = tree / place
        if head == "```python" and path.exists():
            union = re.findall(r"before `(\w+)`", text)[-1]
            code = path.read_text(encoding="utf-8")
            assert f"\n{union} = Annotated[" in code
            path.write_text(
                code.replace(f"\n{union} = Annotated[", f"\n{body}\n\n{union} = Annotated["),
                encoding="utf-8",
            )
        elif head == "```python":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body, encoding="utf-8")
        elif head == "```diff":
            lines = body.splitlines()
            before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
            after = "\n".join(line[1:] for line in lines)
            code = path.read_text(encoding="utf-8")
            assert code.count(before) == 1, f"{place} has changed: {before}"
            path.write_text(code.replace(before, after), encoding="utf-8")
        elif head == "```bash":
            commands += [shlex.split(line) for line in body.splitlines()]
    return typing.cast(list[str], commands)


def test_the_example_of_a_new_algorithm_runs_as_pasted_and_trains(tmp_path: Path) -> None:
    if (ROOT / "src/posttrain/algo/advantages/rank.py").exists():
        pytest.skip("the page's example is in this tree already")
    shutil.copytree(
        ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    page = (DOCS / "howto/add-an-algorithm.md").read_text(encoding="utf-8")
    commands = _pasted(page, tmp_path)
    assert [command[:3] for command in commands] == [["posttrain", "train", "reverse"]] * 2
    env = os.environ | {"PYTHONPATH": str(tmp_path / "src"), "OMP_NUM_THREADS": "1"}
    # One process for all of it: most of the time goes into importing torch.
    program = (
        "import posttrain, sys; assert posttrain.__file__.startswith(sys.argv[1])\n"
        "sys.path.insert(0, 'tests/numerics'); import test_rank\n"
        "[check() for name, check in vars(test_rank).items() if name.startswith('test_')]\n"
        "from posttrain.cli import main\n"
        f"for command in {commands!r}:\n"
        "    sys.argv = [*command, 'eval.num_tasks=4']\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code, end.code\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("rank", "luspo"):
        resolved = tomllib.loads((tmp_path / f"runs/{name}/recipe.resolved.toml").read_text())
        assert name in (resolved["algo"]["type"], resolved["algo"]["loss"]["type"])
        assert (tmp_path / f"runs/{name}/metrics.jsonl").read_text().count('"step"') == 2
