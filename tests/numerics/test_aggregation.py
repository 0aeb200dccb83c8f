"""Aggregation: the value of a step does not depend on how the step was cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algo.aggregation import Denominators, aggregate

MODES = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed_length", "prompt_mean"]
Rows = Sequence[torch.Tensor]  # losses per token of each sequence


def fixed(mode: str, length: int = 8) -> int | None:
    return length if mode == "fixed_length" else None


def share(
    implementation: Callable,
    rows: Rows,
    step: Rows,
    mode: str,
    groups: tuple[Sequence[int], Sequence[int]] | None = None,
) -> torch.Tensor:
    """One micro-batch's share: `rows` of a whole `step`. `groups` says which group each of the rows
    and each of the step's sequences belongs to; without it each is a group of its own."""
    dtype = step[0].dtype if step else torch.float64
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    num_sequences = sum(len(row) > 0 for row in step)
    num_groups, group_lengths = num_sequences, lengths
    if groups is not None:
        of_group: dict[int, int] = {}
        for group, row in zip(groups[1], step, strict=True):
            of_group[group] = of_group.get(group, 0) + len(row)
        num_groups = sum(length > 0 for length in of_group.values())
        group_lengths = torch.tensor([of_group[g] for g in groups[0]], dtype=torch.int64)
    return implementation(
        torch.cat(list(rows)) if rows else torch.zeros(0, dtype=dtype),
        torch.arange(len(rows)).repeat_interleave(lengths),
        mode,
        Denominators(
            sum(len(row) for row in step), num_sequences, lengths, num_groups, group_lengths
        ),
        fixed(mode),
    )


def agg_rows(vector, dtype=torch.float64) -> list[torch.Tensor]:
    inputs = vector("agg_modes")["inputs"]
    return [
        torch.tensor([x for x, m in zip(losses, mask, strict=True) if m], dtype=dtype)
        for losses, mask in zip(inputs["loss_mat"], inputs["mask"], strict=True)
    ]


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_gives_its_hand_value(mode, vector, dtype, matches):
    case = vector("agg_modes")
    rows = agg_rows(vector, dtype)
    names = {"fixed_length": "fixed_length_dr_grpo", "prompt_mean": "prompt_mean_of_token_means"}
    prompts = case["inputs"]["prompt_groups"]
    groups = [i for i, sequences in enumerate(prompts) for _ in sequences]
    value = share(aggregate, rows, rows, mode, (groups, groups))
    matches(value, case["expected"][names.get(mode, mode)], case["tolerance"])
    if mode == "fixed_length":
        assert abs(float(value) - case["expected"]["verl_norm_no_batch_div"]) > 1


def check_distributed(implementation, rows: Rows, mode: str, expected_micro, total, matches):
    """Rank 0 holds sequences 0 and 1 in two micro-batches; rank 1 holds 2 and nothing. W = 2."""
    micros = [[rows[0]], [rows[1]], [rows[2]], []]
    scaled = [2 * share(implementation, micro, rows, mode) for micro in micros]
    matches(torch.stack(scaled), expected_micro)
    matches((scaled[0] + scaled[1] + scaled[2] + scaled[3]) / 2, total)


def test_token_mean_over_ranks_is_the_batch_value(vector, dtype, matches):
    expected = vector("agg_distributed_token_mean")["expected"]
    check_distributed(
        aggregate,
        agg_rows(vector, dtype),
        "token_mean",
        list(expected["per_micro_scaled"].values()),
        expected["sum_over_micros_then_mean_over_ranks"],
        matches,
    )


def test_sequence_mean_over_ranks_is_the_batch_value(vector, dtype, matches):
    expected = vector("agg_distributed_seq_mean")["expected"]
    check_distributed(
        aggregate,
        agg_rows(vector, dtype),
        "seq_mean_token_mean",
        expected["per_micro_scaled"],
        expected["sum_then_mean_over_ranks"],
        matches,
    )


def check_splits(implementation: Callable, mode: str) -> None:
    """Same value and same gradient for accumulation 1, 2, 4 and 8 and for any sample order."""
    generator = torch.Generator().manual_seed(3)
    lengths, groups = [1, 7, 3, 5, 2, 9, 4, 1], [0, 0, 0, 1, 1, 2, 3, 3]
    base = [torch.randn(n, generator=generator, dtype=torch.float64) for n in lengths]

    def run(order: Sequence[int], num_micros: int) -> tuple[float, torch.Tensor]:
        leaves = [row.clone().requires_grad_(True) for row in base]
        size = len(order) // num_micros
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            rows = [leaves[i] ** 2 for i in chosen]
            part = share(implementation, rows, base, mode, ([groups[i] for i in chosen], groups))
            part.backward()
            total = total + part.detach()
        return float(total), torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None])

    value, gradient = run(range(8), 1)
    for order in (list(range(8)), [5, 2, 7, 0, 1, 6, 3, 4]):
        for num_micros in (1, 2, 4, 8):
            other, other_gradient = run(order, num_micros)
            assert other == pytest.approx(value, abs=1e-12)
            assert torch.allclose(other_gradient, gradient, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_the_split_and_the_order_change_neither_value_nor_gradient(mode):
    """Reports a01 and a07: every mode obeys the same accumulation rule."""
    check_splits(aggregate, mode)


def local_denominators(per_token, index, mode, denominators, fixed_length):
    lengths = denominators.sequence_lengths_S
    groups = denominators.group_lengths_S
    local = Denominators(len(per_token), len(lengths), lengths, len(set(groups.tolist())), groups)
    return aggregate(per_token, index, mode, local, fixed_length)


@pytest.mark.parametrize("mode", MODES)
def test_a_local_denominator_fails_the_split_check(mode):
    with pytest.raises(AssertionError):
        check_splits(local_denominators, mode)


def test_the_known_wrong_reductions_fail_the_distributed_vectors(vector, matches):
    def extra_accumulation_factor(*args, **kwargs):
        return aggregate(*args, **kwargs) / 2

    expected = vector("agg_distributed_token_mean")["expected"]
    for mutant in (local_denominators, extra_accumulation_factor):
        with pytest.raises(AssertionError):
            check_distributed(
                mutant,
                agg_rows(vector),
                "token_mean",
                list(expected["per_micro_scaled"].values()),
                expected["sum_over_micros_then_mean_over_ranks"],
                matches,
            )


def test_token_mean_of_uneven_sequences_is_the_same_in_one_micro_batch_and_in_two():
    """Report a01: 1.75 either way, where a local mean gives 2.5; same for the gradient."""
    for split in ([[0, 1]], [[0], [1]]):
        w = torch.ones((), dtype=torch.float64, requires_grad=True)
        step = [torch.tensor([4.0]).double(), torch.ones(3).double()]
        total = sum(share(aggregate, [w * step[i] for i in m], step, "token_mean") for m in split)
        assert total.item() == 1.75
        total.backward()
        assert float(w.grad) == 1.75


def test_token_mean_over_ranks_of_unequal_length():
    """Report a02: 10 tokens of sum 10 and 90 of sum 270 give 2.8, not 2.0."""
    ranks = [torch.full((10,), 1.0), torch.full((90,), 3.0)]
    total = sum(share(aggregate, [row], ranks, "token_mean") for row in ranks)
    assert float(total) == pytest.approx(2.8, rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_masked_sequence_leaves_numerator_and_denominator_together(mode):
    """Report a05: two completions of ten tokens of loss 1, one masked: 1.0, not 0.5."""
    rows = [torch.ones(10), torch.zeros(0)]
    expected = {"seq_mean_token_sum": 10.0, "fixed_length": 10 / 8}.get(mode, 1.0)
    assert float(share(aggregate, rows, rows, mode)) == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_tokens_gives_zero_loss_and_zero_gradients(mode):
    """Report a06: everything masked is 0, never NaN, and backward still runs on every rank."""
    w = torch.ones((), requires_grad=True)
    per_token = w * torch.ones(4)
    loss = aggregate(
        per_token[torch.zeros(4, dtype=torch.bool)],
        torch.zeros(0, dtype=torch.int64),
        mode,
        Denominators(0, 0, torch.zeros(2, dtype=torch.int64), 0, torch.zeros(2, dtype=torch.int64)),
        fixed(mode),
    )
    loss.backward()
    assert loss.item() == 0.0
    assert float(w.grad) == 0.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_what_masked_positions_hold_never_reaches_loss_or_gradient(mode, garbage):
    mask = torch.tensor([False, True, True, False, False, True])
    index = torch.tensor([0, 0, 0, 1, 1, 1])

    def run(filler: float) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.where(mask, torch.arange(6.0), torch.tensor(filler)).requires_grad_(True)
        loss = aggregate(
            (logprobs[mask]) ** 2,
            index[mask],
            mode,
            Denominators(3, 2, torch.tensor([2, 1]), 2, torch.tensor([2, 1])),
            fixed(mode),
        )
        loss.backward()
        return loss.detach(), logprobs.grad

    clean, dirty = run(0.0), run(garbage)
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
    assert not dirty[1][~mask].any()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.data())
def test_any_cut_into_micro_batches_adds_up(lengths, data):
    groups = [data.draw(st.integers(0, 2)) for _ in lengths]
    rows = [torch.arange(1.0, n + 1, dtype=torch.float64) for n in lengths]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    edges = [0, *cuts, len(rows)]
    for mode in MODES:
        whole = share(aggregate, rows, rows, mode, (groups, groups))
        parts = [
            share(aggregate, rows[a:b], rows, mode, (groups[a:b], groups))
            for a, b in itertools.pairwise(edges)
        ]
        assert float(sum(parts)) == pytest.approx(float(whole), abs=1e-12)


def test_a_group_cut_over_micro_batches_keeps_the_mean_of_all_its_tokens():
    """Two sequences of one group, one and three tokens, next to a group of one token."""
    step = [torch.tensor([4.0]), torch.ones(3), torch.tensor([2.0])]
    groups = [5, 5, 9]
    parts = [
        share(aggregate, [step[i]], step, "prompt_mean", ([groups[i]], groups)) for i in range(3)
    ]
    assert float(sum(parts)) == pytest.approx(((4 + 3) / 4 + 2) / 2)


@pytest.mark.parametrize(
    ("mode", "counts"),
    [("token_mean", (2, 1, 1)), ("seq_mean_token_sum", (3, 0, 1)), ("prompt_mean", (3, 1, 0))],
)
def test_denominators_smaller_than_the_micro_batch_are_refused(mode, counts):
    tokens, sequences, groups = counts
    lengths = torch.tensor([3])
    with pytest.raises(ValueError, match="counts of the whole step"):
        aggregate(
            torch.ones(3),
            torch.zeros(3, dtype=torch.int64),
            mode,
            Denominators(tokens, sequences, lengths, groups, lengths),
        )


def test_a_fixed_length_goes_with_its_mode_only():
    for mode, length in (("fixed_length", None), ("token_mean", 8)):
        with pytest.raises(ValueError, match="fixed_length"):
            aggregate(
                torch.ones(1),
                torch.zeros(1, dtype=torch.int64),
                mode,
                Denominators(1, 1, torch.tensor([1])),
                length,
            )
