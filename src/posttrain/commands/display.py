"""How a run shows itself: a live panel on a terminal, plain lines elsewhere, JSON for programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from posttrain.telemetry.files import to_json

PLAIN_EVERY_S = 5.0


def duration(seconds: float) -> str:
    """For people: 8 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class JsonObserver:
    """One JSON object a line on standard output."""

    def message(self, text: str) -> None:
        self._emit({"event": "message", "text": text})

    def progress(self, what: str, done: int, total: int) -> None:
        if done == total:
            self._emit({"event": "progress", "what": what, "done": done, "total": total})

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        self._emit({"event": "step", "step": step, "num_steps": num_steps, **metrics})

    def evaluation(self, policy_version: int, report: Mapping[str, Any]) -> None:
        self._emit({"event": "evaluation", **report})

    def summary(self, summary: Mapping[str, Any]) -> None:
        self._emit({"event": "summary", **summary})

    def _emit(self, record: Mapping[str, Any]) -> None:
        print(to_json(record), flush=True)


class Terminal:
    """People: a live panel on a terminal, else a line every few seconds."""

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._live: Live | None = None
        self._started = time.monotonic()
        self._step_seconds: list[float] = []
        self._last_line = 0.0
        self._state: dict[str, str] = {}
        self._step = 0
        self._activity = "starting"
        self._accuracy = ""

    def __enter__(self) -> Terminal:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, refresh_per_second=4, get_renderable=self._panel
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def progress(self, what: str, done: int, total: int) -> None:
        self._activity = f"{what} {done}/{total}"
        if self._live is None and (done == total or self._line_is_due()):
            self.message(f"  {self._activity}")

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        self._step_seconds.append(metrics["time/step_s"])
        self._activity = "training"
        self._state = _describe(metrics)
        if self._live is None and (step in (1, num_steps) or self._line_is_due()):
            parts = "  ".join(f"{k} {v}" for k, v in self._state.items())
            self.message(f"step {step}/{num_steps}  {self._left()}  {parts}")

    def evaluation(self, policy_version: int, report: Mapping[str, Any]) -> None:
        accuracy = report["accuracy"]
        text = "no valid sample" if accuracy is None else _rate(accuracy)
        self._accuracy = f"{text} at step {policy_version}"
        self.message(f"held-out accuracy {self._accuracy} ({report['num_tasks']} tasks)")
        if measured := report.get("measured"):
            self.message("  " + "  ".join(f"{k} {v:.3f}" for k, v in measured.items()))
        for name, member in report.get("by_environment", {}).items():
            self.message(f"  {name}: {_rate(member)}")
        if report["num_invalid"]:
            self.message(f"  {report['num_invalid']} invalid: {report['invalid_reasons']}")

    def _line_is_due(self) -> bool:
        now = time.monotonic()
        if now - self._last_line < PLAIN_EVERY_S:
            return False
        self._last_line = now
        return True

    def _left(self) -> str:
        recent = self._step_seconds[-10:]
        if not recent:
            return ""
        return f"{duration(sum(recent) / len(recent) * (self._num_steps - self._step))} left"

    def _panel(self) -> Table:
        table = Table.grid(padding=(0, 2))
        elapsed = duration(time.monotonic() - self._started)
        table.add_row(
            Text(f"step {self._step}/{self._num_steps}", style="bold"),
            ProgressBar(total=self._num_steps, completed=self._step, width=30),
            f"{elapsed} gone, {self._left() or '...'}  {self._activity}",
        )
        table.add_row(
            Text("held out"),
            Text(self._accuracy or "..."),
            "   ".join(f"{k} {v}" for k, v in self._state.items()),
        )
        return table


def _rate(estimate: Mapping[str, Any]) -> str:
    interval = estimate["interval"]
    text = f"{estimate['mean']:.3f}"
    return text if interval is None else f"{text} [{interval['low']:.3f}, {interval['high']:.3f}]"


def _describe(metrics: Mapping[str, float]) -> dict[str, str]:
    """The few numbers that say whether training is well."""
    total = metrics["time/step_s"] or 1.0
    split = "/".join(
        f"{100 * metrics.get(name, 0.0) / total:.0f}"
        for name in ("time/rollout_s", "time/learner_s", "time/other_s")
    )
    shown = {
        "reward": ("reward/mean", "{:.3f}"),
        "nll": ("imitation/nll", "{:.3f}"),
        "pairs right": ("preference/accuracy", "{:.2f}"),
        "to teacher": ("distill/reverse_kl", "{:.3f}"),
        "length": ("response/len_mean", "{:.1f}"),
        "entropy": ("policy/entropy_mean", "{:.2f}"),
        "grad": ("learner/grad_norm", "{:.2f}"),
        "sampled tok/s": ("sampler/tok_per_s", "{:.0f}"),
    }
    parts = {
        label: form.format(metrics[name])
        for label, (name, form) in shown.items()
        if name in metrics and not (name == "sampler/tok_per_s" and not metrics[name])
    }
    parts["rollout/learn/other %"] = split
    if invalid := metrics.get("trajectories/invalid_frac"):
        parts["INVALID"] = f"{100 * invalid:.0f} %"
    return parts


@contextmanager
def observer_for(as_json: bool, num_steps: int) -> Iterator[Terminal | JsonObserver]:
    """The observer that fits standard output."""
    if as_json:
        yield JsonObserver()
        return
    console = Console(file=sys.stdout)
    with Terminal(console, num_steps) as terminal:
        yield terminal
