"""Metrics as sums and counts, which add up over blocks, micro-batches, channels and ranks; means come last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from limbeck.distributed.comm import Comm
from limbeck.distributed.device import to_device

Value = float | Tensor
Pair = tuple[Value, Value]
Pairs = dict[str, tuple[float, float]]
"""Metrics as numbers, the form in which they are handed out: name -> (sum, count)."""


class Metrics(Mapping[str, Pair]):
    """Named (sum, count) pairs. Values are numbers or scalar tensors on any device, kept in float64; nothing is read
    from a device before `reduced`, `mean`, `means` or `pairs`.

    >>> Metrics({"kl": (3.0, 2.0)}).add({"kl": (1.0, 2.0), "seen": (0.0, 0.0)}).means()
    {'kl': 1.0}
    """

    def __init__(self, pairs: Mapping[str, Pair] | None = None) -> None:
        self._pairs: dict[str, Pair] = {}
        if pairs is not None:
            self.add(pairs)

    @classmethod
    def total(cls, parts: Iterable[Mapping[str, Pair]]) -> Metrics:
        """The sum of several."""
        out = cls()
        for part in parts:
            out.add(part)
        return out

    def add(self, other: Mapping[str, Pair], prefix: str = "") -> Metrics:
        """Add pairs to those of the same name, in place; `prefix` comes before the names that are added."""
        for name, (total, count) in other.items():
            pair = _wide(total), _wide(count)
            old = self._pairs.get(prefix + name)
            self._pairs[prefix + name] = pair if old is None else (old[0] + pair[0], old[1] + pair[1])
        return self

    def __iter__(self) -> Iterator[str]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, name: str) -> Pair:
        return self._pairs[name]

    def mean(self, name: str) -> float | None:
        """Sum over count; None where there is no such metric or nothing was counted."""
        total, count = (float(value) for value in self._pairs.get(name, (0.0, 0.0)))
        return total / count if count else None

    def means(self) -> dict[str, float]:
        """All means; metrics of which nothing was counted are left out."""
        return {name: total / count for name, (total, count) in self.pairs().items() if count}

    def pairs(self) -> Pairs:
        """The (sum, count) pairs as numbers, in the order in which they came. One wait where they lie on a device."""
        numbers = _stacked([value for pair in self._pairs.values() for value in pair]).tolist()
        return dict(zip(self._pairs, zip(numbers[0::2], numbers[1::2], strict=True), strict=True))

    def reduced(self, comm: Comm, *more: Value, same: Sequence[Tensor] = ()) -> tuple[Metrics, list[float]]:
        """The sum over the ranks, by name, as numbers; names that some rank lacks are 0 there. One wait.

        Args:
            more: further scalars, summed along with the metrics.
            same: scalars that are the same on every rank: read along, not summed.

        Returns:
            The metrics, sorted by name, and the numbers of `more` and `same`.
        """
        names = comm.all_names(self._pairs)
        none: Pair = (0.0, 0.0)
        local = _stacked([*(value for name in names for value in self._pairs.get(name, none)), *more])
        # a step's ranks, once: two numbers per metric and what the host must know besides
        summed = comm.sum(local)
        numbers = torch.cat((summed, *(value.detach().to(summed).reshape(1) for value in same))).tolist()
        out = Metrics()
        for i, name in enumerate(names):
            out._pairs[name] = (numbers[2 * i], numbers[2 * i + 1])
        return out, numbers[2 * len(names) :]


def _wide(value: Value) -> Value:
    if not isinstance(value, Tensor):
        return float(value)
    # mps has no float64
    return value.detach().float() if value.device.type == "mps" else value.detach().double()


def _stacked(values: Sequence[Value]) -> Tensor:
    """float64 `[n]`, on the device of those that lie on one: the host's numbers go there in one copy, behind the work
    that is queued."""
    at_home = [i for i, v in enumerate(values) if not isinstance(v, Tensor) or v.device.type == "cpu"]
    host = torch.tensor([float(values[i]) for i in at_home], dtype=torch.float64)
    away = [v.detach().double().reshape(()) for v in values if isinstance(v, Tensor) and v.device.type != "cpu"]
    if not away:
        return host
    # the host's numbers come first in the concatenation below; this leads back to the order they were given in
    order = torch.tensor(at_home + sorted(set(range(len(values))) - set(at_home)))
    order_back = to_device(order.argsort(), away[0].device)
    return torch.cat((to_device(host, away[0].device), torch.stack(away))).index_select(0, order_back)
