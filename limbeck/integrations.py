"""Distillation inside transformers' own Trainer: its accelerate set-up, logging and checkpoints stay as they are.

    trainer = DistillationTrainer(
        student, args, teacher=teacher, processing_class=tokenizer, teacher_tokenizer=teacher_tokenizer,
        train_dataset=[{"text": "..."}, ...], loss_fn="boundary_kl",
    )
    trainer.train()

Under DDP, FSDP or DeepSpeed the processes read different rows; layouts in which some share rows (tensor or context
parallel) are limbeck's own trainer's.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from limbeck.algorithms.build import common_ends, make_collator, tokenizer_of
from limbeck.algorithms.config import MasterConfig
from limbeck.algorithms.dispatch import DEFAULT, resolve_run
from limbeck.algorithms.validation import bos_warning
from limbeck.algorithms.xtoken_off_policy_distillation import foreign_tokenizers, make_loss
from limbeck.config import merge, with_settings
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.forms import detect
from limbeck.data.microbatch import MicrobatchConfig, ProcessedInputs, ProcessedMicrobatch, process_microbatch
from limbeck.distributed.comm import Comm
from limbeck.distributed.mesh import MeshShape
from limbeck.errors import ConfigError
from limbeck.key_names import stored_keys
from limbeck.losses.contract import Batch, Counts, StudentLayout, Teacher
from limbeck.losses.distillation import CrossTokenizerDistillationLossFn
from limbeck.losses.signals import Head
from limbeck.models.causal import body_of, head_of, unwrap
from limbeck.models.loading import check_head, model_numbers, positions
from limbeck.models.policy import Policy
from limbeck.teachers.build import TeacherConfig, make_teacher
from limbeck.teachers.live import LiveTeacher
from limbeck.tokens import ByteVocab
from limbeck.tokens.bos import set_bos
from limbeck.utils.metrics import Metrics
from limbeck.utils.progress import say
from limbeck.utils.state import load_state, save_state

__all__ = ["DistillationTrainer"]

LOSS_STATE = "limbeck_loss"
"""Folder inside a checkpoint of the Trainer with what the loss keeps: running estimates."""
_LOGGED = ("ce_loss", "kl_loss", "accuracy", "proj_accuracy")


@dataclass(frozen=True)
class _Rows:
    """A collated batch that stays in main memory, where losses are laid out; accelerate moves tensors alone."""

    batch: Batch


class DistillationTrainer(Trainer):
    """A Trainer whose loss is cross-entropy plus one divergence per teacher, of any vocabulary.

    Losses are divided by the tokens and chunks of the whole step: all micro-batches of a gradient accumulation, all
    processes. They come from hidden states, without full logits, except where FSDP or DeepSpeed split the head.

    Args:
        model: transformers causal model, plain or with peft adapters.
        args: training arguments; ``remove_unused_columns`` is switched off, because the records' text is one of them.
        teacher: a model folder, hub id or GGUF file; a frozen transformers model in memory; a mapping with the keys of
            a run file's ``teacher`` section; or a `Teacher` (a cache, a server). A list for several; none:
            cross-entropy alone.
        processing_class: the student's tokenizer; default: that of the folder the model was loaded from.
        teacher_tokenizer: name or tokenizer, one per teacher; default: the model's.
        loss_fn: settings of a run file's ``loss_fn`` section, a mode alone, or a loss function that is made already.
        kwargs: those of `transformers.Trainer`, and keys of a run file as `limbeck.distil` takes them: ``max_length``,
            ``append_eos``, ``temperature``, ``**{"data.mode": "text"}``. Data sets hold records, ``{"text": ...}`` or
            conversations in any form that ``data.train`` may have; which of them, the first record tells. Steps,
            rates, batches and logs are those of ``args``.

    Attributes:
        run_config: the run file that this training would have, settled as `limbeck train` settles it.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        *,
        teacher: Any = None,
        processing_class: Any = None,
        teacher_tokenizer: Any = None,
        loss_fn: CrossTokenizerDistillationLossFn | Mapping[str, Any] | str | None = None,
        **kwargs: Any,
    ) -> None:
        args = args or TrainingArguments("trainer_output")
        args.remove_unused_columns = False
        if args.n_gpu > 1:
            raise ConfigError(
                f"one process would share its batch over {args.n_gpu} GPUs; start it with accelerate launch"
            )
        teachers = _listed(teacher)
        spoken = _listed(teacher_tokenizer) or [None] * len(teachers)
        if len(teachers) != len(spoken):
            raise ConfigError(f"{len(teachers)} teachers but {len(spoken)} teacher_tokenizer; give one each")
        settings = {name: kwargs.pop(name) for name in list(kwargs) if name not in _TRAINERS}
        if isinstance(loss_fn, Mapping | str):
            settings = {"loss_fn": loss_fn, **settings}
        config = _run_config(unwrap(model), teachers, spoken, kwargs, settings)
        self.run_config = config
        bos = config.policy.tokenizer.bos
        if processing_class is None:
            processing_class = tokenizer_of(config.policy)
        elif bos != "auto":
            processing_class = deepcopy(processing_class)
            set_bos(processing_class, bos)
        sections = config.all_teachers
        teachers, spoken = teachers[: len(sections)], spoken[: len(sections)]
        spoken = [
            tokenizer_of(section) if tokenizer is None or isinstance(tokenizer, str | PathLike) else tokenizer
            for section, tokenizer in zip(sections, spoken, strict=True)
        ]
        self.vocab = ByteVocab.from_tokenizer(processing_class)
        foreign = foreign_tokenizers(processing_class, spoken)
        given_loss = loss_fn if isinstance(loss_fn, CrossTokenizerDistillationLossFn) else None
        objectives = [section.loss_fn for section in sections]
        ends = common_ends(config, processing_class, spoken, foreign)
        built_loss = given_loss or make_loss(config.loss_fn, processing_class, foreign, objectives, ends)[0]
        self.loss_fn = _checked_loss(built_loss, len(foreign))
        collator = make_collator(config, processing_class, foreign)
        check_head(unwrap(model), self.vocab.size)
        super().__init__(
            model,
            args,
            data_collator=lambda records: _inputs(collator(records)),
            processing_class=processing_class,
            **kwargs,
        )
        self.teachers = [
            _as_teacher(teacher, section, tokenizer, self.vocab, number, self.args.device)
            for number, (teacher, section, tokenizer) in enumerate(zip(teachers, sections, spoken, strict=True))
        ]
        # what `compute_loss` returns is divided by the counts of the whole step
        # here, for the constructor above sets the first by the model's signature
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self._trained, self._evaluated, self._step = Metrics(), Metrics(), Metrics()
        self.add_callback(_LossState(self))

    def look_at_bos(self) -> None:
        """Warn of models whose texts begin otherwise than they expect, as a run does."""
        if Comm.world().size > 1:
            return  # a model that is split cannot be asked by itself
        several = len(self.teachers) > 1
        sides: list[tuple[str, Any, Any]] = []
        if self.run_config.policy.init != "random":
            assert self.model is not None
            sides.append(("policy", _Logits(unwrap(self.model)), self.processing_class))
        for teacher in self.teachers:
            if teacher.model is not None:
                name = f"teachers.{teacher.number}" if several else "teacher"
                sides.append((name, teacher.model, teacher.model.tokenizer))
        for warning in filter(None, (bos_warning(*side) for side in sides)):
            say(f"warning: {warning}")

    # -- the step ---------------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of one step, and what its losses are divided by, over all of them and all processes."""
        # its own count is of labels, which these batches do not have
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        samples = [self._prefetched(sample) for sample in samples]
        counts = [self.loss_fn.denominators(sample["rows"].batch) for sample in samples]
        if not counts:
            return samples, None
        total = {name: torch.stack([part[name] for part in counts]).sum(0) for name in counts[0]}
        # data-parallel processes, once per step: a few numbers, by which each of them divides its losses
        return samples, Comm.world().sum_named(total)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Loss of one micro-batch, divided by the counts of its step (``num_items_in_batch``), or by its own."""
        training = isinstance(num_items_in_batch, dict)
        batch = inputs["rows"].batch if training else self._prefetched(inputs)["rows"].batch
        counts: Counts = num_items_in_batch if training else self.loss_fn.denominators(batch)
        device = self.args.device
        rows = process_microbatch(batch, self.processing_class, False, MicrobatchConfig(), 1, device=device)
        mb = ProcessedMicrobatch(batch, rows, batch.size, int(batch["input_ids"].shape[1]))
        signals = [teacher.signal(mb, device) for teacher in self.teachers]
        hidden_RH, head = self._student_rows(model, rows)
        laid_out = self.loss_fn.build_layout(mb, [signal.row_start_B for signal in signals])
        loss, metrics = self.loss_fn.compute_loss(hidden_RH, head, signals, laid_out, counts)
        counted = batch["sample_mask"] > 0
        size = float(batch["target_bytes"][counted].sum())
        metrics.add({"bpb": (metrics["ce_loss"][0] / math.log(2), size)})
        for target in (self._trained, self._step) if training else (self._evaluated,):
            target.add(metrics)
        if training:
            # gradients are averaged over processes, but these losses are parts of one sum
            loss = loss * self.accelerator.num_processes
        return (loss, {}) if return_outputs else loss

    def _student_rows(self, model: nn.Module, rows: ProcessedInputs) -> tuple[Tensor, Head]:
        """Hidden states as flat rows with the head; where the head is in shards, full logits and no head."""
        kwargs = rows.model_kwargs(drop_padding_mask=True)
        plain = self.accelerator.unwrap_model(model)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            logits = model(**kwargs).logits
            return logits.flatten(0, 1), Head.identity(self.vocab.size)
        hidden: list[Tensor] = []
        hook = body_of(plain).register_forward_hook(lambda _, __, out: hidden.append(out.last_hidden_state))
        try:
            # through the wrapper, whose own hooks collect gradients; its logits are those of one token
            model(**kwargs, logits_to_keep=1)
        finally:
            hook.remove()
        head = head_of(plain, self.vocab.size)
        if self.args.bf16 and head.weight is not None:
            # the loss reads the head outside of the forward pass, to which accelerate's autocast is confined
            bias = None if head.bias is None else head.bias.bfloat16()
            head = replace(head, weight=head.weight.bfloat16(), bias=bias)
        return hidden[0].flatten(0, 1), head

    def _prefetched(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """A micro-batch that its teachers have been shown, with the chunks that carry loss."""
        batch = sample["rows"].batch
        layout = StudentLayout(MeshShape(data=Comm.world().size), Comm.alone(), self.vocab.size)
        for number, teacher in enumerate(self.teachers):
            teacher.attach(layout)
            mask = teacher.prefetch(batch).mask_B
            if mask is not None:
                batch = BatchedDataDict({**batch.data, f"teacher_{number}_sample_mask": mask})
        return {**sample, "rows": _Rows(self.loss_fn.prepare_batch(batch))}

    def finish_step(self) -> None:
        """After an optimizer step: losses that follow their own running means get the step's. Collective."""
        if self.loss_fn.cfg.dynamic_loss_scaling or self.loss_fn.guard.active:
            self.loss_fn.step_end(self._step.reduced(Comm.world())[0].pairs())
        self._step = Metrics()
        for teacher in self.teachers:
            teacher.step_end()

    # -- evaluation and logs ----------------------------------------------------------------------------------------

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, None, None]:
        """The loss of an evaluation batch."""
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Adds bits per byte and the parts of the loss to what is measured."""
        self._evaluated = Metrics()
        out = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        means = self._means(self._evaluated, ("bpb", *_LOGGED))
        named = {f"{metric_key_prefix}_{name}": value for name, value in means.items()}
        return out._replace(metrics={**(out.metrics or {}), **named})

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the parts of the loss since the last time to a line about training."""
        if "loss" in logs:
            logs = {**logs, **self._means(self._trained, _LOGGED)}
            self._trained = Metrics()
        super().log(logs, *args, **kwargs)

    def _means(self, metrics: Metrics, names: Sequence[str]) -> dict[str, float]:
        # all processes log and evaluate at the same steps: two numbers per name
        means = metrics.reduced(Comm.world())[0].means()
        return {name: means[name] for name in names if name in means}

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train; a checkpoint to go on from also brings the state of the loss."""
        checkpoint = resume_from_checkpoint
        if checkpoint is True:
            checkpoint = get_last_checkpoint(str(self.args.output_dir))
        if checkpoint and (Path(checkpoint) / LOSS_STATE).is_dir():
            self.loss_fn.load_state_dict(load_state(Path(checkpoint) / LOSS_STATE, local=True))
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)


class _Logits:
    """Probabilities of a model as it is, without the mark that a policy leaves on it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @torch.no_grad()
    def get_logprobs(self, batch: BatchedDataDict) -> dict[str, Tensor]:
        training, device = self.model.training, next(self.model.parameters()).device
        ids, lengths = batch["input_ids"].to(device), batch["input_lengths"].to(device)
        mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
        logits = self.model.eval()(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        self.model.train(training)
        next_logprobs = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return {"logprobs": nn.functional.pad(next_logprobs, (1, 0))}


class _LossState(TrainerCallback):
    """Tells the trainer of finished steps, and puts the state of the loss into its checkpoints."""

    def __init__(self, trainer: DistillationTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.look_at_bos()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.finish_step()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # one process writes: running estimates are the same on all
        if args.should_save:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}" / LOSS_STATE
            save_state(folder, self.trainer.loss_fn.state_dict(), local=True)


def _inputs(batch: Batch) -> dict[str, Any]:
    """A batch as the Trainer handles it; `input_ids` are for its own statistics."""
    return {"input_ids": batch["input_ids"], "rows": _Rows(batch)}


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


_TRAINERS = frozenset(inspect.signature(Trainer.__init__).parameters)
_OWN_SECTIONS = ("loss_fn", "data", "teacher", "teachers")
_OF_THE_STUDENT = ("init", "tokenizer", "max_total_sequence_length", "make_sequence_length_divisible_by")


def _run_config(
    model: nn.Module,
    teachers: Sequence[Any],
    tokenizers: Sequence[Any],
    trainers: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> MasterConfig:
    """The run file of this training; ``trainers``: arguments of `transformers.Trainer`."""
    _refuse_trainers(with_settings(stored_keys(DEFAULT), {}, settings))
    sections = [_section(teacher, tokenizer) for teacher, tokenizer in zip(teachers, tokenizers, strict=True)]
    values: dict[str, Any] = {"policy": _section(model, None), "data": {"train": "train_dataset"}}
    if sections:
        values |= {"teacher": sections[0]} if len(sections) == 1 else {"teachers": sections}
    placed = with_settings(stored_keys(DEFAULT), values, settings)
    data = placed["data"]
    record = _first_record(trainers.get("train_dataset"), trainers.get("eval_dataset"))
    if data.get("mode", "auto") == "auto":
        keys = data.get("text_key", "text"), data.get("messages_key", "messages")
        data["mode"] = "text" if record is None else detect(record, *keys, "the first record")[0]
    config, _ = resolve_run(placed)
    assert isinstance(config, MasterConfig)
    return config


def _refuse_trainers(settings: Mapping[str, Any]) -> None:
    """Settings that are transformers' here."""
    for section, keys in settings.items():
        policy_keys = keys if section == "policy" and isinstance(keys, Mapping) else {}
        wrong = [f"policy.{key}" for key in policy_keys if key not in _OF_THE_STUDENT]
        if section not in (*_OWN_SECTIONS, "policy"):
            wrong = [f"{section}.{next(iter(keys))}" if isinstance(keys, Mapping) and keys else section]
        if wrong:
            raise ConfigError(
                f"{wrong[0]!r} is no setting of this Trainer; steps, rates, batches and logs are those of args "
                "(TrainingArguments: learning_rate, max_steps, per_device_train_batch_size, ...)"
            )


def _section(model: Any, tokenizer: Any) -> dict[str, Any]:
    """A model as a section of a run file, with rows that are no longer than its positions."""
    if isinstance(model, Mapping):
        section = dict(model)
    elif isinstance(model, nn.Module):
        config: Any = model.config
        section = {"model_name": str(config.name_or_path or type(model).__name__)}
    elif isinstance(model, Teacher):
        section = {"model_name": type(model).__name__}
    elif isinstance(model, str | PathLike):
        section = {"model_name": str(model)}
    else:
        raise ConfigError(
            f"the teacher is a {type(model).__name__}; give a model folder, a hub id, a GGUF file, a transformers "
            "model, a Teacher or a mapping with the keys of its section"
        )
    most = positions(model.config) if isinstance(model, nn.Module) else None
    if isinstance(model, str | PathLike) and (numbers := model_numbers(section)) is not None:
        most = positions(numbers)
    if most is not None and most < _USUAL_LENGTH:
        section["max_total_sequence_length"] = most
    named = isinstance(tokenizer, str | PathLike)
    return merge(section, {"tokenizer": {"name": str(tokenizer)}}) if named else section


_USUAL_LENGTH = 2048


def _first_record(*datasets: Any) -> Any:
    """The first record of the first data set that is there; of several by name, of the first of them."""
    for dataset in datasets:
        records = next(iter(dataset.values()), None) if isinstance(dataset, Mapping) else dataset
        if records is not None:
            return next(iter(records), None)
    return None


def _as_teacher(
    teacher: Any, section: TeacherConfig, tokenizer: object, student: ByteVocab, number: int, device: torch.device
) -> Teacher:
    if isinstance(teacher, Teacher):
        teacher.number = number
        return teacher
    if section.server is not None:
        raise ConfigError("give a teacher behind a server as a ServerTeacher (limbeck.teachers.server.teacher)")
    if section.cache is not None:
        return make_teacher(section, number, tokenizer, student, seed=0)
    held = teacher if isinstance(teacher, nn.Module) else None
    policy = Policy(section, tokenizer, name=f"teacher_{number}", device=device, init_optimizer=False, model=held)
    return LiveTeacher(policy, student_fingerprint=student.fingerprint, number=number)


def _checked_loss(loss: CrossTokenizerDistillationLossFn, teachers: int) -> CrossTokenizerDistillationLossFn:
    """A loss that this Trainer can follow."""
    if loss.num_teachers != teachers:
        raise ConfigError(f"the loss is made for {loss.num_teachers} teachers, but {teachers} are given")
    return loss
