"""AdamW on fp32 masters behind a policy that computes in bf16 or fp32.

The policy's parameters are what the sampler and the forward pass use. In bf16 each has an fp32
master; gradients of every micro-batch are added up in fp32, and after a step the master is
rounded back. In fp32 the parameter is its own master.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file

from posttrain.config import OptimConfig
from posttrain.errors import JournalCorruptError
from posttrain.kernels.checksum import checksum

_MASTERS, _MOMENTS = "masters.safetensors", "moments.safetensors"
_NUM_UPDATES = "num_updates"


class HasModel(Protocol):
    """A policy, or anything else whose module has parameters to train."""

    @property
    def model(self) -> torch.nn.Module: ...


class MasterOptimizer:
    """Trainable parameters, their masters, and AdamW's state. Frozen ones are only hashed."""

    def __init__(self, owner: HasModel, config: OptimConfig) -> None:
        self.config = config
        named = dict(owner.model.named_parameters())
        self._params = {name: p for name, p in named.items() if p.requires_grad}
        self._frozen = {name: p for name, p in named.items() if not p.requires_grad}
        self._masters: dict[str, torch.Tensor] = {}
        for name, param in self._params.items():
            if param.dtype == torch.float32:
                # A gradient from the start: AdamW leaves out parameters without one, and a
                # restored learner would otherwise treat unused parameters in another way.
                param.grad = torch.zeros_like(param)
                self._masters[name] = param
                continue
            master = param.detach().float()
            master.grad = torch.zeros_like(master)
            self._masters[name] = master
            param.register_post_accumulate_grad_hook(self._accumulate_into(name))
        self._adam = torch.optim.AdamW(
            list(self._masters.values()),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.num_updates = 0
        self._stale: set[str] = set()
        """Masters whose gradient buffer holds what was forgotten: the first gradient replaces it,
        which saves clearing and reading it."""

    @property
    def masters(self) -> Mapping[str, torch.Tensor]:
        """fp32 weights by parameter name, tied ones once."""
        return self._masters

    def forget_moments(self) -> None:
        """Begin AdamW anew, as a reset of the reference asks for."""
        self._adam.state.clear()
        self.num_updates = 0

    def zero_grad(self) -> None:
        """Forget what was accumulated."""
        for name, master in self._masters.items():
            if master is not self._params[name]:
                self._stale.add(name)
            elif master.grad is not None:
                master.grad.zero_()

    def grad_norm(self) -> float:
        """Global L2 norm of the accumulated gradients, before clipping."""
        for name in self._stale:  # no gradient reached them
            grad = self._masters[name].grad
            assert grad is not None
            grad.zero_()
        self._stale.clear()
        grads = [m.grad for m in self._masters.values() if m.grad is not None]
        if not grads:
            return 0.0
        return float(torch.nn.utils.get_total_norm(grads))

    def update(self, lr: float, grad_norm: float) -> None:
        """Clip to `max_grad_norm`, take one AdamW step, refresh the policy's parameters."""
        grads = [m.grad for m in self._masters.values() if m.grad is not None]
        if grad_norm > self.config.max_grad_norm:
            for grad in grads:
                grad.mul_(self.config.max_grad_norm / grad_norm)
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self.num_updates += 1
        self._refresh()

    def _accumulate_into(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(param: torch.Tensor) -> None:
            grad = self._masters[name].grad
            assert grad is not None and param.grad is not None
            if name in self._stale:
                grad.copy_(param.grad)
                self._stale.discard(name)
            else:
                grad.add_(param.grad)
            param.grad = None

        return hook

    def _refresh(self) -> None:
        with torch.no_grad():
            for name, param in self._params.items():
                master = self._masters[name]
                if master is not param:
                    param.copy_(master)

    def weights_hash(self) -> str:
        """SHA-256 over name, shape and checksum (kernels/checksum.py) of every master, by name.

        Where weights are frozen beside an adapter, their own hash comes first: other base weights
        are another policy.
        """
        joined = hashlib.sha256(self._frozen_digest)
        for name in sorted(self._masters):
            master = self._masters[name]
            joined.update(repr((name, tuple(master.shape))).encode())
            joined.update(checksum(master))
        return joined.hexdigest()

    @cached_property
    def _frozen_digest(self) -> bytes:
        """SHA-256 over name, shape and bytes of the frozen weights, read once; b"" without any."""
        if not self._frozen:
            return b""
        digest = hashlib.sha256()
        for name in sorted(self._frozen):
            tensor = self._frozen[name].detach().contiguous()
            digest.update(repr((name, tuple(tensor.shape))).encode())
            digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
        return digest.digest()

    def save(self, folder: Path) -> None:
        """Write masters, moments and counters (safetensors and JSON) into `folder`."""
        moments = {_NUM_UPDATES: torch.tensor(self.num_updates)}  # in a file that is hashed
        for name, master in self._masters.items():
            state = self._adam.state.get(master)
            if state:
                moments[f"exp_avg/{name}"] = state["exp_avg"]
                moments[f"exp_avg_sq/{name}"] = state["exp_avg_sq"]
        save_file({k: v.detach() for k, v in self._masters.items()}, folder / _MASTERS)
        save_file(moments, folder / _MOMENTS)
        hashes = {name: sha256_of(folder / name) for name in (_MASTERS, _MOMENTS)}
        facts = {"sha256": hashes}
        (folder / "optimizer.json").write_text(json.dumps(facts))

    def restore(self, folder: Path) -> None:
        """Load what `save` wrote. Raises JournalCorruptError when bytes changed meanwhile, before
        anything is taken over."""
        facts = json.loads((folder / "optimizer.json").read_text())
        for name, recorded in facts["sha256"].items():
            if not (folder / name).is_file() or sha256_of(folder / name) != recorded:
                raise JournalCorruptError(
                    f"checkpoint {folder}: {name} does not match its recorded hash; delete that "
                    "folder and resume: the steps since an earlier one are redone from the journal"
                )
        masters = load_file(folder / _MASTERS)
        moments = load_file(folder / _MOMENTS)
        self.num_updates = int(moments[_NUM_UPDATES])
        self._adam.state.clear()
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(masters[name])
                if f"exp_avg/{name}" in moments:
                    self._adam.state[master] = {
                        "step": torch.tensor(float(self.num_updates)),
                        "exp_avg": moments[f"exp_avg/{name}"],
                        "exp_avg_sq": moments[f"exp_avg_sq/{name}"],
                    }
        self._refresh()


def sha256_of(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
