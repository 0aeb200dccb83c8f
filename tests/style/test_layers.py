"""Lower layers never import higher ones, and no two modules need each other to be imported."""

from __future__ import annotations

from typing import Any

# A part imports itself and the layers above it in this list.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("types", "errors", "randomness", "names", "memory"),
    ("protocols", "targets"),
    ("config",),
    ("algo", "journal", "telemetry", "recipe_files", "kernels"),
    ("data", "sandbox"),
    ("rewards",),
    ("envs",),
    ("sampling", "rollout", "training", "weights"),
    ("evaluation",),
    ("loop",),
    ("build", "summary", "interrupt"),
    ("run",),
    ("replay",),
    ("stages",),
    ("cluster", "viewer"),
    ("doctor",),
    ("benchmarks",),
    ("commands",),
    ("cli",),
    ("__main__",),
)

# (importer, imported): why. Nothing else may cross within a layer or upwards.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("sampling", "training"): "the embedded engine decodes with the learner's own forward pass",
}


def _part(module: str) -> str:
    """`posttrain.training.models.hub` -> `training`; the package itself -> ``."""
    return module.split(".")[1] if "." in module else ""


def _level(part: str) -> int:
    for level, parts in enumerate(LAYERS):
        if part in parts:
            return level
    raise AssertionError(f"posttrain.{part} has no layer: give it one in {__file__}")


def test_every_part_has_a_layer_and_no_part_is_called_utils(source: Any) -> None:
    for module in source.modules:
        part = _part(module.name)
        assert part == "" or _level(part) >= 0
        banned = {"utils", "util", "helpers", "common", "misc"} & set(module.name.split("."))
        assert not banned, f"{module.name}: name the noun that lives there"


def test_a_module_imports_lower_layers_only(source: Any) -> None:
    wrong, used = [], set()
    for module in source.modules:
        importer = _part(module.name)
        for line in module.imports:
            target = source.module_of(line.target)
            imported = _part(target) if target else ""
            if not target or not imported or imported == importer:
                continue
            if importer == "" or _level(imported) < _level(importer):
                continue
            if (importer, imported) in EXCEPTIONS:
                used.add((importer, imported))
                continue
            wrong.append(f"{module.where(line.line)}: {module.name} imports {target}")
    assert not wrong, "\n".join(wrong)
    assert used == set(EXCEPTIONS), "an exception that nothing needs any more must go"


def test_no_module_needs_itself_to_be_imported(source: Any) -> None:
    """Cycles at import time, found by depth-first search. Lazy imports do not count."""
    edges = {
        module.name: sorted(
            {
                target
                for line in module.imports
                if line.at_import_time and (target := source.module_of(line.target))
            }
            - {module.name}
        )
        for module in source.modules
    }
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for target in edges[name]:
                visit(target, [*path, name])
            done.add(name)

    for name in edges:
        visit(name, [])


def test_only_the_cluster_imports_ray(source: Any) -> None:
    for module in source.modules:
        for line in module.imports:
            if line.target.split(".")[0] == "ray":
                assert _part(module.name) == "cluster", module.where(line.line)


def test_every_folder_with_code_is_a_package(source: Any) -> None:
    folders = {module.path.parent for module in source.modules}
    missing = [
        str(f.relative_to(source.root)) for f in folders if not (f / "__init__.py").is_file()
    ]
    assert not missing, f"no __init__.py in {sorted(missing)}"
