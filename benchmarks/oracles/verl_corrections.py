"""Off-policy corrections against verl.trainer.ppo.rollout_corr_helper."""

from __future__ import annotations

from typing import Any

from batches import EMPTY, EXTREME, ORDINARY, Batch, batches
from comparison import COMPARISONS, Record, call
from torch import Tensor
from verl.trainer.ppo import rollout_corr_helper as helper

PATH = "verl:trainer.ppo.rollout_corr_helper"
WEIGHTS = f"{PATH}.compute_rollout_correction_weights"
MASK = f"{PATH}.compute_rollout_rejection_mask"
INVERTED = "verl's k1 is log(sampler / prox): its bounds are the reciprocals of ours"


def log_ratio_BT(batch: Batch) -> Tensor:
    """log(trainer / sampler), as verl's entry point computes it."""
    return batch.tokens_BT["prox_logprobs"] - batch.tokens_BT["sampler_logprobs"]


def far_apart(batch: Batch) -> Batch:
    """Mismatches up to +-30, where the clamps act."""
    drift_BT = batch.tokens_BT["policy_logprobs"] - batch.tokens_BT["prox_logprobs"]
    return batch.with_tokens(sampler_logprobs=batch.tokens_BT["prox_logprobs"] - drift_BT)


def compare_weight(
    record: Record, ours: str, level: str, threshold: float | str, **settings: Any
) -> None:
    """The weight of every token."""
    drawn = [*batches(ORDINARY, EMPTY)]
    if level == "token":  # of a sequence, ours clamps every token's log-ratio and verl the sum
        drawn += [far_apart(batch) for batch in batches(EXTREME)]
    for batch in drawn:
        weights_BT, _ = helper.compute_rollout_correction_weights(
            log_ratio_BT(batch), batch.mask_BT.double(), level, threshold
        )
        record.same(call(ours, batch.columns(), **settings), batch.flat(weights_BT))


def compare_mask(
    record: Record,
    ours: str,
    option: str,
    threshold: str,
    *,
    unconverted: str = "",
    **settings: Any,
) -> None:
    """Which tokens are kept; `unconverted` is a threshold that keeps others."""
    for batch in batches(ORDINARY, EMPTY):
        kept_N = call(ours, batch.columns(), **settings)
        for spec, hand_over in ((threshold, record.same), (unconverted, record.apart)):
            if spec:
                kept_BT, _ = helper.compute_rollout_rejection_mask(
                    log_ratio_BT(batch), batch.mask_BT.double(), option, spec
                )
                hand_over(kept_N, batch.flat(kept_BT))


@COMPARISONS.add("corrections.tis", f"{WEIGHTS} (token)", page="tis")
def tis(record: Record) -> None:
    compare_weight(record, "corrections.tis", "token", 2.0, cap=2.0)


@COMPARISONS.add("corrections.icepop", f"{WEIGHTS} (token, lower_upper)", page="icepop")
def icepop(record: Record) -> None:
    compare_weight(record, "corrections.icepop", "token", "0.5_2.0", low=0.5, high=2.0)


@COMPARISONS.add("corrections.seq_tis", f"{WEIGHTS} (sequence)", page="seq_tis")
def seq_tis(record: Record) -> None:
    compare_weight(record, "corrections.seq_tis", "sequence", 3.0, cap=3.0)


@COMPARISONS.add("corrections.seq_mis", f"{WEIGHTS} (sequence, lower_upper)", page="seq_mis")
def seq_mis(record: Record) -> None:
    compare_weight(record, "corrections.seq_mis", "sequence", "1e-30_3.0", cap=3.0)


@COMPARISONS.add(
    "corrections.token_mask", f"{MASK} (token_k1)", difference=INVERTED, page="token_mask"
)
def token_mask(record: Record) -> None:
    compare_mask(
        record,
        "corrections.token_mask",
        "token_k1",
        f"{1 / 1.6}_{1 / 0.8}",
        unconverted="0.8_1.6",
        low=0.8,
        high=1.6,
    )


@COMPARISONS.add(
    "corrections.seq_mask", f"{MASK} (seq_sum_k1)", difference=INVERTED, page="seq_mask"
)
def seq_mask(record: Record) -> None:
    compare_mask(
        record,
        "corrections.seq_mask",
        "seq_sum_k1",
        f"{1 / 3}_{1 / 0.7}",
        unconverted="0.7_3.0",
        low=0.7,
        high=3.0,
    )


@COMPARISONS.add(
    "corrections.geometric_mask",
    f"{MASK} (seq_mean_k1)",
    difference=INVERTED,
    page="geometric_mask",
)
def geometric_mask(record: Record) -> None:
    compare_mask(
        record,
        "corrections.geometric_mask",
        "seq_mean_k1",
        f"{1 / 1.25}_{1 / 0.95}",
        unconverted="0.95_1.25",
        low=0.95,
        high=1.25,
    )


@COMPARISONS.add("corrections.k3_mask", f"{MASK} (seq_mean_k3)", page="k3_mask")
def k3_mask(record: Record) -> None:
    compare_mask(record, "corrections.k3_mask", "seq_mean_k3", "0.08", max_k3=0.08)
