"""A Hugging Face model folder: whole, or refused with what is missing and the remedy."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import ModelError

_SINGLE = ("model.safetensors", "pytorch_model.bin")
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a folder holds, read without loading a weight.

    `num_parameters` and `dtype` (of most parameters) come from the safetensors headers; tied
    weights count once. Both are None for a pickle checkpoint, which has no header to read.

    Example:
        >>> ModelInfo("tiny", 10, "float32", 5, 64, True, 40).num_parameters
        10
    """

    name: str
    num_parameters: int | None
    dtype: str | None
    vocab_size: int | None
    max_context: int | None
    has_chat_template: bool
    size_bytes: int


def check_folder(folder: Path) -> None:
    """Raise ModelError, listing everything that keeps `folder` from being trained.

    Needed: config.json, whole weights (safetensors or bin, all shards), a tokenizer, and a chat
    template.
    """
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist; check the path")
    hint = _other_kind(folder)
    problems = [
        *_config_problems(folder),
        *_weight_problems(folder),
        *_tokenizer_problems(folder),
    ]
    if problems:
        raise ModelError(f"model folder {folder} cannot be used: {'; '.join(problems)}{hint}")


def model_info(folder: str | Path) -> ModelInfo:
    """Read name, size and shape of a model from its headers. Raises ModelError as check_folder."""
    folder = Path(folder)
    check_folder(folder)
    config = _read_object(folder / "config.json")
    text = config.get("text_config") or config
    parameters: Counter[str] = Counter()
    for path in sorted(folder.glob("*.safetensors")):
        for entry in _safetensors_header(path).values():
            parameters[entry["dtype"]] += math.prod(entry["shape"])
    most = parameters.most_common(1)
    return ModelInfo(
        name=folder.resolve().name,
        num_parameters=sum(parameters.values()) or None,
        dtype=_DTYPES.get(most[0][0], most[0][0].lower()) if most else None,
        vocab_size=text.get("vocab_size"),
        max_context=text.get("max_position_embeddings"),
        has_chat_template=_has_chat_template(folder),
        size_bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
    )


# --- what can be wrong ------------------------------------------------------------------------


def _other_kind(folder: Path) -> str:
    """A closing hint when the folder is plainly something else."""
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        return ". It is a LoRA adapter: merge it into its base model first"
    gguf = sorted(folder.glob("*.gguf"))
    if gguf and not (folder / "config.json").exists():
        return f". Convert it: posttrain models convert {gguf[0]} --to NEW_FOLDER"
    return ""


def _config_problems(folder: Path) -> Iterator[str]:
    path = folder / "config.json"
    if not path.is_file():
        yield "config.json is missing (give the folder that save_pretrained wrote)"
        return
    try:
        if not isinstance(_read_object(path).get("model_type"), str):
            yield "config.json has no model_type"
    except ModelError as error:
        yield str(error)


def _weight_problems(folder: Path) -> Iterator[str]:
    for name in _SINGLE:
        if (folder / name).is_file():
            yield from _file_problems(folder / name)
            return
        if (folder / f"{name}.index.json").is_file():
            yield from _shard_problems(folder, f"{name}.index.json")
            return
    yield f"weights are missing ({' or '.join(_SINGLE)}, or shards with their .index.json)"


def _shard_problems(folder: Path, index: str) -> Iterator[str]:
    try:
        shards = _read_object(folder / index).get("weight_map")
    except ModelError as error:
        yield str(error)
        return
    if not isinstance(shards, dict) or not shards:
        yield f"{index} has no weight_map"
        return
    names = sorted({str(name) for name in shards.values()})
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        yield f"{len(missing)} of {len(names)} weight shards are missing ({missing[0]}, ...)"
    for name in names:
        if name not in missing:
            yield from _file_problems(folder / name)


def _file_problems(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        start = file.read(40)
    if start.startswith(b"version https://git-lfs"):
        yield f"{path.name} is a git-lfs pointer, not the weights (run git lfs pull there)"
    elif not start:
        yield f"{path.name} is empty"
    elif path.suffix == ".safetensors":
        try:
            _safetensors_header(path)
        except ModelError as error:
            yield str(error)


def _tokenizer_problems(folder: Path) -> Iterator[str]:
    if not any(all((folder / name).is_file() for name in names) for names in _TOKENIZERS):
        choices = ", ".join(" with ".join(names) for names in _TOKENIZERS)
        yield f"the tokenizer is missing (one of {choices})"
    elif not _has_chat_template(folder):
        yield (
            "there is no chat template, so it is probably a base model "
            "(take the instruct model, or write chat_template.jinja into the folder)"
        )


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    path = folder / "tokenizer_config.json"
    return path.is_file() and bool(_read_object(path).get("chat_template"))


# --- reading ----------------------------------------------------------------------------------


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} is not readable JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path.name} is not a JSON object")
    return content


def _safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """The tensors of a file: name -> dtype, shape, offsets.

    Layout (github.com/huggingface/safetensors): 8 bytes little-endian header length, JSON, data.
    """
    size = path.stat().st_size
    damaged = ModelError(f"{path.name} is damaged or was cut short (copy or download it again)")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise damaged
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise damaged from error
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if not header or 8 + length + end != size:
        raise damaged
    return header
