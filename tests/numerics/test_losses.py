"""Policy losses: hand values, then what every loss of the registry must obey.

N loss tokens, sequences end to end. The list of losses is that of the config, so a new loss is
tested here without being named. Closed forms and mutants are in test_mutations.py.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError

import posttrain.algo.losses
from posttrain.algo.advantages.grpo import grpo
from posttrain.algo.aggregation import Denominators, aggregate
from posttrain.algo.columns import rule
from posttrain.algo.logprobs import token_logprobs
from posttrain.algo.losses.terms import LossTerms
from posttrain.config.estimators import RlooConfig
from posttrain.config.losses import LossConfig, LossSection

LOSSES: dict[str, LossSection] = {
    config.model_fields["type"].default: config() for config in get_args(get_args(LossConfig)[0])
}
PER_SEQUENCE = ["gspo", "gspo_token", "gmpo"]
# Its gradient off-policy isn't proportional to A: a quadratic term pulls back at any advantage.
HAS_PENALTY = ["dppo", "kimi"]
# Bounds that leave some tokens inside and some outside on the random tokens below.
NARROW = {"gspo": {"clip_low": 0.05, "clip_high": 0.05}}
NARROW |= {"gspo_token": NARROW["gspo"], "cispo": {"cap": 1.2}, "is_reinforce": {"cap": 1.2}}
NARROW |= {"gmpo": {"clip_low": 0.2, "clip_high": 0.2}, "aspo": {"cap": 1.15}}
NARROW |= {"ppo_clip": {"dual_clip": 1.4}, "dppo": {"mask_low": 0.05, "mask_high": 0.05}}
FAR = 1e3
WIDE = {"ppo_clip": {"clip_low": FAR, "clip_high": FAR, "dual_clip": None}}
WIDE |= {"gspo": {"clip_low": FAR, "clip_high": FAR}, "cispo": {"cap": FAR}}
WIDE |= {"gspo_token": WIDE["gspo"], "is_reinforce": WIDE["cispo"], "gmpo": WIDE["gspo"]}
WIDE |= {"aspo": {**WIDE["gspo"], **WIDE["cispo"]}, "dppo": {"mask_low": 1.0, "mask_high": 1.0}}


def tokens(
    policy: Any, anchor: Any, advantages: Any, sequences: Any = None, dtype=torch.float64
) -> dict[str, torch.Tensor]:
    """Columns of a micro-batch whose prox is its sampler; a sequence for each token by default."""
    anchor_N = torch.as_tensor(anchor, dtype=torch.float64).to(dtype)
    index = range(len(anchor_N)) if sequences is None else sequences
    return {
        "policy_logprobs_N": torch.as_tensor(policy, dtype=torch.float64).to(dtype),
        "prox_logprobs_N": anchor_N,
        "sampler_logprobs_N": anchor_N,
        "advantages_N": torch.as_tensor(advantages, dtype=torch.float64).to(dtype),
        "sequence_index_N": torch.as_tensor(list(index), dtype=torch.int64),
    }


def random_tokens(seed=0, drift=0.3, dtype=torch.float64) -> dict[str, torch.Tensor]:
    """12 sequences of 1 to 7 tokens; one advantage a sequence, of either sign."""
    generator = torch.Generator().manual_seed(seed)
    lengths_S = torch.randint(1, 8, (12,), generator=generator)
    index_N = torch.arange(12).repeat_interleave(lengths_S)
    anchor_N = -3 * torch.rand(len(index_N), generator=generator, dtype=torch.float64) - 0.5
    drift_N = drift * torch.randn(len(index_N), generator=generator, dtype=torch.float64)
    advantages_S = torch.randn(12, generator=generator, dtype=torch.float64)
    return tokens(anchor_N + drift_N, anchor_N, advantages_S[index_N], index_N.tolist(), dtype)


def run(
    name: str, columns: dict[str, torch.Tensor], **settings: Any
) -> tuple[LossTerms, torch.Tensor]:
    """The loss and the gradient of its sum; settings aren't validated, so bounds may be absurd."""
    loss = rule("losses", LOSSES[name].model_copy(update=settings))
    leaf = columns["policy_logprobs_N"].clone().requires_grad_(True)
    terms = loss({**columns, "policy_logprobs_N": leaf})
    (gradient,) = torch.autograd.grad(terms.per_token_N.sum(), leaf)
    return terms, gradient


def clipped(terms: LossTerms) -> torch.Tensor:
    none = torch.zeros_like(terms.per_token_N, dtype=torch.bool)
    low, high = terms.clipped_low_N, terms.clipped_high_N
    return (none if low is None else low) | (none if high is None else high)


def low_and_high(terms: LossTerms) -> tuple[list[bool], list[bool]]:
    assert terms.clipped_low_N is not None and terms.clipped_high_N is not None
    return terms.clipped_low_N.tolist(), terms.clipped_high_N.tolist()


def select(columns: dict[str, torch.Tensor], where: torch.Tensor) -> dict[str, torch.Tensor]:
    return {key: values[where] for key, values in columns.items()}


# --- hand values --------------------------------------------------------------------------------

# Vector -> loss, and its settings from the vector's inputs.
OF_ONE_TOKEN: dict[str, tuple[str, Any]] = {
    "loss_ppo_clip": (
        "ppo_clip",
        lambda i: {"clip_low": i["eps"], "clip_high": i["eps"], "dual_clip": None},
    ),
    "loss_dual_clip": (
        "ppo_clip",
        lambda i: {"clip_low": i["eps"], "clip_high": i["eps"], "dual_clip": i["c"]},
    ),
    "loss_clip_higher": (
        "ppo_clip",
        lambda i: {"clip_low": i["eps_low"], "clip_high": i["eps_high"], "dual_clip": None},
    ),
    "loss_cispo": ("cispo", lambda i: {"cap": i["cap"]}),
    "loss_sapo": ("sapo", lambda i: {"tau_pos": i["tau_pos"], "tau_neg": i["tau_neg"]}),
    "loss_topr_single": ("topr", lambda i: {}),
    "loss_is_reinforce": ("is_reinforce", lambda i: {"cap": i["cap"]}),
    # The vector is before the soft dual clip, and shows good tokens without PPO's upper bound.
    "loss_aspo": ("aspo", lambda i: {"clip_low": i["eps"], "clip_high": FAR, "cap": FAR}),
}


@pytest.mark.parametrize("name", OF_ONE_TOKEN)
@pytest.mark.parametrize("sign", ["pos", "neg"])
def test_losses_of_one_token_give_their_hand_values_and_gradients(
    name, sign, vector, dtype, matches
):
    case = vector(name)
    inputs, expected = case["inputs"], case["expected"][sign]
    loss, settings = OF_ONE_TOKEN[name]
    policy = torch.tensor(inputs["ratio"], dtype=torch.float64).log() + inputs["logp_old"]
    anchor = torch.full_like(policy, inputs["logp_old"])
    advantages = torch.full_like(policy, inputs["advantages"][sign])
    columns = tokens(policy, anchor, advantages, dtype=dtype)
    terms, gradient = run(loss, columns, **settings(inputs))
    matches(terms.per_token_N, expected["loss"], case["tolerance"])
    matches(gradient, expected["grad_wrt_logp"], case["tolerance"])


@pytest.mark.parametrize("sign", ["pos", "neg"])
def test_dppo_gives_its_hand_values_and_gradients(sign, vector, dtype, matches):
    case = vector("loss_dppo_binary_tv")
    inputs, expected = case["inputs"], case["expected"][sign]
    policy = torch.tensor(inputs["p_train"], dtype=torch.float64).log()
    sampler = torch.tensor(inputs["p_infer"], dtype=torch.float64).log()
    advantages = torch.full_like(policy, 1.0 if sign == "pos" else -1.0)
    settings = {key: inputs[key] for key in ("mask_low", "mask_high", "kl_tau")}
    terms, gradient = run("dppo", tokens(policy, sampler, advantages, dtype=dtype), **settings)
    matches(terms.per_token_N, expected["loss"], case["tolerance"])
    matches(gradient, expected["grad"], case["tolerance"])
    low, high = low_and_high(terms)
    assert high == [sign == "pos", False, False] and low == [False, sign == "neg", False]


@pytest.mark.parametrize("name", ["gpg"])
def test_plain_policy_gradient_gives_its_hand_values(name, vector, dtype, matches):
    case = vector("loss_gpg")
    policy, advantages = case["inputs"]["logp"], case["inputs"]["A"]
    terms, gradient = run(name, tokens(policy, policy, advantages, dtype=dtype))
    matches(terms.per_token_N, case["expected"]["loss"], case["tolerance"])
    matches(gradient, case["expected"]["grad"], case["tolerance"])


def sequence_loss(name: str, case: dict[str, Any], dtype: torch.dtype, **settings: Any):
    """Mean over sequences of a vector with rows, its gradient as rows, and its terms."""
    inputs = case["inputs"]
    mask = torch.tensor(inputs["mask"]).bool()
    lengths = mask.sum(dim=1)
    index = torch.arange(len(lengths)).repeat_interleave(lengths)
    policy, prox = (torch.tensor(inputs[k]).double()[mask] for k in ("logp_new", "logp_old"))
    advantages = torch.tensor(inputs["A"]).double()[index]
    columns = tokens(policy, prox, advantages, index.tolist(), dtype)
    leaf = columns["policy_logprobs_N"].clone().requires_grad_(True)
    loss = rule("losses", LOSSES[name].model_copy(update=settings))
    terms = loss({**columns, "policy_logprobs_N": leaf})
    value = aggregate(
        terms.per_token_N, index, "seq_mean_token_mean", Denominators(int(mask.sum()), 2, lengths)
    )
    (gradient,) = torch.autograd.grad(value, leaf)
    rows = torch.zeros(mask.shape, dtype=dtype)
    rows[mask] = gradient
    return value.detach(), rows, terms


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_gspo_gives_its_hand_values_and_gradients(name, vector, dtype, matches):
    case = vector("loss_gspo")
    expected, tolerance = case["expected"], case["tolerance"]
    key = "token" if name == "gspo_token" else "seq"
    value, gradient, terms = sequence_loss(name, case, dtype, clip_low=0.2, clip_high=0.2)
    matches(value, expected[f"unclipped_{key}"]["loss"], tolerance)
    matches(gradient, expected[f"unclipped_{key}"]["grad"], tolerance)
    matches(terms.per_token_N[[0, 4]].abs(), expected["s"], tolerance)
    value, gradient, terms = sequence_loss(name, case, dtype)  # the paper's bounds are the defaults
    matches(value, expected[f"paper_eps_{key}"]["loss"], tolerance)
    matches(gradient, expected[f"paper_eps_{key}"]["grad"], tolerance)
    low, high = low_and_high(terms)
    assert high == [True, True, True, False, False] and not any(low)


def test_gmpo_gives_its_hand_values_and_gradients(vector, dtype, matches):
    case = vector("loss_gmpo")
    expected, tolerance = case["expected"], case["tolerance"]
    value, gradient, _ = sequence_loss("gmpo", case, dtype)
    matches(value, expected["loss"], tolerance)
    matches(gradient, expected["grad"], tolerance)
    value, gradient, terms = sequence_loss("gmpo", case, dtype, clip_low=0.15, clip_high=0.15)
    matches(value, expected["loss_clip015"], tolerance)
    matches(gradient, expected["grad_clip015"], tolerance)
    low, high = low_and_high(terms)
    assert high == [False, False, True, False, False]
    assert not any(low), "one-sided: -.2 with A > 0 is not clipped"


def test_a_step_from_logits_and_rewards_to_the_gradient(vector, dtype, matches):
    case = vector("e2e_grpo_step")
    inputs, expected, tolerance = case["inputs"], case["expected"], case["tolerance"]
    rewards = torch.tensor(inputs["rewards"], dtype=torch.float64)
    advantages = grpo(rewards, std="group", std_eps=inputs["eps_std"])
    matches(advantages, expected["adv"], tolerance)
    logits = torch.tensor(inputs["logits"], dtype=dtype).requires_grad_(True)
    logprobs = token_logprobs(logits.flatten(0, 1), torch.tensor(inputs["tokens"]).flatten())
    matches(logprobs.view(2, 2), expected["logp"], tolerance)
    policy = logprobs[torch.tensor(inputs["mask"]).flatten().bool()]
    index = torch.tensor([0, 0, 1])
    columns = tokens(policy.detach(), policy.detach(), advantages[index], index.tolist(), dtype)
    bounds = {"clip_low": inputs["eps"], "clip_high": inputs["eps"]}
    loss = rule("losses", LOSSES["ppo_clip"].model_copy(update=bounds))
    terms = loss({**columns, "policy_logprobs_N": policy})
    value = aggregate(
        terms.per_token_N, index, "token_mean", Denominators(3, 2, torch.tensor([2, 1]))
    )
    matches(value, expected["loss"], tolerance)
    (gradient,) = torch.autograd.grad(value, logits)
    matches(gradient, expected["grad_logits"], tolerance)


# --- the registry -------------------------------------------------------------------------------


def test_every_loss_is_one_file_one_function_and_one_config():
    folder = Path(posttrain.algo.losses.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "terms", "surrogate"}
    assert files == set(LOSSES)
    for config in LOSSES.values():
        loss = rule("losses", config)
        assert set(loss.settings) == set(type(config).model_fields) - {"type"}, "no dead setting"


@pytest.mark.parametrize("name", LOSSES)
def test_the_page_of_a_loss_shows_its_keys_with_their_defaults(name):
    page = Path(__file__).parents[2] / "docs/algorithms" / f"{name}.md"
    _, _, rest = page.read_text(encoding="utf-8").partition("```toml\n")
    section = tomllib.loads(rest.partition("```")[0])["algo"]["loss"]
    assert section == LOSSES[name].model_dump()
    assert type(LOSSES[name]).model_validate(section) == LOSSES[name]


def test_a_loss_that_reads_the_sampler_says_so_and_reads_no_other_anchor():
    """A behaviour correction on top would count the sampler twice."""
    for config in LOSSES.values():
        columns = rule("losses", config).columns
        assert ("sampler_logprobs_N" in columns) == config.anchor_is_sampler
        assert not {"sampler_logprobs_N", "prox_logprobs_N"} <= set(columns)


@pytest.mark.parametrize("name", PER_SEQUENCE)
def test_a_sequence_ratio_is_never_averaged_over_tokens(name):
    """Averaged over tokens it would weigh sequences by their length."""
    assert LOSSES[name].aggregations == ("seq_mean_token_mean",)
    with pytest.raises(ValidationError, match="belongs to a whole sequence"):
        RlooConfig.model_validate({"loss": name, "aggregation": "token_mean"})
    assert RlooConfig.model_validate({"loss": name}).effective_aggregation == "seq_mean_token_mean"


# --- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "sapo", "gmpo", "dppo", "gpg", "kimi"])
@pytest.mark.parametrize("seed", [0, 1])
def test_autograd_agrees_with_finite_differences(name, seed):
    """The losses without a detached weight; for the others see their closed forms."""
    columns = random_tokens(seed)
    loss = rule("losses", LOSSES[name].model_copy(update=NARROW.get(name, {})))

    def per_token(policy_N: torch.Tensor) -> torch.Tensor:
        return loss({**columns, "policy_logprobs_N": policy_N}).per_token_N

    leaf = columns["policy_logprobs_N"].clone().requires_grad_(True)
    assert torch.autograd.gradcheck(per_token, (leaf,))


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_the_gradient_is_the_plain_policy_gradient(name, dtype):
    """That of -A * policy_logprobs, to the last bit. No loss is an exception where a sequence has
    one advantage; where it has several, see the next test."""
    columns = random_tokens(2, drift=0.0, dtype=dtype)
    terms, gradient = run(name, columns)
    # Equal up to rounding: A / n is summed over n tokens; 4 / tau * tau / 4 isn't 1.
    if name in ("gspo", "gmpo", "sapo"):
        tolerance = 1e-6 if dtype == torch.float32 else 1e-14
        assert torch.allclose(gradient, -columns["advantages_N"], rtol=tolerance, atol=tolerance)
    else:
        assert torch.equal(gradient, -columns["advantages_N"])
    assert not clipped(terms).any()


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_gspo_and_gmpo_give_each_token_the_mean_advantage_of_its_sequence(name):
    """The documented exception: their ratio couples the tokens. gspo_token doesn't."""
    anchor = torch.tensor([-1.0, -2.0, -3.0, -0.5]).double()
    columns = tokens(anchor, anchor, [1.0, 3.0, -2.5, 1.0], [0, 0, 0, 1])
    _, gradient = run(name, columns)
    means = name in ("gspo", "gmpo")
    expected = [-0.5, -0.5, -0.5, -1.0] if means else [-1.0, -3.0, 2.5, -1.0]
    assert torch.allclose(gradient, torch.tensor(expected).double(), atol=1e-14)


@pytest.mark.parametrize("name", LOSSES)
def test_a_zero_advantage_teaches_nothing(name, dtype):
    columns = random_tokens(3, drift=1.0, dtype=dtype)
    columns["advantages_N"] = torch.zeros_like(columns["advantages_N"])
    settings = {"kl_tau": 0.0, "tau": 0.0} if name in HAS_PENALTY else {}
    terms, gradient = run(name, columns, **settings)
    assert not gradient.any() and not terms.per_token_N.any()
    assert not clipped(terms).any()


@pytest.mark.parametrize("name", HAS_PENALTY)
def test_a_quadratic_term_pulls_back_at_any_distance_and_any_advantage(name):
    columns = tokens([-1.0, -80.0], [-2.0, -1.0], [0.0, 0.0])
    _, gradient = run(name, columns)
    assert torch.allclose(gradient, torch.tensor([2e-3, -0.158]).double(), atol=1e-12)


# --- bounds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WIDE)
def test_the_clip_fractions_count_the_tokens_whose_gradient_a_bound_changed(name):
    columns = random_tokens(4)
    terms, gradient = run(name, columns, **NARROW.get(name, {}))
    _, unbounded = run(name, columns, **WIDE[name])
    low, high = terms.clipped_low_N, terms.clipped_high_N
    changed = gradient == 0 if name == "gmpo" else (gradient - unbounded).abs() > 1e-12
    assert torch.equal(clipped(terms), changed)
    assert changed.any() and not changed.all()
    assert high is not None and high.any()
    if low is not None:
        assert low.any() and not (low & high).any()
        assert (columns["advantages_N"][low] < 0).all(), "a lower bound holds bad tokens up"


def test_topr_counts_the_negative_tokens_whose_weight_was_truncated():
    columns = tokens([-1.0, -1.0, -1.0, -3.0], [-2.0, -1.0, -2.0, -1.0], [-1.0, -1.0, 1.0, -1.0])
    terms, gradient = run("topr", columns)
    assert terms.clipped_low_N is None
    assert clipped(terms).tolist() == [True, False, False, False]
    assert gradient.tolist() == pytest.approx([1.0, 1.0, -1.0, float(torch.tensor(-2.0).exp())])


@pytest.mark.parametrize("name", ["sapo", "gpg", "vespo", "kimi"])
def test_a_loss_without_bounds_reports_no_clip_fraction(name):
    terms, _ = run(name, random_tokens(5))
    assert terms.clipped_low_N is None and terms.clipped_high_N is None


def test_the_dual_clip_is_a_clamp_of_the_unclipped_ratio():
    """TRL's `delta`: min(min(ratio, delta) A, clip(ratio) A), for delta above 1 + clip_high."""
    columns = random_tokens(6, drift=1.0)
    ratio = (columns["policy_logprobs_N"] - columns["prox_logprobs_N"]).exp()
    advantages, delta = columns["advantages_N"], 1.5
    expected = -torch.minimum(
        ratio.clamp(max=delta) * advantages, ratio.clamp(0.8, 1.2) * advantages
    )
    terms, _ = run("ppo_clip", columns, clip_low=0.2, clip_high=0.2, dual_clip=delta)
    assert torch.allclose(terms.per_token_N, expected)
    _, high = low_and_high(terms)
    assert (torch.tensor(high) & (advantages < 0)).any()


def test_is_reinforce_is_cispo_on_the_samplers_anchor():
    columns = random_tokens(7)
    columns["prox_logprobs_N"] = columns["policy_logprobs_N"]
    _, gradient = run("is_reinforce", columns, cap=1.3)
    _, other = run("cispo", {**columns, "prox_logprobs_N": columns["sampler_logprobs_N"]}, cap=1.3)
    _, on_policy = run("cispo", columns, cap=1.3)
    assert torch.equal(gradient, other) and not torch.equal(gradient, on_policy)


# --- sequences ----------------------------------------------------------------------------------


def test_a_mean_ratio_and_a_product_of_ratios_are_told_apart():
    """Report a11: 100 tokens that drifted by .01 give 1.01005 in a mean and 2.718 in a product."""
    anchor = torch.full((100,), -1.0, dtype=torch.float64)
    columns = tokens(anchor + 0.01, anchor, torch.ones(100), [0] * 100)
    for name in PER_SEQUENCE:
        terms, _ = run(name, columns, **WIDE[name])
        assert terms.per_token_N.tolist() == pytest.approx([-1.0100501671] * 100)
    product = torch.tensor(1.0).double().exp()
    _, gradient = run("vespo", columns)
    assert torch.allclose(-gradient, product**2 * (3 - 3 * product).exp())
    drifted_down = tokens(anchor - 0.01, anchor, -torch.ones(100), [0] * 100)
    _, gradient = run("topr", drifted_down)
    assert torch.allclose(gradient, 1 / product)


def test_gspo_token_is_gspo_where_a_sequence_has_one_advantage():
    columns = random_tokens(8)
    terms, gradient = run("gspo", columns, **NARROW["gspo"])
    other, other_gradient = run("gspo_token", columns, **NARROW["gspo"])
    assert torch.equal(terms.per_token_N, other.per_token_N)
    assert torch.allclose(gradient, other_gradient, atol=1e-14)


@pytest.mark.parametrize("name", LOSSES)
def test_a_sequence_gets_the_same_loss_in_any_company_and_order(name):
    """Also what makes a loss independent of micro-batches and ranks: no local mean anywhere."""
    columns = random_tokens(9)
    terms, gradient = run(name, columns, **NARROW.get(name, {}))
    index = columns["sequence_index_N"]
    order = torch.randperm(int(index.max()) + 1, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([torch.where(index == s)[0] for s in order])
    shuffled = select(columns, rows)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    shuffled["sequence_index_N"] = rank[shuffled["sequence_index_N"]]
    other, other_gradient = run(name, shuffled, **NARROW.get(name, {}))
    assert torch.allclose(other.per_token_N, terms.per_token_N[rows], rtol=1e-13)
    assert torch.allclose(other_gradient, gradient[rows], rtol=1e-13)
    assert torch.equal(clipped(other), clipped(terms)[rows])
    for s in range(len(order)):
        alone = select(columns, index == s)
        alone["sequence_index_N"] = torch.zeros_like(alone["sequence_index_N"])
        part, part_gradient = run(name, alone, **NARROW.get(name, {}))
        assert torch.allclose(part.per_token_N, terms.per_token_N[index == s], rtol=1e-13)
        assert torch.allclose(part_gradient, gradient[index == s], rtol=1e-13)


# --- degenerate input ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_an_extreme_log_ratio_stays_finite(name, advantage, dtype):
    policy, anchor = [0.0, -5000.0, -1.0, 0.0], [-5000.0, 0.0, -1.0, -5000.0]
    columns = tokens(policy, anchor, [advantage] * 4, [0, 1, 2, 2], dtype)
    terms, gradient = run(name, columns)
    assert terms.per_token_N.isfinite().all() and gradient.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_give_no_loss_and_still_have_a_graph(name, dtype):
    terms, gradient = run(name, tokens([], [], [], dtype=dtype))
    assert terms.per_token_N.dtype == dtype and terms.per_token_N.tolist() == []
    assert gradient.tolist() == []


@pytest.mark.parametrize("name", LOSSES)
def test_the_dtype_of_the_logprobs_is_kept(name, dtype):
    terms, gradient = run(name, random_tokens(10, dtype=dtype))
    assert terms.per_token_N.dtype == gradient.dtype == dtype


@pytest.mark.parametrize("name", LOSSES)
def test_a_nan_on_a_loss_token_is_not_hidden_and_stays_in_its_sequence(name):
    columns = tokens([float("nan"), -1.0], [-1.0, -1.0], [1.0, 1.0])
    terms, _ = run(name, columns)
    assert terms.per_token_N.isnan().tolist() == [True, False]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_changes_none_of_its_columns(name):
    columns = random_tokens(11)
    before = {key: values.clone() for key, values in columns.items()}
    run(name, columns, **NARROW.get(name, {}))
    assert all(torch.equal(columns[key], before[key]) for key in before)
