"""One optimizer step: global counts, micro-batches, gradients summed over ranks, clip, step.

The loss of a micro-batch arrives divided by the counts of the global batch, so gradients simply add up: over
micro-batches and over data-parallel ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import ProcessedMicrobatch, process_global_batch
from limbeck.distributed.exchange import failing_together
from limbeck.utils.errors import ConfigError, DataError, LossError
from limbeck.utils.timer import Timer

if TYPE_CHECKING:
    from limbeck.models.policy import Policy
    from limbeck.models.teachers import TeacherSource

Sums = dict[str, tuple[Any, Any]]


def process_group(mesh_or_group: Any) -> Any:
    """The process group of a data-parallel mesh or group; None where it has only this rank."""
    if mesh_or_group is None or not (dist.is_available() and dist.is_initialized()):
        return None
    group = mesh_or_group.get_group() if hasattr(mesh_or_group, "get_group") else mesh_or_group
    return group if dist.get_world_size(group) > 1 else None


def train_on_batches(
    policy: Policy,
    data: BatchedDataDict,
    loss_fn: Any,
    teachers: Sequence[TeacherSource],
    *,
    eval_mode: bool,
    gbs: int | None,
    mbs: int,
    timer: Timer,
) -> dict[str, Any]:
    """See ``Policy.train``."""
    group = process_group(policy.dp_group)
    ranks = dist.get_world_size(group) if group is not None else 1
    # among several ranks one may have no rows; it still takes part
    local = max(data.size, int(ranks > 1)) if gbs is None else gbs // ranks
    if local < 1 or (gbs is not None and gbs % ranks):
        raise DataError(f"a global batch of {gbs} rows over {ranks} ranks is not usable; give a multiple of {ranks}")
    with timer.time("teacher"):
        attach(teachers, policy)
        data, sums = announce(data, teachers, group)
    results = []
    for index in range(max(1, math.ceil(data.size / local))):
        if not eval_mode and _wants_first_pass(loss_fn):
            first = Step(policy, timer, eval_mode=True)
            first.add(data, loss_fn, teachers, index=index, local=local, mbs=mbs)
            loss_fn.start_step(first.finish()["metrics"])
        step = Step(policy, timer, eval_mode=eval_mode)
        if index == 0:
            step.add_metrics(sums)
        step.add(data, loss_fn, teachers, index=index, local=local, mbs=mbs)
        result = step.finish()
        if not eval_mode and hasattr(loss_fn, "end_step"):
            loss_fn.end_step(result["metrics"])
        results.append(result)
    return results[0] if len(results) == 1 else _merge(results)


def attach(teachers: Sequence[TeacherSource], student: Policy) -> None:
    """Tell the sources that care (those with ``attach(student)``) which ranks read whose rows. Collective."""
    for teacher in teachers:
        if hasattr(teacher, "attach"):
            teacher.attach(student)


def announce(
    data: BatchedDataDict, teachers: Sequence[TeacherSource], group: Any = None
) -> tuple[BatchedDataDict, Sums]:
    """Show a whole batch to the sources that fetch their signals, before anything is counted.

    A source with ``announce(data, index)`` returns which rows it has a signal for (``[B]``, 1 or 0) and metrics. The
    rows that it lacks leave the teacher's denominator, so the others' loss is what it would be without them. An error
    of one of the data-parallel ranks of ``group`` is one of all.
    """
    sums: Sums = {}
    for index, teacher in enumerate(teachers):
        if hasattr(teacher, "announce"):
            with failing_together(group):
                mask, metrics = teacher.announce(data, index)
            data = BatchedDataDict({**data.data, f"teacher_{index}_sample_mask": mask})
            sums |= {f"teacher_{index}/{name}": pair for name, pair in metrics.items()}
    return data, sums


def _wants_first_pass(loss_fn: Any) -> bool:
    settings = getattr(loss_fn, "settings", None)
    return bool(
        getattr(settings, "dynamic_loss_scaling", False)
        and getattr(settings, "dynamic_scaling_source", "running") == "first_pass"
    )


def _check_all_trained(policy: Policy, loss_fn: Any) -> None:
    """A learnable part of the loss that no optimizer knows would stay as it is without a word."""
    assert policy.optimizer is not None
    known = {id(p) for group in policy.optimizer.param_groups for p in group["params"]}
    parameters = loss_fn.parameters() if isinstance(loss_fn, torch.nn.Module) else ()
    if any(p.requires_grad and id(p) not in known for p in parameters):
        raise LossError("the loss has learnable parameters; make the policy with extra_parameters=loss_fn.parameters()")


def _check_layout(policy: Policy, loss_fn: Any) -> None:
    """A loss that does not know of split sequences or vocabularies would give other numbers."""
    shape = policy.mesh_shape
    if shape.same_rows > 1:
        if not hasattr(loss_fn, "check_layout"):
            raise ConfigError(
                f"{type(loss_fn).__name__} knows neither tensor nor context parallelism; set both sizes to 1"
            )
        loss_fn.check_layout(context=shape.context, tensor=shape.tensor)


def _merge(results: list[dict[str, Any]]) -> dict[str, Any]:
    last = dict(results[-1])
    for name in ("loss", "grad_norm"):
        values = [r[name] for r in results if r[name] is not None]
        last[name] = sum(values) / len(values) if values else None
    metrics: Sums = {}
    for result in results:
        for name, (total, count) in result["metrics"].items():
            old = metrics.get(name, (0.0, 0.0))
            metrics[name] = (old[0] + total, old[1] + count)
    last["metrics"] = metrics
    for name in ("tokens", "microbatches"):
        last[name] = sum(r[name] for r in results)
    return last


def same_names(sums: dict[str, list[Tensor]], group: Any, device: torch.device) -> dict[str, list[Tensor]]:
    """The metrics of all ranks, with zeros for those that this rank's rows did not have (no chunk, no site)."""
    if group is None:
        return sums
    # a short digest settles the usual case, in which all ranks have the same
    digest = zlib.crc32("/".join(sorted(sums)).encode())
    ends = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    if int(ends[0]) == -int(ends[1]):
        return sums
    lists: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(lists, sorted(sums), group=group)
    zeros = [torch.zeros((), dtype=torch.float64, device=device)] * 2
    return {name: sums.get(name, zeros) for name in sorted(set().union(*lists))}


class Step:
    """One optimizer step in parts: ``add`` one or more batches, each with a loss of its own, then ``finish``.

    Gradients add up over everything that was added; the step is taken once. Under data parallelism every rank makes the
    same calls, with the rows it has (possibly none).
    """

    def __init__(self, policy: Policy, timer: Timer, *, eval_mode: bool = False) -> None:
        self.policy, self.timer, self.eval_mode = policy, timer, eval_mode
        self.group, self.reduce_group = process_group(policy.dp_group), process_group(policy.reduce_group)
        self.sums: dict[str, list[Tensor]] = {}
        self.tokens = self.number = 0
        self.counts: dict[str, Tensor] = {}
        self.valid = {"global_valid_seqs": 0.0, "global_valid_toks": 0.0}
        self.losses: list[tuple[Tensor, ProcessedMicrobatch]] = []
        self.rows: list[Any] = []
        self.teachers: list[TeacherSource] = []
        if not eval_mode:
            self._drop_gradients()

    def add(
        self,
        data: BatchedDataDict,
        loss_fn: Any,
        teachers: Sequence[TeacherSource] = (),
        *,
        index: int = 0,
        local: int | None = None,
        mbs: int = 1,
    ) -> None:
        """Forward and backward of global batch ``index`` of ``data``, ``local`` rows of this rank (default: all)."""
        size = max(data.size, 1) if local is None else local
        prepared = process_global_batch(data, loss_fn, self.group, batch_idx=index, batch_size=size)
        batch, counts = prepared["batch"], prepared.get("counts", {})
        if not self.eval_mode:
            _check_all_trained(self.policy, loss_fn)
        _check_layout(self.policy, loss_fn)
        attach(teachers, self.policy)
        self.teachers += [teacher for teacher in teachers if teacher not in self.teachers]
        iterator, number = self.policy.microbatches(batch, mbs)
        with torch.set_grad_enabled(not self.eval_mode):
            for mb in iterator:
                self.losses.append((self._microbatch(mb, loss_fn, teachers, counts), mb))
        self.number += number
        self.counts.update(counts)
        self.valid = {name: value + float(prepared[name]) for name, value in self.valid.items()}
        self.rows += list(batch.get("idx") or [])

    def finish(self) -> dict[str, Any]:
        """Check, step, and reduce metrics over ranks; see ``Policy.train`` for the result."""
        self._check_losses(self.losses)
        rate = self.policy.optimizer.param_groups[0]["lr"] if self.policy.optimizer else None
        norm = None if self.eval_mode else self._optimize()
        metrics, loss, tokens = self._reduce([value for value, _ in self.losses])
        self._release()
        return {
            "loss": loss,
            "grad_norm": norm,
            "lr": rate,
            "metrics": metrics,
            "tokens": tokens,
            "microbatches": self.number,
            "counts": self.counts,
            **self.valid,
        }

    def _microbatch(
        self, mb: ProcessedMicrobatch, loss_fn: Any, teachers: Sequence[TeacherSource], counts: dict[str, Tensor]
    ) -> Tensor:
        policy, timer = self.policy, self.timer
        signals, starts = [], []
        with timer.time("teacher"):
            for number, teacher in enumerate(teachers):
                signal, start = teacher.signal(mb, number, policy.device)
                signals.append(signal)
                starts.append(start)
            inputs = loss_fn.prepare(mb, starts)
            if policy.mesh is not None and policy.mesh.shape.context > 1:
                inputs = loss_fn.share(inputs, policy.mesh.context_rank, policy.mesh.shape.context)
        with timer.time("forward"):
            hidden = policy.forward_hidden(mb.processed_inputs)
        with timer.time("loss"):
            loss, metrics = loss_fn.compute(hidden, policy.head(), signals, inputs, counts)
        if not self.eval_mode:
            with timer.time("backward"):
                loss.backward()
        self.add_metrics(metrics)
        # ranks that share rows count them once
        if not mb.is_dummy and policy.counts_rows:
            self.tokens += int(mb.data_dict["input_lengths"].sum())
        return torch.as_tensor(loss).detach()

    def add_metrics(self, metrics: Sums) -> None:
        """Add (sum, count) pairs to this step's."""
        for name, pair in metrics.items():
            values = [torch.as_tensor(v, dtype=torch.float64, device=self.policy.device) for v in pair]
            old = self.sums.get(name)
            self.sums[name] = values if old is None else [a + b for a, b in zip(old, values, strict=True)]

    def _check_losses(self, losses: list[tuple[Tensor, ProcessedMicrobatch]]) -> None:
        bad = [mb for value, mb in losses if not bool(torch.isfinite(value))]
        # every rank must take the same way out, or the others wait in the gradients' all-reduce for ever
        if self._any(bool(bad)):
            rows = bad[0].data_dict.get("idx") if bad else None
            self._drop_gradients()
            raise LossError(
                f"the loss is not finite{'' if rows is None else f' on the samples {list(rows)}'}; the step was not "
                "taken; lower the learning rate or look at these samples"
            )

    def _drop_gradients(self) -> None:
        if self.policy.optimizer is not None:
            self.policy.optimizer.zero_grad(set_to_none=True)
        if self.policy.sharded is not None:
            self.policy.sharded.release(gradient=True)

    def _release(self) -> None:
        """Heads that were gathered for this step."""
        if self.policy.sharded is not None:
            self.policy.sharded.release()
        for teacher in self.teachers:
            if hasattr(teacher, "release"):
                teacher.release()

    def _any(self, flag: bool) -> bool:
        if self.reduce_group is None:
            return flag
        value = torch.tensor(float(flag), device=self.policy.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.reduce_group)
        return bool(value)

    def _optimize(self) -> float:
        policy = self.policy
        assert policy.optimizer is not None
        with self.timer.time("optimizer"):
            params = [p for g in policy.optimizer.param_groups for p in g["params"]]
            self._sum_gradients(params)
            limit = math.inf if policy.cfg["max_grad_norm"] is None else float(policy.cfg["max_grad_norm"])
            clip = torch.nn.utils.clip_grad_norm_ if policy.sharded is None else policy.sharded.clip
            norm = clip(params, limit)
            if not bool(torch.isfinite(norm)):
                self._drop_gradients()
                raise LossError(
                    f"the gradient norm is {float(norm)}{f' on the samples {self.rows}' if self.rows else ''}; the "
                    "step was not taken; lower the learning rate or look at these samples"
                )
            policy.optimizer.step()
            if policy.scheduler is not None:
                policy.scheduler.step()
            policy.steps += 1
            policy.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def _sum_gradients(self, params: list[Tensor]) -> None:
        """Plain data parallelism; a sharded model knows which of its gradients are sums already."""
        if self.policy.sharded is not None:
            self.policy.sharded.collect(params)
            return
        if self.group is None:
            return
        for p in params:
            # a parameter that this rank's rows did not reach still takes part, with zeros
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=self.group)

    def _reduce(self, losses: list[Tensor]) -> tuple[Sums, float, int]:
        device = self.policy.device
        self.sums = same_names(self.sums, self.reduce_group, device)
        names = sorted(self.sums)
        total = torch.stack([value.double() for value in losses]).sum() if losses else torch.zeros((), device=device)
        flat = [total.reshape(1).double(), torch.tensor([self.tokens], dtype=torch.float64, device=device)]
        flat += [torch.stack(self.sums[name]) for name in names]
        values = torch.cat(flat)
        if self.reduce_group is not None:
            dist.all_reduce(values, group=self.reduce_group)
        numbers = values.tolist()
        metrics: Sums = {n: (numbers[2 + 2 * i], numbers[3 + 2 * i]) for i, n in enumerate(names)}
        return metrics, numbers[0], int(numbers[1])
