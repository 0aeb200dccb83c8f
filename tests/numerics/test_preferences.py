"""Preference losses: hand values, agreement with TRL, limits and gradients."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import torch

from posttrain.algo.columns import Rule, rule
from posttrain.algo.preferences.bradley_terry import bayes_accuracy, bradley_terry, pair_accuracy
from posttrain.algo.preferences.dpo import dpo
from posttrain.algo.preferences.ipo import ipo
from posttrain.algo.preferences.kto import kto, kto_kl_baseline
from posttrain.algo.preferences.orpo import log_odds, orpo
from posttrain.algo.preferences.pairs import log_ratio_margin
from posttrain.algo.preferences.robust_dpo import robust_dpo
from posttrain.config.objectives import (
    ApoDownConfig,
    ApoZeroConfig,
    BradleyTerryConfig,
    CpoConfig,
    DpoConfig,
    HingeConfig,
    IpoConfig,
    OrpoConfig,
    PreferenceLossConfig,
    PreferenceSection,
    RobustDpoConfig,
    SimpoConfig,
)

CONFIGS: tuple[type[PreferenceSection], ...] = get_args(get_args(PreferenceLossConfig)[0])
PAIRED = [config() for config in CONFIGS if config.paired]
SIDES = ("policy_chosen_P", "policy_rejected_P", "ref_chosen_P", "ref_rejected_P")


def named(config: object) -> str:
    return config.type  # type: ignore[attr-defined]


def pairs(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Three pairs: the first in order, the second misordered, the third long."""
    return {
        "policy_chosen_P": torch.tensor([-10, -3.5, -40], dtype=dtype),
        "policy_rejected_P": torch.tensor([-14, -2.5, -20], dtype=dtype),
        "ref_chosen_P": torch.tensor([-12, -3, -41.5], dtype=dtype),
        "ref_rejected_P": torch.tensor([-13, -4, -18], dtype=dtype),
        "chosen_lengths_P": torch.tensor([4, 2, 20]),
        "rejected_lengths_P": torch.tensor([7, 1, 9]),
    }


# --- vectors ------------------------------------------------------------------------------------


def test_bradley_terry(vector, matches, dtype):
    case = vector("bt_loss")
    inputs, expected = case["inputs"], case["expected"]
    chosen_P = torch.tensor(inputs["chosen"], dtype=dtype, requires_grad=True)
    rejected_P = torch.tensor(inputs["rejected"], dtype=dtype)
    margin_P = torch.tensor(inputs["margin"], dtype=dtype)
    loss_P = bradley_terry(chosen_P, rejected_P, margin=margin_P)
    loss_P.mean().backward()
    matches(loss_P, expected["per_pair"])
    matches(loss_P.mean(), expected["loss"])
    matches(chosen_P.grad, expected["grad_chosen"])


def test_the_ceiling_of_a_reward_model_on_noisy_labels(vector, matches, dtype):
    case = vector("bt_bayes_accuracy")
    gaps_P = torch.tensor(case["inputs"]["score_gaps"], dtype=dtype)
    matches(torch.stack([bayes_accuracy(g[None]) for g in gaps_P]), case["expected"]["bayes_acc"])
    matches(bayes_accuracy(-gaps_P), case["expected"]["mean"])


def test_dpo_and_ipo(vector, matches, dtype):
    case = vector("dpo_loss")
    inputs, expected = case["inputs"], case["expected"]
    names = ("pi_chosen", "pi_rejected", "ref_chosen", "ref_rejected")
    chosen_P, rejected_P, ref_chosen_P, ref_rejected_P = (
        torch.tensor([float(inputs[name])], dtype=dtype, requires_grad=True) for name in names
    )
    sides = (chosen_P, rejected_P, ref_chosen_P, ref_rejected_P)
    lengths = torch.tensor([3]), torch.tensor([4])
    beta = inputs["beta"]
    margin_P = beta * log_ratio_margin(*sides)
    matches(margin_P, [expected["logit"]])
    matches(margin_P, [expected["implicit_reward_margin"]])
    loss_P = dpo(*sides, *lengths, beta=beta)
    loss_P.sum().backward()
    matches(loss_P, [expected["loss"]])
    matches(chosen_P.grad, [expected["grad_pi_chosen"]])
    matches(ipo(*sides, *lengths, beta=beta), [expected["ipo_loss"]])


# --- agreement ----------------------------------------------------------------------------------

# What TRL 1.16.0 gives for `pairs`: DPOTrainer's loss types sigmoid, sigmoid_norm, ipo, hinge,
# robust, apo_zero and apo_down, CPOTrainer's simpo, the preference terms of CPO and ORPO.
TRL = [
    (DpoConfig(), [0.5543552445, 0.7981388694, 0.5333821554]),
    (DpoConfig(beta=5.0, length_normalised=True), [0.039397646, 8.7501584488, 0.2039613934]),
    (IpoConfig(length_normalised=True), [18.9846938776, 45.5625, 22.1161188272]),
    (HingeConfig(), [0.7, 1.2, 0.65]),
    (RobustDpoConfig(flip_rate=0.2), [0.4543552445, 0.864805536, 0.4167154888]),
    (ApoZeroConfig(), [0.9251868152, 1.0499272418, 0.9127361573]),
    (ApoDownConfig(), [0.9753914805, 1.0373366008, 0.9508122664]),
    (SimpoConfig(), [1.7014132780, 0.3132616875, 0.7213107112]),
    (CpoConfig(nll_coef=0.0), [0.5130152524, 0.7443966601, 2.1269280110]),
    (CpoConfig(), [2.5 + 0.5130152524, 1.75 + 0.7443966601, 2.0 + 2.1269280110]),
    (OrpoConfig(), [2.5 + 0.1011694595, 1.75 + 0.0354299992, 2.0 + 0.0574655943]),
]


@pytest.mark.parametrize(("config", "expected"), TRL, ids=lambda value: getattr(value, "type", ""))
def test_losses_agree_with_trl(config, expected, matches, dtype):
    matches(rule("preferences", config)(pairs(dtype)), expected)


# --- settings and functions ---------------------------------------------------------------------


@pytest.mark.parametrize("config", [*(c() for c in CONFIGS), BradleyTerryConfig()], ids=named)
def test_a_config_sets_every_setting_of_its_function_and_no_other(config):
    bound = rule("preferences", config)
    parameters = inspect.signature(bound.function).parameters.values()
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == set(bound.settings)
    assert set(bound.settings) == set(type(config).model_fields) - {"type"}


@pytest.mark.parametrize("config", [c() for c in CONFIGS], ids=named)
def test_the_page_of_a_loss_shows_its_defaults(config):
    page = Path(__file__).parents[2] / "docs" / "algorithms" / f"{config.type}.md"
    (block,) = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert tomllib.loads(block)["algo"]["loss"] == config.model_dump()


def test_only_losses_with_a_reference_ask_for_one():
    without = {named(c) for c in PAIRED if not set(SIDES[2:]) & set(rule("preferences", c).columns)}
    assert without == {"simpo", "cpo", "orpo"}


# --- properties ---------------------------------------------------------------------------------


@pytest.mark.parametrize("config", PAIRED, ids=named)
def test_gradients_are_right(config):
    loss, columns = rule("preferences", config), pairs()
    policy = tuple(columns[name].clone().requires_grad_() for name in SIDES[:2])

    def of_policy(chosen_P, rejected_P):
        return loss({**columns, "policy_chosen_P": chosen_P, "policy_rejected_P": rejected_P})

    assert torch.autograd.gradcheck(of_policy, policy)


@pytest.mark.parametrize("config", PAIRED, ids=named)
def test_each_loss_falls_as_the_rejected_gets_less_likely(config):
    columns = pairs()
    columns["policy_rejected_P"].requires_grad_()
    rule("preferences", config)(columns).sum().backward()
    gradient_P = columns["policy_rejected_P"].grad
    assert gradient_P is not None and bool((gradient_P > 0).all())


@pytest.mark.parametrize("config", PAIRED, ids=named)
def test_every_loss_is_finite_where_the_policy_is_certain_or_hopeless(config, dtype):
    def column(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    columns = {
        "policy_chosen_P": column(0.0, -1e5, 0.0, -1e-12).requires_grad_(),
        "policy_rejected_P": column(-1e5, 0.0, 0.0, 0.0).requires_grad_(),
        "ref_chosen_P": column(-1e4, -1.0, 0.0, 0.0),
        "ref_rejected_P": column(-1.0, -1e4, 0.0, 0.0),
        "chosen_lengths_P": torch.tensor([5, 5, 0, 1]),
        "rejected_lengths_P": torch.tensor([5, 5, 0, 1]),
    }
    loss_P = rule("preferences", config)(columns)
    loss_P.sum().backward()
    for name in SIDES[:2]:
        gradient_P = columns[name].grad
        assert gradient_P is not None and bool(gradient_P.isfinite().all())
    assert bool(loss_P.isfinite().all())


@pytest.mark.parametrize("config", PAIRED, ids=named)
def test_no_pairs_give_no_losses(config):
    empty = {name: column[:0] for name, column in pairs().items()}
    assert rule("preferences", config)(empty).tolist() == []


def test_a_policy_that_is_its_reference_starts_at_the_known_values(matches):
    columns = pairs()
    columns |= {"ref_chosen_P": columns["policy_chosen_P"]}
    columns |= {"ref_rejected_P": columns["policy_rejected_P"]}
    start = {"dpo": 0.6931471806, "ipo": 25.0, "hinge": 1.0, "apo_zero": 1.0, "apo_down": 1.0}
    start |= {"robust_dpo": 0.6931471806}
    for config in PAIRED:
        if named(config) in start:
            matches(rule("preferences", config)(columns), [start[named(config)]] * 3)


def test_a_smoothed_label_is_matched_and_not_exceeded():
    """cDPO is least where sigmoid(beta h) is 1 - e; plain DPO keeps growing the margin."""
    best = torch.tensor([(0.8 / 0.2)]).double().log().requires_grad_()
    zero, lengths = torch.zeros(1).double(), torch.ones(1).long()
    loss = dpo(best, zero, zero, zero, lengths, lengths, beta=1.0, label_smoothing=0.2)
    (smoothed,) = torch.autograd.grad(loss.sum(), best)
    (plain,) = torch.autograd.grad(
        dpo(best, zero, zero, zero, lengths, lengths, beta=1.0).sum(), best
    )
    assert abs(smoothed.item()) < 1e-12 and plain.item() == pytest.approx(-0.2)


def test_robust_dpo_is_dpo_on_average_over_flipped_labels(matches):
    chosen_P, rejected_P, ref_chosen_P, ref_rejected_P = (pairs()[name] for name in SIDES)
    sides = (chosen_P, rejected_P, ref_chosen_P, ref_rejected_P)
    flipped = (rejected_P, chosen_P, ref_rejected_P, ref_chosen_P)
    lengths = torch.ones(3).long()
    rate = 0.3
    observed_P = (1 - rate) * robust_dpo(*sides, beta=0.1, flip_rate=rate)
    observed_P = observed_P + rate * robust_dpo(*flipped, beta=0.1, flip_rate=rate)
    matches(observed_P, dpo(*sides, lengths, lengths, beta=0.1).tolist(), 1e-12)
    smoothed_P = dpo(*sides, lengths, lengths, beta=0.1, label_smoothing=rate)
    assert not torch.allclose(smoothed_P, robust_dpo(*sides, beta=0.1, flip_rate=rate))


def test_a_longer_answer_of_equal_quality_moves_only_summed_losses():
    """Twice the tokens at the same log-prob each: means stay, sums double."""
    columns = pairs()
    doubled = {name: 2 * column for name, column in columns.items()}
    for config in (SimpoConfig(), OrpoConfig(), DpoConfig(length_normalised=True)):
        loss = rule("preferences", config)
        assert torch.allclose(loss(doubled), loss(columns))
    summed = rule("preferences", DpoConfig())
    assert not torch.allclose(summed(doubled), summed(columns))


def test_an_odds_ratio_is_that_of_probabilities(matches, dtype):
    p = torch.tensor([0.1, 0.5, 0.9, 0.999], dtype=dtype)
    matches(log_odds(p.log()), (p.double() / (1 - p.double())).log().tolist(), 1e-4)
    lengths = torch.ones(1).long()
    one = torch.tensor([0.6], dtype=dtype).log()
    other = torch.tensor([0.2], dtype=dtype).log()
    expected = -0.5108256238 + 0.1 * -0.1541506798  # odds 1.5 / .25 = 6: log sigmoid(log 6)
    matches(orpo(one, other, lengths, lengths, odds_coef=0.1), [-expected])


# --- single answers -----------------------------------------------------------------------------


def test_kto_values_surplus_over_the_baseline(matches, dtype):
    policy_S = torch.tensor([-4.0, -4.0, -9.0], dtype=dtype)
    ref_S = torch.tensor([-7.0, -7.0, -7.0], dtype=dtype)
    desirable_S = torch.tensor([True, False, False])
    z = torch.tensor(1.0, dtype=dtype)
    settings = {"beta": 0.5, "desirable_coef": 1.0, "undesirable_coef": 2.0}
    # Surpluses 1, 1 and -1.5 after beta: sigmoid(-1), 2 sigmoid(1), 2 sigmoid(-1.5).
    expected = [0.2689414214, 1.4621171573, 0.3648510453]
    matches(kto(policy_S, ref_S, desirable_S, z, **settings), expected)
    bound = Rule(kto, settings)
    assert bound.columns == ("policy_sum_S", "ref_sum_S", "desirable_S", "kl_baseline")


def test_the_baseline_of_kto_is_never_negative_and_never_trained(dtype):
    log_ratio_M = torch.tensor([3.0, -1.0], dtype=dtype, requires_grad=True)
    zero_M = torch.zeros(2, dtype=dtype)
    z = kto_kl_baseline(log_ratio_M, zero_M)
    assert z.item() == 1.0 and not z.requires_grad
    assert kto_kl_baseline(-log_ratio_M, zero_M).item() == 0.0
    assert kto_kl_baseline(zero_M[:0], zero_M[:0]).item() == 0.0


def test_kto_gradients_are_right():
    policy_S = torch.tensor([-4.0, -5.0], dtype=torch.float64, requires_grad=True)
    ref_S = torch.tensor([-7.0, -4.0], dtype=torch.float64)
    desirable_S = torch.tensor([True, False])
    z = torch.tensor(0.3, dtype=torch.float64)

    def of_policy(sums_S):
        return kto(
            sums_S, ref_S, desirable_S, z, beta=0.1, desirable_coef=1.0, undesirable_coef=1.5
        )

    assert torch.autograd.gradcheck(of_policy, (policy_S,))


# --- reward models ------------------------------------------------------------------------------


def test_centring_picks_the_constant_that_the_likelihood_leaves_open():
    chosen_P, rejected_P = torch.tensor([1.0]).double(), torch.tensor([-1.0]).double()
    moved = [
        bradley_terry(chosen_P + by, rejected_P + by, centre_coef=0.01).item() for by in (-3, 0, 3)
    ]
    assert moved[1] < moved[0] == pytest.approx(moved[2])
    free = [bradley_terry(chosen_P + by, rejected_P + by).item() for by in (-3, 0, 3)]
    assert free == pytest.approx([free[0]] * 3)


def test_bradley_terry_gradients_are_right():
    scores = tuple(torch.randn(2, 4, dtype=torch.float64, generator=torch.manual_seed(0)))
    leaves = tuple(side.clone().requires_grad_() for side in scores)

    def loss(chosen_P, rejected_P):
        return bradley_terry(chosen_P, rejected_P, margin=0.3, centre_coef=0.1)

    assert torch.autograd.gradcheck(loss, leaves)


def test_a_tie_is_half_right(dtype):
    chosen_P = torch.tensor([1.0, 0.0, 2.0, 2.0], dtype=dtype)
    rejected_P = torch.tensor([0.0, 1.0, 2.0, 1.0], dtype=dtype)
    assert pair_accuracy(chosen_P, rejected_P).item() == 0.625
    assert pair_accuracy(chosen_P[:0], rejected_P[:0]).item() == 0.5
