"""The critic of estimators that read values."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from posttrain.config.section import NonNegative, PositiveFloat, Section


class CriticConfig(Section):
    """A value head, on the policy's trunk or on a trunk of its own, with its own optimizer."""

    trunk: Literal["shared", "own"] = Field(
        default="shared",
        description="own: a second copy of the model's weights, optimizer states included.",
    )
    lr: PositiveFloat = Field(default=1e-4, description="Follows the schedule of optim.")
    coef: PositiveFloat = Field(
        default=0.5, description="Weight of the value loss beside the policy's."
    )
    clip: PositiveFloat | None = Field(
        default=0.5, description="Most that a value moves in a step without paying for it."
    )
    pretrain_steps: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="First steps in which the critic alone learns (VC-PPO, arXiv:2503.01491).",
    )
    bootstrap_truncated: bool = Field(
        default=False,
        description="Add the value of the last state where a limit cut a trajectory; for rewards "
        "that do not judge the cut already.",
    )
    weight_decay: NonNegative = 0.0
    max_grad_norm: PositiveFloat = 1.0
