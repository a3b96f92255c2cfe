"""The training step, all of it: prefetch, counts, micro-batches, backward, reduce, clip, optimizer.

The loss of a micro-batch arrives divided by the counts of the global batch, so gradients simply add up: over
micro-batches, over step inputs and over data-parallel ranks. The host waits for the device once per step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from limbeck.config import FREE
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.layout import teacher_prefix
from limbeck.data.microbatch import MicrobatchConfig, ProcessedMicrobatch, valid_counts
from limbeck.distributed.device import forget_peak, memory_free, memory_peak, memory_room
from limbeck.errors import CheckpointError, ConfigError, LossError
from limbeck.losses.blocks import deferred_checks
from limbeck.losses.contract import Counts, Loss, State, Teacher
from limbeck.losses.signals import Head, TeacherOutput
from limbeck.models.budget import MEASURED_STEPS, Measured, ran_out, release_memory
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
    same_schedule,
    schedule_at,
    scheduler_state,
)
from limbeck.utils.metrics import Metrics, Pair
from limbeck.utils.progress import say
from limbeck.utils.timer import Timer

Monitor = Callable[[Tensor, Head, Sequence[TeacherOutput], Any], Mapping[str, Pair]]
"""Measures a micro-batch beside its loss: (hidden rows, head, signals, the loss's inputs) -> metrics."""


class TrainingConfig(BaseModel):
    """How the weights of a model are trained."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    train_global_batch_size: int = Field(default=32, ge=1)
    """Records per optimizer step over all ranks; default: ``distillation.num_prompts_per_step``, which must be a
    multiple."""
    train_micro_batch_size: int | None = Field(default=None, ge=1, json_schema_extra=FREE)
    """Rows per forward pass on each rank; gradients of micro-batches add up. null: rows packed or by length, as many
    tokens as the device's memory takes."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm; null: never."""
    optimizer: OptimizerConfig = OptimizerConfig(kwargs=DEFAULT_ARGUMENTS)
    """Which optimizer; a section without a name changes settings of AdamW."""
    scheduler: SchedulerConfig | list[SchedulerConfig] | None = None
    """Learning rate over the steps: one schedule, or several in a row; default: constant."""


@dataclass(frozen=True)
class StepInput:
    """Material of a step: rows of this rank, a loss with its own denominators, and its teachers in order.

    Attributes:
        factor: of the loss in the total; 1 costs no multiplication.
        group_size: neighbouring rows that must share a micro-batch (a preference pair: 2).
        monitor: measured along with every micro-batch.
        reported: metrics of the loss that are kept, also where no rank has a row for them; empty: all of them.
        prefix: of the names of its metrics and counts, where two step inputs have losses of one kind.
    """

    batch: BatchedDataDict
    loss: Loss[Any]
    teachers: Sequence[Teacher] = ()
    factor: float = 1.0
    group_size: int = 1
    monitor: Monitor | None = None
    reported: Sequence[str] = ()
    prefix: str = ""

    def own(self, metrics: Mapping[str, Pair]) -> Mapping[str, Pair]:
        """Metrics of this step input among a step's, by the names that its loss gave them."""
        if not self.prefix:
            return metrics
        return {name.removeprefix(self.prefix): pair for name, pair in metrics.items() if name.startswith(self.prefix)}


@dataclass(frozen=True)
class StepResult:
    """Figures of a step as the host learns them; sums and counts are those of all ranks.

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
    """Optimizer, schedule, clipping, and the reduction of gradients and metrics over ranks, for one model."""

    def __init__(self, model: LanguageModel, cfg: TrainingConfig) -> None:
        self.model, self.cfg, self.steps = model, cfg, 0
        self.parameters = [p for p in model.model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(self.parameters, cfg.optimizer)
        self.scheduler = build_scheduler(self.optimizer, cfg.scheduler)

    def step(
        self, step_inputs: Sequence[StepInput], timer: Timer | None = None, *, micro_batch_size: int | None = None
    ) -> StepResult:
        """One optimizer step over all step inputs. Under data parallelism every rank makes the same call, with the rows
        it has (possibly none).

        Args:
            timer: sections ``teacher``, ``forward``, ``layout``, ``loss``, ``backward``, ``optimizer``, and ``wait``:
                for a device that works behind the host.
            micro_batch_size: rows per micro-batch where neither dynamic batching nor packing is on; default: as
                configured, or found.

        Raises:
            LossError: a loss or gradient is not finite, or a teacher scored other ids; weights and optimizer are as
                before.
        """
        timer = timer or Timer()
        micro_batch_size = micro_batch_size or self.cfg.train_micro_batch_size
        self.model.model.train()
        try:
            step_inputs, asked = prefetch(self.model, step_inputs, timer)
            # an error in the middle of the step before may have left some
            self._drop_gradients()
            before = self._begin_measuring(micro_batch_size)
            work = MicrobatchRunner(self.model, step_inputs, micro_batch_size, timer, training=True)
            if before is not None:
                self._learn(before, work)
            work.metrics.add(asked)
            result = self._finish(work, timer)
        finally:
            # between steps the model samples, is validated or teaches: without dropout
            self.model.model.eval()
        for step_input in step_inputs:
            step_input.loss.step_end(step_input.own(result.metrics))
        # an average moves once, however many step inputs it teaches
        for teacher in dict.fromkeys(teacher for step_input in step_inputs for teacher in step_input.teachers):
            teacher.step_end()
        return result

    def _begin_measuring(self, micro_batch_size: int | None) -> int | None:
        """Bytes that are held before a step whose memory corrects the budget; None for another step."""
        if not self.model.finds_budget(micro_batch_size) or not self.steps or self.model.budget.steps >= MEASURED_STEPS:
            return None
        forget_peak(self.model.device)
        return memory_room(self.model.device)[1]

    def _learn(self, before: int, work: MicrobatchRunner) -> None:
        grads = [p.grad for p in self.parameters if p.grad is not None]
        size = sum(grad.numel() * grad.element_size() for grad in grads)
        peak = memory_peak(self.model.device)
        changed = self.model.budget.learn(Measured(before, peak, size, work.largest, work.microbatches))
        if changed is not None:
            say(f"batches: {changed[1]:,} tokens per micro-batch by what a step took, not {changed[0]:,}")

    def _finish(self, work: MicrobatchRunner, timer: Timer) -> StepResult:
        """Collect gradients, wait for the device once, check, step."""
        # read here: the schedule moves it on before the result is made
        rate = float(self.optimizer.param_groups[0]["lr"])
        with timer.time("optimizer"):
            # the optimizer may hold them in groups by layout
            params = [p for group in self.optimizer.param_groups for p in group["params"]]
            self.model.sharding.collect(params)
            limit = math.inf if self.cfg.max_grad_norm is None else self.cfg.max_grad_norm
            # also without a limit: the norm is logged, and tells whether every gradient is finite
            norm = self.model.sharding.clip(params, limit)
        with timer.time("wait"):
            result = work.read(norm)
        # before the optimizer's step, which would carry a NaN into its moments for good
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
        """Layout of a stored state; None where it is whole."""
        if not self.model.sharding.is_sharded:
            return None
        # moments come into being with the first step, and shards are read into tensors that exist
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
            # before the schedule, which writes its learning rates into the optimizer's groups
            load_optimizer_state(self.optimizer, self.parameters, state["optimizer"])
        except ValueError as e:
            raise CheckpointError(f"{where} does not fit this model: {e}") from e
        if self.scheduler is not None and state["scheduler"] is not None:
            groups = len(self.optimizer.param_groups)
            stored = scheduler_state(state["scheduler"], groups)
            if same_schedule(self.scheduler.state_dict(), stored):
                self.scheduler.load_state_dict(stored)
            else:
                self.scheduler = schedule_at(self.optimizer, self.cfg.scheduler, int(state["steps"]))
                rate = self.optimizer.param_groups[0]["lr"]
                next_rate = f"step {state['steps'] + 1} has learning rate {rate:.3g}"
                say(f"the schedule is made anew for the new length: {next_rate}")
        self.steps = int(state["steps"])


def evaluate(
    model: LanguageModel,
    step_inputs: Sequence[StepInput],
    timer: Timer | None = None,
    *,
    micro_batch_size: int | None = None,
) -> StepResult:
    """Loss and metrics of what a step would learn from, without gradient; see `Trainer.step`."""
    timer = timer or Timer()
    model.model.eval()
    step_inputs, asked = prefetch(model, step_inputs, timer)
    return _measured(model, step_inputs, micro_batch_size, timer, asked)


def _measured(
    model: LanguageModel,
    step_inputs: Sequence[StepInput],
    micro_batch_size: int | None,
    timer: Timer,
    asked: Mapping[str, Pair],
) -> StepResult:
    """A pass without gradient over step inputs whose teachers have been asked."""
    work = MicrobatchRunner(model, step_inputs, micro_batch_size, timer, training=False)
    work.metrics.add(asked)
    with timer.time("wait"):
        result = work.read()
    if work.flags.infinite or work.flags.contradicting:
        work.refuse(None)
    work.release()
    return result


def prefetch(
    model: LanguageModel, step_inputs: Sequence[StepInput], timer: Timer
) -> tuple[list[StepInput], Mapping[str, Pair]]:
    """Show whole batches to the teachers, before anything is counted. Collective.

    Rows that a teacher has no signal for leave its denominator (``teacher_<i>_sample_mask``), so the others' loss is
    what it would be without them. An error of one rank is one of all.
    """
    asked = Metrics()
    out = []
    with timer.time("teacher"):
        for step_input in step_inputs:
            batch = step_input.batch
            for number, teacher in enumerate(step_input.teachers):
                teacher.attach(model.layout)
                with model.dims.data.fail_together():
                    answer = teacher.prefetch(batch)
                if answer.mask_B is not None:
                    key = f"teacher_{number}_sample_mask"
                    # records that name one teacher have left the rows of the others out already
                    mask_B = answer.mask_B * batch[key] if key in batch else answer.mask_B
                    batch = BatchedDataDict({**batch.data, key: mask_B})
                asked.add(answer.metrics, prefix=f"teacher_{number}/")
            out.append(replace(step_input, batch=batch))
    # ranks that share rows count them once
    return out, asked if model.dims.owns_rows else dict.fromkeys(asked, (0.0, 0.0))


@dataclass
class _Done:
    """Record of a micro-batch that was run: its loss, the flags that its checks left, and how to compute it again."""

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


def found_batches(model: LanguageModel, micro_batch_size: int | None, teachers: Sequence[Teacher]) -> str | None:
    """One line about batches that a run finds by itself; None where they are named. Collective."""
    if not model.finds_budget(micro_batch_size):
        return None
    free = memory_free(model.device) / 2**30
    reason = model.unpacked or next((teacher.unpacked for teacher in teachers if teacher.unpacked), "")
    kind = "packed" if model.packs_found(reason) else "by length"
    if kind != "packed" and model.device.type == "cuda" and model.cfg.budgets is None:
        kind += f" ({reason})"
    rooms = [room for teacher in teachers if (room := teacher.room()) is not None]
    others = [f"{room:,} for {'the teacher' if len(rooms) == 1 else f'teacher {i}'}" for i, room in enumerate(rooms)]
    each = ", ".join([f"{model.budget.tokens(True):,} tokens per micro-batch for the student", *others])
    return f"batches: {kind}, {each} (of {free:,.0f} GiB free)"


class _Splitting:
    """Micro-batches of a budget that is found: its sections, and what happens where memory runs out all the same.

    Losses are sums over counts of the global batch, so a micro-batch that finds no room is taken in parts. What its
    backward pass has done is kept: a parameter gets its whole gradient of a micro-batch at once or none of it, so the
    parts are asked for the gradients of the others.

    Attributes:
        missing: of the micro-batch that found no room, parameters without a gradient of it; None: all of them.
    """

    def __init__(self, model: LanguageModel, step_input: StepInput, *, grad: bool) -> None:
        self.model, self.step_input, self.grad = model, step_input, grad
        self.missing: list[Tensor] | None = None
        self._at: Teacher | None = None
        self._alone = not model.sharding.is_sharded and not any(teacher.shared for teacher in step_input.teachers)
        trained = [*model.model.parameters(), *step_input.loss.parameters()] if grad and self._alone else []
        self._parameters = [p for p in trained if p.requires_grad]

    def batching(self, batch: BatchedDataDict) -> MicrobatchConfig:
        """Budgets of the student and of its teachers, as they hold now."""
        model, room = self.model, {"": self.model.budget.tokens(self.grad)}
        named = None if model.cfg.budgets is None else model.cfg.budgets[1].teacher_mb_tokens
        for number, teacher in enumerate(self.step_input.teachers):
            most = teacher.room()
            if named is not None:
                most = named if isinstance(named, int) else named[number]
            if most is not None:
                prefix = (teacher_prefix(batch, teacher.number) or ("", ""))[0]
                room[prefix] = min(room.get(prefix, most), most)
        unpacked = next((teacher.unpacked for teacher in self.step_input.teachers if teacher.unpacked), "")
        return model.found_batching(batch, room, unpacked=unpacked)

    def taken(self, mb: ProcessedMicrobatch, missing: list[Tensor] | None, take: Callable[..., None]) -> bool:
        """Take a micro-batch; False where it found no room and budgets are lower now. ``missing``: see above, of the
        micro-batch that it is a part of."""
        before = [(p.grad, 0 if p.grad is None else p.grad._version) for p in self._parameters]
        self._at = None
        try:
            take(missing, self._note)
            return True
        except Exception as error:
            if not ran_out(error):
                raise
            self._make_room(mb, error)
        left = None if missing is None else {id(p) for p in missing}
        self.missing = [
            p
            for p, (grad, version) in zip(self._parameters, before, strict=True)
            # backward adds to a gradient in place (another version) or makes one (another tensor): neither has happened
            if (left is None or id(p) in left) and p.grad is grad and (grad is None or grad._version == version)
        ]
        # behind the `except`: until it is left, the error's traceback holds the tensors of the pass
        release_memory(self.model.device)
        return False

    def _note(self, teacher: Teacher | None) -> None:
        self._at = teacher

    def _make_room(self, mb: ProcessedMicrobatch, error: BaseException) -> None:
        group_size = self.step_input.group_size
        if not self._alone:
            tokens = mb.processed_inputs.input_ids.numel() // 2
            kind = "sequence_packing" if mb.processed_inputs.is_packed else "dynamic_batching"
            raise ConfigError(
                f"memory ran out in a micro-batch of {2 * tokens:,} tokens, and ranks that share a model cannot repeat "
                f"it; set policy.{kind}.enabled: true and policy.{kind}.train_mb_tokens: {tokens}"
            ) from error
        if self._at is not None and self._at.room() is not None:
            self._at.make_room(mb, error, group_size)
        else:
            self.model.make_room(mb, error, grad=self.grad, group_size=group_size)


class MicrobatchRunner:
    """Forward (and, in training, backward) of all micro-batches of all step inputs; the host is ahead of the device."""

    def __init__(
        self,
        model: LanguageModel,
        step_inputs: Sequence[StepInput],
        micro_batch_size: int | None,
        timer: Timer,
        *,
        training: bool,
    ) -> None:
        self.model, self.dims, self.timer, self.training = model, model.dims, timer, training
        self.metrics, self.counts, self.flags = Metrics(), Counts(), _Flags()
        self.tokens = self.microbatches = self.largest = 0
        self.valid = {"global_valid_seqs": 0.0, "global_valid_toks": 0.0}
        self.done: list[_Done] = []
        self.samples: list[Any] = []
        self.teachers = list(dict.fromkeys(teacher for step_input in step_inputs for teacher in step_input.teachers))
        for step_input in step_inputs:
            self._add(step_input, micro_batch_size)

    def _add(self, step_input: StepInput, micro_batch_size: int | None) -> None:
        self._check_layout(step_input.loss)
        with self.timer.time("layout"):
            batch = step_input.loss.prepare_batch(step_input.batch)
            # data-parallel ranks, once per step input: a few numbers, by which every rank divides its losses
            counts = self.dims.data.sum_named({**valid_counts(batch), **step_input.loss.denominators(batch)})
            self.valid = {name: value + float(counts.pop(name)) for name, value in self.valid.items()}
        group_size = step_input.group_size
        by_budget = self.model.finds_budget(micro_batch_size)
        split = _Splitting(self.model, step_input, grad=self.training) if by_budget else None
        microbatches = self.model.microbatches(
            batch,
            None if micro_batch_size is None else micro_batch_size * group_size,
            group_size=group_size,
            cfg=None if split is None else split.batching(batch),
        )
        for mb in self.timer.iterate(microbatches, "layout"):
            if split is None or mb.is_dummy:
                self._microbatch(mb, step_input, counts)
            elif not split.taken(mb, microbatches.tag, functools.partial(self._microbatch, mb, step_input, counts)):
                microbatches.again(split.batching(batch), split.missing)
            self.largest = max(self.largest, mb.processed_inputs.input_ids.numel())
        self.microbatches += microbatches.total
        self.counts.update({step_input.prefix + name: count for name, count in counts.items()})
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

    def _microbatch(
        self,
        mb: ProcessedMicrobatch,
        step_input: StepInput,
        counts: Counts,
        missing: Sequence[Tensor] | None = None,
        asked: Callable[[Teacher | None], None] = lambda teacher: None,
    ) -> None:
        """``missing``: parameters that have no gradient of these rows yet; None: all. ``asked``: called with who
        works next, a teacher or None, the student."""
        with torch.set_grad_enabled(self.training), deferred_checks() as flags:
            loss, metrics = self._loss(mb, step_input, counts, asked)
            # backward refuses an empty list, and where nothing is missing there is nothing to do
            if self.training and (missing is None or missing):
                with self.timer.time("backward"):
                    loss.backward(inputs=missing)
        self.metrics.add(metrics)
        # ranks that share rows count them once
        if not mb.is_dummy and self.dims.owns_rows:
            self.tokens += int(mb.data_dict["input_lengths"].sum())
        again = functools.partial(self._loss, mb, step_input, counts)
        # still on the device: to look at it here would make the host wait in every micro-batch
        self.done.append(_Done(torch.as_tensor(loss).detach(), flags, mb, again))

    def _loss(
        self,
        mb: ProcessedMicrobatch,
        step_input: StepInput,
        counts: Counts,
        asked: Callable[[Teacher | None], None] = lambda teacher: None,
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics of one micro-batch. What keeps the device busy is queued first: the teachers that are models
        and the student; the host then looks up stored signals and lays out the loss while it works."""
        model, timer, loss_fn = self.model, self.timer, step_input.loss
        outputs: dict[int, TeacherOutput] = {}

        def ask(on_device: bool) -> None:
            with timer.time("teacher"):
                for number, teacher in enumerate(step_input.teachers):
                    if teacher.on_device == on_device:
                        asked(teacher)
                        outputs[number] = teacher.signal(mb, model.device)
            asked(None)

        with timer.time("teacher"):
            for teacher in step_input.teachers:
                teacher.begin(mb)
        ask(on_device=True)
        with timer.time("forward"):
            hidden_RH = model.forward_hidden(mb.processed_inputs)
        ask(on_device=False)
        # by number again, whoever was asked first
        signals = [outputs[number] for number in range(len(step_input.teachers))]
        with timer.time("layout"):
            inputs = loss_fn.build_layout(mb, [signal.row_start_B for signal in signals])
            if self.dims.context.size > 1:
                inputs = loss_fn.shard(inputs, self.dims.context)
        with timer.time("loss"):
            head = model.head()
            loss, metrics = loss_fn.compute_loss(hidden_RH, head, signals, inputs, counts)
            if step_input.reported:
                metrics = Metrics({name: metrics.get(name, (0.0, 0.0)) for name in step_input.reported})
            if step_input.monitor is not None:
                metrics.add(step_input.monitor(hidden_RH, head, signals, inputs))
            if step_input.prefix:
                metrics = Metrics().add(metrics, step_input.prefix)
        return loss if step_input.factor == 1 else loss * step_input.factor, metrics

    def read(self, norm: Tensor | None = None) -> StepResult:
        """Loss, metrics and flags summed over ranks; the one place where a step waits for the device."""
        zero = torch.zeros((), dtype=torch.float64, device=self.model.device)
        # in float64, so that the figure does not depend on how the batch was cut
        losses = torch.stack([done.loss.double() for done in self.done]) if self.done else zero[None]
        flags = sum((flag.double() for done in self.done for flag in done.flags), zero.expand(2))
        infinite = (~torch.isfinite(losses)).sum() + flags[0]
        # of the whole gradient already, on every rank: it is read along and not summed
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
        # of several ranks only some have the bad rows, and the others would not come to the pass's collectives
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
