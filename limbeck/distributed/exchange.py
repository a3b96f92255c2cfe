"""Small things that ranks tell each other: bytes from one to all, and that one of them cannot go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from limbeck.utils.errors import LimbeckError

_GOOD, _BAD = b"+", b"-"


def device_of(group: Any) -> torch.device:
    """Where tensors must lie that travel over ``group``."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def broadcast_bytes(raw: bytes, group: Any, source: int = 0) -> bytes:
    """``raw`` of the rank ``source`` of the group, on all of its ranks; what the others pass is not looked at."""
    device = device_of(group)
    size = torch.tensor([len(raw)], device=device)
    dist.broadcast(size, group=group, group_src=source)
    if dist.get_rank(group) == source:
        data = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device) if raw else None
    else:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    if not int(size):
        return b""
    assert data is not None
    dist.broadcast(data, group=group, group_src=source)
    return data.cpu().numpy().tobytes()


def once_for_all(work: Callable[[], bytes], group: Any) -> bytes:
    """What ``work`` gives on the group's first rank (None: this rank alone), on all of its ranks.

    An error of that rank is one of all: the others raise a ``LimbeckError`` with its text.
    """
    if group is None:
        return work()
    answer = b""
    if dist.get_rank(group) == 0:
        try:
            answer = _GOOD + work()
        except Exception as error:  # whatever it is, the others must not wait for an answer
            broadcast_bytes(_BAD + (str(error) or type(error).__name__).encode(), group)
            raise
    answer = broadcast_bytes(answer, group)
    if answer[:1] == _BAD:
        raise LimbeckError(answer[1:].decode())
    return answer[1:]


@contextmanager
def failing_together(group: Any) -> Iterator[None]:
    """Work that may fail on some ranks of ``group`` (None: this rank alone): an error of one is raised by all.

    Otherwise the others would go on and wait for it in their next collective.
    """
    error: LimbeckError | None = None
    try:
        yield
    except LimbeckError as found:
        error = found
    if group is not None:
        ranks = dist.get_world_size(group)
        first = torch.tensor([ranks if error is None else dist.get_rank(group)], device=device_of(group))
        dist.all_reduce(first, op=dist.ReduceOp.MIN, group=group)
        if int(first) < ranks:
            text = broadcast_bytes(str(error or "").encode(), group, int(first)).decode()
            error = error or LimbeckError(text)
    if error is not None:
        raise error
