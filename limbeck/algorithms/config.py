"""Run files, section by section."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from limbeck import short_forms
from limbeck.algorithms.engine import EngineConfig
from limbeck.algorithms.monitors import MonitorConfig
from limbeck.algorithms.rewards import RewardConfig
from limbeck.algorithms.rollouts import GuardConfig
from limbeck.algorithms.samples import SamplesConfig
from limbeck.config import FREE
from limbeck.data.sources import DataConfig
from limbeck.distributed.launch import ClusterConfig
from limbeck.errors import ConfigError
from limbeck.losses.chunk_policy import ChunkPolicyConfig
from limbeck.losses.distillation import CrossTokenizerDistillationLossConfig
from limbeck.losses.divergences import Direction
from limbeck.losses.hint import HintLossConfig
from limbeck.losses.policy_gradient import PolicyLossConfig
from limbeck.losses.preference import PreferenceLossConfig
from limbeck.losses.weights import ChannelWeights, WeightConfig
from limbeck.models.continuous import SamplerKind
from limbeck.models.generate import SamplingConfig
from limbeck.models.policy import PolicyConfig
from limbeck.teachers.build import TeacherConfig
from limbeck.traces.dataset import TracesConfig
from limbeck.traces.states import FailedStatesConfig
from limbeck.utils.checkpoint import CheckpointingConfig
from limbeck.utils.logger import LoggerConfig

T = TypeVar("T")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class LoopConfig(_Section):
    """Length of a run and when it is validated."""

    num_prompts_per_step: int = Field(default=32, ge=1)
    """Records per step over all ranks."""
    max_num_steps: int = Field(default=1000, ge=1, json_schema_extra=FREE)
    """Optimizer steps after which the run ends."""
    max_num_epochs: int = Field(default=1, ge=1, json_schema_extra=FREE)
    """Passes over the data after which the run ends, whichever comes first."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Of the order of records, new weights and dropout."""
    val_period: int = Field(default=0, ge=0, json_schema_extra=FREE)
    """Validate every this many steps; 0: not between start and end."""
    val_at_start: bool = Field(default=True, json_schema_extra=FREE)
    """Validate before the first step."""
    val_at_end: bool = Field(default=True, json_schema_extra=FREE)
    """Validate after the last step."""
    val_batch_size: int = Field(default=8, ge=1, json_schema_extra=FREE)
    """Records per validation batch on each rank."""
    save_start: bool = Field(default=False, json_schema_extra=FREE)
    """Also write a checkpoint ``step_0`` before training, to compare with."""


class OffPolicyDistillationConfig(LoopConfig):
    """Length of an off-policy distillation and when it is validated."""

    samples: SamplesConfig = Field(default=SamplesConfig(), json_schema_extra=FREE)
    """What student and teacher write behind fixed prompts at every validation."""


class _RunFile(_Section):
    """What every run file understands: short forms."""

    @model_validator(mode="before")
    @classmethod
    def _written_out(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        out = _as_value_error(lambda: short_forms.expand(data))
        loop = out.get("distillation")
        given = loop.get("max_num_steps") if isinstance(loop, Mapping) else None
        if isinstance(loop, LoopConfig):
            given = loop.max_num_steps
        steps = given if isinstance(given, int) else LoopConfig().max_num_steps
        return _as_value_error(lambda: short_forms.write_out_schedule(out, steps))


def _as_value_error(make: Callable[[], T]) -> T:
    """Refusals of the parts as pydantic expects them."""
    try:
        return make()
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _default_loss() -> CrossTokenizerDistillationLossConfig:
    return CrossTokenizerDistillationLossConfig.model_validate({})


class MasterConfig(_RunFile):
    """Distils teachers of any tokenizer into a student, on texts or conversations."""

    policy: PolicyConfig
    """The student."""
    teacher: TeacherConfig | None = None
    """The teacher; leave it out for cross-entropy alone."""
    teachers: list[TeacherConfig] = []
    """Several teachers, instead of ``teacher``."""
    loss_fn: CrossTokenizerDistillationLossConfig = Field(default_factory=_default_loss)
    """What is minimised."""
    data: DataConfig
    """What is read."""
    distillation: OffPolicyDistillationConfig = OffPolicyDistillationConfig()
    """How long, and when it is validated."""
    logger: LoggerConfig = Field(default=LoggerConfig(), json_schema_extra=FREE)
    """The run folder and where metrics go."""
    cluster: ClusterConfig = Field(default=ClusterConfig(), json_schema_extra=FREE)
    """Where the processes of a run come from."""
    checkpointing: CheckpointingConfig = Field(default=CheckpointingConfig(), json_schema_extra=FREE)
    """When to save, and what to keep."""

    @model_validator(mode="after")
    def _consistent(self) -> MasterConfig:
        if self.teacher is not None and self.teachers:
            raise ValueError("teacher and teachers are both given; use one of them")
        if not self.named_teachers:
            self.loss_fn = self.loss_fn.without_teachers()
        elif self.policy.init == "pretrained":
            self.loss_fn = self.loss_fn.for_pretrained()
        if len(self.named_teachers) > 1:
            self.loss_fn = self.loss_fn.for_several()
        remote = any(own.server is not None and own.cache is None for own in self.all_teachers)
        if remote and self.loss_fn.temperature != 1.0:
            raise ValueError(
                f"loss_fn.temperature is {self.loss_fn.temperature}, but a server gives log-probabilities at 1; "
                "set it to 1"
            )
        metric = self.checkpointing.metric_name
        if metric is not None and metric.startswith(("val/", "val:")) and self.data.validation is None:
            raise ValueError(
                f"checkpointing.metric_name is {metric!r}, but data.validation is not given, so nothing measures it; "
                "give validation data, or leave metric_name out"
            )
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
    def named_teachers(self) -> list[TeacherConfig]:
        """The teachers in order, however they were given."""
        return [self.teacher] if self.teacher is not None else list(self.teachers)

    @property
    def all_teachers(self) -> list[TeacherConfig]:
        """The teachers that the loss asks: with ``loss_fn.kl_loss_weight: 0`` none."""
        return self.named_teachers if self.loss_fn.kl_loss_weight > 0 else []

    @property
    def reads_start(self) -> bool:
        """Whether a run that goes on reads the weights once more that the student began with."""
        return self.policy.trains_adapters()


# -- on-policy ---------------------------------------------------------------------------------------------------------


class SampledLossConfig(CrossTokenizerDistillationLossConfig):
    """The distillation loss on text that the student wrote: reverse KL, and no cross-entropy with its own words."""

    ce_loss_scale: float = Field(0.0, description="factor of cross-entropy")
    direction: Direction = Field("reverse", description="forward: KL(teacher||student); reverse; jsd")

    def _default_ce_scale(self, *, taught: bool) -> float:
        return 0.0


class AnchorConfig(_Section):
    """A second divergence on sampled text: reverse KL to the student's own start or average."""

    kind: Literal["frozen", "ema"] = "frozen"
    """The start as it was, or a moving average of the weights."""
    weight: float = Field(default=0.1, gt=0)
    """Of this divergence beside that of the teachers."""
    ema_decay: float = Field(default=0.99, ge=0, lt=1)
    """With ``ema``: share of the average that stays at each step."""


class OnPolicyConfig(SamplingConfig):
    """What the student writes, and how it is corrected."""

    fraction: float = Field(default=1.0, ge=0, le=1)
    """Share of the records that are prompts; the others are learnt from as they are stored. Which is which follows from
    ``distillation.seed``. The two losses count by their shares."""
    prompt_tokens: int = Field(default=32, ge=1)
    """Of a text so many student tokens are its prompt (text mode)."""
    turns: Literal["last", "all"] = "last"
    """A conversation is a prompt up to its last answer, or, with ``all``, up to each of its answers: as many prompts as
    it has assistant turns."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Continuations of each prompt."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Most that is written after a prompt: the first tokens of an answer teach most."""
    loss_fn: SampledLossConfig = Field(default_factory=lambda: SampledLossConfig.model_validate({}))
    """The loss on sampled text, with defaults of its own: reverse KL, no cross-entropy."""
    policy_gradient: ChunkPolicyConfig | None = None
    """The reverse KL as a policy gradient with the probabilities of sampled tokens alone, in place of ``loss_fn``."""
    anchor: AnchorConfig | None = None
    """Hold the student near its start, or near an average of its past, on what it writes."""
    reward: RewardConfig | None = None
    """Score every sample and learn from that, too, by policy gradient."""
    sampler: SamplerKind = "auto"
    """In this process: ``generate``, ``batch_size`` answers from their first token to the last one's end, or
    ``continuous``, where one that ends makes room for the next at once, on a copy of the weights; ``auto``: the second
    on a GPU with a flash kernel, a model that is not split and no ``stop`` texts, otherwise the first."""
    engine: EngineConfig | None = None
    """Sample by vLLM, or in processes of a Ray cluster, instead of in this process."""
    guard: GuardConfig = Field(default=GuardConfig(), json_schema_extra=FREE)
    """Signs that end a run which runs away with its own text."""
    monitor_chunks: int = Field(default=256, ge=0, json_schema_extra=FREE)
    """Chunks per micro-batch of which entropy, the teacher's log-probabilities and the reverse KL are measured."""
    failed_states: FailedStatesConfig | None = None
    """``data.train`` holds agent logs: the student tries again where a recorded action failed, and its teachers read a
    hint about the failure before they score the attempt."""
    compare_stops: bool = True
    """Compare the student's end of an answer with the teacher's by role, whatever their ids; False: leave it out."""
    mask_blanks: bool = True
    """Leave out chunks of nothing but spaces and tabs with teachers of other tokenizers: these differ there in
    splitting and not in meaning."""

    @model_validator(mode="after")
    def _consistent(self) -> OnPolicyConfig:
        if self.loss_fn.learnable_projection or self.loss_fn.projection_matrix_path is not None:
            raise ValueError("on_policy.loss_fn uses the projections of loss_fn; give projection keys there")
        if self.policy_gradient is not None and self.loss_fn.model_fields_set:
            raise ValueError("on_policy.loss_fn and on_policy.policy_gradient are both given; use one of them")
        if self.engine is not None and self.engine.ray is None and self.sampler != "auto":
            raise ValueError("on_policy.sampler and on_policy.engine are both given; use one of them")
        if self.reward is not None and self.samples_per_prompt < 2:
            raise ValueError("a reward counts against the other samples of its prompt; set samples_per_prompt above 1")
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError("at temperature 0 all samples of a prompt are the same; set samples_per_prompt to 1")
        return self


class OnPolicyMasterConfig(MasterConfig):
    """Distils on text that the student writes itself, scored by the teachers."""

    algorithm: Literal["on_policy_distillation"] = "on_policy_distillation"
    """``on_policy_distillation`` lets the student write; left out: distillation on stored text."""
    on_policy: OnPolicyConfig = OnPolicyConfig()
    """What the student writes, and how it is corrected."""

    @model_validator(mode="after")
    def _can_be_sampled(self) -> OnPolicyMasterConfig:
        if self.on_policy.fraction == 0:
            return self
        states = self.on_policy.failed_states
        if not self.all_teachers and (self.named_teachers or states is None):
            raise ValueError("on-policy distillation needs a teacher; give teacher, or set on_policy.fraction to 0")
        if states is not None and (self.data.mode != "chat" or self.on_policy.fraction < 1):
            raise ValueError("on_policy.failed_states needs data.mode chat and on_policy.fraction 1")
        if states is not None and self.on_policy.turns == "all":
            raise ValueError("a failed state is one place of its conversation; leave out on_policy.turns")
        if states is not None and self.all_teachers and "self_teacher" in states.model_fields_set:
            raise ValueError("teacher and on_policy.failed_states.self_teacher are both given; use one of them")
        self._check_averages()
        if any(own.cache is not None for own in self.all_teachers):
            raise ValueError("a cache has no signals for text that is yet to be written; leave out teacher.cache")
        if self.loss_fn.learnable_projection:
            raise ValueError("loss_fn.learnable_projection goes with on_policy.fraction 0 alone; leave it out")
        if self.policy.train_global_batch_size != self.distillation.num_prompts_per_step:
            raise ValueError("what is sampled is learnt from in one update; leave out policy.train_global_batch_size")
        remote = any(own.server is not None for own in self.all_teachers)
        if remote and self.on_policy.loss_fn.temperature != 1.0:
            raise ValueError("a server gives log-probabilities at 1; set on_policy.loss_fn.temperature to 1")
        most = self.policy.max_total_sequence_length
        length = min(self.data.max_input_seq_length or most, most)
        if length <= self.on_policy.max_new_tokens:
            raise ValueError(
                f"on_policy.max_new_tokens is {self.on_policy.max_new_tokens}, which leaves no room for a prompt in "
                f"rows of {length} tokens; lower it, or raise data.max_input_seq_length"
            )
        return self

    @property
    def self_teacher(self) -> FailedStatesConfig | None:
        """How the student reads the hints itself; None where other teachers do, or nobody."""
        return None if self.all_teachers or self.on_policy.fraction == 0 else self.on_policy.failed_states

    @property
    def reads_start(self) -> bool:
        own, anchor = self.self_teacher, self.on_policy.anchor if self.on_policy.fraction else None
        frozen = (anchor is not None and anchor.kind == "frozen") or (own is not None and own.self_teacher == "frozen")
        return frozen or super().reads_start

    def _check_averages(self) -> None:
        own, anchor = self.self_teacher, self.on_policy.anchor
        averaged = {
            "on_policy.anchor.kind": anchor is not None and anchor.kind == "ema",
            "on_policy.failed_states.self_teacher": own is not None and own.self_teacher == "ema",
        }
        narrow = (self.policy.param_dtype or "float32") != "float32"
        for name in (name for name, on in averaged.items() if on and narrow):
            raise ValueError(
                f"an average of {self.policy.param_dtype} weights would stand still; set policy.param_dtype to float32 "
                f"or {name} to frozen"
            )


# -- traces ------------------------------------------------------------------------------------------------------------


class TraceLossConfig(_Section):
    """total = policy.weight x policy + alpha x hint + beta x preference."""

    policy: PolicyLossConfig = PolicyLossConfig()
    """The policy channel: rewards."""
    hint: HintLossConfig = HintLossConfig()
    """The hint channel: failed messages."""
    preference: PreferenceLossConfig = PreferenceLossConfig()
    """The preference channel."""
    alpha: WeightConfig = WeightConfig(value=1.0)
    """Weight of the hint channel over the steps; a number, or a schedule."""
    beta: WeightConfig = WeightConfig(value=1.0)
    """Weight of the preference channel over the steps; a number, or a schedule."""
    block_rows: int = Field(default=512, ge=1)
    """Rows that pass through the head at a time."""

    @field_validator("alpha", "beta", mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"value": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


class TraceTrainingConfig(LoopConfig):
    """Length of a training on traces; validation measures the probabilities of failed and preferred messages."""

    num_prompts_per_step: int = Field(default=8, ge=1)
    """Traces per step over all ranks."""
    monitor: MonitorConfig = Field(default=MonitorConfig(), json_schema_extra=FREE)
    """Figures that show a collapse early."""


class TraceMasterConfig(_RunFile):
    """Trains a student on agent traces: rewards, hints at failed messages, preference pairs."""

    algorithm: Literal["trace_distillation"] = "trace_distillation"
    """``trace_distillation`` trains on agent traces; left out: cross-tokenizer distillation."""
    policy: PolicyConfig
    """The student."""
    teacher: TeacherConfig | None = None
    """Another model, of any family, that reads the hints; default: the student itself (``loss.hint.self_teacher``)."""
    traces: TracesConfig
    """What is read."""
    loss: TraceLossConfig = TraceLossConfig()
    """What is minimised."""
    distillation: TraceTrainingConfig = TraceTrainingConfig()
    """How long, and when it is validated."""
    logger: LoggerConfig = Field(default=LoggerConfig(), json_schema_extra=FREE)
    """The run folder and where metrics go."""
    cluster: ClusterConfig = Field(default=ClusterConfig(), json_schema_extra=FREE)
    """Where the processes of a run come from."""
    checkpointing: CheckpointingConfig = Field(default=CheckpointingConfig(), json_schema_extra=FREE)
    """When to save, and what to keep."""

    @model_validator(mode="after")
    def _consistent(self) -> TraceMasterConfig:
        prompts = self.distillation.num_prompts_per_step
        if "train_global_batch_size" not in self.policy.model_fields_set:
            self.policy.train_global_batch_size = prompts
        if self.policy.train_global_batch_size != prompts:
            raise ValueError(
                f"policy.train_global_batch_size is {self.policy.train_global_batch_size}, but a step takes "
                f"distillation.num_prompts_per_step = {prompts} traces; leave it out"
            )
        self._check_teacher()
        on = self.channels()
        if not any(any(w.model_dump()[k] for k in ("value", "final")) for w in on.values()):
            raise ValueError("every channel is off or has weight 0, so there is nothing to train; raise a weight")
        return self

    def _check_teacher(self) -> None:
        hint = self.loss.hint
        if self.teacher is None:
            narrow = (self.policy.param_dtype or "float32") != "float32"
            if narrow and hint.self_teacher == "ema" and self.traces.channels.hint:
                raise ValueError(
                    f"an average of {self.policy.param_dtype} weights would stand still; set policy.param_dtype to "
                    "float32 or loss.hint.self_teacher to frozen"
                )
            return
        if "self_teacher" in hint.model_fields_set:
            raise ValueError("teacher and loss.hint.self_teacher are both given; use one of them")
        if self.teacher.cache is not None:
            raise ValueError("a hinted teacher is a live model or a server; leave out teacher.cache")
        if self.teacher.server is not None and (hint.temperature != 1 or (hint.topk and hint.topk_by == "student")):
            raise ValueError(
                "a server gives its own most likely tokens at temperature 1; set loss.hint.temperature to 1 and leave "
                "out loss.hint.topk or choose topk_by: teacher"
            )

    def channels(self) -> dict[str, WeightConfig]:
        """Channels that are switched on, with their weights."""
        weights = {
            "policy": WeightConfig(value=self.loss.policy.weight),
            "hint": self.loss.alpha,
            "preference": self.loss.beta,
        }
        return {name: weight for name, weight in weights.items() if getattr(self.traces.channels, name)}

    def weights(self) -> ChannelWeights:
        """Factors of the channels over the steps; 0 for those that are switched off."""
        on = self.channels()
        off = WeightConfig()
        return ChannelWeights(
            alpha=on.get("hint", off).schedule(),
            beta=on.get("preference", off).schedule(),
            policy=on.get("policy", off).value,
        )

    def uses(self, channel: str) -> bool:
        """Whether a channel ever counts: switched on, and with a weight that is not always 0."""
        weight = self.channels().get(channel)
        return weight is not None and any(asdict(weight.schedule())[key] > 0 for key in ("value", "final"))
