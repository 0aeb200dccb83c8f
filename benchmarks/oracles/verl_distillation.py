"""Distillation against verl: a forward KL over the teacher's tokens, and the advantage of OPD."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from batches import ORDINARY, batches, some_logits
from comparison import COMPARISONS, Record, function
from verl.trainer.distillation.fsdp import losses
from verl.trainer.ppo import core_algos


@COMPARISONS.add(
    "distillation:opd_advantages",
    "verl:trainer.ppo.core_algos.kl_penalty (k1, as distillation_loss negates it)",
    page="opd",
)
def opd(record: Record) -> None:
    for batch in batches(ORDINARY):
        student_N = batch.flat(batch.tokens_BT["prox_logprobs"])
        teacher_N = batch.flat(batch.tokens_BT["teacher_logprobs"])
        ours_N = function("distillation:opd_advantages")(student_N, teacher_N)
        record.same(ours_N, -core_algos.kl_penalty(student_N, teacher_N, "k1"))


@COMPARISONS.add(
    "distillation:forward_kl",
    "verl:trainer.distillation.fsdp.losses.compute_forward_kl_topk",
    difference="verl sums over the teacher's top k tokens without renormalising, in float32; "
    "equal when k is the vocabulary",
    page="distillation",
    tolerance=1e-5,
    floor=1.0,
)
def forward_kl(record: Record) -> None:
    config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=None))
    for batch in batches(ORDINARY):
        student_NV = some_logits(batch)[batch.mask_BT].detach().requires_grad_()
        teacher_NV = some_logits(batch).detach().flip(0)[batch.mask_BT] * 0.7
        ours_N = function("distillation:forward_kl")(student_NV, teacher_NV)
        for k in (teacher_NV.shape[1], 3):
            best_NK, ids_NK = teacher_NV.log_softmax(dim=-1).topk(k)
            as_sequence = {"layout": torch.jagged}
            theirs_N = losses.compute_forward_kl_topk(
                student_NV[None],
                torch.nested.nested_tensor([best_NK], **as_sequence),
                torch.nested.nested_tensor([ids_NK], **as_sequence),
                config,
                "thd",
            )["distillation_losses"][0]
            if k < teacher_NV.shape[1]:
                record.apart(ours_N, theirs_N)
                continue
            record.same(ours_N, theirs_N)
            gradients = [
                torch.autograd.grad(loss_N.sum(), student_NV, retain_graph=True)[0]
                for loss_N in (ours_N, theirs_N)
            ]
            record.same_gradient(*gradients)
