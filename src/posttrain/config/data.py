"""Given data: demonstrations to imitate, pairs to compare. One class each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from posttrain.config.section import Positive, Section


class _DataSection(Section):
    path: str = Field(description="JSONL, JSON, CSV, Parquet, or a folder from save_to_disk.")
    prompt: str = Field(
        default="prompt", description="Column with a string or a list of chat messages."
    )
    system: str | None = Field(
        default=None, description="System message; None leaves it to the template."
    )
    split: str = Field(default="train", description="Of a folder from save_to_disk.")
    eval_path: str | None = Field(default=None, description="Held-out rows in a file of their own.")
    eval_frac: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.1, description="Share of the different prompts that is held out."
    )
    num_eval: Positive = Field(default=200, description="Held-out prompts at most.")

    @model_validator(mode="after")
    def _split_has_an_effect(self) -> _DataSection:
        if self.eval_path is not None:
            self.refuse_without_effect(["eval_frac"], "with eval_path")
        return self


class DemonstrationsConfig(_DataSection):
    """Rows of a prompt and the answer to imitate."""

    type: Literal["demonstrations"] = "demonstrations"
    completion: str = Field(default="completion", description="Column with the answer's text.")


class PairsConfig(_DataSection):
    """Rows of a prompt, a better and a worse answer."""

    type: Literal["pairs"] = "pairs"
    chosen: str = Field(default="chosen", description="Column with the better answer.")
    rejected: str = Field(default="rejected", description="Column with the worse answer.")


DataConfig = Annotated[DemonstrationsConfig | PairsConfig, Field(discriminator="type")]
