"""Run files, section by section."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from typing_extensions import Self

from limbeck import short_forms
from limbeck.algorithms.engine import EngineConfig
from limbeck.algorithms.monitors import MonitorConfig
from limbeck.algorithms.observers.early_stopping import EarlyStoppingConfig
from limbeck.algorithms.observers.record_bits import RecordBitsConfig
from limbeck.algorithms.observers.runaway import GuardConfig
from limbeck.algorithms.observers.samples import SamplesConfig
from limbeck.algorithms.observers.tasks import RunTaskConfig
from limbeck.algorithms.rewards import RewardConfig
from limbeck.config import FREE
from limbeck.data.sources import DataConfig
from limbeck.distributed.device import default_device
from limbeck.distributed.launch import ClusterConfig
from limbeck.environments.kinds import AnyEnvironment
from limbeck.errors import ConfigError
from limbeck.evaluation.tasks import check_names
from limbeck.losses.chunk_policy import ChunkPolicyConfig
from limbeck.losses.distillation_config import CrossTokenizerDistillationLossConfig, Gate, Scoring
from limbeck.losses.divergences import Direction
from limbeck.losses.hint import HintLossConfig
from limbeck.losses.policy_gradient import PolicyLossConfig
from limbeck.losses.preference import PreferenceLossConfig
from limbeck.losses.weights import ChannelWeights, WeightConfig
from limbeck.models.continuous import SamplerKind
from limbeck.models.generate import SamplingConfig
from limbeck.models.policy import PolicyConfig
from limbeck.teachers.build import TeacherConfig
from limbeck.teachers.self_teacher import SelfSource
from limbeck.traces.dataset import TracesConfig
from limbeck.traces.failed_state_prompts import FailedStatesConfig, HintAfterFailureConfig
from limbeck.utils.checkpoint import CheckpointingConfig
from limbeck.utils.logger import LoggerConfig

T = TypeVar("T")
_MOST = 2**53
"""Beyond it a count is no longer exact in floating point; no run comes there."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class LoopConfig(_Section):
    """Length of a run and when it is validated."""

    num_prompts_per_step: int = Field(default=32, ge=1, le=_MOST)
    """Records per step over all ranks."""
    max_num_steps: int = Field(default=1000, ge=1, le=_MOST, json_schema_extra=FREE)
    """Optimizer steps after which the run ends."""
    max_num_epochs: int = Field(default=1, ge=1, le=_MOST, json_schema_extra=FREE)
    """Passes over the data after which the run ends, whichever comes first."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seed of the order of records, new weights and dropout."""
    val_period: int = Field(default=0, ge=0, json_schema_extra=FREE)
    """Validate every this many steps; 0: not between start and end."""
    val_at_start: bool = Field(default=True, json_schema_extra=FREE)
    """Validate before the first step."""
    val_at_end: bool = Field(default=True, json_schema_extra=FREE)
    """Validate after the last step."""
    val_batch_size: int | None = Field(default=None, ge=1, json_schema_extra=FREE)
    """Records per validation batch on each rank, which no figure depends on; null: 8 on a CPU, 64 on an accelerator,
    in micro-batches like those of training."""
    save_start: bool = Field(default=False, json_schema_extra=FREE)
    """Also write a checkpoint ``step_0`` before training, to compare with."""
    early_stopping: EarlyStoppingConfig | None = Field(default=None, json_schema_extra=FREE)
    """End the run when a metric of its validations no longer improves; null: it takes all its steps."""

    @property
    def val_rows(self) -> int:
        """Records per validation batch on each rank of this machine."""
        return self.val_batch_size or (8 if default_device().type == "cpu" else 64)


class OffPolicyDistillationConfig(LoopConfig):
    """Length of an off-policy distillation and when it is validated."""

    samples: SamplesConfig = Field(default=SamplesConfig(), json_schema_extra=FREE)
    """Texts that student and teacher write behind fixed prompts at every validation."""
    tasks: list[RunTaskConfig] = Field(default=[], json_schema_extra=FREE)
    """Tasks that the student is validated on: each gives ``val/task/NAME``, the share of its problems that a verifier
    finds solved. All of them take at most a fifth of the run's time, unless they say how many problems to ask."""
    baseline: bool = Field(default=False, json_schema_extra=FREE)
    """Then train the same student by cross-entropy alone on the same records, in ``baseline`` inside the run folder, so
    that the report and the model card can state what the teacher was worth."""
    record_bits: RecordBitsConfig = Field(default=RecordBitsConfig(), json_schema_extra=FREE)
    """Bits of single validation records, by which the gain over the baseline has a standard error."""


class _RunFile(_Section):
    """Base of every run file, which understands short forms."""

    @model_validator(mode="before")
    @classmethod
    def _written_out(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        out = _as_value_error(lambda: short_forms.expand(data))
        loop = out.get("distillation")
        max_steps = loop.get("max_num_steps") if isinstance(loop, Mapping) else None
        if isinstance(loop, LoopConfig):
            max_steps = loop.max_num_steps
        # more is refused with the section
        steps = min(max_steps, _MOST) if isinstance(max_steps, int) else LoopConfig().max_num_steps
        return _as_value_error(lambda: short_forms.write_out_schedule(out, steps))


def _as_value_error(make: Callable[[], T]) -> T:
    """Refusals of the parts as pydantic expects them."""
    try:
        return make()
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _one_metric(
    loop: LoopConfig, checkpointing: CheckpointingConfig, *, usual: str | None, validates: bool
) -> CheckpointingConfig:
    """The section ``checkpointing`` with the metric of early stopping: the best checkpoint is the one that it names."""
    stopping, ranked = loop.early_stopping, checkpointing.metric_name
    if ranked is not None and ranked != "val_loss" and not ranked.startswith(("val/", "val:")):
        raise ValueError(
            f"checkpointing.metric_name is {ranked!r}, but checkpoints are ranked by what validations measure; give a "
            "name such as val/bpb or val/loss, or leave it out"
        )
    if stopping is None:
        return checkpointing
    if not validates:
        raise ValueError("distillation.early_stopping needs validations; give data.validation, or set data.holdout")
    if loop.val_period == 0:
        raise ValueError(
            "distillation.early_stopping needs validations while a run goes on; set distillation.val_period"
        )
    named = [name.replace(":", "/", 1) for name in (stopping.metric, checkpointing.metric_name) if name is not None]
    metric = named[0] if named else usual
    if metric is None or not metric.startswith("val/"):
        raise ValueError(
            f"distillation.early_stopping goes by {metric or 'no metric'}, which no validation measures; set "
            "distillation.early_stopping.metric to the name of one as logged, such as val/bpb on texts or "
            "val/erroneous_logprob on traces"
        )
    if len(set(named)) > 1:
        raise ValueError(
            f"distillation.early_stopping.metric is {named[0]!r} and checkpointing.metric_name {named[1]!r}, but the "
            "best checkpoint is the one that early stopping goes by; give one of them"
        )
    loop.early_stopping = stopping.model_copy(update={"metric": metric})
    return checkpointing.model_copy(update={"metric_name": metric})


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
    """Loss that is minimised."""
    data: DataConfig
    """Data that are read."""
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
        pretrained, teachers = self.policy.init == "pretrained", len(self.named_teachers)
        self._check_teachers_objectives()
        self.loss_fn = self.loss_fn.settled(pretrained=pretrained, teachers=teachers, modes=self.modes)
        self._check_temperature("loss_fn", self.loss_fn.temperature)
        self._check_self_teachers()
        self._check_baseline()
        self._check_routes()
        check_names(self.distillation.tasks)
        validates = self.data.validates or bool(self.distillation.tasks)
        usual = "val/bpb" if self.data.validates or not self.distillation.tasks else None
        self.checkpointing = _one_metric(self.distillation, self.checkpointing, usual=usual, validates=validates)
        metric = self.checkpointing.metric_name
        self.checkpointing = self._by_task(metric)
        if metric is not None and metric.startswith(("val/", "val:")) and not validates:
            raise ValueError(
                f"checkpointing.metric_name is {metric!r}, but data.validation is not given, so nothing measures it; "
                "give validation data, set data.holdout, or leave metric_name out"
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
    def modes(self) -> list[str]:
        """The objective of every teacher."""
        return [(teacher.loss_fn or self.loss_fn).mode for teacher in self.named_teachers]

    def _check_teachers_objectives(self) -> None:
        """Refuse teachers' own objectives where they cannot be."""
        objectives = [teacher.loss_fn for teacher in self.named_teachers if teacher.loss_fn is not None]
        if objectives and len(self.named_teachers) < 2:
            raise ValueError("teacher.loss_fn is for one of several teachers; give the run's loss_fn alone")
        if objectives and self.loss_fn.teacher_combination == "averaged_logits":
            raise ValueError(
                "with loss_fn.teacher_combination 'averaged_logits' all teachers are one target, which one objective "
                "compares; leave out teachers.N.loss_fn, or use sum"
            )
        for objective in objectives:
            objective.check_temperature(self.loss_fn.temperature)

    def _by_task(self, metric: str | None) -> CheckpointingConfig:
        """The section ``checkpointing``: of scores of tasks the higher one is the better."""
        if metric is None or not metric.startswith(("val/task/", "val:task/")):
            return self.checkpointing
        name, known = metric[len("val/task/") :], [task.name for task in self.distillation.tasks]
        if name not in known:
            raise ValueError(
                f"the metric {metric!r} names no task of this run; expected val/task/ and one of "
                f"{', '.join(known) or 'distillation.tasks, which is empty'}"
            )
        return self.checkpointing.model_copy(update={"higher_is_better": True})

    def _check_temperature(self, where: str, temperature: float) -> None:
        kinds = [teacher.source.kind for teacher in self.all_teachers if not teacher.kind.any_temperature]
        if kinds and temperature != 1.0:
            raise ValueError(
                f"{where}.temperature is {temperature}, but a {kinds[0]} gives log-probabilities at 1; set it to 1"
            )

    def _check_routes(self) -> None:
        """Refuse names by which no record could choose a teacher."""
        names = [teacher.name for teacher in self.named_teachers if teacher.name is not None]
        if len(set(names)) < len(names):
            raise ValueError(f"two teachers have one name: {', '.join(names)}; give each its own")
        if names and self.data.teacher_key is None:
            raise ValueError("teachers have names, but data.teacher_key is null, so that no record can choose one")
        if not names and self.data.teacher_key not in (None, type(self.data).model_fields["teacher_key"].default):
            raise ValueError("data.teacher_key is given, but no teacher has a name; give each of them teachers.name")
        if names and self.loss_fn.teacher_combination == "averaged_logits":
            raise ValueError(
                "loss_fn.teacher_combination averaged_logits takes all teachers for every record; leave out their "
                "names, or use another combination"
            )

    def _check_baseline(self) -> None:
        if not self.distillation.baseline:
            return
        if not self.all_teachers:
            raise ValueError(
                "distillation.baseline is true, but the run is cross-entropy alone already; leave baseline out"
            )
        if not self.data.validates:
            raise ValueError(
                "distillation.baseline is true, but nothing compares the two students; give data.validation, or set "
                "data.holdout"
            )

    def _check_self_teachers(self) -> None:
        """Refuse a student that is its own teacher where that teaches nothing."""
        sources = [teacher.source for teacher in self.all_teachers if isinstance(teacher.source, SelfSource)]
        if any(source.weights == "live" for source in sources):
            raise ValueError(
                "source.weights is 'live': a student learns nothing from what it says itself at that moment; use "
                "frozen, ema or base"
            )
        if any(source.weights == "base" for source in sources) and self.policy.adapters is None:
            raise ValueError(
                "source.weights is 'base', but the student has no adapters; set policy.lora, or use frozen"
            )
        loss = self.loss_fn
        alone = bool(sources) and len(sources) == len(self.all_teachers)
        if alone and loss.ce_loss_scale == 0 and not loss.dynamic_loss_scaling:
            raise ValueError(
                "the student is its own only teacher and loss_fn.ce_loss_scale is 0, so that it would stay as it is; "
                "raise it, or add another teacher"
            )
        narrow = (self.policy.param_dtype or "float32") != "float32"
        if narrow and any(source.weights == "ema" for source in sources):
            raise ValueError(
                f"an average of {self.policy.param_dtype} weights would stand still; set policy.param_dtype to float32 "
                "or source.weights to frozen"
            )

    @property
    def named_teachers(self) -> list[TeacherConfig]:
        """The teachers in order, however they were given; one that is the student itself has the student's model."""
        sections = [self.teacher] if self.teacher is not None else self.teachers
        return [section.beside(self.policy) for section in sections]

    @property
    def all_teachers(self) -> list[TeacherConfig]:
        """The teachers that the loss asks: with ``loss_fn.kl_loss_weight: 0`` none."""
        return self.named_teachers if self.loss_fn.kl_loss_weight > 0 else []

    @property
    def reads_start(self) -> bool:
        """Whether a run that goes on reads the weights once more that the student began with."""
        teachers = self.all_teachers
        return self.policy.adapters is not None or any(t.kind.reads_start(t.source) for t in teachers)


# -- on-policy ---------------------------------------------------------------------------------------------------------


class SampledLossConfig(CrossTokenizerDistillationLossConfig):
    """The distillation loss on text that the student wrote: reverse KL, and no cross-entropy with its own words."""

    default_direction: ClassVar[Direction] = "reverse"

    ce_loss_scale: float | None = Field(None, ge=0, description="factor of cross-entropy; null: 0")
    gate: Gate | None = Field(None, description="soft: count a chunk by the teacher's advantage; null: none")
    teacher_scoring: Scoring | None = Field(
        None, description="per-sample weights softmax(alpha * score) by this score; null: static"
    )

    def settled(self, *, pretrained: bool = False, teachers: int = 1, modes: Sequence[str] = ()) -> Self:
        """These settings with what is null chosen, which goes by no student and no number of teachers here."""
        chosen = {"ce_loss_scale": 0.0, "gate": "none", "teacher_combination": "sum", "teacher_scoring": "static"}
        update = {key: value for key, value in chosen.items() if getattr(self, key) is None}
        return self.model_copy(update=update) if update else self


def _sampled_loss() -> SampledLossConfig:
    return SampledLossConfig.model_validate({}).settled()


class AnchorConfig(_Section):
    """A second divergence on sampled text: reverse KL to the student's own start or average."""

    kind: Literal["frozen", "ema"] = "frozen"
    """The start as it was, or a moving average of the weights."""
    weight: float = Field(default=0.1, gt=0)
    """Weight of this divergence beside that of the teachers."""
    ema_decay: float = Field(default=0.99, ge=0, lt=1)
    """With ``ema``: share of the average that stays at each step."""


class OnPolicyConfig(SamplingConfig):
    """Text that the student writes, and how it is corrected."""

    fraction: float = Field(default=1.0, ge=0, le=1)
    """Share of the records that are prompts; the others are learnt from as they are stored. Which is which follows from
    ``distillation.seed``. The two losses count by their shares."""
    prompt_tokens: int = Field(default=32, ge=1)
    """Student tokens at the start of a text that are its prompt (text mode)."""
    turns: Literal["last", "all"] = "last"
    """A conversation is a prompt up to its last answer, or, with ``all``, up to each of its answers: as many prompts as
    it has assistant turns."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Continuations of each prompt."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Most that is written after a prompt: the first tokens of an answer teach most."""
    loss_fn: SampledLossConfig = Field(default_factory=_sampled_loss)
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
    overlap: int = Field(default=0, ge=0, le=1)
    """1: while a step trains, an ``engine`` writes the samples of the next, with weights that are one step old, and
    served teachers score them; 0: one after the other."""
    guard: GuardConfig = Field(default=GuardConfig(), json_schema_extra=FREE)
    """Signs that end a run which runs away with its own text."""
    monitor_chunks: int = Field(default=256, ge=0, json_schema_extra=FREE)
    """Chunks per micro-batch of which entropy, the teacher's log-probabilities and the reverse KL are measured."""
    environment: AnyEnvironment | None = None
    """Tools that answer the student's calls: each record begins an episode of several answers, all of which are learnt
    from. A Python file of functions, ``module:Class``, or settings with their ``kind``."""
    hint_after_failure: HintAfterFailureConfig | None = None
    """Where a tool call of an episode failed, the teachers read a hint about the failure before they score the answer
    that made it; ``{}``: hints as for logs of agents."""
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
        if self.loss_fn.projection_matrix_path is not None:
            raise ValueError("on_policy.loss_fn uses the projections of loss_fn; give projection keys there")
        self.loss_fn = self.loss_fn.settled()
        if self.policy_gradient is not None and self.loss_fn != _sampled_loss():
            raise ValueError("on_policy.loss_fn and on_policy.policy_gradient are both given; use one of them")
        if self.engine is not None and self.engine.ray is None and self.sampler != "auto":
            raise ValueError("on_policy.sampler and on_policy.engine are both given; use one of them")
        if self.overlap and self.engine is None:
            raise ValueError(
                "on_policy.overlap is 1, but the student samples in this process, with the very weights that a step "
                "changes; give on_policy.engine (server, vllm or ray), or set overlap to 0"
            )
        if self.reward is not None and self.samples_per_prompt < 2:
            raise ValueError("a reward counts against the other samples of its prompt; set samples_per_prompt above 1")
        if self.reward is not None and self.reward.verifier is not None:
            if self.failed_states is not None:
                raise ValueError("a failed state has no right answer that on_policy.reward.verifier could compare with")
            if self.turns == "all":
                raise ValueError("on_policy.reward.verifier judges a conversation's last answer; set turns to last")
        if self.environment is not None and self.failed_states is not None:
            raise ValueError("on_policy.environment and on_policy.failed_states are both given; use one of them")
        if self.environment is not None and self.turns == "all":
            raise ValueError("with on_policy.environment every answer is learnt from; leave out on_policy.turns")
        if self.environment is None and self.hint_after_failure is not None:
            raise ValueError("on_policy.hint_after_failure needs calls that can fail; give on_policy.environment")
        if self.reward is not None and self.reward.environment:
            if self.environment is None:
                raise ValueError("on_policy.reward.environment needs an environment; give on_policy.environment")
            if self.environment.kind == "functions":
                raise ValueError(
                    "functions give no reward, which on_policy.reward.environment asks for; give reward.verifier or "
                    "another kind of environment"
                )
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError("at temperature 0 all samples of a prompt are the same; set samples_per_prompt to 1")
        return self


class OnPolicyMasterConfig(MasterConfig):
    """Distils on text that the student writes itself, scored by the teachers."""

    algorithm: Literal["on_policy_distillation"] = "on_policy_distillation"
    """``on_policy_distillation`` lets the student write; left out: distillation on stored text."""
    on_policy: OnPolicyConfig = OnPolicyConfig()
    """Text that the student writes, and how it is corrected."""

    @model_validator(mode="after")
    def _can_be_sampled(self) -> OnPolicyMasterConfig:
        if self.distillation.baseline:
            raise ValueError(
                "distillation.baseline is true, but a student that writes its own text has no such baseline; leave it "
                "out, or compare with a run on stored text"
            )
        if self.on_policy.fraction == 0:
            return self
        states = self.on_policy.failed_states
        if self.on_policy.environment is not None and self.data.mode == "text":
            raise ValueError("on_policy.environment needs conversations; set data.mode to chat")
        if not self.all_teachers and (self.named_teachers or states is None):
            raise ValueError("on-policy distillation needs a teacher; give teacher, or set on_policy.fraction to 0")
        if states is not None and (self.data.mode != "chat" or self.on_policy.fraction < 1):
            raise ValueError("on_policy.failed_states needs data.mode chat and on_policy.fraction 1")
        if states is not None and self.data.holdout:
            raise ValueError("on_policy.failed_states reads agent logs whole; give data.validation, not data.holdout")
        if states is not None and self.on_policy.turns == "all":
            raise ValueError("a failed state is one place of its conversation; leave out on_policy.turns")
        if states is not None and self.all_teachers and "self_teacher" in states.model_fields_set:
            raise ValueError("teacher and on_policy.failed_states.self_teacher are both given; use one of them")
        if states is not None and "teacher_context_as" not in self.data.model_fields_set:
            # a hint stands directly before the action that failed
            self.data.teacher_context_as = "hint"
        self._check_averages()
        for teacher in self.all_teachers:
            if not teacher.kind.knows_new_text:
                raise ValueError(
                    f"a {teacher.source.kind} has no signals for text that is yet to be written; "
                    "use another teacher.source"
                )
        if self.policy.train_global_batch_size != self.distillation.num_prompts_per_step:
            raise ValueError("what is sampled is learnt from in one update; leave out policy.train_global_batch_size")
        self._check_temperature("on_policy.loss_fn", self.on_policy.loss_fn.temperature)
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
        self_teacher, anchor = self.self_teacher, self.on_policy.anchor if self.on_policy.fraction else None
        frozen = (anchor is not None and anchor.kind == "frozen") or (
            self_teacher is not None and self_teacher.self_teacher == "frozen"
        )
        return frozen or super().reads_start

    def _check_averages(self) -> None:
        self_teacher, anchor = self.self_teacher, self.on_policy.anchor
        averaged = {
            "on_policy.anchor.kind": anchor is not None and anchor.kind == "ema",
            "on_policy.failed_states.self_teacher": self_teacher is not None and self_teacher.self_teacher == "ema",
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

    num_prompts_per_step: int = Field(default=8, ge=1, le=_MOST)
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
    """Data that are read."""
    loss: TraceLossConfig = TraceLossConfig()
    """Loss that is minimised."""
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
        self.checkpointing = _one_metric(self.distillation, self.checkpointing, usual=None, validates=True)
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
        if self.teacher.loss_fn is not None:
            raise ValueError("traces have losses of their own; leave out teacher.loss_fn")
        if self.teacher.kind.follows_student:
            raise ValueError("the student reads the hints itself where no teacher is given; set loss.hint.self_teacher")
        if not self.teacher.kind.knows_new_text:
            raise ValueError(f"a {self.teacher.source.kind} has no signals behind hints; use another teacher.source")
        if not self.teacher.kind.any_temperature and (
            hint.temperature != 1 or (hint.topk and hint.topk_by == "student")
        ):
            raise ValueError(
                f"a {self.teacher.source.kind} gives its own most likely tokens at temperature 1; set "
                "loss.hint.temperature to 1 and leave out loss.hint.topk or choose topk_by: teacher"
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
            alpha=on.get("hint", off),
            beta=on.get("preference", off),
            policy=on.get("policy", off).value,
        )

    def uses(self, channel: str) -> bool:
        """Whether a channel ever counts: switched on, and with a weight that is not always 0."""
        weight = self.channels().get(channel)
        return weight is not None and max(weight.value, weight.final) > 0
