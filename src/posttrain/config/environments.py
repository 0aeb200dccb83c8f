"""Where tasks come from: one class an environment."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from posttrain.config.section import Positive, Section

Example = Annotated[tuple[str, str], Field(strict=False)]


class _EnvSection(Section):
    system: str | None = Field(
        default=None, description="System message; None leaves it to the template."
    )
    examples: tuple[Example, ...] = Field(
        default=(),
        strict=False,
        description="Questions and answers shown as earlier turns, for models that need to see "
        "the form of an answer.",
    )
    num_eval: Positive = Field(default=200, description="Held-out tasks.")


class ArithmeticConfig(_EnvSection):
    """Integer arithmetic, made on the spot; held-out problems never occur in training."""

    type: Literal["arithmetic"] = "arithmetic"
    operations: tuple[Literal["+", "-", "*"], ...] = Field(
        default=("+",), strict=False, min_length=1, description="Which occur."
    )
    min_operand: int = Field(default=0, description="Smallest number.")
    max_operand: int = Field(default=99, description="Largest number.")
    prompt: str = Field(default="{a} {op} {b} = ?", description="With {a}, {op} and {b}.")
    num_train: Positive | None = Field(
        default=None, description="Training problems; None: all others."
    )

    @model_validator(mode="after")
    def _range_holds_problems(self) -> ArithmeticConfig:
        if self.max_operand < self.min_operand:
            raise ValueError(
                f"max_operand {self.max_operand} is below min_operand {self.min_operand}"
            )
        return self


class LargestConfig(_EnvSection):
    """Name the largest of several different numbers."""

    type: Literal["largest"] = "largest"
    count: Annotated[int, Field(ge=2)] = Field(default=4, description="Numbers in a task.")
    min_number: Annotated[int, Field(ge=0)] = Field(default=0, description="Smallest number.")
    max_number: Positive = Field(default=99, description="Largest number.")
    prompt: str = Field(default="Largest: {numbers}", description="With {numbers}.")
    num_train: Positive = Field(default=100_000, description="Training tasks.")

    @model_validator(mode="after")
    def _range_holds_numbers(self) -> LargestConfig:
        if self.count > self.max_number - self.min_number:
            raise ValueError(
                f"{self.min_number}..{self.max_number} leaves no choice of {self.count} different "
                "numbers; widen the range"
            )
        return self


class ReverseConfig(_EnvSection):
    """Reverse a short string; reward is the fraction of right characters."""

    type: Literal["reverse"] = "reverse"
    alphabet: str = Field(default="abcd", description="Characters of the strings.")
    length: Positive = Field(default=3, description="Characters in a string.")
    num_eval: Positive = Field(default=16, description="Held-out strings, at most half of all.")


class BinarySearchConfig(_EnvSection):
    """Find a hidden number by guessing; the environment answers higher, lower or correct."""

    type: Literal["binary_search"] = "binary_search"
    low: int = Field(default=1, description="Smallest secret.")
    high: int = Field(default=7, description="Largest secret.")
    max_guesses: Positive = Field(default=3, description="Guesses in a game.")
    terse: bool = Field(
        default=False, description="Observations of one character, for tiny models."
    )
    turn_reward: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="Reward of a guess that the answers so far allow, for credit by turns.",
    )

    @model_validator(mode="after")
    def _range_is_a_range(self) -> BinarySearchConfig:
        if self.high <= self.low:
            raise ValueError(f"high {self.high} must be above low {self.low}")
        return self


class ReasoningGymConfig(_EnvSection):
    """Any reasoning-gym dataset by name, or a composite of several."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str | None = Field(default=None, description="Name of a dataset.")
    params: dict[str, Any] = Field(default_factory=dict, description="Its arguments.")
    composite: tuple[dict[str, Any], ...] = Field(
        default=(),
        strict=False,
        description="Tables with name, weight and params of each dataset.",
    )
    size: Positive = Field(default=1000, description="Training tasks that are generated.")
    prompt_suffix: str = Field(default="", description="Written after each question.")

    @model_validator(mode="after")
    def _one_source(self) -> ReasoningGymConfig:
        if (self.dataset is None) == (not self.composite):
            raise ValueError("set exactly one of dataset and composite")
        return self


class DatasetConfig(_EnvSection):
    """The user's own rows and reward function.

    `reward` is "math", "exact", or "FILE.py:FUNCTION" / "package.module:FUNCTION". The function's
    parameters name what it needs: `completion`, `prompt`, `task`, and any column of the data.
    """

    type: Literal["dataset"] = "dataset"
    path: str = Field(description="JSONL, JSON, CSV, Parquet, or a folder from save_to_disk.")
    reward: str = Field(description='"math", "exact", or a function.')
    prompt: str = Field(
        default="prompt", description="Column with a string or a list of chat messages."
    )
    answer: str = Field(
        default="answer", description='Column of the gold answer, for "math", "exact".'
    )
    id_column: str | None = Field(
        default=None, description="Column that names a row; default: its number."
    )
    template: str | None = Field(
        default=None, description='For instance "{question}\\nThink, then answer."'
    )
    split: str = Field(default="train", description="Of a folder from save_to_disk.")
    eval_path: str | None = Field(default=None, description="Held-out rows in a file of their own.")
    eval_frac: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.1, description="Share of the different prompts that is held out."
    )
    reward_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=10.0, description="Seconds after which a grader is killed."
    )
    reward_workers: Positive = Field(default=1, description="Grader processes.")
    correct_at: float = Field(
        default=1.0, description="Reward from which a sample counts as correct."
    )

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> DatasetConfig:
        if self.template is not None:
            self.refuse_without_effect(["prompt"], "with template, which makes the prompt")
        if self.eval_path is not None:
            self.refuse_without_effect(["eval_frac"], "with eval_path")
        if self.reward in ("math", "exact"):
            self.refuse_without_effect(["correct_at"], f'with reward = "{self.reward}"')
        else:
            self.refuse_without_effect(["answer"], "with a reward function: it names columns")
        if self.reward == "exact":
            self.refuse_without_effect(
                ["reward_timeout_s", "reward_workers"], "on a comparison without a process"
            )
        return self


class PythonEnvConfig(_EnvSection):
    """An environment of the user's: "FILE.py:NAME" or "package.module:NAME", a class or function
    that is called with `params` and gives an object with the methods of `protocols.EnvSpec`."""

    type: Literal["python"] = "python"
    target: str = Field(description="What builds the environment.")
    params: dict[str, Any] = Field(default_factory=dict, description="Its arguments.")

    @model_validator(mode="after")
    def _prompts_are_its_own(self) -> PythonEnvConfig:
        self.refuse_without_effect(
            ["system", "examples", "num_eval"],
            "on a python environment, which makes its own tasks: pass it in params if it takes one",
        )
        return self


SingleEnvConfig = Annotated[
    ArithmeticConfig
    | LargestConfig
    | ReverseConfig
    | BinarySearchConfig
    | ReasoningGymConfig
    | DatasetConfig
    | PythonEnvConfig,
    Field(discriminator="type"),
]


class MixtureConfig(Section):
    """Several environments in one run: [env.members.NAME] holds each, with a type of its own."""

    type: Literal["mixture"] = "mixture"
    members: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")], SingleEnvConfig] = Field(
        min_length=2
    )
    weights: dict[str, Positive] = Field(
        default_factory=dict, description="Draws of each member in a round; 1 where not given."
    )

    @model_validator(mode="after")
    def _weights_name_members(self) -> MixtureConfig:
        for name in self.weights.keys() - self.members.keys():
            raise ValueError(
                f"weights names {name!r}, which is no member; members are {', '.join(self.members)}"
            )
        return self


EnvConfig = Annotated[SingleEnvConfig | MixtureConfig, Field(discriminator="type")]
