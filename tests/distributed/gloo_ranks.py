"""Forks gloo ranks that share a step, and writes what each number of ranks arrives at.

Run as `gloo_ranks.py FOLDER`; results are FOLDER/WORLD_SIZE.pt. Every rank has part of the
micro-batches and the last of several has none. What the ranks tell each other is added up by hand
here: three counts before, loss and gradient after. The micro-batches of a group lie on different
ranks, so that its tokens must be added up too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from posttrain.algo.aggregation import Denominators
from posttrain.algo.builder import build_algorithm
from posttrain.algo.component import Component
from posttrain.config import RlooConfig
from posttrain.config.losses import EVERY_AGGREGATION, CispoConfig, PpoClipConfig, ToprConfig
from posttrain.data.packing import pack
from posttrain.training.token_columns import GlobalCounts, known_columns, of_stream, stream_of
from posttrain.types import Microbatch, TrainSample

WORLD_SIZES = (1, 2, 4)
NUM_DRAWS = 5
LOSSES = (PpoClipConfig, CispoConfig, ToprConfig)
Result = tuple[torch.Tensor, torch.Tensor]  # loss of the step [], gradient of its tokens [N]


def components() -> dict[str, Component]:
    """Three losses with every aggregation."""
    found = {}
    for loss in LOSSES:
        for mode in EVERY_AGGREGATION:
            length = 7 if mode == "fixed_length" else None
            config = RlooConfig(loss=loss(), aggregation=mode, fixed_length=length)
            (found[f"{loss().type}-{mode}"],) = build_algorithm(config).components
    return found


def make_micros() -> list[Microbatch]:
    """A micro-batch a sample, siblings far apart: sample i is of draw i % NUM_DRAWS."""
    rng = np.random.default_rng(5)
    samples = []
    for i in range(3 * NUM_DRAWS):
        mask = np.arange(int(rng.integers(3, 9))) >= 2
        advantage = rng.normal()
        samples.append(
            TrainSample(
                token_ids=np.arange(len(mask), dtype=np.int32),
                loss_mask=mask,
                sampler_logprobs=np.where(mask, -rng.exponential(1.5), 0).astype(np.float32),
                policy_versions=np.where(mask, 0, -1).astype(np.int32),
                turn_index=np.where(mask, 0, -1).astype(np.int32),
                streams={"policy": np.where(mask, advantage, 0).astype(np.float32)},
                draw_id=i % NUM_DRAWS,
                sample_index=i // NUM_DRAWS,
            )
        )
    return [micro for sample in samples for micro in pack([sample], 100)]


def make_logprobs(count: int) -> torch.Tensor:
    return -torch.rand(count, generator=torch.Generator().manual_seed(6), dtype=torch.float64) - 0.3


def mine_of(rank: int, world_size: int) -> list[int]:
    """Numbers of the rank's micro-batches."""
    holders = max(1, world_size - 1)
    return [i for i in range(3 * NUM_DRAWS) if i % holders == rank]


def backward(
    component: Component, micros: Sequence[Microbatch], chosen: Sequence[int], counts: Any
) -> Result:
    """Loss and gradient of the chosen micro-batches; `counts(micro)` gives their denominators."""
    starts = np.cumsum([0, *(m.num_loss_tokens for m in micros)])
    leaf = make_logprobs(int(starts[-1])).requires_grad_(True)
    total = leaf[:0].sum()  # a rank without samples still has a backward pass
    for i in chosen:
        policy_N = leaf[starts[i] : starts[i + 1]]
        columns = known_columns(micros[i]) | {
            "policy_logprobs_N": policy_N,
            "prox_logprobs_N": policy_N.detach() + 0.2,
        }
        columns = of_stream(columns, stream_of(component, micros[i]))
        fixed = {name: values.detach() for name, values in columns.items()}
        columns |= component.prepare(fixed, {})
        total = total + component.loss(columns, counts(micros[i]), {}).loss
    total.backward()
    assert leaf.grad is not None
    return total.detach(), leaf.grad


def one_process() -> dict[str, Result]:
    """The whole step at once, with the counts of the learner."""
    micros = make_micros()
    results = {}
    for name, component in components().items():
        counts = GlobalCounts([component], micros)
        results[name] = backward(
            component,
            micros,
            range(len(micros)),
            lambda micro, counts=counts, component=component: counts.denominators(component, micro),
        )
    return results


def counted(micros: Sequence[Microbatch], chosen: Sequence[int], added_up: bool) -> Any:
    """Denominators from tokens, sequences and tokens of each draw, over all ranks or this one."""
    own = torch.zeros(2 + NUM_DRAWS, dtype=torch.int64)
    for i in chosen:
        length = micros[i].num_loss_tokens
        own += torch.tensor([length, 1, *[0] * NUM_DRAWS])
        own[2 + micros[i].owners[0][0]] += length
    if added_up:
        dist.all_reduce(own)
    tokens, sequences, of_draw = int(own[0]), int(own[1]), own[2:]

    def denominators(micro: Microbatch) -> Denominators:
        lengths = torch.tensor([micro.num_loss_tokens])
        of_group = of_draw[[micro.owners[0][0]]]
        return Denominators(tokens, sequences, lengths, int((of_draw > 0).sum()), of_group)

    return denominators


def run_rank(rank: int, world_size: int, folder: str) -> None:
    """One rank; rank 0 writes what all together arrive at, and what local counts would give."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet-{world_size}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    micros, chosen = make_micros(), mine_of(rank, world_size)
    results: dict[str, dict[str, Result]] = {"global": {}, "local": {}}
    for kind, of_kind in results.items():
        counts = counted(micros, chosen, added_up=kind == "global")
        for name, component in components().items():
            loss, gradient = backward(component, micros, chosen, counts)
            dist.all_reduce(loss)
            dist.all_reduce(gradient)
            of_kind[name] = (loss, gradient)
    if rank == 0:
        torch.save(results, Path(folder) / f"{world_size}.pt")
    dist.destroy_process_group()


def main() -> None:
    folder = sys.argv[1]
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name may lead nowhere
    for world_size in WORLD_SIZES:
        start_processes(run_rank, (world_size, folder), world_size, start_method="fork")


if __name__ == "__main__":
    main()
