"""Everything that ranks tell each other: all collectives of Limbeck are methods of `Comm`."""

from __future__ import annotations

import json
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from limbeck.errors import LimbeckError

_GOOD, _BAD = b"+", b"-"
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_BUCKET_BYTES = 32 * 2**20


def init_distributed(backend: str = "auto", timeout: float | None = None) -> Comm:
    """Join the ranks that torchrun (or Ray) has announced in the environment; `Comm.alone()` for a single process.

    `timeout`: seconds that a collective waits for a rank; default: torch's.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        if backend == "auto":
            backend = "nccl" if torch.cuda.is_available() else "gloo"
        if torch.cuda.is_available():
            # before the group exists: NCCL works on the device that is current then
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend, timeout=None if timeout is None else timedelta(seconds=timeout))
    return Comm.world()


@contextmanager
def naming_silent_ranks(patience: float = 5.0) -> Iterator[None]:
    """A collective that has waited too long becomes a `LimbeckError` that names the ranks nobody heard of.

    Every rank whose collective timed out says so in the group's store; who does not within `patience` seconds is named.
    """
    try:
        yield
    except RuntimeError as error:
        if Comm.world().size == 1 or not _TIMED_OUT.search(str(error)):
            raise
        silent = _silent_ranks(patience)
        who = f"rank {', '.join(map(str, silent))} has" if silent else "some rank has"
        raise LimbeckError(
            f"{who} not answered rank {Comm.world().rank} within cluster.timeout: it is stopped, or has more to do "
            "than the others; look at its machine, or raise cluster.timeout"
        ) from error


def _silent_ranks(patience: float) -> list[int]:
    world, store = Comm.world(), dist.distributed_c10d._get_default_store()
    names = [f"limbeck/waiting/{rank}" for rank in range(world.size)]
    try:
        # or asking would wait as long as the collective has
        store.set_timeout(timedelta(seconds=patience))
        store.set(names[world.rank], "1")
        # ranks time out one after another: those that do so a little later have answered, too
        time.sleep(patience)
        return [rank for rank, name in enumerate(names) if not store.check([name])]
    except RuntimeError:
        # the store lives in the process of rank 0, or dies with it
        return [0]


def leave_distributed() -> None:
    """Close the process group, so that peers in a collective fail instead of waiting. Nothing where there is none."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


class Comm:
    """Ranks that work on one thing. `Comm.alone()` has one rank and does nothing, so no caller asks whether there are
    others. Every rank makes the same calls in the same order, with tensors of the same shape and type.

    Tensors may lie anywhere: those that the backend cannot carry travel over `device` and come back to where they were.

    Attributes:
        rank, size: this rank's number among `size` ranks.
        device: where the backend wants travelling tensors (NCCL: this process's GPU, otherwise the CPU).
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank, self.size, self.device = 0, 1, torch.device("cpu")
        if group is not None:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            if "nccl" in dist.get_backend(group):
                self.device = torch.device("cuda", torch.cuda.current_device())

    @classmethod
    def alone(cls) -> Comm:
        return _ALONE

    @classmethod
    def world(cls) -> Comm:
        """All processes of the run."""
        if not (dist.is_available() and dist.is_initialized()):
            return _ALONE
        return cls.of(dist.group.WORLD)

    @classmethod
    def of(cls, ranks: Comm | dist.ProcessGroup | DeviceMesh | None) -> Comm:
        """The ranks of a process group or of a mesh of one dimension; None, or a group of one: `alone`."""
        if isinstance(ranks, Comm):
            return ranks
        if ranks is None or not (dist.is_available() and dist.is_initialized()):
            return _ALONE
        group = ranks.get_group() if isinstance(ranks, DeviceMesh) else ranks
        return cls(group) if dist.get_world_size(group) > 1 else _ALONE

    def __repr__(self) -> str:
        return f"Comm(rank={self.rank}, size={self.size}, device={str(self.device)!r})"

    # ---- tensors ----

    def sum(self, x: Tensor) -> Tensor:
        """Elementwise sum over the ranks, without gradient; `x` itself where this rank is alone."""
        return self._reduced(x, dist.ReduceOp.SUM)

    def max(self, x: Tensor) -> Tensor:
        """Elementwise maximum over the ranks, without gradient; `x` itself where this rank is alone."""
        return self._reduced(x, dist.ReduceOp.MAX)

    @torch.no_grad()
    def _reduced(self, x: Tensor, op: Any) -> Tensor:
        if self.size == 1:
            return x
        out = self._own_copy(x)
        # Every rank of the group: counts and metrics (a few numbers), log-sum-exps and realised tokens of a split
        # vocabulary (one number per row), sums of split responses. All ranks go on with the result, hence no reduce.
        dist.all_reduce(out, op=op, group=self._group)
        return out.to(x.device)

    def _own_copy(self, x: Tensor) -> Tensor:
        """Contiguous, on `device`, and not the caller's."""
        if x.device.type == self.device.type:
            return x.detach().clone(memory_format=torch.contiguous_format)
        return x.detach().to(self.device).contiguous()

    def _travelling(self, x: Tensor) -> Tensor:
        return (x if x.device.type == self.device.type else x.to(self.device)).contiguous()

    @torch.no_grad()
    def sum_(self, *tensors: Tensor) -> None:
        """Sum over the ranks, in place. Small tensors of one type travel together."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            if len(bucket) == 1 and bucket[0].is_contiguous() and bucket[0].device.type == self.device.type:
                self._sum_in_place(bucket[0])
                continue
            # every message has a latency of its own: hundreds of small gradients take longer apart than their bytes do
            flat = self._travelling(torch.cat([t.reshape(-1) for t in bucket]))
            self._sum_in_place(flat)
            for t, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                t.copy_(part.view(t.shape))

    def _sum_in_place(self, flat: Tensor) -> None:
        # Data-parallel ranks after the last backward pass: all gradients, once per step. Replicas need the whole sum;
        # shards have had theirs by FSDP's reduce-scatter, and only what no engine has reduced comes here.
        dist.all_reduce(flat, group=self._group)

    def sum_same_loss(self, x: Tensor) -> Tensor:
        """Sum over ranks that all compute the same loss from it: the gradient of that loss is already the whole one
        on every rank, so it passes unchanged (a sum's own gradient would count it `size` times)."""
        if self.size == 1:
            return x
        out: Tensor = _SumSameLoss.apply(x, self)
        return out

    @torch.no_grad()
    def gather(self, x: Tensor) -> list[Tensor]:
        """`x` of every rank, by rank, without gradient."""
        if self.size == 1:
            return [x]
        mine = self._travelling(x.detach())
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        # Context-parallel ranks: keys and values of a layer and the last hidden states, [B, T / n, ...] from each;
        # tensor-parallel ranks: hidden states split along the sequence, candidates of a top-k; a teacher's ranks:
        # ids of each other's rows. All ranks use all parts.
        dist.all_gather(parts, mine, group=self._group)
        return [part.to(x.device) for part in parts]

    @torch.no_grad()
    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """Sum over the ranks of their `parts[rank]`: one part for each rank goes in, this rank's sum comes out."""
        if self.size == 1:
            return parts[0]
        out = torch.empty_like(parts[0], memory_format=torch.contiguous_format, device=self.device)
        # The backward pass of `gather` over a sequence: each rank has gradients of everybody's keys and values and
        # wants the sum of its own, 1/n of what an all-reduce would bring.
        dist.reduce_scatter(out, [self._travelling(part) for part in parts], group=self._group)
        return out.to(parts[0].device)

    @torch.no_grad()
    def all_to_all(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], into: Tensor | None = None
    ) -> Tensor:
        """Rows for every rank, `send[r]` of them for rank r, in order of rank; `receive[r]` rows come from rank r.

        `into`: contiguous memory for what comes; not used where this rank is alone."""
        if self.size == 1:
            return rows
        sent = self._travelling(rows)
        here = into is not None and into.device.type == self.device.type
        out = into if into is not None and here else sent.new_empty(sum(receive), *rows.shape[1:])
        # Tensor-parallel ranks, per block of n rows and direction. Plain losses: each student column travels to the
        # ranks that hold the teacher columns it maps to, n V_s / T (1 - 1/T) numbers; a reduce-scatter of partial sums
        # over the teacher's columns would move T times as much. Kernels: each rank's columns of a block's logits to
        # the rank that computes the block, as many numbers, and their gradient back.
        dist.all_to_all_single(out, sent, list(receive), list(send), group=self._group)
        if into is None:
            return out.to(rows.device)
        return into if here else into.copy_(out)

    @torch.no_grad()
    def broadcast_(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite `x` with that of rank `source`, and return it."""
        if self.size > 1:
            there = self._travelling(x)
            # Weights that rank 0 has read, tensor by tensor, to ranks that keep a part of each: no rank but the first
            # ever holds the whole model. Also the bytes of `broadcast_json` and `first_only`.
            dist.broadcast(there, group=self._group, group_src=source)
            if there is not x:
                x.copy_(there)
        return x

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            # Around the renames of a checkpoint: rank 0 must not name it before all have written.
            dist.barrier(group=self._group)

    # ---- small things ----

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on some rank."""
        return flag if self.size == 1 else bool(self.max(torch.tensor(int(flag), device=self.device)))

    def broadcast_json(self, value: Any, source: int = 0) -> Any:
        """A value that JSON can hold, of rank `source`; what the others pass is not looked at."""
        if self.size == 1:
            return value
        return json.loads(self._broadcast_bytes(json.dumps(value).encode() if self.rank == source else b"", source))

    def _broadcast_bytes(self, raw: bytes, source: int = 0) -> bytes:
        size = int(self.broadcast_(torch.tensor(len(raw), device=self.device), source))
        if not size:
            return b""
        # a bytearray can be written: what is received goes into this memory
        data = torch.frombuffer(bytearray(raw if self.rank == source else size), dtype=torch.uint8)
        return self.broadcast_(data, source).numpy().tobytes()

    def _gather_bytes(self, raw: bytes) -> list[bytes]:
        sizes = torch.cat(self.gather(torch.tensor([len(raw)], device=self.device))).tolist()
        # `gather` wants one shape from all ranks, and no backend sends nothing
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        padded[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else padded[:0]
        return [t[:size].numpy().tobytes() for t, size in zip(self.gather(padded), sizes, strict=True)]

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """Bytes that every rank has for this one, by rank; `parts[r]` is what this one has for rank r."""
        if self.size == 1:
            return list(parts)
        send = [len(part) for part in parts]
        receive = [int(sizes[self.rank]) for sizes in self.gather(torch.tensor(send, device=self.device))]
        # frombuffer takes no empty buffer
        whole = torch.frombuffer(bytearray(b"".join(parts)) or bytearray(1), dtype=torch.uint8)[: sum(send)]
        # data-parallel ranks, once per on-policy step: the samples that change hands, some kilobytes each
        raw = self.all_to_all(whole, send, receive).cpu().numpy().tobytes()
        ends = [sum(receive[: r + 1]) for r in range(self.size)]
        return [raw[end - size : end] for end, size in zip(ends, receive, strict=True)]

    def sum_counter(self, counts: Counter[str]) -> Counter[str]:
        """The sum of all ranks' counts, which need not have the same names."""
        if self.size == 1:
            return counts
        total: Counter[str] = Counter()
        for raw in self._gather_bytes(json.dumps(counts).encode()):
            total.update(json.loads(raw))
        return total

    def all_names(self, names: Iterable[str]) -> list[str]:
        """Names that some rank has, sorted."""
        mine = sorted(names)
        if self.size == 1:
            return mine
        # a short digest settles the usual case, in which all ranks have the same
        digest = zlib.crc32("/".join(mine).encode())
        # the maximum of -x is minus the minimum of x: one reduction tells whether all are equal
        highest, lowest = self.max(torch.tensor([digest, -digest], device=self.device)).tolist()
        if highest == -lowest:
            return mine
        return sorted({name for raw in self._gather_bytes(json.dumps(mine).encode()) for name in json.loads(raw)})

    def sum_named(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scalars summed over the ranks in one reduction, in float64 on the way (exact for counts). A name that some
        rank does not have counts as 0 there; it gets a float64 on `device`."""
        if self.size == 1:
            return dict(values)
        names = self.all_names(values)
        zero = torch.zeros((), dtype=torch.float64)
        mine = [values.get(name, zero).detach().to(self.device, torch.float64) for name in names]
        sums = dict(zip(names, self.sum(torch.stack(mine)) if mine else (), strict=True))
        return {name: value.to(values[name]) if name in values else value for name, value in sums.items()}

    # ---- errors ----

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """Work that may fail on some ranks: an error of one is one of all. The others raise one of its kind
        (`LimbeckError` if it is not ours) with its rank and its text.

        Otherwise the others would go on and wait for it in their next collective.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # whatever it is, the others must not wait
            if _TIMED_OUT.search(str(raised)):
                raise  # nobody would answer
            error = raised
        if self.size > 1:
            # the highest of numbers that fall with the rank: the first rank with an error
            mine = 0 if error is None else self.size - self.rank
            worst = int(self.max(torch.tensor(mine, device=self.device)))
            if worst:
                source = self.size - worst
                packed = self._broadcast_bytes(_packed(error), source)
                error = error or _unpacked(packed, f"rank {source}: ")
        if error is not None:
            raise error

    def first_only(self, work: Callable[[], bytes]) -> bytes:
        """Answer of `work` on the first rank, handed to all of them.

        An error of that rank is one of all: the others raise one of its kind (`LimbeckError` if it is not ours) with
        its text.
        """
        if self.size == 1:
            return work()
        answer = b""
        if self.rank == 0:
            try:
                # the sign travels with the answer: the others cannot know whether an error or a result comes
                answer = _GOOD + work()
            except Exception as error:  # whatever it is, the others must not wait for an answer
                self._broadcast_bytes(_BAD + _packed(error))
                raise
        answer = self._broadcast_bytes(answer)
        if answer[:1] == _BAD:
            raise _unpacked(answer[1:])
        return answer[1:]


_ALONE = Comm(None)


def _packed(error: Exception | None) -> bytes:
    return json.dumps([type(error).__name__, str(error) or type(error).__name__]).encode()


def _unpacked(raw: bytes, lead: str = "") -> LimbeckError:
    name, text = json.loads(raw)
    kinds = {kind.__name__: kind for kind in LimbeckError.__subclasses__()}
    return kinds.get(name, LimbeckError)(lead + text)


class _SumSameLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, comm: Comm) -> Tensor:
        return comm.sum(part)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type and device together, up to `_BUCKET_BYTES`; the same on all ranks."""
    open_: dict[tuple[torch.dtype, str], list[Tensor]] = {}
    sizes: Counter[tuple[torch.dtype, str]] = Counter()
    for t in tensors:
        key = (t.dtype, t.device.type)
        size = t.numel() * t.element_size()
        if sizes[key] and sizes[key] + size > _BUCKET_BYTES:
            yield open_.pop(key)
            sizes[key] = 0
        open_.setdefault(key, []).append(t)
        sizes[key] += size
    yield from open_.values()
