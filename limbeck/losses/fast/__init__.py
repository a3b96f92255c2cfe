"""Which micro-batches the kernels can do. Imports none of them, so it can be asked where Triton is not installed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from limbeck.losses.blocks import Term
from limbeck.losses.fast.kernels import triton_available
from limbeck.losses.fast.order import ColumnPlan, columns_for
from limbeck.losses.inputs import LossInputs
from limbeck.losses.objectives import corrected, published
from limbeck.losses.objectives.base import Leaf
from limbeck.losses.settings import LossSettings
from limbeck.losses.signals import Head, HiddenSignal, Signal, TopKSignal
from limbeck.losses.vocab.projection import VocabMap
from limbeck.utils.errors import LossError

FAST_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_FORWARD_ONLY: tuple[Leaf, ...] = (
    corrected.boundary_kl,
    corrected.same_vocabulary,
    published.p_kl,
    published.common_kl,
)


def device_ready(device: torch.device) -> bool:
    """Whether the kernels can run on this device."""
    return device.type == "cuda" and triton_available()


def _plain(head: Head) -> bool:
    """A bare matrix: no bias, no softcap, no scale, no wrapper, not divided among processes."""
    bare = head.weight is not None and head.module is None and head.bias is None
    bare = bare and not head.axis.sharded
    return bare and not head.softcap and head.scale == 1.0 and head.weight.dtype in FAST_TYPES  # type: ignore[union-attr]


def signal_ready(signal: Signal) -> bool:
    """Whether the kernels can read this teacher."""
    return isinstance(signal, TopKSignal) or (isinstance(signal, HiddenSignal) and _plain(signal.head))


def student_ready(hidden: Tensor, head: Head) -> bool:
    """Whether the kernels can read these hidden states and this head."""
    return hidden.dtype in FAST_TYPES and _plain(head)


def term_ready(term: Term) -> bool:
    """Whether a term has a fast form: one teacher, fixed projection, and a divergence that the kernels know."""
    mode, spec = term.mode, term.mode.spec
    if len(term.signals) != 1 or (mode.rest_weight is not None and mode.rest_weight.requires_grad):
        return False
    if term.leaf is corrected.alm:
        return True
    top_k = isinstance(term.signals[0], TopKSignal)
    if top_k:
        return term.leaf is corrected.boundary_kl
    known = any(term.leaf is leaf for leaf in _FORWARD_ONLY)
    bucketed = term.leaf is corrected.same_vocabulary and spec.topk is not None
    return known and spec.kind == "forward" and spec.entry_clip is None and not bucketed


def plan(settings: LossSettings, maps: Sequence[VocabMap | None], inputs: LossInputs) -> ColumnPlan | None:
    """Column order of a micro-batch on the CPU, where the kernels may come to be used. maps: one per teacher."""
    here = torch.cuda.is_available() and triton_available()
    if settings.fast_path == "off" or (settings.fast_path == "auto" and not here):
        return None
    first = maps[0] if maps else None
    sizes = None if first is None else (first.student_size, first.teacher_size)
    return columns_for(settings.mode, inputs.tokens, inputs.layouts, sizes, settings.block_rows)


def usable_columns(
    settings: LossSettings,
    inputs: LossInputs,
    hidden: Tensor,
    head: Head,
    signals: Sequence[Signal],
    terms: Sequence[Term],
) -> ColumnPlan | None:
    """The column order if the kernels can do this micro-batch; None: the plain path does it."""
    forced = settings.fast_path == "force"
    ready = (
        inputs.columns is not None
        and (forced or device_ready(hidden.device))
        and student_ready(hidden, head)
        and all(signal_ready(s) for s in signals)
        and all(term_ready(t) for t in terms)
    )
    if forced and not ready:
        raise LossError(
            f"fast_path is 'force' but the kernels do not cover mode {settings.mode!r} with these settings, teachers "
            "and heads; use 'auto'"
        )
    return inputs.columns if ready else None
