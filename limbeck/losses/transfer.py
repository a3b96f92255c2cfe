"""Moves all index tables of a micro-batch to a device in one copy per type.

Copies out of ordinary memory make the host wait until the device has reached them; one pinned copy does not.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from limbeck.distributed.device import to_device

_Tree = TypeVar("_Tree")


def moved(tree: _Tree, device: torch.device | str) -> _Tree:
    """Copy of a tree of dataclasses, lists and tuples whose tensors live on `device`."""
    target = torch.device(device)
    found: dict[int, Tensor] = {}
    _collect(tree, found)
    new: dict[int, Tensor] = {}
    for dtype in {t.dtype for t in found.values()}:
        same = {key: t for key, t in found.items() if t.dtype == dtype}
        flat = torch.cat([t.reshape(-1) for t in same.values()])
        pieces = to_device(flat, target).split([t.numel() for t in same.values()])
        new |= {key: piece.view(t.shape) for (key, t), piece in zip(same.items(), pieces, strict=True)}
    out: _Tree = _rebuilt(tree, new)
    return out


def _collect(node: Any, found: dict[int, Tensor]) -> None:
    if isinstance(node, Tensor):
        found[id(node)] = node
    elif isinstance(node, list | tuple):
        for item in node:
            _collect(item, found)
    elif is_dataclass(node):
        for f in fields(node):
            _collect(getattr(node, f.name), found)


def _rebuilt(node: Any, new: dict[int, Tensor]) -> Any:
    if isinstance(node, Tensor):
        return new[id(node)]
    if isinstance(node, list | tuple):
        return type(node)(_rebuilt(item, new) for item in node)
    if is_dataclass(node) and not isinstance(node, type):
        values = {f.name: getattr(node, f.name) for f in fields(node) if f.init}
        kept = {k: v for k, v in values.items() if isinstance(v, Tensor | list | tuple) or is_dataclass(v)}
        return replace(node, **{k: _rebuilt(v, new) for k, v in kept.items()})
    return node
