"""One optimizer step: global counts, micro-batches, gradients summed over ranks, clip, step.

The loss of a micro-batch arrives divided by the counts of the global batch, so gradients simply add up: over
micro-batches and over data-parallel ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import ProcessedMicrobatch, process_global_batch
from limbeck.losses.blocks import deferred_checks
from limbeck.losses.contract import Loss
from limbeck.losses.signals import Signal
from limbeck.utils.errors import ConfigError, DataError, LossError
from limbeck.utils.metrics import Metrics, Pair
from limbeck.utils.timer import Timer

if TYPE_CHECKING:
    from limbeck.models.policy import Policy

Sums = dict[str, tuple[Any, Any]]


class TeacherSource(Protocol):
    """Where a teacher's signals come from.

    A source may also have ``attach(student)`` (it is then told the student's policy before it is asked), ``announce``
    (see ``announce``) and ``release()`` (a step has ended).

    A source with a true ``runs_model`` keeps the device busy, and is asked before the student's forward pass; one that
    looks its signals up is asked after it, while the device works.
    """

    vocab_size: int

    def signal(
        self, microbatch: ProcessedMicrobatch, teacher_index: int, device: torch.device | str
    ) -> tuple[Signal, Tensor]:
        """The signal of one micro-batch on ``device`` and the flat row [B] at which each sample starts in it."""
        ...

    def logprobs(self, data: BatchedDataDict, teacher_index: int) -> Tensor:
        """Log-probability of every teacher token [B, T_t], 0 at the first token and in padding (float32, CPU)."""
        ...


def train_on_batches(
    policy: Policy,
    data: BatchedDataDict,
    loss_fn: Loss[Any],
    teachers: Sequence[TeacherSource],
    *,
    eval_mode: bool,
    gbs: int | None,
    mbs: int,
    timer: Timer,
) -> dict[str, Any]:
    """See ``Policy.train``."""
    ranks = policy.dims.data.size
    # among several ranks one may have no rows; it still takes part
    local = max(data.size, int(ranks > 1)) if gbs is None else gbs // ranks
    if local < 1 or (gbs is not None and gbs % ranks):
        raise DataError(f"a global batch of {gbs} rows over {ranks} ranks is not usable; give a multiple of {ranks}")
    with timer.time("teacher"):
        data, sums = announce(data, teachers, policy)
    results = []
    for index in range(max(1, math.ceil(data.size / local))):
        if not eval_mode and loss_fn.needs_first_pass:
            first = Step(policy, timer, eval_mode=True)
            first.add(data, loss_fn, teachers, index=index, local=local, mbs=mbs)
            loss_fn.first_pass(first.finish()["metrics"])
        step = Step(policy, timer, eval_mode=eval_mode)
        if index == 0:
            step.add_metrics(sums)
        step.add(data, loss_fn, teachers, index=index, local=local, mbs=mbs)
        result = step.finish()
        if not eval_mode:
            loss_fn.step_end(result["metrics"])
        results.append(result)
    return results[0] if len(results) == 1 else _merge(results)


def attach(teachers: Sequence[TeacherSource], student: Policy) -> None:
    """Tell the sources that care (those with ``attach(student)``) which ranks read whose rows. Collective."""
    for teacher in teachers:
        if hasattr(teacher, "attach"):
            teacher.attach(student)


def announce(data: BatchedDataDict, teachers: Sequence[TeacherSource], student: Policy) -> tuple[BatchedDataDict, Sums]:
    """Show a whole batch to the sources that fetch their signals, before anything is counted. Collective.

    A source with ``announce(data, index)`` returns which rows it has a signal for (``[B]``, 1 or 0) and metrics. The
    rows that it lacks leave the teacher's denominator, so the others' loss is what it would be without them. An error
    of one rank is one of all.
    """
    attach(teachers, student)
    sums: Sums = {}
    for index, teacher in enumerate(teachers):
        if hasattr(teacher, "announce"):
            with student.dims.data.fail_together():
                mask, metrics = teacher.announce(data, index)
            data = BatchedDataDict({**data.data, f"teacher_{index}_sample_mask": mask})
            sums |= {f"teacher_{index}/{name}": pair for name, pair in metrics.items()}
    # ranks that share rows count them once
    return data, sums if student.dims.owns_rows else dict.fromkeys(sums, (0.0, 0.0))


def _check_all_trained(policy: Policy, loss_fn: Loss[Any]) -> None:
    """A learnable part of the loss that no optimizer knows would stay as it is without a word."""
    assert policy.optimizer is not None
    known = {id(p) for group in policy.optimizer.param_groups for p in group["params"]}
    if any(p.requires_grad and id(p) not in known for p in loss_fn.parameters()):
        raise LossError("the loss has learnable parameters; make the policy with extra_parameters=loss_fn.parameters()")


def _check_layout(policy: Policy, loss_fn: Loss[Any]) -> None:
    """A loss that does not know of split sequences or vocabularies would give other numbers."""
    shape = policy.dims.shape
    for kind, size, known in (
        ("tensor", shape.tensor, loss_fn.tensor_parallel),
        ("context", shape.context, loss_fn.context_parallel),
    ):
        if size > 1 and not known:
            raise ConfigError(f"{type(loss_fn).__name__} does not know {kind} parallelism; set its size to 1")


def _merge(results: list[dict[str, Any]]) -> dict[str, Any]:
    last = dict(results[-1])
    for name in ("loss", "grad_norm"):
        values = [r[name] for r in results if r[name] is not None]
        last[name] = sum(values) / len(values) if values else None
    last["metrics"] = Metrics.total(result["metrics"] for result in results).pairs()
    for name in ("tokens", "microbatches"):
        last[name] = sum(r[name] for r in results)
    return last


@dataclass
class _Done:
    """What is kept of a micro-batch: its loss, the flags that its checks left, and how to compute it again."""

    loss: Tensor
    flags: list[Tensor]
    mb: ProcessedMicrobatch
    again: Callable[[], Any]

    def is_bad(self) -> bool:
        return not bool(torch.isfinite(self.loss)) or any(bool(flag.any()) for flag in self.flags)


class _Read(NamedTuple):
    """What the host learns of a step. infinite: some loss is not finite; contradicting: a teacher scored other tokens
    than the loss was given."""

    loss: float
    metrics: Sums
    tokens: int
    infinite: bool
    contradicting: bool
    norm: float | None


class Step:
    """One optimizer step in parts: ``add`` one or more batches, each with a loss of its own, then ``finish``.

    Gradients add up over everything that was added; the step is taken once. Under data parallelism every rank makes the
    same calls, with the rows it has (possibly none).
    """

    def __init__(self, policy: Policy, timer: Timer, *, eval_mode: bool = False) -> None:
        self.policy, self.timer, self.eval_mode = policy, timer, eval_mode
        self.dims = policy.dims
        self.metrics = Metrics()
        self.tokens = self.number = 0
        self.counts: dict[str, Tensor] = {}
        self.valid = {"global_valid_seqs": 0.0, "global_valid_toks": 0.0}
        self.done: list[_Done] = []
        self.rows: list[Any] = []
        self.teachers: list[TeacherSource] = []
        if not eval_mode:
            self._drop_gradients()

    def add(
        self,
        data: BatchedDataDict,
        loss_fn: Loss[Any],
        teachers: Sequence[TeacherSource] = (),
        *,
        index: int = 0,
        local: int | None = None,
        mbs: int = 1,
    ) -> None:
        """Forward and backward of global batch ``index`` of ``data``, ``local`` rows of this rank (default: all)."""
        size = max(data.size, 1) if local is None else local
        prepared = process_global_batch(data, loss_fn, self.dims.data, batch_idx=index, batch_size=size)
        batch, counts = prepared["batch"], prepared.get("counts", {})
        if not self.eval_mode:
            _check_all_trained(self.policy, loss_fn)
        _check_layout(self.policy, loss_fn)
        attach(teachers, self.policy)
        self.teachers += [teacher for teacher in teachers if teacher not in self.teachers]
        iterator, number = self.policy.microbatches(batch, mbs)
        for mb in iterator:
            self._microbatch(mb, loss_fn, teachers, counts)
        self.number += number
        self.counts.update(counts)
        self.valid = {name: value + float(prepared[name]) for name, value in self.valid.items()}
        self.rows += list(batch.get("idx") or [])

    def finish(self) -> dict[str, Any]:
        """Collect gradients, wait for the device once, check, step; see ``Policy.train`` for the result."""
        rate = self.policy.optimizer.param_groups[0]["lr"] if self.policy.optimizer else None
        norm = None if self.eval_mode else self._collect_gradients()
        with self.timer.time("wait"):
            read = self._read(norm)
        self._check(read)
        if not self.eval_mode:
            self._optimize()
        self._release()
        return {
            "loss": read.loss,
            "grad_norm": read.norm,
            "lr": rate,
            "metrics": read.metrics,
            "tokens": read.tokens,
            "microbatches": self.number,
            "counts": self.counts,
            **self.valid,
        }

    def _microbatch(
        self, mb: ProcessedMicrobatch, loss_fn: Loss[Any], teachers: Sequence[TeacherSource], counts: dict[str, Tensor]
    ) -> None:
        with torch.set_grad_enabled(not self.eval_mode), deferred_checks() as flags:
            loss, metrics = self._loss(mb, loss_fn, teachers, counts)
            if not self.eval_mode:
                with self.timer.time("backward"):
                    loss.backward()
        self.add_metrics(metrics)
        # ranks that share rows count them once
        if not mb.is_dummy and self.dims.owns_rows:
            self.tokens += int(mb.data_dict["input_lengths"].sum())
        again = functools.partial(self._loss, mb, loss_fn, teachers, counts)
        self.done.append(_Done(torch.as_tensor(loss).detach(), flags, mb, again))

    def _loss(
        self, mb: ProcessedMicrobatch, loss_fn: Loss[Any], teachers: Sequence[TeacherSource], counts: dict[str, Tensor]
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics of one micro-batch. What keeps the device busy is queued first: the teachers that are models
        and the student; the host then looks up stored signals and lays out the loss while it works."""
        policy, timer = self.policy, self.timer
        signals: dict[int, tuple[Any, Tensor | None]] = {}

        def ask(models: bool) -> None:
            with timer.time("teacher"):
                for number, teacher in enumerate(teachers):
                    if getattr(teacher, "runs_model", False) == models:
                        signals[number] = teacher.signal(mb, number, policy.device)

        ask(models=True)
        with timer.time("forward"):
            hidden = policy.forward_hidden(mb.processed_inputs)
        ask(models=False)
        with timer.time("loss"):
            found = [signals[number] for number in range(len(teachers))]
            inputs = loss_fn.prepare(mb, [start for _, start in found])
            if policy.dims.context.size > 1:
                inputs = loss_fn.shard(inputs, policy.dims.context)
            return loss_fn.compute(hidden, policy.head(), [signal for signal, _ in found], inputs, counts)

    def add_metrics(self, metrics: Mapping[str, Pair]) -> None:
        """Add (sum, count) pairs to this step's."""
        self.metrics.add(metrics)

    def _check(self, read: _Read) -> None:
        """Refuse a step whose loss or gradient is not finite; all ranks come to the same answer."""
        wrong = read.infinite or read.contradicting
        if not wrong and (read.norm is None or math.isfinite(read.norm)):
            return
        self._drop_gradients()
        bad = [done for done in self.done if done.is_bad()]
        if bad and self.dims.shape.world == 1:
            # the weights are as they were: asked again, the loss itself says what is wrong
            with torch.no_grad():
                bad[0].again()
        rows = list(bad[0].mb.data_dict.get("idx") or []) if bad else []
        where = f" on the samples {rows or self.rows}" if rows or self.rows else ""
        if read.contradicting:
            raise LossError(
                f"a teacher scored other tokens than the loss was given{where}; the step was not taken; run it in one "
                "process to see which"
            )
        what = "the loss is not finite" if read.infinite else f"the gradient norm is {read.norm}"
        raise LossError(f"{what}{where}; the step was not taken; lower the learning rate or look at these samples")

    def _drop_gradients(self) -> None:
        if self.policy.optimizer is not None:
            self.policy.optimizer.zero_grad(set_to_none=True)
        self.policy.sharding.release(gradient=True)

    def _release(self) -> None:
        """Heads that were gathered for this step."""
        self.policy.sharding.release()
        for teacher in self.teachers:
            if hasattr(teacher, "release"):
                teacher.release()

    def _collect_gradients(self) -> Tensor:
        """Sum gradients over ranks and clip them; returns their norm, still on the device."""
        policy = self.policy
        assert policy.optimizer is not None
        with self.timer.time("optimizer"):
            params = [p for g in policy.optimizer.param_groups for p in g["params"]]
            policy.sharding.collect(params)
            limit = math.inf if policy.cfg.max_grad_norm is None else policy.cfg.max_grad_norm
            return policy.sharding.clip(params, limit)

    def _optimize(self) -> None:
        policy = self.policy
        assert policy.optimizer is not None
        with self.timer.time("optimizer"):
            policy.optimizer.step()
            if policy.scheduler is not None:
                policy.scheduler.step()
            policy.steps += 1
            policy.optimizer.zero_grad(set_to_none=True)

    def _read(self, norm: Tensor | None) -> _Read:
        """Loss, metrics and flags summed over ranks; the one place where a step waits for the device."""
        zero = torch.zeros((), dtype=torch.float64, device=self.policy.device)
        losses = torch.stack([done.loss.double() for done in self.done]) if self.done else zero[None]
        flags = sum((flag.double() for done in self.done for flag in done.flags), zero.expand(2))
        infinite = (~torch.isfinite(losses)).sum() + flags[0]
        same = [] if norm is None else [norm]
        # data x context ranks, once per step: a few numbers, all that the host learns of it
        metrics, (loss, bad, odd, tokens, *norms) = self.metrics.reduced(
            self.dims.loss, losses.sum(), infinite, flags[1], self.tokens, same=same
        )
        return _Read(loss, metrics.pairs(), int(tokens), bool(bad), bool(odd), norms[0] if norms else None)
