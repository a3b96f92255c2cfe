"""Configuration of a policy (student or teacher), with the published keys and Limbeck's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from limbeck.utils.errors import ConfigError

Dtype = Literal["float32", "bfloat16", "float16"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class TokenizerConfig(_Strict):
    """Where the tokenizer comes from; default: the model's own."""

    name: str | None = None
    chat_template: str | None = None
    """Template text, or a path to a ``.jinja`` file; default: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = {}


class DTensorConfig(_Strict):
    """Parallel layout of the model."""

    enabled: bool = True
    cpu_offload: bool = False
    """With ``fsdp``: keep shards, gradients and optimizer state in main memory."""
    sequence_parallel: bool = False
    """With tensor parallelism: split hidden states between attention and MLP along the sequence."""
    activation_checkpointing: bool = False
    tensor_parallel_size: int = Field(default=1, ge=1)
    context_parallel_size: int = Field(default=1, ge=1)
    context_parallel_attention: Literal["auto", "gather", "ring"] = "auto"
    """How ranks that share a sequence attend: to gathered keys and values, which is also ``auto``. ``ring`` was removed
    and is refused."""
    fsdp: bool = False
    """Shard parameters, gradients and optimizer state over the data- and context-parallel processes (FSDP2)."""


class DynamicBatchingConfig(_Strict):
    """Micro-batches by token budget instead of by number of rows."""

    enabled: bool = False
    train_mb_tokens: int | None = Field(default=None, ge=1)
    logprob_mb_tokens: int | None = Field(default=None, ge=1)
    teacher_mb_tokens: int | list[int] | None = None
    sequence_length_round: int = Field(default=1, ge=1)


class SequencePackingConfig(DynamicBatchingConfig):
    """Several samples in one sequence, attention within each of them."""

    algorithm: str = "modified_first_fit_decreasing"


class OptimizerConfig(_Strict):
    """An optimizer by dotted name, such as ``torch.optim.AdamW``."""

    name: str
    kwargs: dict[str, Any] = {}


class SchedulerConfig(_Strict):
    """One schedule by dotted name; in a list, one entry may hold the ``milestones`` at which the next one begins."""

    name: str | None = None
    kwargs: dict[str, Any] = {}
    milestones: list[int] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> SchedulerConfig:
        if (self.name is None) == (self.milestones is None):
            raise ValueError("a scheduler entry has either a name or milestones")
        return self


class LoraConfig(_Strict):
    """Low-rank adapters through peft; only they are trained, and they are merged on export."""

    enabled: bool = True
    r: int = Field(default=16, ge=1)
    alpha: float = 32.0
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: str | list[str] = "all-linear"
    modules_to_save: list[str] | None = None
    use_rslora: bool = False


class CompileConfig(_Strict):
    """torch.compile of the model's body. Round lengths up (``sequence_length_round``) to bound recompilation."""

    enabled: bool = False
    mode: str | None = None
    dynamic: bool | None = None


class PolicyConfig(_Strict):
    """A causal language model and how to train or score with it."""

    model_name: str | None = None
    """Folder, hub id or GGUF file; with ``init: random`` also a folder or hub id that only gives the configuration."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    init: Literal["pretrained", "random"] = "pretrained"
    model_overrides: dict[str, Any] = {}
    """Keys of the transformers configuration; with ``init: random`` and no ``model_name`` it must hold model_type."""
    train_global_batch_size: int = Field(default=32, ge=1)
    train_micro_batch_size: int = Field(default=1, ge=1)
    logprob_batch_size: int = Field(default=1, ge=1)
    max_total_sequence_length: int = Field(default=2048, ge=1)
    precision: Dtype = "float32"
    """Type of the computation. bfloat16 over float32 parameters runs under autocast."""
    param_dtype: Dtype | None = None
    """Type of the parameters; default: float32 where they are trained, ``precision`` where they are frozen."""
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    dtensor_cfg: DTensorConfig = DTensorConfig()
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    make_sequence_length_divisible_by: int = Field(default=1, ge=1)
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    optimizer: OptimizerConfig = OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 1e-5, "weight_decay": 0.0})
    scheduler: SchedulerConfig | list[SchedulerConfig] | None = None
    lora: LoraConfig | None = None
    compile: CompileConfig = CompileConfig()

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(data.get("compile"), bool):
            data = {**data, "compile": {"enabled": data["compile"]}}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> PolicyConfig:
        if self.model_name is None and (self.init != "random" or "model_type" not in self.model_overrides):
            raise ValueError("model_name is missing; give a model, or init: random with model_overrides.model_type")
        if self.dynamic_batching.enabled and self.sequence_packing.enabled:
            raise ValueError("dynamic_batching and sequence_packing are both enabled; switch one of them off")
        for name in ("dynamic_batching", "sequence_packing"):
            section = getattr(self, name)
            if section.enabled and section.train_mb_tokens is None:
                raise ValueError(f"{name}.train_mb_tokens is missing; give the tokens per micro-batch")
        return self


def read_template(given: str | None) -> str | None:
    """A chat template's text, whether given itself or as the path of a ``.jinja`` file; None: the tokenizer's own."""
    if given is None or not given.endswith(".jinja"):
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {given!r} cannot be read: {error}") from error
