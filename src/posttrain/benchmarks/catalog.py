"""Which benchmarks there are. Imports none of them, so that listing them costs nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from posttrain.errors import ConfigError
from posttrain.names import did_you_mean


@dataclass(frozen=True, slots=True)
class Benchmark:
    """`entry` is MODULE:FUNCTION in this package; the function takes the command line's rest."""

    name: str
    entry: str
    summary: str

    def run(self, arguments: Sequence[str]) -> None:
        """Measure, print, and save when asked to."""
        module, function = self.entry.split(":")
        main: Callable[[Sequence[str]], None] = getattr(
            importlib.import_module(f"posttrain.benchmarks.{module}"), function
        )
        main(arguments)


BENCHMARKS: tuple[Benchmark, ...] = (
    Benchmark("grpo-short", "grpo:short", "whole GRPO steps, short prompts, against TRL"),
    Benchmark("grpo-long-prompt", "grpo:long_prompt", "whole GRPO steps, 1,000-token prompts"),
    Benchmark("rollout", "rollout:main", "sampled tokens a second, against other engines"),
    Benchmark("train-step", "train_step:main", "one optimizer step, against plain transformers"),
    Benchmark("limits", "limits:main", "what bandwidth and peak allow, and how far from it we are"),
    Benchmark("scaling", "scaling:main", "cost against sizes, beside the operations it takes"),
    Benchmark("loop-overhead", "loop_overhead:main", "share of wall time in neither side"),
    Benchmark("control-plane", "control_plane:main", "trajectories a second without a model"),
    Benchmark("resume", "resume:main", "seconds from SIGKILL to training on"),
    Benchmark("import-time", "import_time:main", "what starting costs"),
)


def benchmark(name: str) -> Benchmark:
    """Raises ConfigError for a name that is not in the catalog."""
    for candidate in BENCHMARKS:
        if candidate.name == name:
            return candidate
    names = [b.name for b in BENCHMARKS]
    raise ConfigError(
        f"benchmark {name!r} is unknown"
        + (did_you_mean(name, names) or f"; there are {', '.join(names)}")
    )
