"""Everything that [algo] may be."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from posttrain.config.estimators import EstimatorConfig
from posttrain.config.supervised import (
    DistillConfig,
    PreferenceConfig,
    RaftConfig,
    RewardModelConfig,
    SftConfig,
)

AlgoConfig = Annotated[
    EstimatorConfig | SftConfig | RaftConfig | PreferenceConfig | RewardModelConfig | DistillConfig,
    Field(discriminator="type"),
]
