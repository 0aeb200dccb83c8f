"""Recipes: frozen pydantic models, TOML in, overrides on top. Imports nothing heavy."""

from posttrain.config.algorithms import AlgoConfig
from posttrain.config.data import DataConfig, DemonstrationsConfig, PairsConfig
from posttrain.config.environments import (
    ArithmeticConfig,
    BinarySearchConfig,
    DatasetConfig,
    EnvConfig,
    LargestConfig,
    MixtureConfig,
    PythonEnvConfig,
    ReasoningGymConfig,
    ReverseConfig,
    SingleEnvConfig,
)
from posttrain.config.estimators import EstimatorConfig, GrpoConfig, RlooConfig
from posttrain.config.model import (
    LoraConfig,
    ModelConfig,
    OptimConfig,
    SamplerConfig,
    SamplingConfig,
)
from posttrain.config.policy_gradient import PolicyGradientConfig
from posttrain.config.recipe import (
    CheckpointConfig,
    EvalConfig,
    ExpectConfig,
    LearnerConfig,
    Recipe,
    RolloutConfig,
    cache_dir,
    default_threads,
)
from posttrain.config.section import Section
from posttrain.config.supervised import (
    DistillConfig,
    PreferenceConfig,
    RaftConfig,
    RewardModelConfig,
    SftConfig,
)

__all__ = [
    "AlgoConfig",
    "ArithmeticConfig",
    "BinarySearchConfig",
    "CheckpointConfig",
    "DataConfig",
    "DatasetConfig",
    "DemonstrationsConfig",
    "DistillConfig",
    "EnvConfig",
    "EstimatorConfig",
    "EvalConfig",
    "ExpectConfig",
    "GrpoConfig",
    "LargestConfig",
    "LearnerConfig",
    "LoraConfig",
    "MixtureConfig",
    "ModelConfig",
    "OptimConfig",
    "PairsConfig",
    "PolicyGradientConfig",
    "PreferenceConfig",
    "PythonEnvConfig",
    "RaftConfig",
    "ReasoningGymConfig",
    "Recipe",
    "ReverseConfig",
    "RewardModelConfig",
    "RlooConfig",
    "RolloutConfig",
    "SamplerConfig",
    "SamplingConfig",
    "Section",
    "SftConfig",
    "SingleEnvConfig",
    "cache_dir",
    "default_threads",
]
