"""tiny-char and random models of other families, and records made of what was sampled from them."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from posttrain.types import (
    Completion,
    FinishReason,
    Int32,
    SamplingParams,
    TokenSequence,
    TrainBatch,
    TrainSample,
)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    # Tensors of a few numbers: on a busy machine waking threads costs more than the maths.
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny-char folder that nobody changes."""
    from posttrain.training.models import write_tiny_char

    folder = tmp_path_factory.mktemp("tiny-char")
    write_tiny_char(folder)
    return folder


@pytest.fixture(scope="session")
def make_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A model folder of a config class of transformers, random weights, tiny-char's tokenizer."""
    vocab = json.loads((tiny_folder / "tokenizer.json").read_text())["model"]["vocab"]

    def make(config_class: Any, **fields: Any) -> Path:
        import torch
        from transformers import AutoModelForCausalLM

        folder = tmp_path_factory.mktemp(config_class.__name__)
        config = config_class(
            vocab_size=len(vocab), pad_token_id=0, bos_token_id=1, eos_token_id=2, **fields
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        for name in TOKENIZER_FILES:
            shutil.copy(tiny_folder / name, folder / name)
        return folder

    return make


@pytest.fixture(scope="session")
def sharp_folder(make_folder: Callable[..., Path]) -> Path:
    """A tiny Llama whose next-token distributions are far from uniform, so that errors show."""
    from transformers import LlamaConfig

    return make_folder(
        LlamaConfig,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )


@pytest.fixture(scope="session")
def read_policy(tiny_folder: Path, sharp_folder: Path) -> Callable[..., Any]:
    """A policy that tests only read: read_policy("tiny" or "sharp" or a folder, dtype)."""
    from posttrain.training.policy import load_policy

    named = {"tiny": tiny_folder, "sharp": sharp_folder}
    loaded: dict[Any, Any] = {}

    def get(which: str | Path, dtype: Any = "float32") -> Any:
        if (which, dtype) not in loaded:
            folder = named[which] if isinstance(which, str) else which
            loaded[which, dtype] = load_policy(folder, dtype=dtype)
        return loaded[which, dtype]

    return get


@pytest.fixture(scope="session")
def sample_all() -> Callable[..., list[Completion]]:
    """Completions of prompts, request i with seed 100 + i, submitted in `order`."""
    from posttrain.sampling.embedded import EmbeddedSampler

    def run(
        policy: Any,
        prompts: Sequence[Int32],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        max_batch: int = 16,
        order: Iterable[int] | None = None,
    ) -> list[Completion]:
        sampler = EmbeddedSampler(policy, max_batch=max_batch)
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        chosen = list(range(len(prompts))) if order is None else list(order)

        async def all_of_them() -> dict[int, Completion]:
            done = await asyncio.gather(
                *(sampler.generate(prompts[i], each[i], seed=100 + i) for i in chosen)
            )
            return dict(zip(chosen, done, strict=True))

        completions = asyncio.run(all_of_them())
        return [completions[i] for i in sorted(chosen)]

    return run


def _train_sample(
    prompt: Int32,
    completion: Completion,
    advantage: float = 1.0,
    draw_id: int = 0,
    sample_index: int = 0,
    stream: str = "policy",
) -> TrainSample:
    mask = np.arange(len(prompt) + len(completion)) >= len(prompt)
    return TrainSample(
        token_ids=np.concatenate([prompt, completion.token_ids]).astype(np.int32),
        loss_mask=mask,
        sampler_logprobs=np.concatenate(
            [np.zeros(len(prompt), np.float32), completion.sampler_logprobs]
        ),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        turn_index=np.where(mask, 0, -1).astype(np.int32),
        streams={stream: np.where(mask, advantage, 0).astype(np.float32)},
        draw_id=draw_id,
        sample_index=sample_index,
    )


def _train_batch(samples: Sequence[TrainSample], step: int = 1) -> TrainBatch:
    return TrainBatch(step, tuple(samples), tuple(dict.fromkeys(s.draw_id for s in samples)))


def _completion(
    ids: Sequence[int], text: str = "", reason: FinishReason = FinishReason.EOS, version: int = 0
) -> Completion:
    logprobs = [-0.5 - 0.01 * i for i in range(len(ids))]
    return Completion.build(ids, logprobs, [version] * len(ids), reason, text)


def _sequence(prompt: Sequence[int], completion: Completion) -> TokenSequence:
    glue = len(prompt)
    return TokenSequence.build(
        [*prompt, *completion.token_ids],
        [2] * glue + [0] * len(completion),
        [0.0] * glue + completion.sampler_logprobs.tolist(),
        [-1] * glue + completion.policy_versions.tolist(),
    )


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    """Records from little: make.sample, make.batch, make.completion, make.sequence."""
    return SimpleNamespace(
        sample=_train_sample, batch=_train_batch, completion=_completion, sequence=_sequence
    )
