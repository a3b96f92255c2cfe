"""Ranks of one process that take turns: what tensor parallelism computes and moves, without a second GPU.

One rank works at a time, until it reaches a collective; when all have reached it, each goes on with what it would have
received. So kernels never run side by side, and the time of all ranks together, divided by their number, is what one of
them computes. ``sent`` counts the bytes that a rank would put on the wire: to all others what they ask for, and for an
all-reduce the 2 (T - 1) / T of its size that a ring moves.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from limbeck.distributed.comm import Comm

T = TypeVar("T")


class InTurn:
    """``size`` ranks, see above. ``sent``: bytes by kind of collective, summed over the ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent: Counter[str] = Counter()
        self._condition = threading.Condition()
        self._turn = 0
        self._working: set[int] = set()
        self._boxes: dict[int, dict[int, Any]] = {}
        self._errors: list[BaseException] = []

    def run(self, work: Callable[[Comm], T]) -> list[T]:
        """What ``work`` gives on every rank; an error of one is raised here."""
        results: dict[int, T] = {}
        self._errors = []
        self._turn, self._working, self._boxes = 0, set(range(self.size)), {}
        threads = [threading.Thread(target=self._one, args=(rank, work, results)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return [results[rank] for rank in range(self.size)]

    def _one(self, rank: int, work: Callable[[Comm], T], results: dict[int, T]) -> None:
        try:
            self._wait(rank)
            # otherwise the backward passes of all ranks share one thread per device, and the first would wait for ever
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = work(_Rank(self, rank))
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._working.discard(rank)
            self._hand_on(rank)

    def _hand_on(self, rank: int) -> None:
        with self._condition:
            if self._working:
                self._turn = min(self._working, key=lambda other: (other - rank - 1) % self.size)
            self._condition.notify_all()

    def _wait(self, rank: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == rank or bool(self._errors))
        if self._errors:
            raise RuntimeError("another rank has failed")

    def swap(self, rank: int, number: int, value: Any) -> list[Any]:
        """What all ranks bring to collective ``number``."""
        self._boxes.pop(number - 2, None)  # all have read what was brought to the last but one
        self._boxes.setdefault(number, {})[rank] = value
        self._hand_on(rank)
        self._wait(rank)
        box = self._boxes[number]
        if len(box) < self.size:
            raise RuntimeError(f"rank {rank} is in a collective in which others never were")
        return [box[other] for other in range(self.size)]


class _Rank(Comm):
    def __init__(self, ranks: InTurn, rank: int) -> None:
        super().__init__(None)
        self.rank, self.size, self._ranks, self._calls = rank, ranks.size, ranks, 0

    def _swap(self, kind: str, value: Any, wire: float, read: Callable[[list[Any]], T]) -> T:
        """What `read` makes of all ranks' values; none goes on, and may change its own, before all have read."""
        self._calls += 2
        self._ranks.sent[kind] += round(wire)
        result = read(self._ranks.swap(self.rank, self._calls, value))
        self._ranks.swap(self.rank, self._calls + 1, None)
        return result

    @torch.no_grad()
    def _reduced(self, x: Tensor, op: Any) -> Tensor:
        def read(parts: list[Tensor]) -> Tensor:
            out = parts[0].clone()
            for part in parts[1:]:
                out = torch.maximum(out, part) if op == dist.ReduceOp.MAX else out + part
            return out

        wire = 2 * (self.size - 1) / self.size * x.numel() * x.element_size()
        return self._swap("all_reduce", x.detach(), wire, read)

    @torch.no_grad()
    def gather(self, x: Tensor) -> list[Tensor]:
        wire = (self.size - 1) * x.numel() * x.element_size()
        return self._swap("all_gather", x.detach(), wire, lambda parts: [part.clone() for part in parts])

    @torch.no_grad()
    def all_to_all(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], into: Tensor | None = None
    ) -> Tensor:
        out = rows.new_empty(sum(receive), *rows.shape[1:]) if into is None else into

        def read(parts: list[Sequence[Tensor]]) -> Tensor:
            for place, part in zip(out.split(list(receive)), parts, strict=True):
                place.copy_(part[self.rank])
            return out

        each = rows.detach().split(list(send))
        wire = sum(part.numel() for rank, part in enumerate(each) if rank != self.rank) * rows.element_size()
        return self._swap("all_to_all", each, wire, read)
