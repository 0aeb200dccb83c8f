"""Algorithms beside a policy gradient: imitation, preferences, reward models, distillation."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from posttrain.config.objectives import BradleyTerryConfig, DpoConfig, PreferenceLossConfig
from posttrain.config.policy_gradient import PolicyGradientConfig, UpdateConfig, by_name
from posttrain.config.section import Positive


class SftConfig(UpdateConfig):
    """Supervised fine-tuning on demonstrations."""

    needs: ClassVar[str] = "demonstrations"
    type: Literal["sft"] = "sft"
    aggregation: Literal["token_mean", "seq_mean_token_mean"] = "token_mean"


class RaftConfig(UpdateConfig):
    """Expert iteration: imitate what was sampled and succeeded (arXiv:2304.06767, 2308.08998)."""

    needs: ClassVar[str] = "rollouts"
    min_group_size: ClassVar[int] = 1
    type: Literal["raft"] = "raft"
    aggregation: Literal["token_mean", "seq_mean_token_mean"] = "token_mean"
    threshold: float = Field(default=1.0, description="Least reward that is imitated.")
    max_per_task: Positive | None = Field(
        default=None, description="Most answers to one task, the best first, none twice."
    )
    normalise: bool = Field(
        default=False,
        description='Every solved task weighs the same; needs aggregation = "seq_mean_token_mean".',
    )

    @model_validator(mode="after")
    def _sequences_are_what_is_weighed(self) -> RaftConfig:
        if self.normalise and self.aggregation == "token_mean":
            raise ValueError(
                "normalise weighs answers and aggregation is token_mean, in which a long answer "
                'still weighs more; set aggregation = "seq_mean_token_mean"'
            )
        return self


class PreferenceConfig(UpdateConfig):
    """DPO and its kin, on given pairs or on the best and the worst of sampled groups."""

    needs: ClassVar[str] = "pairs"
    type: Literal["preference"] = "preference"
    loss: Annotated[PreferenceLossConfig, BeforeValidator(by_name)] = Field(
        default_factory=DpoConfig
    )

    @property
    def min_group_size(self) -> int:
        """Two make a pair; a labelled answer stands alone."""
        return 2 if self.loss.paired else 1


class RewardModelConfig(UpdateConfig):
    """A scalar score from pairs (Bradley-Terry)."""

    needs: ClassVar[str] = "pairs"
    min_group_size: ClassVar[int] = 2
    type: Literal["reward_model"] = "reward_model"
    loss: BradleyTerryConfig = Field(default_factory=BradleyTerryConfig)
    head_lr: Annotated[float, Field(gt=0)] = 1e-3


class DistillConfig(PolicyGradientConfig):
    """On-policy distillation: the student samples, the teacher scores each token."""

    min_group_size: ClassVar[int] = 1
    equal_rewards_teach: ClassVar[bool] = True
    type: Literal["distill"] = "distill"
    teacher: str = Field(description="A model name or folder with the student's tokenizer.")
    coef: Annotated[float, Field(gt=0)] = 1.0
    divergence: Literal["sampled", "reverse_kl", "forward_kl", "jsd"] = Field(
        default="sampled",
        description="sampled: the teacher's over the student's log-prob of each sampled token as "
        "advantage; the others compare whole distributions at each position (GKD).",
    )
    beta: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.5, description="Of jsd: the teacher's share of the mixture."
    )

    @model_validator(mode="after")
    def _settings_are_read(self) -> DistillConfig:
        if self.divergence != "jsd":
            self.refuse_without_effect(["beta"], 'without divergence = "jsd"')
        if self.divergence != "sampled":
            self.refuse_without_effect(
                [
                    "coef",
                    "loss",
                    "anchor",
                    "corrections",
                    "kl",
                    "entropy",
                    "positive_nll_coef",
                    "hindsight_coef",
                    "truncated",
                ],
                f'with divergence = "{self.divergence}", which is the loss itself',
            )
        return self

    @model_validator(mode="after")
    def _rewards_are_not_read(self) -> DistillConfig:
        self.refuse_without_effect(
            ["shaping", "zero_variance"], "with distill, which reads no reward"
        )
        if self.kl is not None and self.kl.place == "reward":
            raise ValueError(
                'kl.place is "reward", and distill reads no reward; use kl.place = "loss"'
            )
        return self
