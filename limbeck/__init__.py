"""Limbeck: distil any language model into any other, across tokenizers and across contexts."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "distil"]


def __getattr__(name: str) -> Any:
    """``limbeck.distil``, which brings torch along, is loaded when it is first asked for."""
    if name != "distil":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from limbeck.api import distil

    return distil
