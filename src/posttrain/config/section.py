"""What every part of a recipe is: frozen, strict about names and types. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """Base of every part of a recipe: frozen, strict about names and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _none_switches_off(cls, values: Any) -> Any:
        """TOML has no null: "none" switches off what is on by default."""
        if not isinstance(values, dict):
            return values
        return {
            name: None if value == "none" and cls.switches_off(name) else value
            for name, value in values.items()
        }

    @classmethod
    def switches_off(cls, name: str) -> bool:
        """Whether None is a value of this setting and not its default."""
        field = cls.model_fields.get(name)
        if field is None or field.get_default(call_default_factory=True) is None:
            return False
        return type(None) in get_args(field.annotation)

    def refuse_without_effect(self, names: Sequence[str], why: str) -> None:
        """Raise ValueError for a setting that was changed but would be ignored."""
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].get_default(
                call_default_factory=True
            ):
                raise ValueError(f"{name} has no effect {why}; leave it out")
