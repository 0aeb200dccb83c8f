"""Runs the learning checks for any seeds and prints what each of them reached.

    python scripts/learning_checks.py --seeds 3 4 5 --check 3 --only ppo_clip grpo

A row is printed when it is done: check, what learned, seed, result, steps, processor seconds.
Check 8 (preferences, distillation, flows) has its fixed seeds in
tests/numerics/test_preference_learning.py and is run from there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS / "learning"))

from checks import bandits, contextual, controls, longer  # noqa: E402
from checks.trial import Curve  # noqa: E402


@dataclass(frozen=True)
class Check:
    """`run(seed)` gives the result, the steps it took (None: it has none, or never got there), and
    whether it passed."""

    number: str
    name: str
    run: Callable[[int], tuple[str, int | None, bool]]


def of_curve(curve: Curve) -> tuple[str, int | None, bool]:
    """The best mean of five steps, and when the bound was reached."""
    return f"{curve.best:.3f}", curve.reached, curve.reached is not None


def bandit(seed: int) -> tuple[str, int | None, bool]:
    reached, value = bandits.learn_bandit(seed)
    return f"{value:.3f}", reached, reached is not None


def gradient(name: str) -> Callable[[int], tuple[str, int | None, bool]]:
    """Mean of 20,000 sampled gradients over the exact one, along the exact one."""

    def run(seed: int) -> tuple[str, int | None, bool]:
        mean_A, error_A = bandits.sampled_gradient(name, 20_000, seed)
        exact_A, wanted = bandits.exact_gradient(), bandits.RATIOS[name][1]
        ratio = float(mean_A @ exact_A / (exact_A @ exact_A))
        passed = bool(((mean_A - wanted * exact_A).abs() < 3.5 * error_A).all())
        return f"ratio {ratio:.3f} ({wanted})", None, passed

    return run


def fixed_point(mode: str) -> Callable[[int], tuple[str, int | None, bool]]:
    def run(seed: int) -> tuple[str, int | None, bool]:
        distance = bandits.total_variation(
            bandits.kl_fixed_point(mode, seed)[0], bandits.target(mode)
        )
        return f"TV {distance:.4f}", bandits.KL_STEPS, distance < 0.01

    return run


def correction(name: str) -> Callable[[int], tuple[str, int | None, bool]]:
    """Largest distance from its exact expectation in standard errors."""

    def run(seed: int) -> tuple[str, int | None, bool]:
        sigmas, _ = bandits.off_policy_errors(name, seed)
        return f"{sigmas:.1f} sigma", None, sigmas < 3

    return run


def mean_weight(seed: int) -> tuple[str, int | None, bool]:
    _, sigmas = bandits.off_policy_errors("tis_full", seed)
    return f"{sigmas:.1f} sigma", None, sigmas < 3


def control(name: str) -> Callable[[int], tuple[str, int | None, bool]]:
    """A broken run, which passes by not learning."""

    def run(seed: int) -> tuple[str, int | None, bool]:
        steps = controls.BROKEN_STEPS
        spoil = controls.BROKEN[name]
        best = contextual.learn_map(contextual.PLAIN, seed, num_steps=steps, spoil=spoil).best
        return f"{best:.3f}", steps, best < 0.05

    return run


def staged(seed: int) -> tuple[str, int | None, bool]:
    with tempfile.TemporaryDirectory() as folder:
        before, after = longer.sft_then_rl(seed, Path(folder))
    return f"{before:.2f} -> {after:.2f}", None, after >= 0.95


def tested(seed: int) -> tuple[str, int | None, bool]:
    file = TESTS / "numerics/test_preference_learning.py"
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", str(file)], capture_output=True)
    return "its tests", None, done.returncode == 0


def checks() -> Iterator[Check]:
    """All of them, in order."""
    yield Check("1", "bernoulli bandit", bandit)
    for name in bandits.RATIOS:
        yield Check("1", f"gradient of {name}", gradient(name))
    for mode in bandits.KL_MODES:
        yield Check("2", f"KL {mode}", fixed_point(mode))
    for name in contextual.LOSSES:
        yield Check(
            "3", f"loss {name}", lambda s, n=name: of_curve(contextual.learn_with_loss(n, s))
        )
    for name in contextual.ESTIMATORS:
        yield Check(
            "3",
            f"estimator {name}",
            lambda s, n=name: of_curve(contextual.learn_with_estimator(n, s)),
        )
    for name in controls.BROKEN:
        yield Check("3", f"broken: {name}", control(name))
    yield Check("4", "length", lambda s: of_curve(longer.learn_length(s)))
    for name in longer.SEARCHERS:
        yield Check(
            "5", f"binary search {name}", lambda s, n=name: of_curve(longer.learn_search(n, s))
        )
    yield Check("6", "sft-then-rl", staged)
    for name in bandits.CORRECTIONS:
        yield Check("7a", f"gradient with {name}", correction(name))
    yield from off_policy_checks()
    yield Check("7c", "mean weight", mean_weight)
    yield Check("8", "preferences", tested)


def off_policy_checks() -> Iterator[Check]:
    for lag, temperature in ((8, 1.0), (32, 1.0), (0, 2.0), (8, 2.0)):
        for corrected in (True, False):
            settings = {"lag": lag, "temperature": temperature, "corrected": corrected}
            yield Check(
                "7b",
                f"lag {lag}, temperature {temperature:g}, {'tis' if corrected else 'none'}",
                lambda s, k=settings: of_curve(contextual.learn_off_policy(s, **k)),
            )


def main() -> int:
    """Status 1 when a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--check", nargs="+", help="numbers, such as 3 or 7b; default: all")
    parser.add_argument("--only", nargs="+", help="words of the rows to run, such as grpo")
    wanted = parser.parse_args()
    failed = 0
    print(f"{'check':<6}{'what':<36}{'seed':>5}  {'result':<22}{'steps':>6}{'cpu s':>8}")
    for check in checks():
        if wanted.check and not check.number.startswith(tuple(wanted.check)):
            continue
        if wanted.only and not set(wanted.only) & set(check.name.split()):
            continue
        for seed in [0] if check.number == "8" else wanted.seeds:
            before = _cpu_s()
            result, steps, passed = check.run(seed)
            failed += not passed
            row = f"{check.number:<6}{check.name:<36}{seed:>5}  {result:<22}{steps or '':>6}"
            print(f"{row}{_cpu_s() - before:>8.1f}{'' if passed else '  FAILED'}", flush=True)
    return 1 if failed else 0


def _cpu_s() -> float:
    """Seconds of the processor, of ended children too."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    sys.exit(main())
