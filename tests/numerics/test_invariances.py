"""Every component on ragged batches: no cut, order, company or mask changes value or gradient.

The learner's own parts count and gather (packing, streams, global counts, preparation over the
step); in place of a model, log-probs are a leaf that holds one number for each token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.algo.builder import build_algorithm
from posttrain.algo.columns import rule
from posttrain.algo.component import Component, PolicyLoss
from posttrain.algo.regression import ValueRegression
from posttrain.algo.supervised import Imitation
from posttrain.algo.token_stats import TokenStats
from posttrain.config import (
    DistillConfig,
    EstimatorConfig,
    PolicyGradientConfig,
    PreferenceConfig,
    RewardModelConfig,
    RlooConfig,
)
from posttrain.config.corrections import CorrectionConfig
from posttrain.config.losses import LossConfig
from posttrain.config.objectives import PreferenceLossConfig
from posttrain.config.regularisers import EntropyConfig, KlConfig
from posttrain.data.packing import pack
from posttrain.recipe_files import models_in
from posttrain.training.token_columns import (
    GlobalCounts,
    Work,
    key_of,
    known_columns,
    of_stream,
    prepare_whole_step,
    stream_of,
)
from posttrain.types import Microbatch, TrainSample

CLOSE = 1e-9
FIXED_LENGTH = 7
CONSTANTS = {"step": 3, "version": 2.5, "seed": 11}
LEAVES = ("policy_logprobs_N", "entropy_N", "values_N", "scores_N", "divergence_N")
NOTHING = np.zeros(0, np.int64)
EMPTY = Microbatch(
    NOTHING, NOTHING, (), (), NOTHING, NOTHING, np.zeros(0, np.float32), *[NOTHING] * 3, (), {}
)
"""What a rank gets when there are more ranks than samples."""


# --- steps ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Samples, and what models say of each of their L positions, masked ones included."""

    samples: tuple[TrainSample, ...]
    columns: Mapping[str, torch.Tensor]

    @property
    def starts(self) -> list[int]:
        """Where each sample's positions begin."""
        return [0, *np.cumsum([len(s) for s in self.samples]).tolist()]

    def trained(self, indices: Sequence[int]) -> torch.Tensor:
        """Positions of the trained tokens of these samples, in order."""
        starts = self.starts
        found = [np.flatnonzero(self.samples[i].loss_mask) + starts[i] for i in indices]
        return torch.from_numpy(np.concatenate([NOTHING, *found]))

    def filled(self, filler: float) -> Step:
        """With this number at every position that is not trained, in models and records."""
        mask = np.concatenate([s.loss_mask for s in self.samples])
        is_trained = torch.from_numpy(mask)
        columns = {k: torch.where(is_trained, v, filler) for k, v in self.columns.items()}

        def outside(sample: TrainSample, values: Any) -> Any:
            return np.where(sample.loss_mask, values, np.float32(filler))

        samples = [
            replace(
                s,
                sampler_logprobs=outside(s, s.sampler_logprobs),
                streams={name: outside(s, weights) for name, weights in s.streams.items()},
            )
            for s in self.samples
        ]
        return Step(tuple(samples), columns)


def make_step(
    seed: int = 0,
    *,
    num_draws: int = 5,
    per_token: bool = False,
    on_policy: bool = False,
    stream: str = "policy",
) -> Step:
    """Groups of two to four trajectories, some forked into two sequences, with observations between
    turns. One sample in each group is of another stream, and one is of both."""
    rng = np.random.default_rng(seed)
    samples: list[TrainSample] = []
    for draw in range(num_draws):
        for member in range(int(rng.integers(2, 5))):
            names = {0: [stream, "another"], 1: [stream]}.get(member, [stream])
            advantage = float(rng.normal())
            for part in range(2 if (draw + member) % 4 == 0 else 1):
                samples.append(make_sample(rng, draw, member, part, names, advantage, per_token))
        samples.append(make_sample(rng, draw, 9, 0, ["another"], 1.0, per_token))
    columns = make_columns(rng, sum(len(s) for s in samples), on_policy)
    sampler = columns.pop("sampler_logprobs_N").split([len(s) for s in samples])
    reported = [
        replace(s, sampler_logprobs=np.where(s.loss_mask, mine, 0).astype(np.float32))
        for s, mine in zip(samples, sampler, strict=True)
    ]
    return Step(tuple(reported), columns)


def make_sample(
    rng: np.random.Generator,
    draw: int,
    member: int,
    part: int,
    names: Sequence[str],
    advantage: float,
    per_token: bool,
) -> TrainSample:
    """A prompt shared by the group, then turns with observations between them."""
    prompt = [draw % 3, 7, 8][: 1 + draw % 3]
    kinds = [*[0] * len(prompt), *(rng.random(int(rng.integers(1, 9))) < 0.7).astype(int), 1]
    mask = np.array(kinds, np.bool_)
    ids = np.concatenate([prompt, rng.integers(0, 9, len(mask) - len(prompt))]).astype(np.int32)
    turns = np.cumsum(np.diff(np.concatenate([[0], kinds])) == 1) - 1 + 10 * part
    weights = rng.normal(size=len(mask)) if per_token else np.full(len(mask), advantage)
    return TrainSample(
        token_ids=ids,
        loss_mask=mask,
        sampler_logprobs=np.zeros(len(mask), np.float32),
        policy_versions=np.where(mask, rng.integers(0, 3, len(mask)), -1).astype(np.int32),
        turn_index=np.where(mask, turns, -1).astype(np.int32),
        streams={name: np.where(mask, weights, 0).astype(np.float32) for name in names},
        draw_id=100 + draw,
        sample_index=member,
    )


def make_columns(rng: np.random.Generator, total: int, on_policy: bool) -> dict[str, torch.Tensor]:
    """float64, [L]. What the sampler reports is rounded to float32, as in a record."""

    def noise(scale: float) -> torch.Tensor:
        return torch.from_numpy(scale * rng.normal(size=total))

    # Numbers that float32 holds, so that all three policies can be equal.
    policy = torch.from_numpy(-rng.exponential(1.5, total) - 0.01).float().double()
    drift = 0.0 if on_policy else 0.25
    return {
        "policy_logprobs_N": policy,
        "prox_logprobs_N": policy + noise(drift),
        "sampler_logprobs_N": (policy + noise(drift)).float(),
        "ref_logprobs_N": policy + noise(0.5),
        "teacher_logprobs_N": policy + noise(0.5),
        "entropy_N": noise(1.0).abs(),
        "sum_pi_squared_N": torch.from_numpy(rng.random(total)),
        "values_N": noise(1.0),
        "scores_N": noise(1.0),
        "divergence_N": noise(1.0).abs(),
    }


# --- one step of the learner, without a model -----------------------------------------------------

Cut = Sequence[tuple[Microbatch, torch.Tensor]]
"""Micro-batches, and where the step has their trained tokens."""


@dataclass(frozen=True)
class Outcome:
    """Value, gradient at every position for each leaf that has one, and the merged metrics."""

    loss: float
    gradients: dict[str, torch.Tensor]
    metrics: dict[str, float]

    def check(self, other: Outcome) -> None:
        """The same but for rounding."""
        assert other.loss == pytest.approx(self.loss, rel=CLOSE, abs=1e-12)
        assert other.gradients.keys() == self.gradients.keys()
        for name, mine in self.gradients.items():
            error = float((other.gradients[name] - mine).abs().max())
            assert error <= CLOSE * float(mine.abs().max()), name
        assert other.metrics == pytest.approx(self.metrics, rel=CLOSE, abs=1e-12)


def run_step(component: Component, step: Step, cut: Cut, counts: Any = None) -> Outcome:
    """What the learner does with a step. `counts` makes denominators of a single micro-batch."""
    leaves = {name: step.columns[name].clone().requires_grad_(True) for name in LEAVES}
    works = [
        Work(micro, known_columns(micro) | {n: v[at] for n, v in step.columns.items()})
        for micro, at in cut
    ]
    if component.whole_step:
        prepare_whole_step(component, works, CONSTANTS, {})
    of_step = GlobalCounts([component], [micro for micro, _ in cut])
    value, stats = 0.0, TokenStats(0)
    for work, (micro, at) in zip(works, cut, strict=True):
        now = {name: leaf[at] for name, leaf in leaves.items()}
        columns = of_stream({**work.known, **now}, stream_of(component, micro)) | CONSTANTS
        if component.whole_step:
            columns |= work.prepared[key_of(component)]
        else:
            columns |= component.prepare({**columns, **detached(columns)}, {})
        local = of_step if counts is None else counts([component], [micro])
        output = component.loss(columns, local.denominators(component, micro), {})
        output.loss.backward()  # of a micro-batch without tokens too: its 0 is part of the graph
        value += float(output.loss.detach())
        stats = stats.merge(output.stats)
    gradients = {n: v.grad for n, v in leaves.items() if v.grad is not None and v.grad.any()}
    return Outcome(value, gradients, component.metrics(stats))


def detached(columns: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {k: v.detach() for k, v in columns.items() if isinstance(v, torch.Tensor)}


def packed(
    step: Step, order: Sequence[int], max_tokens: int = 10_000, *, whole_groups: bool = False
) -> list[tuple[Microbatch, torch.Tensor]]:
    """These samples in this order, cut by a budget of rows."""
    micros = pack([step.samples[i] for i in order], max_tokens, whole_groups=whole_groups)
    at = step.trained(order).split([micro.num_loss_tokens for micro in micros])
    return list(zip(micros, at, strict=True))


def whole(step: Step) -> Cut:
    return packed(step, range(len(step.samples)))


def at_random(step: Step, seed: int, *, unit: str = "sample", shuffled: bool = True) -> Cut:
    """Samples in any order, cut anywhere, with empty micro-batches between them. A unit is never
    cut apart and keeps its order: a forked "trajectory", or a "draw" whose members are compared."""
    rng = np.random.default_rng(seed)
    units: dict[Any, list[int]] = {}
    for i, sample in enumerate(step.samples):
        key = {"sample": i, "draw": sample.draw_id}.get(unit, (sample.draw_id, sample.sample_index))
        units.setdefault(key, []).append(i)
    order = list(units.values())
    if shuffled:
        order = [order[i] for i in rng.permutation(len(order))]
    parts: list[list[int]] = [[]]
    for own in order:
        if rng.random() < 0.4 and parts[-1]:
            parts.append([])
        parts[-1] += own
    cut = [micro for part in parts for micro in packed(step, part)]
    for _ in range(2):
        cut.insert(int(rng.integers(0, len(cut) + 1)), (EMPTY, torch.from_numpy(NOTHING)))
    return cut


def check_cuts(component: Component, step: Step, **how: Any) -> Outcome:
    """Any cut and any order give what one batch gives; so does any budget of rows."""
    expected = run_step(component, step, whole(step))
    assert expected.gradients, "something is learned"
    for seed in range(3):
        expected.check(run_step(component, step, at_random(step, seed, **how)))
    together = how.get("unit") == "draw"
    for budget in (1, 20, 45):
        cut = packed(step, range(len(step.samples)), budget, whole_groups=together)
        expected.check(run_step(component, step, cut))
    return expected


# --- policy losses --------------------------------------------------------------------------------

LOSSES = {c.model_fields["type"].default: c for c in models_in(LossConfig)}
PAIRS = [(name, mode) for name, config in LOSSES.items() for mode in config.aggregations]
# Their penalty for moving away does not ask for an advantage.
LEASHED = ("dppo", "kimi")


def policy_loss(config: PolicyGradientConfig) -> PolicyLoss:
    component = build_algorithm(config).components[0]
    assert isinstance(component, PolicyLoss)
    return component


def with_loss(name: str, mode: str, **more: Any) -> PolicyLoss:
    length = FIXED_LENGTH if mode == "fixed_length" else None
    return policy_loss(
        RlooConfig(loss=LOSSES[name](), aggregation=mode, fixed_length=length, **more)
    )


def test_every_loss_and_every_aggregation_are_here():
    assert len(LOSSES) >= 13 and {mode for _, mode in PAIRS} == {
        "token_mean",
        "seq_mean_token_mean",
        "seq_mean_token_sum",
        "fixed_length",
        "prompt_mean",
    }


@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_a_policy_loss_is_the_same_however_the_step_is_cut(name, mode):
    """Reports a01 and a07, and a05: a micro-batch may hold nothing, or nothing of the stream."""
    for per_token in (False, True):
        check_cuts(with_loss(name, mode), make_step(1, per_token=per_token))


@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_a_local_denominator_of_a_policy_loss_would_be_noticed(name, mode):
    check_local(with_loss(name, mode), make_step(1))


@pytest.mark.parametrize(("name", "mode"), PAIRS)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_what_masked_positions_hold_reaches_neither_value_nor_gradient(name, mode, garbage):
    component, step = with_loss(name, mode), make_step(2)
    filled = step.filled(0.0), step.filled(garbage)
    clean, dirty = (run_step(component, one, at_random(one, 0)) for one in filled)
    assert (dirty.loss, dirty.metrics) == (clean.loss, clean.metrics)
    for leaf, gradient in clean.gradients.items():
        assert torch.equal(dirty.gradients[leaf], gradient)
    masked = np.concatenate([~s.loss_mask for s in step.samples])
    assert not clean.gradients["policy_logprobs_N"][torch.from_numpy(masked)].any()


@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_an_advantage_of_zero_gives_a_gradient_of_exactly_zero(name, mode):
    """A group whose members are all worth the same leaves the others' gradients as they are."""
    step = make_step(3, on_policy=name in LEASHED)

    def flat(sample: TrainSample) -> TrainSample:
        zero = sample.draw_id in (101, 103)
        return replace(sample, streams={n: w * (not zero) for n, w in sample.streams.items()})

    component = with_loss(name, mode)
    kept = Step(tuple(flat(s) for s in step.samples), step.columns)
    (gradient,) = run_step(component, kept, at_random(kept, 0)).gradients.values()
    full = run_step(component, step, at_random(step, 0)).gradients["policy_logprobs_N"]
    flat_positions = step.trained(
        [i for i, s in enumerate(step.samples) if s.draw_id in (101, 103)]
    )
    assert not gradient[flat_positions].any()
    others = torch.ones(len(gradient), dtype=torch.bool).index_fill(0, flat_positions, False)
    assert torch.equal(gradient[others], full[others])


def token_shares(step: Step, mode: str) -> torch.Tensor:
    """How much a token of the stream counts in the loss of the step, straight from the definition;
    0 at all other positions."""
    mine = [i for i, s in enumerate(step.samples) if "policy" in s.streams]
    lengths = {i: step.samples[i].num_loss_tokens for i in mine}
    groups: dict[int, int] = {}
    for i in mine:
        draw = step.samples[i].draw_id
        groups[draw] = groups.get(draw, 0) + lengths[i]
    shares = torch.zeros(step.starts[-1], dtype=torch.float64)
    for i in mine:
        shares[step.trained([i])] = {
            "token_mean": 1 / sum(lengths.values()),
            "seq_mean_token_mean": 1 / (len(mine) * lengths[i]),
            "seq_mean_token_sum": 1 / len(mine),
            "fixed_length": 1 / (len(mine) * FIXED_LENGTH),
            "prompt_mean": 1 / (len(groups) * groups[step.samples[i].draw_id]),
        }[mode]
    return shares


@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_on_policy_the_ratio_is_exactly_one_and_the_gradient_the_plain_one(name, mode):
    """-advantage times the token's share, for all of them: nothing is clipped or reweighted."""
    step = make_step(4, on_policy=True)
    outcome = run_step(with_loss(name, mode), step, at_random(step, 1))
    assert outcome.metrics["policy/ratio_mean"] == outcome.metrics["policy/ratio_max"] == 1
    assert outcome.metrics["mismatch/abs_max"] == 0
    assert outcome.metrics["correction/mean"] == 1
    clipped = [v for k, v in outcome.metrics.items() if k.startswith("policy/clip")]
    assert not any(clipped)
    weights = [s.streams.get("policy", np.zeros(len(s), np.float32)) for s in step.samples]
    advantages = torch.from_numpy(np.concatenate(weights)).double()
    expected = -advantages * token_shares(step, mode)
    gradient = outcome.gradients["policy_logprobs_N"]
    assert float((gradient - expected).abs().max()) < 1e-12


# --- what goes with a policy loss -----------------------------------------------------------------

CORRECTIONS = {c.model_fields["type"].default: c for c in models_in(CorrectionConfig)}
BOUNDS = {
    "k3_mask": {"max_k3": 0.03},
    "geometric_mask": {"low": 0.9, "high": 1.1},
    "clip_cov": {"frac": 0.1, "low": 0.01, "high": 100.0},
    "opsm": {"delta": 0.05},
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_is_the_same_however_the_step_is_cut(name):
    """Those that choose among all tokens of the step included (AReaL #1730). `clip_cov` draws by
    place in the step, so that only the order is its own."""
    config = RlooConfig(corrections=(CORRECTIONS[name](**BOUNDS.get(name, {})),))
    component, step = policy_loss(config), make_step(5, per_token=name == "clip_cov")
    outcome = check_cuts(component, step, shuffled=name != "clip_cov")
    plain = run_step(policy_loss(RlooConfig(corrections=())), step, whole(step))
    assert outcome.loss != pytest.approx(plain.loss, rel=1e-6), "it changes something"


REGULARISED = {
    "kl_in_reward": {"kl": KlConfig(coef=0.3)},
    "k2_in_loss": {"kl": KlConfig(place="loss", estimator="k2", coef=0.3)},
    "k3_in_loss": {"kl": KlConfig(place="loss", estimator="k3", coef=0.3)},
    "k3_weighted_in_loss": {"kl": KlConfig(place="loss", estimator="k3_weighted", coef=0.3)},
    "kl_on_top_covariance": {
        "kl": KlConfig(place="loss", estimator="k2", only="top_covariance", top_frac=0.2)
    },
    "entropy": {"entropy": EntropyConfig(coef=0.1)},
    "sampler_as_anchor": {"anchor": "sampler"},
    "loglinear_anchor": {"anchor": "loglinear"},
}


@pytest.mark.parametrize("name", REGULARISED)
def test_a_regulariser_is_the_same_however_the_step_is_cut(name):
    """KL in the reward runs to the end of a trajectory, also of one that forked, and has the
    group's other members as baseline: so trajectories stay together and nothing else must."""
    component, step = policy_loss(RlooConfig(**REGULARISED[name])), make_step(6)
    unit = "trajectory" if name == "kl_in_reward" else "sample"
    outcome = check_cuts(component, step, unit=unit)
    plain = run_step(policy_loss(RlooConfig()), step, whole(step))
    assert outcome.loss != pytest.approx(plain.loss, rel=1e-6), "it changes something"


def test_kl_in_the_reward_runs_to_the_end_of_a_trajectory_that_forked():
    """Its later sequence is part of what an earlier token led to, and no baseline for it."""
    step = make_step(6, num_draws=1, on_policy=True)
    owners = [s.sample_index for s in step.samples if "policy" in s.streams]
    assert owners.count(0) == 2, "the first trajectory forked"
    component = policy_loss(RlooConfig(kl=KlConfig(coef=0.3)))

    def gradient(ref_logprobs: torch.Tensor) -> torch.Tensor:
        columns = {**step.columns, "ref_logprobs_N": ref_logprobs}
        outcome = run_step(component, Step(step.samples, columns), whole(step))
        return outcome.gradients["policy_logprobs_N"]

    reference = step.columns["ref_logprobs_N"]
    farther = reference.clone()
    farther[step.trained([1])[-1]] -= 1  # one nat more at the very end of the second sequence
    change = (gradient(farther) - gradient(reference)) / token_shares(step, "token_mean")
    for i, owner in enumerate(owners):
        expected = 0.3 if owner == 0 else -0.3 / (len(set(owners)) - 1)
        assert change[step.trained([i])].tolist() == pytest.approx(
            [expected] * step.samples[i].num_loss_tokens
        )


# --- estimators of tokens, and their critic -------------------------------------------------------


def needed(config: type[PolicyGradientConfig]) -> PolicyGradientConfig:
    return config(teacher="t") if config is DistillConfig else config()


BY_TOKENS = {
    config.model_fields["type"].default: needed(config)
    for config in (*models_in(EstimatorConfig), DistillConfig)
    if any(name.endswith("_N") for name in rule("advantages", needed(config)).columns)
}


@pytest.mark.parametrize("name", BY_TOKENS)
@pytest.mark.parametrize("kl", [None, KlConfig(coef=0.3)])
def test_an_estimator_over_tokens_is_the_same_however_the_step_is_cut(name, kl):
    """Returns, baselines and whitening are over the step, not over a micro-batch (dist_whiten)."""
    component = policy_loss(BY_TOKENS[name].model_copy(update={"kl": kl}))
    check_cuts(component, make_step(7, per_token=True), unit="trajectory")


@pytest.mark.parametrize("name", [n for n, config in BY_TOKENS.items() if config.has_critic])
@pytest.mark.parametrize("kl", [None, KlConfig(coef=0.3)])
def test_a_critic_is_the_same_however_the_step_is_cut(name, kl):
    component = build_algorithm(BY_TOKENS[name].model_copy(update={"kl": kl})).components[1]
    assert isinstance(component, ValueRegression)
    step = make_step(8, per_token=True)
    outcome = check_cuts(component, step, unit="trajectory")
    assert set(outcome.gradients) == {"values_N"}
    check_masked(component, step)
    check_local(component, step)


# --- imitation and preferences --------------------------------------------------------------------


def check_masked(component: Component, step: Step) -> None:
    filled = step.filled(0.0), step.filled(float("nan"))
    clean, dirty = (run_step(component, one, whole(one)) for one in filled)
    assert (dirty.loss, dirty.metrics) == (clean.loss, clean.metrics)
    for leaf, gradient in clean.gradients.items():
        assert torch.equal(dirty.gradients[leaf], gradient)


def check_local(component: Component, step: Step) -> None:
    """Denominators of the micro-batch alone, where half of the groups are in each of two."""
    order = range(len(step.samples))
    first = [i for i in order if step.samples[i].draw_id < 102]
    halves = [*packed(step, first), *packed(step, [i for i in order if i not in first])]
    expected = run_step(component, step, whole(step))
    expected.check(run_step(component, step, halves))
    with pytest.raises(AssertionError):
        expected.check(run_step(component, step, halves, counts=GlobalCounts))


@pytest.mark.parametrize("mode", sorted({mode for _, mode in PAIRS} - {"fixed_length"}))
def test_imitation_is_the_same_however_the_step_is_cut(mode):
    component = Imitation(0.3, aggregation=mode, stream="policy")
    step = make_step(9, per_token=True)
    check_cuts(component, step)
    check_masked(component, step)
    check_local(component, step)
    (gradient,) = run_step(component, step, whole(step)).gradients.values()
    weights = [s.streams.get("policy", np.zeros(len(s), np.float32)) for s in step.samples]
    expected = -0.3 * torch.from_numpy(np.concatenate(weights)).double() * token_shares(step, mode)
    assert float((gradient - expected).abs().max()) < 1e-12


def make_pairs(seed: int, stream: str, *, last_only: bool = False) -> Step:
    """Two sides a draw, some of them forked: +1 on the chosen one, which comes first or second.
    `last_only` trains the last token of a side alone, where a score is read."""
    step = make_step(seed, stream=stream)
    last_of_side = {(s.draw_id, s.sample_index): i for i, s in enumerate(step.samples)}
    samples, positions = [], []
    for i, sample in enumerate(step.samples):
        key = (sample.draw_id, sample.sample_index)
        if sample.sample_index > 1 or (last_only and last_of_side[key] != i):
            continue
        mask = sample.loss_mask
        if last_only:
            mask = np.arange(len(sample)) == np.flatnonzero(mask)[-1]
        sign = np.float32(1 if sample.sample_index == sample.draw_id % 2 else -1)
        streams = {stream: np.where(mask, sign, np.float32(0))}
        samples.append(replace(sample, loss_mask=mask, streams=streams))
        positions.append(torch.arange(step.starts[i], step.starts[i + 1]))
    chosen = torch.cat(positions)
    return Step(tuple(samples), {name: values[chosen] for name, values in step.columns.items()})


def of_draw(step: Step, draw_id: int) -> Step:
    mine = [i for i, s in enumerate(step.samples) if s.draw_id == draw_id]
    starts = step.starts
    at = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in mine])
    return Step(tuple(step.samples[i] for i in mine), {k: v[at] for k, v in step.columns.items()})


def check_pairs(component: Component, step: Step) -> None:
    outcome = check_cuts(component, step, unit="draw")
    outcome.check(run_step(component, step, packed(step, range(len(step.samples))[::-1])))
    check_masked(component, step)
    check_local(component, step)
    alone = [of_draw(step, draw_id) for draw_id in sorted({s.draw_id for s in step.samples})]
    losses = [run_step(component, pair, whole(pair)).loss for pair in alone]
    assert outcome.loss == pytest.approx(sum(losses) / len(losses), rel=CLOSE)


@pytest.mark.parametrize("config", [c for c in models_in(PreferenceLossConfig) if c.paired])
def test_a_preference_loss_is_the_mean_over_pairs_however_the_step_is_cut(config):
    (component,) = build_algorithm(PreferenceConfig(loss=config())).components
    check_pairs(component, make_pairs(10, "preference"))


def test_a_reward_model_s_loss_is_the_mean_over_pairs_however_the_step_is_cut():
    (component,) = build_algorithm(RewardModelConfig()).components
    check_pairs(component, make_pairs(11, "score", last_only=True))


@pytest.mark.parametrize("config", [c for c in models_in(PreferenceLossConfig) if not c.paired])
def test_a_loss_of_single_answers_is_their_mean_however_the_step_is_cut(config):
    """Its KL baseline is of the step; sides of one task need not meet."""
    (component,) = build_algorithm(PreferenceConfig(loss=config())).components
    step = make_pairs(12, "preference")
    check_cuts(component, step)
    check_masked(component, step)
    check_local(component, step)


@pytest.mark.parametrize("mode", sorted({mode for _, mode in PAIRS}))
def test_a_divergence_from_a_teacher_is_the_same_however_the_step_is_cut(mode):
    length = FIXED_LENGTH if mode == "fixed_length" else None
    config = DistillConfig(
        teacher="t", divergence="forward_kl", aggregation=mode, fixed_length=length
    )
    (component,) = build_algorithm(config).components
    step = make_step(13)
    outcome = check_cuts(component, step)
    check_masked(component, step)
    check_local(component, step)
    error = outcome.gradients["divergence_N"] - token_shares(step, mode)
    assert float(error.abs().max()) < 1e-12
