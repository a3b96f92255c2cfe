"""The head that goes with cached hidden states: one safetensors file in the cache's folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from limbeck.losses.signals import Head
from limbeck.utils.errors import CacheError
from limbeck.utils.files import fsync_path

HEAD_NAME = "head.safetensors"


def save_head(folder: str | Path, head: Head) -> None:
    """Store a linear head (weight, bias, scale, softcap)."""
    if head.weight is None:
        raise CacheError("hidden states can only be cached for a model with a plain linear head; cache top-k instead")
    tensors = {"weight": head.weight.detach()[: head.vocab_size].cpu().contiguous().clone()}
    if head.bias is not None:
        tensors["bias"] = head.bias.detach()[: head.vocab_size].cpu().contiguous().clone()
    meta = json.dumps({"vocab_size": head.vocab_size, "scale": head.scale, "softcap": head.softcap})
    path = Path(folder) / HEAD_NAME
    tmp = path.with_suffix(".tmp")
    save_file(tensors, tmp, metadata={"head": meta})
    fsync_path(tmp)
    tmp.replace(path)


def load_head(folder: str | Path, device: torch.device | str) -> Head:
    """Read a stored head onto ``device``."""
    path = Path(folder) / HEAD_NAME
    try:
        with safe_open(path, framework="pt", device=str(device)) as f:
            meta = json.loads((f.metadata() or {})["head"])
            weight = f.get_tensor("weight")
            bias = f.get_tensor("bias") if "bias" in f.keys() else None  # noqa: SIM118
        return Head(int(meta["vocab_size"]), weight=weight, bias=bias, softcap=meta["softcap"], scale=meta["scale"])
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as e:
        raise CacheError(f"the head of the cache {str(folder)!r} cannot be read ({e}); make the cache again") from e
