"""The training step, all of it: prefetch, counts, micro-batches, backward, reduce, clip, optimizer.

The loss of a micro-batch arrives divided by the counts of the global batch, so gradients simply add up: over
micro-batches, over channels and over data-parallel ranks. The host waits for the device once per step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import ProcessedMicrobatch, valid_counts
from limbeck.errors import CheckpointError, ConfigError, LossError
from limbeck.losses.blocks import deferred_checks
from limbeck.losses.contract import Counts, Loss, State, Teacher
from limbeck.losses.signals import Head, Signal
from limbeck.models.causal import is_lora
from limbeck.models.language_model import LanguageModel
from limbeck.models.lora import adapter_state, load_adapter_state
from limbeck.models.optim import (
    DEFAULT_ARGUMENTS,
    OptimizerConfig,
    SchedulerConfig,
    build_optimizer,
    build_scheduler,
    empty_optimizer_state,
    load_optimizer_state,
    optimizer_state,
    scheduler_state,
)
from limbeck.utils.metrics import Metrics, Pair
from limbeck.utils.timer import Timer

Monitor = Callable[[Tensor, Head, Sequence[Signal], Any], Mapping[str, Pair]]
"""Measures a micro-batch beside its loss: (hidden rows, head, signals, the loss's inputs) -> metrics."""


class TrainingConfig(BaseModel):
    """How the weights of a model are trained."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    train_global_batch_size: int = Field(default=32, ge=1)
    """Records per optimizer step over all ranks; default: ``distillation.num_prompts_per_step``, which must be a
    multiple."""
    train_micro_batch_size: int = Field(default=1, ge=1)
    """Rows per forward pass on each rank; gradients of micro-batches add up."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm; null: never."""
    optimizer: OptimizerConfig = OptimizerConfig(kwargs=DEFAULT_ARGUMENTS)
    """Which optimizer; a section without a name changes settings of AdamW."""
    scheduler: SchedulerConfig | list[SchedulerConfig] | None = None
    """Learning rate over the steps: one schedule, or several in a row; default: constant."""


@dataclass(frozen=True)
class Channel:
    """What a step learns from: rows of this rank, a loss with its own denominators, and its teachers in order.

    Attributes:
        factor: of the loss in the total; 1 costs no multiplication.
        rows_together: neighbouring rows that must share a micro-batch (a preference pair: 2).
        monitor: measured along with every micro-batch.
        reported: metrics of the loss that are kept, also where no rank has a row for them; empty: all of them.
        prefix: of the names of its metrics and counts, where two channels have losses of one kind.
    """

    batch: BatchedDataDict
    loss: Loss[Any]
    teachers: Sequence[Teacher] = ()
    factor: float = 1.0
    rows_together: int = 1
    monitor: Monitor | None = None
    reported: Sequence[str] = ()
    prefix: str = ""

    def own(self, metrics: Mapping[str, Pair]) -> Mapping[str, Pair]:
        """Of a step's metrics those of this channel, by the names that its loss gave them."""
        if not self.prefix:
            return metrics
        return {name.removeprefix(self.prefix): pair for name, pair in metrics.items() if name.startswith(self.prefix)}


@dataclass(frozen=True)
class StepResult:
    """What the host learns of a step; sums and counts are those of all ranks.

    Attributes:
        grad_norm: before clipping; None without a step.
        lr: with which the step was taken; None for a model without an optimizer.
        tokens: real student tokens.
        counts: denominators of the losses.
        global_valid_seqs, global_valid_toks: rows and supervised tokens that count.
    """

    loss: float
    grad_norm: float | None
    lr: float | None
    metrics: dict[str, tuple[float, float]]
    tokens: int
    microbatches: int
    counts: Counts
    global_valid_seqs: float
    global_valid_toks: float

    def as_dict(self) -> dict[str, Any]:
        """The published form."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @staticmethod
    def merged(results: Sequence[StepResult]) -> StepResult:
        """Several steps as one: means of loss and norm, sums of metrics, tokens and micro-batches."""
        if len(results) == 1:
            return results[0]
        norms = [r.grad_norm for r in results if r.grad_norm is not None]
        return replace(
            results[-1],
            loss=sum(r.loss for r in results) / len(results),
            grad_norm=sum(norms) / len(norms) if norms else None,
            metrics=Metrics.total(r.metrics for r in results).pairs(),
            tokens=sum(r.tokens for r in results),
            microbatches=sum(r.microbatches for r in results),
        )


class Trainer:
    """Optimizer, schedule, clipping, and the reduction of gradients and metrics over ranks, for one model.

    Args:
        extra_parameters: trained along with the model, such as a loss function's learnable projections.
    """

    def __init__(
        self, model: LanguageModel, cfg: TrainingConfig, *, extra_parameters: Iterable[nn.Parameter] = ()
    ) -> None:
        self.model, self.cfg, self.steps = model, cfg, 0
        self.parameters = [p for p in (*model.model.parameters(), *extra_parameters) if p.requires_grad]
        self.optimizer = build_optimizer(self.parameters, cfg.optimizer)
        self.scheduler = build_scheduler(self.optimizer, cfg.scheduler)

    def step(self, channels: Sequence[Channel], timer: Timer | None = None, *, rows: int | None = None) -> StepResult:
        """One optimizer step over all channels. Under data parallelism every rank makes the same call, with the rows it
        has (possibly none).

        Args:
            timer: sections ``teacher``, ``forward``, ``layout``, ``loss``, ``backward``, ``optimizer``, and ``wait``:
                for a device that works behind the host.
            rows: per micro-batch where neither dynamic batching nor packing is on; default: as configured.

        Raises:
            LossError: a loss or gradient is not finite, or a teacher scored other ids; weights and optimizer are as
                before.
        """
        timer = timer or Timer()
        for channel in channels:
            self._check_all_trained(channel.loss)
        rows = rows or self.cfg.train_micro_batch_size
        self.model.model.train()
        try:
            channels, asked = prefetch(self.model, channels, timer)
            for channel in channels:
                if channel.loss.needs_first_pass:
                    channel.loss.first_pass(channel.own(_measured(self.model, [channel], rows, timer, {}).metrics))
            self._drop_gradients()
            work = _Pass(self.model, channels, rows, timer, training=True)
            work.metrics.add(asked)
            result = self._finish(work, timer)
        finally:
            self.model.model.eval()
        for channel in channels:
            channel.loss.step_end(channel.own(result.metrics))
            for teacher in channel.teachers:
                teacher.step_end()
        return result

    def _finish(self, work: _Pass, timer: Timer) -> StepResult:
        """Collect gradients, wait for the device once, check, step."""
        rate = float(self.optimizer.param_groups[0]["lr"])
        with timer.time("optimizer"):
            # the optimizer may hold them in groups by layout
            params = [p for group in self.optimizer.param_groups for p in group["params"]]
            self.model.sharding.collect(params)
            limit = math.inf if self.cfg.max_grad_norm is None else self.cfg.max_grad_norm
            norm = self.model.sharding.clip(params, limit)
        with timer.time("wait"):
            result = work.read(norm)
        if work.flags.infinite or work.flags.contradicting or not math.isfinite(result.grad_norm or 0.0):
            self._drop_gradients()
            work.refuse(result.grad_norm)
        with timer.time("optimizer"):
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.steps += 1
            self.optimizer.zero_grad(set_to_none=True)
        work.release()
        return replace(result, lr=rate)

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model.sharding.release(gradient=True)

    def _check_all_trained(self, loss: Loss[Any]) -> None:
        """A learnable part of the loss that no optimizer knows would stay as it is without a word."""
        known = {id(p) for p in self.parameters}
        if any(p.requires_grad and id(p) not in known for p in loss.parameters()):
            raise LossError(
                "the loss has learnable parameters; make the policy with extra_parameters=loss_fn.parameters()"
            )

    def state_dict(self) -> State:
        """All that a resumed run needs beside the weights: optimizer, schedule, adapters, steps."""
        model = self.model.model
        return {
            "optimizer": optimizer_state(self.optimizer, self.parameters),
            "scheduler": scheduler_state(self.scheduler.state_dict()) if self.scheduler else None,
            "adapter": adapter_state(model) if is_lora(model) else None,
            "steps": self.steps,
        }

    def template(self) -> State | None:
        """What a stored state is laid out like; None where it is whole."""
        if not self.model.sharding.is_sharded:
            return None
        empty_optimizer_state(self.optimizer)
        out: State = {"optimizer": optimizer_state(self.optimizer, self.parameters)}
        if is_lora(self.model.model):
            out["adapter"] = adapter_state(self.model.model)
        return out

    def load_state_dict(self, state: State, where: str = "the train state") -> None:
        """Go on from a state; the weights themselves come with the model. ``where`` names it in errors."""
        model = self.model.model
        if state["optimizer"] is None or (state["adapter"] is None) == is_lora(model):
            raise CheckpointError(
                f"{where} comes from another kind of run (optimizer or adapters differ); "
                "resume with the configuration that wrote it"
            )
        if is_lora(model):
            load_adapter_state(model, state["adapter"])
        try:
            load_optimizer_state(self.optimizer, self.parameters, state["optimizer"])
        except ValueError as e:
            raise CheckpointError(f"{where} does not fit this model: {e}") from e
        if self.scheduler is not None and state["scheduler"] is not None:
            groups = len(self.optimizer.param_groups)
            self.scheduler.load_state_dict(scheduler_state(state["scheduler"], groups))
        self.steps = int(state["steps"])


def evaluate(
    model: LanguageModel, channels: Sequence[Channel], timer: Timer | None = None, *, rows: int = 1
) -> StepResult:
    """Loss and metrics of what a step would learn from, without gradient; see `Trainer.step`."""
    timer = timer or Timer()
    model.model.eval()
    channels, asked = prefetch(model, channels, timer)
    return _measured(model, channels, rows, timer, asked)


def _measured(
    model: LanguageModel, channels: Sequence[Channel], rows: int, timer: Timer, asked: Mapping[str, Pair]
) -> StepResult:
    """A pass without gradient over channels whose teachers have been asked."""
    work = _Pass(model, channels, rows, timer, training=False)
    work.metrics.add(asked)
    with timer.time("wait"):
        result = work.read()
    if work.flags.infinite or work.flags.contradicting:
        work.refuse(None)
    work.release()
    return result


def prefetch(
    model: LanguageModel, channels: Sequence[Channel], timer: Timer
) -> tuple[list[Channel], Mapping[str, Pair]]:
    """Show whole batches to the teachers, before anything is counted. Collective.

    Rows that a teacher has no signal for leave its denominator (``teacher_<i>_sample_mask``), so the others' loss is
    what it would be without them. An error of one rank is one of all.
    """
    asked = Metrics()
    out = []
    with timer.time("teacher"):
        for channel in channels:
            batch = channel.batch
            for number, teacher in enumerate(channel.teachers):
                teacher.attach(model.layout)
                with model.dims.data.fail_together():
                    found = teacher.prefetch(batch)
                if found.mask_B is not None:
                    batch = BatchedDataDict({**batch.data, f"teacher_{number}_sample_mask": found.mask_B})
                asked.add(found.metrics, prefix=f"teacher_{number}/")
            out.append(replace(channel, batch=batch))
    # ranks that share rows count them once
    return out, asked if model.dims.owns_rows else dict.fromkeys(asked, (0.0, 0.0))


@dataclass
class _Done:
    """What is kept of a micro-batch: its loss, the flags that its checks left, and how to compute it again."""

    loss: Tensor
    flags: list[Tensor]
    mb: ProcessedMicrobatch
    again: Callable[[], Any]

    def is_bad(self) -> bool:
        return not bool(torch.isfinite(self.loss)) or any(bool(flag.any()) for flag in self.flags)


class _Flags(NamedTuple):
    """infinite: some loss is not finite; contradicting: a teacher scored other tokens than the loss was given."""

    infinite: bool = False
    contradicting: bool = False


class _Pass:
    """Forward (and, in training, backward) of all micro-batches of all channels; the host is ahead of the device."""

    def __init__(
        self, model: LanguageModel, channels: Sequence[Channel], rows: int, timer: Timer, *, training: bool
    ) -> None:
        self.model, self.dims, self.timer, self.training = model, model.dims, timer, training
        self.metrics, self.counts, self.flags = Metrics(), Counts(), _Flags()
        self.tokens = self.microbatches = 0
        self.valid = {"global_valid_seqs": 0.0, "global_valid_toks": 0.0}
        self.done: list[_Done] = []
        self.samples: list[Any] = []
        self.teachers = list(dict.fromkeys(teacher for channel in channels for teacher in channel.teachers))
        for channel in channels:
            self._add(channel, rows)

    def _add(self, channel: Channel, rows: int) -> None:
        self._check_layout(channel.loss)
        with self.timer.time("layout"):
            batch = channel.loss.annotate(channel.batch)
            # data-parallel ranks, once per channel: a few numbers, by which every rank divides its losses
            counts = self.dims.data.sum_named({**valid_counts(batch), **channel.loss.counts(batch)})
            self.valid = {name: value + float(counts.pop(name)) for name, value in self.valid.items()}
        together = channel.rows_together
        iterator, number = self.model.microbatches(batch, rows * together, rows_together=together)
        for mb in self.timer.iterate(iterator, "layout"):
            self._microbatch(mb, channel, counts)
        self.microbatches += number
        self.counts.update({channel.prefix + name: count for name, count in counts.items()})
        self.samples += list(batch.get("idx") or [])

    def _check_layout(self, loss: Loss[Any]) -> None:
        """A loss that does not know of split sequences or vocabularies would give other numbers."""
        shape = self.dims.shape
        for kind, size, known in (
            ("tensor", shape.tensor, loss.tensor_parallel),
            ("context", shape.context, loss.context_parallel),
        ):
            if size > 1 and not known:
                raise ConfigError(f"{type(loss).__name__} does not know {kind} parallelism; set its size to 1")

    def _microbatch(self, mb: ProcessedMicrobatch, channel: Channel, counts: Counts) -> None:
        with torch.set_grad_enabled(self.training), deferred_checks() as flags:
            loss, metrics = self._loss(mb, channel, counts)
            if self.training:
                with self.timer.time("backward"):
                    loss.backward()
        self.metrics.add(metrics)
        # ranks that share rows count them once
        if not mb.is_dummy and self.dims.owns_rows:
            self.tokens += int(mb.data_dict["input_lengths"].sum())
        again = functools.partial(self._loss, mb, channel, counts)
        self.done.append(_Done(torch.as_tensor(loss).detach(), flags, mb, again))

    def _loss(self, mb: ProcessedMicrobatch, channel: Channel, counts: Counts) -> tuple[Tensor, Metrics]:
        """Loss and metrics of one micro-batch. What keeps the device busy is queued first: the teachers that are models
        and the student; the host then looks up stored signals and lays out the loss while it works."""
        model, timer, loss_fn = self.model, self.timer, channel.loss
        found: dict[int, Signal] = {}

        def ask(on_device: bool) -> None:
            with timer.time("teacher"):
                for number, teacher in enumerate(channel.teachers):
                    if teacher.on_device == on_device:
                        found[number] = teacher.signal(mb, model.device)

        with timer.time("teacher"):
            for teacher in channel.teachers:
                teacher.begin(mb)
        ask(on_device=True)
        with timer.time("forward"):
            hidden_RH = model.forward_hidden(mb.processed_inputs)
        ask(on_device=False)
        signals = [found[number] for number in range(len(channel.teachers))]
        with timer.time("layout"):
            inputs = loss_fn.prepare(mb, [signal.row_start_B for signal in signals])
            if self.dims.context.size > 1:
                inputs = loss_fn.shard(inputs, self.dims.context)
        with timer.time("loss"):
            head = model.head()
            loss, metrics = loss_fn.compute(hidden_RH, head, signals, inputs, counts)
            if channel.reported:
                metrics = Metrics({name: metrics.get(name, (0.0, 0.0)) for name in channel.reported})
            if channel.monitor is not None:
                metrics.add(channel.monitor(hidden_RH, head, signals, inputs))
            if channel.prefix:
                metrics = Metrics().add(metrics, channel.prefix)
        return loss if channel.factor == 1 else loss * channel.factor, metrics

    def read(self, norm: Tensor | None = None) -> StepResult:
        """Loss, metrics and flags summed over ranks; the one place where a step waits for the device."""
        zero = torch.zeros((), dtype=torch.float64, device=self.model.device)
        losses = torch.stack([done.loss.double() for done in self.done]) if self.done else zero[None]
        flags = sum((flag.double() for done in self.done for flag in done.flags), zero.expand(2))
        infinite = (~torch.isfinite(losses)).sum() + flags[0]
        same = [] if norm is None else [norm]
        # data x context ranks, once per step: a few numbers, all that the host learns of it
        metrics, (loss, bad, odd, tokens, *norms) = self.metrics.reduced(
            self.dims.loss, losses.sum(), infinite, flags[1], self.tokens, same=same
        )
        self.flags = _Flags(bool(bad), bool(odd))
        return StepResult(
            loss=loss,
            grad_norm=norms[0] if norms else None,
            lr=None,
            metrics=metrics.pairs(),
            tokens=int(tokens),
            microbatches=self.microbatches,
            counts=self.counts,
            **self.valid,
        )

    def refuse(self, norm: float | None) -> None:
        """Say what is wrong with a step whose loss or gradient is not finite; all ranks come to the same answer."""
        bad = [done for done in self.done if done.is_bad()]
        if bad and self.dims.shape.world == 1:
            # the weights are as they were: asked again, the loss itself says what is wrong
            with torch.no_grad():
                bad[0].again()
        rows = list(bad[0].mb.data_dict.get("idx") or []) if bad else []
        where = f" on the samples {rows or self.samples}" if rows or self.samples else ""
        if self.flags.contradicting:
            raise LossError(
                f"a teacher scored other tokens than the loss was given{where}; the step was not taken; run it in one "
                "process to see which"
            )
        what = "the loss is not finite" if self.flags.infinite else f"the gradient norm is {norm}"
        raise LossError(f"{what}{where}; the step was not taken; lower the learning rate or look at these samples")

    def release(self) -> None:
        """Heads that were gathered for this pass."""
        self.model.sharding.release()
        for teacher in self.teachers:
            teacher.release()
