"""OpenRLHF's loss modules and advantage code, imported without its training engine.

`openrlhf.models` and `openrlhf.trainer` import DeepSpeed, flash-attn and Ray actors for classes
that are not compared. So the packages are entered without running their `__init__`, and while they
are imported the names of those engines are empty modules; the files that are compared run as
published.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from batches import Batch
from losses import Loss
from torch import Tensor

ENGINES = ("deepspeed", "openrlhf.trainer.ray.launcher")
PACKAGES = ("models", "trainer", "trainer.ppo_utils", "trainer.ray", "utils")


@contextmanager
def _without_engines() -> Iterator[None]:
    found = importlib.util.find_spec("openrlhf")
    assert found is not None and found.submodule_search_locations
    root = Path(next(iter(found.submodule_search_locations)))
    for name in PACKAGES:
        package = ModuleType(f"openrlhf.{name}")
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[package.__name__] = package
    assert transformers.AutoTokenizer  # it looks for DeepSpeed when it is loaded: not this one
    for name in ENGINES:
        engine: Any = ModuleType(name)
        engine.RayActorGroup = object
        sys.modules[name] = engine
    yield
    for name in ENGINES:
        del sys.modules[name]


with _without_engines():
    loss = importlib.import_module("openrlhf.models.loss")
    utils = importlib.import_module("openrlhf.models.utils")
    ppo_utils = "openrlhf.trainer.ppo_utils"
    kl_controller = importlib.import_module(f"{ppo_utils}.kl_controller")
    length_penalty = importlib.import_module(f"{ppo_utils}.length_penalty")
    experience_maker = importlib.import_module(f"{ppo_utils}.experience_maker")


def policy_loss(
    batch: Batch, *, dual_clip: float | None = None, seq: bool = False, **settings: Any
) -> Loss:
    """PolicyLoss, with the counts of the whole batch; `seq`: per-sequence means."""
    policy_BT = batch.leaf()
    module = loss.PolicyLoss(
        clip_eps_low=0.2,
        clip_eps_high=0.28,
        dual_clip=dual_clip,
        token_level_loss=not seq,
        **settings,
    )
    value, *_ = module(
        policy_BT,
        batch.tokens_BT["prox_logprobs"],
        batch.tokens_BT["advantages"],
        batch.mask_BT.double(),
        batch.tokens_BT["sampler_logprobs"],
        batch_num_tokens=batch.denominators.num_loss_tokens,
        global_batch_size=batch.denominators.num_sequences,
    )
    (gradient_BT,) = torch.autograd.grad(value, policy_BT)
    return Loss(value.detach(), batch.flat(gradient_BT))


class Scored(NamedTuple):
    """[N] each, of the loss tokens."""

    advantages_N: Tensor
    returns_N: Tensor


def score(
    batch: Batch,
    estimator: str,
    group_size: int,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    kl_coef: float = 0.0,
    kl_BT: Tensor | None = None,
) -> Scored:
    """compute_advantages_and_returns for groups of `group_size` consecutive rows."""
    maker = object.__new__(experience_maker.RemoteExperienceMaker)
    advantage = SimpleNamespace(estimator=estimator, gamma=gamma, lambd=lam, no_std_norm=False)
    maker.strategy = SimpleNamespace(
        args=SimpleNamespace(
            reward=SimpleNamespace(clip_range=None),
            rollout=SimpleNamespace(n_samples_per_prompt=group_size),
            algo=SimpleNamespace(advantage=advantage),
        )
    )
    maker.advantage_estimator = estimator
    maker.kl_ctl = SimpleNamespace(value=kl_coef)
    experience = SimpleNamespace(
        index=list(range(len(batch.mask_BT))),
        rewards=batch.rewards_B.clone(),
        info={},
        kl=torch.zeros_like(batch.tokens_BT["values"]) if kl_BT is None else kl_BT,
        values=batch.tokens_BT["values"].clone(),
        action_mask=batch.mask_BT.double(),
    )
    (scored,) = maker.compute_advantages_and_returns([experience])
    return Scored(batch.flat(scored.advantages), batch.flat(scored.returns))
