"""The policy: a Hugging Face causal language model seen as flat tokens in, log-probs out.

Learner and embedded sampler share one instance, so there is nothing to copy or to synchronise.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from posttrain.config import LoraConfig
from posttrain.data.prefix_tree import PrefixTree, build_prefix_tree
from posttrain.errors import ConfigError, ModelError
from posttrain.kernels.attention import padded_head_size
from posttrain.kernels.library import available
from posttrain.training import attention, fast_modules
from posttrain.training.lora import Adapter, add_adapter
from posttrain.types import Microbatch

FP32_ROWS = 64
BF16_MIN_ROWS = 4
"""On a CPU a row of a matrix product must not depend on how many rows there are. In bf16 that
holds from two rows on (a single row takes a matrix-vector kernel that rounds differently); in
fp32 between multiples of 64. Rows are padded accordingly (measurements: docs/numerics.md)."""

_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass
class Policy:
    """Model, tokenizer and the facts the rest needs."""

    model: Any
    tokenizer: Any
    folder: Path
    dtype: torch.dtype
    max_context: int
    eos_token_ids: tuple[int, ...]
    adapter: Adapter | None = None
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Held while the weights are changed, or read by a thread that another one could disturb."""

    @property
    def num_layers(self) -> int:
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def kv_bytes_per_token(self) -> int:
        """What the keys and values of one token take in all layers."""
        config = self.model.config.get_text_config()
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * self.num_layers * kv_heads * padded_head_size(d) * self.dtype.itemsize

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    def hidden(
        self,
        token_ids_T: torch.Tensor,
        position_ids_T: torch.Tensor,
        make_layout: Callable[[int], attention.Layout],
    ) -> torch.Tensor:
        """Final hidden states [T, hidden] of flat tokens [T] int64 at positions [T] int64.

        `make_layout` gets the number of rows the model will see, padding included.
        """
        count = len(token_ids_T)
        rows = self.padded_rows(count)
        if rows != count:
            pad = token_ids_T.new_zeros(rows - count)
            token_ids_T = torch.cat([token_ids_T, pad])
            position_ids_T = torch.cat([position_ids_T, pad])
        output = self.model.base_model(
            input_ids=token_ids_T[None],
            position_ids=position_ids_T[None],
            use_cache=False,
            layout=make_layout(rows),
        )
        return output.last_hidden_state[0, :count]

    def tree_hidden(self, tree: PrefixTree | Microbatch) -> torch.Tensor:
        """`hidden` of a prefix tree's rows; a row sees the rows before it on its path alone."""
        return self.hidden(
            torch.from_numpy(tree.token_ids),
            torch.from_numpy(tree.position_ids),
            lambda rows: attention.TreeLayout(tree.paths, tree.first_owned, rows),
        )

    def raw_logits(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """What the output head gives, [M, V] in the policy's dtype."""
        count = len(hidden_MH)
        rows = self.padded_rows(count)
        if rows != count:
            pad = hidden_MH.new_zeros(rows - count, hidden_MH.shape[1])
            hidden_MH = torch.cat([hidden_MH, pad])
        return self.model.get_output_embeddings()(hidden_MH)[:count]

    @property
    def exact(self) -> bool:
        """Whether a token has the same log-prob, bit for bit, when it is sampled from a cache and
        when it is computed again among others (docs/numerics.md)."""
        on_cpu = self.model.get_output_embeddings().weight.device.type == "cpu"
        exact_kind = self.model.config._attn_implementation == attention.EXACT
        return on_cpu and exact_kind and self.dtype == torch.bfloat16

    @cached_property
    def kernel_logits(self) -> bool:
        """Whether the kernels can read the raw logits: bf16 on a CPU, a plain layer, and neither
        scaled nor capped."""
        head, config = self.model.get_output_embeddings(), self.model.config
        changed = any(getattr(config, name, None) for name in _LOGIT_CHANGES)
        return type(head) is torch.nn.Linear and available(head.weight) and not changed

    def logits(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """Logits [M, V] float32, with the model's own scaling or soft cap."""
        logits = self.raw_logits(hidden_MH).float()
        config = self.model.config
        if scale := getattr(config, "logit_scale", None):
            logits = logits * scale
        if scaling := getattr(config, "logits_scaling", None):
            logits = logits / scaling
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = cap * torch.tanh(logits / cap)
        return logits

    def sampling_logits(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """Logits [M, V] for `choose_tokens`: raw ones where the kernels read them."""
        return self.raw_logits(hidden_MH) if self.kernel_logits else self.logits(hidden_MH)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the whole id list at once, special tokens visible."""
        return self.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def adapter_disabled(self) -> AbstractContextManager[None]:
        """While it is entered the policy is its base model: a reference without a second copy.

        For forward passes alone: no backward pass may run inside, and it does not nest. Raises
        ConfigError when the policy has no adapter.
        """
        return self._adapter().disabled()

    def _adapter(self) -> Adapter:
        if self.adapter is None:
            raise ConfigError(
                f"the policy of model folder {self.folder} has no adapter: every weight of it is "
                "trained; set model.lora to train one"
            )
        return self.adapter

    def padded_rows(self, count: int) -> int:
        """Rows that a pass over `count` of them computes."""
        if self.dtype == torch.float32:
            return -(-count // FP32_ROWS) * FP32_ROWS
        return max(count, self._min_rows)

    @cached_property
    def _min_rows(self) -> int:
        """Rows from which every product is large enough for the kernel that large ones take."""
        smallest = min(p.numel() for p in self.model.parameters() if p.dim() == 2)
        return max(BF16_MIN_ROWS, attention.SMALL_PRODUCT // smallest + 1)

    def export(
        self, folder: Path, dtype: torch.dtype, masters: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Write a Hugging Face folder: weights in `dtype`, config, tokenizer, chat template.

        `masters` are the fp32 weights by parameter name, of which the model holds a rounded copy.
        An adapter is merged into the weights, which plain transformers then loads.
        """
        implementation = self.model.config._attn_implementation
        state = self.exact_state(dtype, masters or {})
        self.model.config._attn_implementation = "sdpa"
        try:
            self.model.save_pretrained(folder, state_dict=state)
            self.tokenizer.save_pretrained(folder)
        finally:
            self.model.config._attn_implementation = implementation
        config = json.loads((folder / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")  # save_pretrained writes the model's
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def exact_state(
        self, dtype: torch.dtype, masters: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The model's state dict in `dtype`, rounded from the masters, an adapter merged in."""
        exact = self._exact_weights(masters)
        if self.adapter is not None:
            exact = self.adapter.merge(exact, dtype)
        once = {tensor.data_ptr(): tensor.detach().to(dtype) for tensor in exact.values()}
        return {name: once[tensor.data_ptr()] for name, tensor in exact.items()}  # tied stays tied

    def export_adapter(
        self, folder: Path, dtype: torch.dtype, masters: Mapping[str, torch.Tensor], base_name: str
    ) -> None:
        """Write the adapter alone, as peft does, for the base model called `base_name`.

        Raises ConfigError when the policy has none.
        """
        self._adapter().write(folder, self._exact_weights(masters), dtype, base_name)

    def _exact_weights(self, masters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(self.model.state_dict()) | self._under_every_name(masters)

    def _under_every_name(self, masters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A tied weight has one master and several names in the state dict."""
        owner = {id(p): name for name, p in self.model.named_parameters()}
        tied = self.model.named_parameters(remove_duplicate=False)
        return {name: masters[owner[id(p)]] for name, p in tied if owner[id(p)] in masters}


_LOGIT_CHANGES = ("logit_scale", "logits_scaling", "final_logit_softcapping")
_SOFTCAP = "attn_logit_softcapping"


def load_policy(
    folder: Path,
    *,
    dtype: Literal["bfloat16", "float32"],
    attention_kind: Literal["exact", "sdpa"] = "exact",
    max_context: int | None = None,
    gradient_checkpointing: bool = False,
    lora: LoraConfig | None = None,
    seed: int = 0,
    trained: bool = True,
) -> Policy:
    """Load a Hugging Face causal-LM folder; with `lora`, an adapter drawn from `seed` beside it.

    A policy that is not trained (a reference, a teacher) does not sample either, so it keeps no
    second copy of its weights for that.

    Raises ModelError when it cannot serve as a policy, and what `add_adapter` raises.
    """
    attention.register()
    disable_progress_bar()  # a run shows its own progress
    model, tokenizer = _load(folder, dtype)
    model.config.use_cache = False
    config = model.config.get_text_config()
    limit = int(getattr(config, "max_position_embeddings", 0) or 1 << 30)
    if max_context is not None and max_context > limit:
        raise ModelError(
            f"model.max_context is {max_context}, but {folder} reads at most {limit} tokens; "
            "lower it"
        )
    _refuse_lengths_that_matter(config, max_context or limit, folder)
    if attention_kind == "sdpa" and getattr(config, _SOFTCAP, None):
        raise ModelError(
            f"model folder {folder}: its attention has a soft cap, which the fused kernel lacks; "
            'set model.attention = "exact"'
        )
    adapter = None if lora is None else add_adapter(model, lora, seed, folder)
    model.eval()  # dropout off: the sampler and the learner must be the same function
    reference = _native_logits(model)
    model.set_attn_implementation(attention.EXACT if attention_kind == "exact" else attention.FUSED)
    fast_modules.install(model, packed=trained)
    policy = Policy(
        model=model,
        tokenizer=tokenizer,
        folder=folder,
        dtype=getattr(torch, dtype),
        max_context=max_context or limit,
        eos_token_ids=_eos_ids(model, tokenizer),
        adapter=adapter,
    )
    _check_same_function(policy, reference)
    if gradient_checkpointing:
        _recompute_layers(model, folder)
    return policy


def _load(folder: Path, dtype: str) -> tuple[Any, Any]:
    """Model and tokenizer as transformers makes them, from whole weights."""
    try:
        config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelError(
            f"model folder {folder}: cannot be loaded as a causal language model "
            f"({type(error).__name__}: {error}); check that it is a complete Hugging Face folder"
        ) from error
    model, loading = loaded
    _refuse_other_weights(loading, folder)
    return model, tokenizer


def _refuse_other_weights(loading: Any, folder: Path) -> None:
    """Raises ModelError where transformers would fill in or drop weights with a warning."""
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, loading[what])):
            raise ModelError(
                f"model folder {folder}: weights and config.json disagree: {len(names)} "
                f"{what.replace('_', ' ')}, such as {names[0]}; complete the folder or mend its "
                "config.json"
            )


def _recompute_layers(model: Any, folder: Path) -> None:
    """Layers keep their inputs only and run again in the backward pass.

    transformers' own switch works in training mode alone, which would turn dropout on.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"model folder {folder}: {type(model).__name__} has no layers that can be recomputed; "
            "set learner.gradient_checkpointing = false"
        )
    for layer in layers:
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def _refuse_lengths_that_matter(config: Any, max_context: int, folder: Path) -> None:
    """Raises ModelError where a token's state depends on how long other sequences are, or where
    the window of its attention is one that the packed path does not know."""
    rope = getattr(config, "rope_parameters", None) or {}
    for part in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        trained = part.get("original_max_position_embeddings")
        if part.get("rope_type") == "longrope" and trained and max_context > trained:
            raise ModelError(
                f"model folder {folder}: LongRoPE rotates every sequence of a batch by the length "
                f"of the longest, so beyond {trained} tokens a sequence would depend on its "
                f"neighbours; set model.max_context to {trained} or less"
            )
    unknown = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        raise ModelError(
            f"model folder {folder}: layers of type {', '.join(sorted(unknown))} are not supported "
            f"by the embedded engine, only {', '.join(sorted(_LAYER_TYPES))}; take another model"
        )


def _probe_ids(model: Any) -> torch.Tensor:
    """Two sequences [2, 7] that begin alike: packed, each must see its own tokens alone."""
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(1, 8) * 7919) % vocab
    other = (ids + 1) % vocab
    return torch.stack([ids, torch.cat([ids[:3], other[3:]])])


def _native_logits(model: Any) -> torch.Tensor:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(input_ids=_probe_ids(model), use_cache=False).logits.float()


def _check_same_function(policy: Policy, reference: torch.Tensor) -> None:
    """The packed path must be the model that transformers runs; refuse what it is not."""
    owner = f"model folder {policy.folder}: {type(policy.model).__name__}"
    tree = build_prefix_tree(list(_probe_ids(policy.model).numpy()))
    try:
        with torch.no_grad():
            packed = policy.logits(policy.tree_hidden(tree))
    except Exception as error:
        raise ModelError(
            f"{owner} cannot run on packed attention ({type(error).__name__}: {error}); this "
            "architecture is not supported by the embedded engine, take another model"
        ) from error
    ours = packed[torch.from_numpy(np.stack(tree.paths))]
    scale = float(reference.abs().max())
    error = float((ours - reference).abs().max())
    if not error <= (0.05 if policy.dtype == torch.bfloat16 else 1e-3) * max(scale, 1.0):
        raise ModelError(
            f"{owner} gives other logits through packed attention than through transformers "
            f"(difference {error:.3g} at scale {scale:.3g}); this architecture is not supported by "
            "the embedded engine, take another model"
        )


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    ids: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for source in (generation, model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        if isinstance(value, int):
            ids.add(value)
        elif value is not None:
            ids.update(int(v) for v in value)
    return tuple(sorted(ids))
