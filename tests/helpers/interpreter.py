"""Whether kernels can run on the CPU here."""

from __future__ import annotations

import functools
import os

import torch

from limbeck.losses.fast import triton_available


@functools.cache
def interpreter_fault() -> str | None:
    """Why Triton's interpreter is of no use, or None. Some of its versions do not go with some versions of numpy."""
    if os.environ.get("TRITON_INTERPRET") != "1" or not triton_available():
        return "Triton's interpreter is not at hand"
    from triton.runtime.errors import InterpreterError

    from limbeck.losses.fast.kernels.stats import column_stats

    try:
        column_stats(torch.zeros(40, 128))
    except InterpreterError as error:
        return f"Triton's interpreter fails on a loop over a range: {error}"
    return None
