"""The run file of off-policy distillation, section by section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from limbeck.data.sources import DataConfig
from limbeck.distributed.launch import ClusterConfig
from limbeck.losses.config import CrossTokenizerDistillationLossConfig
from limbeck.models.policy_config import PolicyConfig
from limbeck.teachers.server.client import ServerConfig
from limbeck.utils.checkpoint import CheckpointingConfig
from limbeck.utils.logger import LoggerConfig


class OffPolicyDistillationConfig(BaseModel):
    """Length of a run and when it is validated."""

    model_config = ConfigDict(extra="forbid")

    num_prompts_per_step: int = Field(default=32, ge=1)
    """Records per step over all ranks."""
    max_num_steps: int = Field(default=1000, ge=1)
    max_num_epochs: int = Field(default=1, ge=1)
    seed: int = 42
    val_period: int = Field(default=0, ge=0)
    """Validate every this many steps; 0: not between start and end."""
    val_at_start: bool = True
    val_at_end: bool = True
    val_batch_size: int = Field(default=8, ge=1)
    """Records per validation batch on each rank."""


class TeacherConfig(PolicyConfig):
    """A teacher: a model, and where its signals come from."""

    cache: str | None = None
    """Folder written by ``limbeck cache``: train from stored signals, without the teacher's weights."""
    cache_k: int = Field(default=128, ge=1)
    """Most likely tokens that ``limbeck cache`` stores per position; with a server it stores ``server.k``."""
    cache_kind: Literal["topk", "hidden"] = "topk"
    """What ``limbeck cache`` stores: top-k lists, or hidden states with the head."""
    server: ServerConfig | None = None
    """A server that scores for this teacher, instead of weights in this process; only its tokenizer is loaded here.
    With ``cache``: ``limbeck cache`` fills it from the server, and training reads the cache alone."""

    @model_validator(mode="before")
    @classmethod
    def _name_of_a_remote_model(cls, data: Any) -> Any:
        """A remote teacher needs no weights here, so its name or its tokenizer's is name enough."""
        if isinstance(data, Mapping) and data.get("server") is not None and data.get("model_name") is None:
            server, tokenizer = data["server"], data.get("tokenizer")
            names = [
                part.get(key) for part, key in ((server, "model"), (tokenizer, "name")) if isinstance(part, Mapping)
            ]
            if any(names):
                return {**data, "model_name": next(name for name in names if name)}
        return data

    def policy_settings(self) -> PolicyConfig:
        """The model itself, without where its signals come from."""
        names = PolicyConfig.model_fields
        return PolicyConfig.model_validate({k: v for k, v in self.model_dump().items() if k in names})


def _default_loss() -> CrossTokenizerDistillationLossConfig:
    return CrossTokenizerDistillationLossConfig.model_validate({})


class MasterConfig(BaseModel):
    """A whole run file."""

    model_config = ConfigDict(extra="forbid")

    policy: PolicyConfig
    teacher: TeacherConfig | None = None
    """The teacher; leave it out for cross-entropy alone."""
    teachers: list[TeacherConfig] = []
    """Several teachers, instead of ``teacher``."""
    loss_fn: CrossTokenizerDistillationLossConfig = Field(default_factory=_default_loss)
    data: DataConfig
    distillation: OffPolicyDistillationConfig = OffPolicyDistillationConfig()
    logger: LoggerConfig = LoggerConfig()
    cluster: ClusterConfig = ClusterConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()

    @model_validator(mode="after")
    def _consistent(self) -> MasterConfig:
        if self.teacher is not None and self.teachers:
            raise ValueError("teacher and teachers are both given; use one of them")
        prompts = self.distillation.num_prompts_per_step
        if "train_global_batch_size" not in self.policy.model_fields_set:
            self.policy.train_global_batch_size = prompts
        if prompts % self.policy.train_global_batch_size:
            raise ValueError(
                f"distillation.num_prompts_per_step is {prompts}, which is no multiple of "
                f"policy.train_global_batch_size {self.policy.train_global_batch_size}"
            )
        if self.data.join_to_bytes is not None and prompts != self.policy.train_global_batch_size:
            raise ValueError(
                "with data.join_to_bytes a record holds any number of rows, so a step cannot be cut into updates; "
                "leave policy.train_global_batch_size out"
            )
        return self

    @property
    def all_teachers(self) -> list[TeacherConfig]:
        """The teachers in order, however they were given."""
        return [self.teacher] if self.teacher is not None else list(self.teachers)
