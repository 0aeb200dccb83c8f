"""A LoRA adapter beside frozen weights, through peft (Hu et al. 2021, arXiv:2106.09685).

An adapted layer computes y = x W^T + scaling * (x A^T) B^T with A [rank, in] and B [out, rank];
scaling is alpha / rank, or alpha / sqrt(rank) for rsLoRA (Kalajdzievski 2023, arXiv:2312.03732).
B begins at zero, so a run begins as its base model.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.pytorch_utils import Conv1D

from posttrain.config import LoraConfig
from posttrain.errors import ConfigError, MissingDependencyError, ModelError
from posttrain.names import did_you_mean
from posttrain.randomness import stream

_NAME = "default"
"""peft's name of the one adapter; it is part of parameter names, and so of weights_hash."""
_OWNER = "base_model.model."
"""peft's prefix of a parameter's name in an adapter file."""


class Adapter:
    """The adapter inside a policy's model, whose modules it has replaced in place.

    `weights` of its methods are the model's parameters by name, those of the adapter among them.
    """

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def disabled(self) -> AbstractContextManager[None]:
        """While it is entered the model computes what the base model computes, to the bit."""
        return self._wrapped.disable_adapter()

    def merge(
        self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """The base model's state dict with W + scaling * B A, summed in fp32, rounded once."""
        merged = {
            _plain_name(name): tensor.detach().to(dtype)
            for name, tensor in weights.items()
            if ".lora_" not in name and ".original_module." not in name
        }
        for name, layer in self._layers():
            a = weights[f"{name}.lora_A.{_NAME}.weight"].detach().float()
            b = weights[f"{name}.lora_B.{_NAME}.weight"].detach().float()
            delta = layer.scaling[_NAME] * (b @ a)
            base = weights[f"{name}.base_layer.weight"].detach().float()
            total = base + (delta.T if layer.fan_in_fan_out else delta)
            merged[f"{name}.weight"] = total.to(dtype)
        return merged

    def write(
        self, folder: Path, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, base_name: str
    ) -> None:
        """peft's own format: adapter_config.json and adapter_model.safetensors."""
        peft = _import_peft()
        owned = {f"{_OWNER}{name}": tensor for name, tensor in weights.items()}
        state = peft.get_peft_model_state_dict(
            self._wrapped, state_dict=owned, save_embedding_layers=False
        )
        tensors = {name: t.detach().to(dtype).contiguous() for name, t in state.items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = copy.copy(self._wrapped.peft_config[_NAME])
        config.base_model_name_or_path = base_name
        config.inference_mode = True
        config.target_modules = sorted(config.target_modules)  # a set would be in any order
        config.save_pretrained(str(folder))

    def _layers(self) -> Iterable[tuple[str, Any]]:
        from peft.tuners.lora import LoraLayer

        model = self._wrapped.get_base_model()
        return [(n, m) for n, m in model.named_modules() if isinstance(m, LoraLayer)]

    def draw(self, seed: int) -> None:
        """Set every A to U(-1/sqrt(in), 1/sqrt(in)) and every B to zero.

        The distribution is peft's default (that of nn.Linear). A layer's draw is a function of the
        run's seed and the layer's name: it depends on no global state and on no other layer.
        """
        for name, layer in self._layers():
            a, b = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
            bound = a.shape[1] ** -0.5
            drawn = stream(seed, f"lora_A {name}").uniform(-bound, bound, size=tuple(a.shape))
            with torch.no_grad():
                a.copy_(torch.from_numpy(drawn))
                b.zero_()


def add_adapter(model: Any, config: LoraConfig, seed: int, folder: Path) -> Adapter:
    """Freeze the model's weights and put an adapter beside them, in the model's dtype.

    Raises ConfigError when a name of `config` is not a module that can be adapted,
    MissingDependencyError without peft, and ModelError when peft cannot adapt the model.
    """
    peft = _import_peft()
    targets = _target_layers(model, config, folder)
    names = config.target_modules
    wanted = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,
        use_rslora=config.rslora,
        target_modules=list(names) if names != "all-linear" else _last_parts(targets),
        modules_to_save=_train_also(model, config, targets, folder) or None,
        fan_in_fan_out=all(isinstance(module, Conv1D) for module in targets.values()),
    )
    try:
        # peft draws from torch's global generator: what it draws is replaced, the state restored.
        with torch.random.fork_rng(devices=[]):
            wrapped = peft.get_peft_model(model, wanted, _NAME, autocast_adapter_dtype=False)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModelError(
            f"model folder {folder}: peft cannot adapt {type(model).__name__} ({error}); name "
            "other model.lora.target_modules"
        ) from error
    adapter = Adapter(wrapped)
    adapter.draw(seed)
    return adapter


def _target_layers(model: Any, config: LoraConfig, folder: Path) -> dict[str, Any]:
    """The linear layers to adapt, by full name. Raises ConfigError naming those there are."""
    linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear | Conv1D)}
    if config.target_modules == "all-linear":
        head = model.get_output_embeddings()
        return {name: module for name, module in linear.items() if module is not head}
    names = _named("target_modules", "linear layer", config.target_modules, linear, folder)
    _refuse_tied("target_modules", model, names, folder)
    return {name: linear[name] for name in names}


def _train_also(
    model: Any, config: LoraConfig, targets: Mapping[str, Any], folder: Path
) -> list[str]:
    """Full names of the modules to train whole. Raises ConfigError for what cannot be."""
    if not config.train_also:
        return []
    holders = {name: m for name, m in model.named_modules() if list(m.parameters(recurse=False))}
    names = _named("train_also", "module with weights", config.train_also, holders, folder)
    if both := sorted(set(names) & set(targets)):
        raise ConfigError(
            f"model.lora.train_also: {both[0]} is adapted already; leave it out, or name "
            "target_modules without it"
        )
    _refuse_tied("train_also", model, names, folder)
    return names


def _named(
    setting: str, kind: str, wanted: Iterable[str], there: Mapping[str, Any], folder: Path
) -> list[str]:
    """Full names out of `there` that are, or end with, a wanted one. Each must fit something."""
    found: dict[str, None] = {}
    for name in wanted:
        fitting = [full for full in there if f".{full}".endswith(f".{name}")]
        if not fitting:
            options = _last_parts(there)
            raise ConfigError(
                f"model.lora.{setting}: {name} is no {kind} of {folder}, which has "
                f"{', '.join(options)}{did_you_mean(name, options)}"
            )
        found |= dict.fromkeys(fitting)
    return list(found)


def _refuse_tied(setting: str, model: Any, names: Iterable[str], folder: Path) -> None:
    """Trained in one place only, a tied weight would no longer be the one that was loaded."""
    count = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for name in names:
        if any(count[id(p)] > 1 for p in model.get_submodule(name).parameters()):
            raise ConfigError(
                f"model.lora.{setting}: the weight of {name} in {folder} is tied to another "
                "module's (tie_word_embeddings); leave it out"
            )


def _last_parts(names: Iterable[str]) -> list[str]:
    """`q_proj` of `model.layers.0.self_attn.q_proj`, each once, in order."""
    return list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in names))


def _plain_name(name: str) -> str:
    """A parameter's name in the model before it was adapted."""
    return name.replace(".base_layer.", ".").replace(f".modules_to_save.{_NAME}.", ".")


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError(
            'model.lora needs peft: pip install "posttrain[lora]"'
        ) from error
    return peft
