"""A folder is usable, or the message says what is missing and what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from posttrain.errors import ModelError
from posttrain.training.models import check_folder, model_info


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "config.json is missing"),
        ("model.safetensors", "weights are missing"),
        ("tokenizer.json", "the tokenizer is missing"),
        ("chat_template.jinja", "no chat template.*instruct model"),
    ],
)
def test_each_missing_part_is_named(missing: str, message: str, tiny_char: Path) -> None:
    check_folder(tiny_char)
    (tiny_char / missing).unlink()
    with pytest.raises(ModelError, match=message):
        check_folder(tiny_char)


def test_everything_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        check_folder(tmp_path)
    for part in ("config.json", "weights", "tokenizer"):
        assert part in str(caught.value)
    with pytest.raises(ModelError, match="does not exist"):
        check_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 500, -1])
def test_weights_cut_anywhere_are_refused(keep: int, tiny_char: Path) -> None:
    weights = tiny_char / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors (is empty|is damaged)"):
        check_folder(tiny_char)


def test_weights_with_bytes_too_many_are_refused(tiny_char: Path) -> None:
    with (tiny_char / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ModelError, match="damaged"):
        check_folder(tiny_char)


def test_a_git_lfs_pointer_is_recognised(tiny_char: Path) -> None:
    (tiny_char / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match="git lfs pull"):
        check_folder(tiny_char)


def test_a_missing_shard_is_named_and_whole_shards_are_accepted(tiny_char: Path) -> None:
    one = tiny_char / "model-00001-of-00002.safetensors"
    two = tiny_char / "model-00002-of-00002.safetensors"
    (tiny_char / "model.safetensors").rename(one)
    shutil.copy(one, two)
    index = {"weight_map": {"a": one.name, "b": two.name}}
    (tiny_char / "model.safetensors.index.json").write_text(json.dumps(index))
    check_folder(tiny_char)
    two.unlink()
    with pytest.raises(ModelError, match=r"1 of 2 weight shards.*00002-of-00002"):
        check_folder(tiny_char)
    (tiny_char / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="no weight_map"):
        check_folder(tiny_char)


def test_broken_json_is_named_not_raised_through(tiny_char: Path) -> None:
    for content, message in (
        ("{", "not readable"),
        ("[]", "not a JSON object"),
        ("{}", "model_type"),
    ):
        (tiny_char / "config.json").write_text(content)
        with pytest.raises(ModelError, match=f"config.json.*{message}"):
            check_folder(tiny_char)


def test_a_chat_template_inside_the_tokenizer_config_counts(tiny_char: Path) -> None:
    path = tiny_char / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = (tiny_char / "chat_template.jinja").read_text()
    path.write_text(json.dumps(config))
    (tiny_char / "chat_template.jinja").unlink()
    check_folder(tiny_char)


def test_an_adapter_and_a_gguf_folder_get_their_own_advice(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="merge it into its base model"):
        check_folder(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "m.gguf").write_text("")
    with pytest.raises(ModelError, match=r"posttrain models convert .*m\.gguf"):
        check_folder(tmp_path)


def test_info_counts_what_torch_counts(tiny_char: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_char)
    info = model_info(tiny_char)
    assert info.num_parameters == sum(p.numel() for p in model.parameters())
    assert (info.dtype, info.vocab_size, info.max_context) == ("float32", 85, 1024)
    assert info.size_bytes == sum(path.stat().st_size for path in tiny_char.iterdir())
    assert (info.name, info.has_chat_template) == ("tiny-char", True)


def test_info_loads_no_weights_and_no_torch(tiny_char: Path) -> None:
    code = (
        "import sys; from posttrain.training.models import model_info\n"
        f"model_info({str(tiny_char)!r})\n"
        "sys.exit(', '.join({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
