"""What is around the code: recipes, links, and nothing of the machine it was written on."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from posttrain.config import Recipe

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


# --- recipes ------------------------------------------------------------------------------------


def test_every_shipped_recipe_loads_and_claims_something(source: Any) -> None:
    recipes = sorted((source.root / "src/posttrain/recipes").glob("*.toml"))
    assert "quickstart" in {path.stem for path in recipes}, "make quickstart trains it"
    for path in recipes:
        recipe = Recipe.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        assert recipe.name == path.stem, path
        assert recipe.description, f"{path} has no description"
        claim = recipe.expect
        assert claim is not None, f"{path} has no [expect]"
        assert claim.accuracy_after_min is not None, f"{path} does not say what it reaches"
        learns = claim.accuracy_after_min > (claim.accuracy_before_max or 0)
        assert learns or "template" in recipe.description, f"{path} claims to learn nothing"


# --- documents ----------------------------------------------------------------------------------


def _anchors(text: str) -> set[str]:
    """The ids that GitHub gives to headings."""
    anchors = set()
    for heading in re.findall(r"^#+\s+(.*)$", _FENCE.sub("", text), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.strip().lower())
        anchors.add(words.replace(" ", "-"))
    return anchors


def test_links_in_documents_lead_somewhere(source: Any) -> None:
    broken = []
    for path in source.files:
        if path.suffix != ".md":
            continue
        for link in _LINK.findall(_FENCE.sub("", path.read_text(encoding="utf-8"))):
            if re.match(r"[a-z]+:", link):  # another site: not ours to check
                continue
            place, _, anchor = link.partition("#")
            target = (path.parent / place).resolve() if place else path
            if not target.exists() or (
                anchor and anchor not in _anchors(target.read_text(encoding="utf-8"))
            ):
                broken.append(f"{path.relative_to(source.root)}: {link}")
    assert not broken, "\n".join(broken)


# --- nothing of this machine --------------------------------------------------------------------

# Written in pieces, so that this file passes its own test.
_PLACES = [
    r"(?<![\w./-])/" + r"work/",
    r"/tmp/" + r"work\b",
    r"(?<![\w.])/" + r"(home|Users)/(?!(user|me|you|alice|bob)\b)\w+/",
]
_REGISTRIES = [
    "pypi" + r"\.org",
    "python" + "hosted",
    "download" + r"\.pytorch",
    "registry" + r"\.npm",
    r"(extra-)?index-" + r"url[ =]+https?:",
    "deb" + r"\.debian\.org",
]


def test_no_path_of_a_machine_and_no_registry_host_is_written_down(source: Any) -> None:
    places = [re.compile(place) for place in (*_PLACES, *_REGISTRIES)]
    places.append(re.compile(re.escape(f"{source.root}/")))
    home = Path.home()
    if len(home.parts) > 2:  # /root alone names nobody
        places.append(re.compile(re.escape(f"{home}/")))
    found = []
    for path in source.files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if any(place.search(line) for place in places):
                found.append(f"{path.relative_to(source.root)}:{number}: {line.strip()[:80]}")
    assert not found, "\n".join(found)


# --- installation -------------------------------------------------------------------------------


def test_constraints_satisfy_what_the_project_declares(source: Any) -> None:
    """A range that moves past the tested version must take constraints.txt with it."""
    lines = (source.root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {}
    for line in lines:
        if not line.startswith("#"):
            requirement = Requirement(line)
            (pin,) = requirement.specifier
            assert pin.operator == "==" and "+" not in pin.version, line
            pinned[_canonical(requirement.name)] = pin.version
    project = tomllib.loads((source.root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    for extra in project["optional-dependencies"].values():
        declared += extra
    for requirement in map(Requirement, declared):
        name = _canonical(requirement.name)
        if name != "posttrain":
            assert name in pinned, f"{name} is not in constraints.txt: run make constraints"
            assert requirement.specifier.contains(pinned[name]), f"{requirement} != {pinned[name]}"


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_no_document_holds_a_placeholder(source: Any) -> None:
    documents = [*source.root.glob("*.md"), *(source.root / "docs").rglob("*.md")]
    assert len(documents) > 10
    for path in documents:
        assert "@@" not in path.read_text(encoding="utf-8"), f"{path} has a number left to fill in"
