"""Statistics of evaluations: what a score is, how sure it is, and whether two scores differ.

The question is the unit of everything: samples of one question are not independent of each other
(arXiv:2411.00640). Q questions, n samples of a question, c correct ones among them. Where
a quantity cannot be known (the spread of one question), it is None and never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from posttrain.evaluation.student_t import t_quantile

_EXACT_SIGN_FLIP_QUESTIONS = 16  # 2^16 sign patterns are enumerated; beyond that they're drawn
_CHUNK = 1000  # resamples at a time, so that memory does not grow with their number


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval, both ends included.

    Example:
        >>> Interval(0.25, 0.75).low
        0.25
    """

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over questions, its standard error and interval (None with a single question).

    Example:
        >>> avg_at_k([[1.0], [0.0]]).mean
        0.5
    """

    mean: float
    se: float | None
    interval: Interval | None
    num_questions: int


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """after - before by question. num_better and num_worse count questions whose mean moved.

    `se` and `interval` are None with a single question. `test` says how `p_value` was found.

    Example:
        >>> result = compare_paired({"a": [0.0], "b": [0.0]}, {"a": [1.0], "b": [0.0]},
        ...                         np.random.default_rng(0))
        >>> result.mean_diff, result.num_better, result.test
        (0.5, 1, 'mcnemar_exact')
    """

    num_questions: int
    mean_before: float
    mean_after: float
    mean_diff: float
    se: float | None
    interval: Interval | None
    num_better: int
    num_worse: int
    p_value: float
    test: Literal["mcnemar_exact", "sign_flip_exact", "sign_flip_sampled"]


# --- one question -------------------------------------------------------------------------------


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """P(at least one of k samples is correct) = 1 - C(n-c, k) / C(n, k). arXiv:2107.03374 eq. 1.

    Unbiased and exact. Raises ValueError when k samples cannot be had from n.
    """
    _check_counts(num_samples, num_correct, k)
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def pass_hat_k(num_samples: int, num_correct: int, k: int) -> float:
    """P(all of k samples are correct) = C(c, k) / C(n, k). arXiv:2406.12045 (tau-bench)."""
    _check_counts(num_samples, num_correct, k)
    return math.comb(num_correct, k) / math.comb(num_samples, k)


def _check_counts(num_samples: int, num_correct: int, k: int) -> None:
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"{num_correct} of {num_samples} samples correct is impossible")
    if not 1 <= k <= num_samples:
        raise ValueError(
            f"k is {k} with {num_samples} samples; need 1 <= k <= samples per question"
        )


# --- many questions -----------------------------------------------------------------------------


def avg_at_k(scores: Sequence[Sequence[float]], confidence: float = 0.95) -> Estimate:
    """Mean over questions of each question's mean; scores are one row of samples a question.

    The standard error is sd(question means) / sqrt(Q), sd with Q-1: clustered by question. The
    interval uses Student's t with Q-1 degrees of freedom, because Q is often small; it is not
    cut to [0, 1], since a score need not be a rate.
    """
    return mean_over_questions([_mean(row) for row in scores], confidence)


def mean_over_questions(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """The mean of one number per question (a pass@k, a difference), as in `avg_at_k`."""
    if not values:
        raise ValueError("no questions to average; an evaluation needs at least one")
    means_Q = np.asarray(values, np.float64)
    mean, count = float(means_Q.mean()), len(means_Q)
    if count == 1:
        return Estimate(mean, None, None, 1)
    se = float(means_Q.std(ddof=1)) / math.sqrt(count)
    margin = t_quantile(0.5 + confidence / 2, count - 1) * se
    return Estimate(mean, se, Interval(mean - margin, mean + margin), count)


def wilson(num_successes: int, num_trials: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval (1927) for one rate of independent trials; [0, 1] for no trials."""
    if not 0 <= num_successes <= num_trials:
        raise ValueError(f"{num_successes} successes in {num_trials} trials is impossible")
    if num_trials == 0:
        return Interval(0.0, 1.0)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate, shrink = num_successes / num_trials, 1 + z * z / num_trials
    centre = (rate + z * z / (2 * num_trials)) / shrink
    spread = rate * (1 - rate) / num_trials + z * z / (4 * num_trials**2)
    margin = z * math.sqrt(spread) / shrink
    # The ends are 0 and 1 exactly at the edges; rounding must not say 1e-17.
    low = 0.0 if num_successes == 0 else centre - margin
    high = 1.0 if num_successes == num_trials else centre + margin
    return Interval(low, high)


def rule_of_three(num_trials: int) -> float:
    """95 % upper bound of a rate that showed 0 events: 3/n, at most 1. Hanley 1983."""
    return min(1.0, 3 / num_trials) if num_trials else 1.0


def bootstrap_interval(
    question_means: Sequence[float],
    generator: np.random.Generator,
    *,
    num_resamples: int = 10_000,
    confidence: float = 0.95,
) -> Interval | None:
    """Percentile interval of the mean, resampling questions with their samples together.

    None with fewer than two questions, where every resample is the same.
    """
    means_Q = np.asarray(question_means, np.float64)
    if len(means_Q) < 2:
        return None
    resampled = [
        means_Q[generator.integers(len(means_Q), size=(size, len(means_Q)))].mean(axis=1)
        for size in _chunks(num_resamples)
    ]
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(resampled), [tail, 1 - tail])
    return Interval(float(low), float(high))


# --- before and after ---------------------------------------------------------------------------


def compare_paired(
    before: Mapping[str, Sequence[float]],
    after: Mapping[str, Sequence[float]],
    generator: np.random.Generator,
    *,
    confidence: float = 0.95,
    num_flips: int = 10_000,
) -> PairedComparison:
    """Paired by question id (arXiv:2411.00640 section 4): scores are samples of each question.

    The p-value (two-sided, of no difference) is McNemar's exact test when every question has one
    sample of 0 or 1 on both sides, else a sign-flip permutation test of the question means: all
    sign patterns up to 16 questions, `num_flips` drawn ones beyond. Raises ValueError unless
    both sides hold the same questions.
    """
    if before.keys() != after.keys():
        odd = sorted(before.keys() ^ after.keys())
        raise ValueError(
            f"{len(odd)} questions are on one side only ({', '.join(map(str, odd[:3]))}); "
            "compare evaluations of the same questions"
        )
    questions = sorted(before)
    means_before = [_mean(before[q]) for q in questions]
    means_after = [_mean(after[q]) for q in questions]
    diffs_Q = np.asarray(means_after, np.float64) - np.asarray(means_before, np.float64)
    estimate = mean_over_questions(diffs_Q.tolist(), confidence)
    better, worse = int((diffs_Q > 0).sum()), int((diffs_Q < 0).sum())
    test: Literal["mcnemar_exact", "sign_flip_exact", "sign_flip_sampled"]
    if all(_is_single_binary(side[q]) for side in (before, after) for q in questions):
        test, p_value = "mcnemar_exact", mcnemar_exact(better, worse)
    elif len(questions) <= _EXACT_SIGN_FLIP_QUESTIONS:
        test, p_value = "sign_flip_exact", _sign_flip_exact(diffs_Q)
    else:
        test = "sign_flip_sampled"
        p_value = _sign_flip_sampled(diffs_Q, generator, num_flips)
    return PairedComparison(
        num_questions=len(questions),
        mean_before=float(np.mean(means_before)),
        mean_after=float(np.mean(means_after)),
        mean_diff=estimate.mean,
        se=estimate.se,
        interval=estimate.interval,
        num_better=better,
        num_worse=worse,
        p_value=p_value,
        test=test,
    )


def sample_size_per_arm(
    rate: float, difference: float, *, alpha: float = 0.05, power: float = 0.8
) -> int:
    """Questions that each of two unpaired arms needs to tell `rate` from `rate + difference`.

    ceil(2 rate (1 - rate) (z_{1 - alpha/2} + z_power)^2 / difference^2): two-sided z-test of two
    proportions, with the variance at `rate` in both arms. Pairing by question needs fewer. Raises
    ValueError unless 0 < rate < 1 and difference is not 0.
    """
    if not 0 < rate < 1 or difference == 0:
        raise ValueError(
            f"rate is {rate} and difference {difference}; need 0 < rate < 1 and a difference"
        )
    normal = NormalDist()
    z = normal.inv_cdf(1 - alpha / 2) + normal.inv_cdf(power)
    return math.ceil(2 * rate * (1 - rate) * (z / difference) ** 2)


def mcnemar_exact(num_better: int, num_worse: int) -> float:
    """Two-sided exact binomial p-value of the discordant pairs; 1 when there are none."""
    discordant = num_better + num_worse
    tail = sum(math.comb(discordant, i) for i in range(min(num_better, num_worse) + 1))
    return min(1.0, 2 * tail / 2**discordant)


def _sign_flip_exact(diffs_Q: np.ndarray) -> float:
    count = len(diffs_Q)
    patterns = np.arange(2**count)[:, None] >> np.arange(count) & 1
    sums = np.where(patterns == 1, diffs_Q, -diffs_Q).sum(axis=1)
    return float(np.mean(_at_least_as_far(sums, diffs_Q)))


def _sign_flip_sampled(
    diffs_Q: np.ndarray, generator: np.random.Generator, num_flips: int
) -> float:
    hits = 0
    for size in _chunks(num_flips):
        signs = generator.integers(0, 2, size=(size, len(diffs_Q))) * 2 - 1
        hits += int(_at_least_as_far(signs @ diffs_Q, diffs_Q).sum())
    # The observed signs are one of the patterns: p is never 0 (Phipson and Smyth 2010).
    return (hits + 1) / (num_flips + 1)


def _at_least_as_far(sums: np.ndarray, diffs_Q: np.ndarray) -> np.ndarray:
    # The slack keeps patterns that tie with the observed one from losing to rounding.
    return np.abs(sums) >= abs(float(diffs_Q.sum())) - 1e-9 * float(np.abs(diffs_Q).sum())


def _mean(row: Sequence[float]) -> float:
    if len(row) == 0:
        raise ValueError("a question has no valid sample; leave it out and report how many")
    return float(np.mean(np.asarray(row, np.float64)))


def _is_single_binary(row: Sequence[float]) -> bool:
    return len(row) == 1 and row[0] in (0.0, 1.0)


def _chunks(total: int) -> list[int]:
    return [min(_CHUNK, total - start) for start in range(0, total, _CHUNK)]
