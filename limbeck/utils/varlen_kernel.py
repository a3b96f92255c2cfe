"""torch's variable-length flash kernel under one signature; its spelling differs between versions of torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class VarlenKernel:
    """Causal attention within documents; queries stand at the end of their document's keys.

    function: `torch.nn.attention.varlen.varlen_attn`; known: the names of its parameters.
    """

    function: Callable[..., Any]
    known: frozenset[str]

    @property
    def takes_windows(self) -> bool:
        """Whether a sliding window can be asked for."""
        return "window_size" in self.known

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        borders: tuple[Tensor, Tensor],
        longest: tuple[int, int],
        *,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """query `[N_q, H, D]`, key and value `[N_k, H_kv, D]` -> `[N_q, H, D]`.

        borders: cumulative lengths of queries and of keys, int32 `[documents + 1]` each; longest: of a document, on
        either side; window: keys that a query sees, itself included.
        """
        options: dict[str, Any] = {"is_causal": True, "scale": scale}
        options = {name: value for name, value in options.items() if name in self.known}
        if self.takes_windows:
            options["window_size"] = (-1 if window is None else window - 1, 0)
        groups = query.shape[1] // key.shape[1]
        if "enable_gqa" in self.known:
            options["enable_gqa"] = groups > 1
        elif groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out: Tensor = self.function(query, key, value, *borders, *longest, **options)
        return out


def _find() -> VarlenKernel | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return VarlenKernel(varlen_attn, frozenset(inspect.signature(varlen_attn).parameters))


# found once, here: a compiled layer can look it up but not look for it
_KERNEL = _find()


def varlen_kernel() -> VarlenKernel | None:
    """The kernel of this torch; None where it has none."""
    return _KERNEL
