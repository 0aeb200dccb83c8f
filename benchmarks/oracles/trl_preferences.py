"""Preference losses, reward models and distillation against TRL."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from batches import ORDINARY, batches, some_logits
from comparison import COMPARISONS, Record, function
from losses import imitation_loss
from pairs import Pairs, preference, some_pairs
from torch import Tensor
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.orpo import ORPOTrainer
from trl_calls import float64, trainer

DPO = "trl:trainer.dpo_trainer.DPOTrainer._compute_loss"
BETA = 0.3


def outputs(logprobs_BT: Tensor) -> SimpleNamespace:
    """What a model with a fused head gives the trainers; all but log_probs feeds metrics only."""
    return SimpleNamespace(
        log_probs=logprobs_BT,
        entropy=torch.zeros_like(logprobs_BT),
        mean_logits=torch.zeros_like(logprobs_BT),
        is_top1=torch.zeros_like(logprobs_BT, dtype=torch.bool),
    )


def model_inputs(mask_BT: Tensor) -> dict[str, Tensor]:
    """Token ids and masks with one prompt token before the answers."""
    completion_mask = torch.nn.functional.pad(mask_BT.long(), (1, 0))
    ids = torch.zeros_like(completion_mask)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "completion_mask": completion_mask,
    }


def dpo_loss(pairs: Pairs, loss_type: str, **settings: Any) -> Tensor:
    """A loss type of the DPO trainer, a scalar."""
    made = trainer(
        DPOTrainer,
        **{
            "ld_alpha": None,
            "f_divergence_type": "reverse_kl",
            "loss_types": [loss_type],
            "loss_weights": [1.0],
            "beta": BETA,
            "label_smoothing": 0.0,
            "use_weighting": False,
            "precompute_ref_logps": True,
            "_total_train_tokens": 0,
            "_tp_size": 1,
        }
        | settings,
    )
    inputs = model_inputs(pairs.batch.mask_BT)
    inputs["ref_chosen_logps"] = pairs.columns["ref_chosen_P"]
    inputs["ref_rejected_logps"] = pairs.columns["ref_rejected_P"]
    answer = outputs(pairs.policy_BT * pairs.batch.mask_BT)
    return made._compute_loss(lambda **_: answer, inputs, return_outputs=False)


def compare_dpo(
    record: Record, ours: str, loss_type: str, trl: dict[str, Any] | None = None, **settings: Any
) -> None:
    """Mean over the pairs, and its gradient."""
    for pairs in some_pairs():
        loss = preference(ours, pairs, beta=BETA, **settings).mean()
        pairs.same(record, loss, dpo_loss(pairs, loss_type, **(trl or {})))


@COMPARISONS.add("preferences.dpo", f"{DPO} (sigmoid)", page="dpo")
def dpo(record: Record) -> None:
    compare_dpo(record, "dpo", "sigmoid")


@COMPARISONS.add("preferences.dpo (length_normalised)", f"{DPO} (sigmoid_norm)", page="dpo")
def dpo_norm(record: Record) -> None:
    compare_dpo(record, "dpo", "sigmoid_norm", length_normalised=True)


@COMPARISONS.add("preferences.robust_dpo", f"{DPO} (robust)", page="robust_dpo")
def robust_dpo(record: Record) -> None:
    compare_dpo(record, "robust_dpo", "robust", {"label_smoothing": 0.2}, flip_rate=0.2)


@COMPARISONS.add("preferences.hinge", f"{DPO} (hinge)", page="hinge")
def hinge(record: Record) -> None:
    compare_dpo(record, "hinge", "hinge")


@COMPARISONS.add(
    "preferences.ipo",
    f"{DPO} (ipo)",
    difference="TRL takes log-ratios per token, the paper and our default sums; equal with "
    "length_normalised",
    page="ipo",
)
def ipo(record: Record) -> None:
    compare_dpo(record, "ipo", "ipo", length_normalised=True)
    for pairs in some_pairs():
        record.apart(preference("ipo", pairs, beta=BETA).mean(), dpo_loss(pairs, "ipo"))


@COMPARISONS.add("preferences.apo_zero", f"{DPO} (apo_zero)", page="apo_zero")
def apo_zero(record: Record) -> None:
    compare_dpo(record, "apo_zero", "apo_zero")


@COMPARISONS.add("preferences.apo_down", f"{DPO} (apo_down)", page="apo_down")
def apo_down(record: Record) -> None:
    compare_dpo(record, "apo_down", "apo_down")


@COMPARISONS.add("supervised:Imitation", f"{DPO} (sft)")
def imitation(record: Record) -> None:
    for pairs in some_pairs():
        mask_BT = pairs.batch.mask_BT.clone()
        mask_BT[len(mask_BT) // 2 :] = False
        loss = imitation_loss(pairs.policy_BT, mask_BT, "token_mean")
        pairs.same(record, loss, dpo_loss(pairs, "sft"))


@COMPARISONS.add(
    "preferences.cpo (nll_coef = 0)", "trl:experimental.cpo.CPOTrainer.cpo_loss", page="cpo"
)
def cpo(record: Record) -> None:
    for pairs in some_pairs():
        made = trainer(CPOTrainer, alpha=0.0, beta=BETA, label_smoothing=0.0, loss_type="sigmoid")
        sides = pairs.columns["policy_chosen_P"], pairs.columns["policy_rejected_P"]
        ours_P = preference("cpo", pairs, beta=BETA, nll_coef=0.0)
        pairs.same(record, ours_P, made.cpo_loss(*sides)[0])


@COMPARISONS.add(
    "preferences.simpo", "trl:experimental.cpo.CPOTrainer.cpo_loss (simpo)", page="simpo"
)
def simpo(record: Record) -> None:
    for pairs in some_pairs():
        made = trainer(
            CPOTrainer,
            alpha=0.0,
            beta=2.0,
            label_smoothing=0.0,
            loss_type="simpo",
            simpo_gamma=0.5,
        )
        theirs_P = made.cpo_loss(pairs.means("chosen"), pairs.means("rejected"))[0]
        pairs.same(record, preference("simpo", pairs, beta=2.0, gamma=0.5), theirs_P)


@COMPARISONS.add(
    "preferences.orpo (odds-ratio term)",
    "trl:experimental.orpo.ORPOTrainer.odds_ratio_loss",
    difference="TRL returns beta log sigmoid, to be subtracted from its NLL, in float32",
    page="orpo",
    tolerance=1e-4,
    floor=1.0,
)
def orpo(record: Record) -> None:
    for pairs in some_pairs():
        made = trainer(ORPOTrainer, beta=0.2)
        chosen_P = pairs.means("chosen")
        theirs_P = made.odds_ratio_loss(chosen_P, pairs.means("rejected"))[0]
        ours_P = preference("orpo", pairs, odds_coef=0.2) + chosen_P
        pairs.same(record, ours_P, -theirs_P)
        record.apart(ours_P, theirs_P)


@COMPARISONS.add(
    "preferences.kto and kto_kl_baseline",
    "trl:trainer.kto_trainer.KTOTrainer._compute_loss",
    page="kto",
)
def kto(record: Record) -> None:
    for pairs in some_pairs():
        mask_BT, tokens_BT = pairs.batch.mask_BT, pairs.batch.tokens_BT
        sums_B = {
            name: (logprobs_BT * mask_BT).sum(dim=1) for name, logprobs_BT in tokens_BT.items()
        }
        desirable_B = torch.arange(len(mask_BT)) % 3 > 0
        made = trainer(
            KTOTrainer,
            calculate_KL=True,
            precompute_ref_logps=True,
            loss_type="kto",
            beta=BETA,
            desirable_weight=1.2,
            undesirable_weight=0.8,
            _total_train_tokens=0,
            _tp_size=1,
        )
        inputs = model_inputs(mask_BT)
        inputs |= {f"KL_{name}": value for name, value in model_inputs(mask_BT).items()}
        inputs |= {
            "label": desirable_B,
            "ref_logps": sums_B["ref_logprobs"],
            "ref_KL_logps": sums_B["sampler_logprobs"],
        }
        # The model is asked for the mismatched answers first
        answers = iter(
            [outputs(tokens_BT["teacher_logprobs"] * mask_BT), outputs(pairs.policy_BT * mask_BT)]
        )
        theirs = made._compute_loss(lambda *_, a=answers, **__: next(a), inputs, False)
        baseline = function("preferences.kto:kto_kl_baseline")(
            sums_B["teacher_logprobs"], sums_B["sampler_logprobs"]
        )
        ours_B = function("preferences.kto")(
            (pairs.policy_BT * mask_BT).sum(dim=1),
            sums_B["ref_logprobs"],
            desirable_B,
            baseline,
            beta=BETA,
            desirable_coef=1.2,
            undesirable_coef=0.8,
        )
        pairs.same(record, ours_B.mean(), theirs)


@COMPARISONS.add(
    "preferences.bradley_terry",
    "trl:trainer.reward_trainer.RewardTrainer.compute_loss",
    page="bradley_terry",
)
def bradley_terry(record: Record) -> None:
    for batch in batches(ORDINARY):
        scores_B = batch.tokens_BT["values"][:, 0].clone().requires_grad_()
        margin_P = batch.tokens_BT["entropy"][:6, 0]
        made = trainer(
            RewardTrainer,
            args=SimpleNamespace(center_rewards_coefficient=0.01),
            _total_train_tokens=0,
            _tp_size=1,
        )
        inputs = {"attention_mask": torch.ones(len(scores_B), 1), "margin": margin_P}
        logits = SimpleNamespace(logits=scores_B[:, None])
        theirs = made.compute_loss(lambda answer=logits, **_: answer, inputs)
        chosen_P, rejected_P = scores_B.chunk(2)
        ours = function("preferences.bradley_terry")(
            chosen_P, rejected_P, margin=margin_P, centre_coef=0.01
        ).mean()
        record.same(ours, theirs)
        record.same_gradient(
            torch.autograd.grad(ours, scores_B)[0], torch.autograd.grad(theirs, scores_B)[0]
        )


@COMPARISONS.add(
    "distillation:forward_kl, reverse_kl, jsd",
    "trl:experimental.gkd.GKDTrainer.generalized_jsd_loss",
    page="distillation",
)
def divergences(record: Record) -> None:
    for batch in batches(ORDINARY):
        student_BTV = some_logits(batch)
        teacher_BTV = some_logits(batch).detach().flip(0) * 0.7
        labels_BT = torch.where(batch.mask_BT, 1, -100)
        student_NV, teacher_NV = student_BTV[batch.mask_BT], teacher_BTV[batch.mask_BT]
        for beta, name, settings in (
            (0, "forward_kl", {}),
            (1, "reverse_kl", {}),
            (0.5, "jsd", {"beta": 0.5}),
            (0.1, "jsd", {"beta": 0.1}),
        ):
            ours = function(f"distillation:{name}")(student_NV, teacher_NV, **settings).mean()
            with float64():
                theirs = GKDTrainer.generalized_jsd_loss(
                    student_BTV, teacher_BTV, labels_BT, beta=beta
                )
            record.same(ours, theirs)
            gradients = [
                torch.autograd.grad(loss, student_BTV, retain_graph=True)[0]
                for loss in (ours, theirs)
            ]
            record.same_gradient(*gradients)
