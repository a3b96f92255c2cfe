"""Distillation inside transformers' own Trainer: its accelerate set-up, logging and checkpoints stay as they are.

    trainer = DistillationTrainer(
        student, args, teacher=teacher, processing_class=tokenizer, teacher_tokenizer=teacher_tokenizer,
        train_dataset=[{"text": "..."}, ...], loss={"mode": "boundary_kl"},
    )
    trainer.train()

Under DDP, FSDP or DeepSpeed the processes read different rows; layouts in which some share rows (tensor or context
parallel) are limbeck's own trainer's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from limbeck.algorithms.xtoken_off_policy_distillation import foreign_tokenizers, make_loss
from limbeck.config import resolve
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.data.microbatch import MicrobatchConfig, ProcessedInputs, ProcessedMicrobatch, process_microbatch
from limbeck.distributed.comm import Comm
from limbeck.distributed.mesh import MeshShape
from limbeck.errors import ConfigError
from limbeck.losses.contract import Batch, Counts, StudentLayout, Teacher
from limbeck.losses.distillation import CrossTokenizerDistillationLossConfig, CrossTokenizerDistillationLossFn
from limbeck.losses.signals import Head
from limbeck.models.causal import body_of, head_of, unwrap
from limbeck.models.loading import check_head, positions
from limbeck.models.policy import Policy
from limbeck.teachers.live import LiveTeacher
from limbeck.tokens import ByteVocab
from limbeck.utils.metrics import Metrics
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
        teacher: frozen transformers model in memory, or a `Teacher` (a cache, a server); a list for several.
        processing_class: the student's tokenizer.
        teacher_tokenizer: one per teacher, in the same form as ``teacher``.
        loss: settings of `CrossTokenizerDistillationLossConfig`, or a loss function that is made already.
        max_length: longest row of either side in tokens; never more than a model's positions.
        collator_options: ``mode``, ``append_eos`` and further arguments of `CrossTokenizerCollator`.
        kwargs: those of `transformers.Trainer`. Data sets hold records, ``{"text": ...}`` or ``{"messages": [...]}``.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        *,
        teacher: Any,
        processing_class: Any,
        teacher_tokenizer: Any,
        loss: CrossTokenizerDistillationLossFn | Mapping[str, Any] | None = None,
        max_length: int = 2048,
        collator_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        args = args or TrainingArguments("trainer_output")
        args.remove_unused_columns = False
        if args.n_gpu > 1:
            raise ConfigError(
                f"one process would share its batch over {args.n_gpu} GPUs; start it with accelerate launch"
            )
        teachers, spoken = _listed(teacher), _listed(teacher_tokenizer)
        if len(teachers) != len(spoken):
            raise ConfigError(f"{len(teachers)} teachers but {len(spoken)} teacher_tokenizer; give one each")
        self.vocab = ByteVocab.from_tokenizer(processing_class)
        foreign = foreign_tokenizers(processing_class, spoken)
        self.loss_fn = _made_loss(loss, processing_class, foreign)
        collator = CrossTokenizerCollator(
            student_tokenizer=processing_class,
            teacher_tokenizer=foreign,
            ctx_length_student=_length(unwrap(model), max_length),
            ctx_length_teacher=[_length(own, max_length) for own in teachers],
            chunks_as="layout",
            conditions=[objective.conditions for objective in self.loss_fn.objectives],
            **(collator_options or {}),
        )
        check_head(unwrap(model), self.vocab.size)
        super().__init__(
            model,
            args,
            data_collator=lambda records: _inputs(collator(records)),
            processing_class=processing_class,
            **kwargs,
        )
        self.teachers = [
            _as_teacher(own, tokenizer, self.vocab, number, self.args.device)
            for number, (own, tokenizer) in enumerate(zip(teachers, spoken, strict=True))
        ]
        # what `compute_loss` returns is divided by the counts of the whole step
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self._trained, self._evaluated, self._step = Metrics(), Metrics(), Metrics()
        self.add_callback(_LossState(self))

    # -- the step ---------------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of one step, and what its losses are divided by, over all of them and all processes."""
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        samples = [self._prefetched(sample) for sample in samples]
        counts = [self.loss_fn.counts(sample["rows"].batch) for sample in samples]
        if not counts:
            return samples, None
        total = {name: torch.stack([own[name] for own in counts]).sum(0) for name in counts[0]}
        # data-parallel processes, once per step: a few numbers, by which each of them divides its losses
        return samples, Comm.world().sum_named(total)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Loss of one micro-batch, divided by the counts of its step (``num_items_in_batch``), or by its own."""
        training = isinstance(num_items_in_batch, dict)
        batch = inputs["rows"].batch if training else self._prefetched(inputs)["rows"].batch
        counts: Counts = num_items_in_batch if training else self.loss_fn.counts(batch)
        device = self.args.device
        rows = process_microbatch(batch, self.processing_class, False, MicrobatchConfig(), 1, device=device)
        mb = ProcessedMicrobatch(batch, rows, batch.size, int(batch["input_ids"].shape[1]))
        signals = [teacher.signal(mb, device) for teacher in self.teachers]
        hidden_RH, head = self._student_rows(model, rows)
        laid_out = self.loss_fn.prepare(mb, [signal.row_start_B for signal in signals])
        loss, metrics = self.loss_fn.compute(hidden_RH, head, signals, laid_out, counts)
        counted = batch["sample_mask"] > 0
        size = float(batch["target_bytes"][counted].sum())
        metrics.add({"bpb": (metrics["ce_loss"][0] / math.log(2), size)})
        for own in (self._trained, self._step) if training else (self._evaluated,):
            own.add(metrics)
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
        found: list[Tensor] = []
        hook = body_of(plain).register_forward_hook(lambda _, __, out: found.append(out.last_hidden_state))
        try:
            # through the wrapper, whose own hooks collect gradients; its logits are those of one token
            model(**kwargs, logits_to_keep=1)
        finally:
            hook.remove()
        head = head_of(plain, self.vocab.size)
        if self.args.bf16 and head.weight is not None:
            bias = None if head.bias is None else head.bias.bfloat16()
            head = replace(head, weight=head.weight.bfloat16(), bias=bias)
        return found[0].flatten(0, 1), head

    def _prefetched(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """A micro-batch that its teachers have been shown, with the chunks that carry loss."""
        batch = sample["rows"].batch
        layout = StudentLayout(MeshShape(data=Comm.world().size), Comm.alone(), self.vocab.size)
        for number, teacher in enumerate(self.teachers):
            teacher.attach(layout)
            mask = teacher.prefetch(batch).mask_B
            if mask is not None:
                batch = BatchedDataDict({**batch.data, f"teacher_{number}_sample_mask": mask})
        return {**sample, "rows": _Rows(self.loss_fn.annotate(batch))}

    def finish_step(self) -> None:
        """After an optimizer step: losses that follow their own running means are told them. Collective."""
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
        found = self._means(self._evaluated, ("bpb", *_LOGGED))
        named = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
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
        found = resume_from_checkpoint
        if found is True:
            found = get_last_checkpoint(str(self.args.output_dir))
        if found and (Path(found) / LOSS_STATE).is_dir():
            self.loss_fn.load_state_dict(load_state(Path(found) / LOSS_STATE, local=True))
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)


class _LossState(TrainerCallback):
    """Tells the trainer of finished steps, and puts the state of the loss into its checkpoints."""

    def __init__(self, trainer: DistillationTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.finish_step()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.should_save:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}" / LOSS_STATE
            save_state(folder, self.trainer.loss_fn.state_dict(), local=True)


def _inputs(batch: Batch) -> dict[str, Any]:
    """A batch as the Trainer handles it; `input_ids` are for its own statistics."""
    return {"input_ids": batch["input_ids"], "rows": _Rows(batch)}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _length(model: Any, most: int) -> int:
    """Longest row of a model; a teacher that is none (a cache) has no bound of its own."""
    own = positions(model.config) if isinstance(model, nn.Module) else None
    return most if own is None else min(own, most)


def _as_teacher(own: Any, tokenizer: object, student: ByteVocab, number: int, device: torch.device) -> Teacher:
    if isinstance(own, Teacher):
        own.number = number
        return own
    policy = Policy({}, tokenizer, name=f"teacher_{number}", device=device, init_optimizer=False, model=own)
    return LiveTeacher(policy, student_fingerprint=student.fingerprint, number=number)


def _made_loss(
    loss: CrossTokenizerDistillationLossFn | Mapping[str, Any] | None, student_tokenizer: object, foreign: Sequence[Any]
) -> CrossTokenizerDistillationLossFn:
    if not isinstance(loss, CrossTokenizerDistillationLossFn):
        loss = make_loss(resolve(CrossTokenizerDistillationLossConfig, loss or {}), student_tokenizer, foreign)
    if any(p.requires_grad for p in loss.parameters()) or loss.needs_first_pass:
        raise ConfigError(
            "learnable_projection and dynamic_scaling_source 'first_pass' are limbeck's own trainer's; leave them out"
        )
    if loss.num_teachers != len(foreign):
        raise ConfigError(f"the loss is made for {loss.num_teachers} teachers, but {len(foreign)} are given")
    return loss
