"""Model folders: found by name, checked, fetched, converted, described."""

from posttrain.training.models.folder import ModelInfo, check_folder, model_info
from posttrain.training.models.gguf import convert_gguf
from posttrain.training.models.hub import (
    MODELS,
    KnownModel,
    cached_folder,
    is_cached,
    resolve_model,
)
from posttrain.training.models.tiny import write_tiny_char

__all__ = [
    "MODELS",
    "KnownModel",
    "ModelInfo",
    "cached_folder",
    "check_folder",
    "convert_gguf",
    "is_cached",
    "model_info",
    "resolve_model",
    "write_tiny_char",
]
