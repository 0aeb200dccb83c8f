"""The learning rate as a pure function of the step, so that a resume cannot restart it."""

from __future__ import annotations

import math

from posttrain.config import OptimConfig


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """Learning rate of `step` (from 1): linear warm-up, then constant, linear or cosine decay.

    The decay ends at `min_lr_frac * lr` on step `num_steps`.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    progress = min(1.0, progress)
    decay = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_frac + (1 - config.min_lr_frac) * decay)
