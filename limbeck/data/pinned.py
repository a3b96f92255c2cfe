"""Copies to an accelerator that the host does not wait for."""

from __future__ import annotations

import torch


def to_device(value: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """``value`` on ``device``. From main memory to CUDA it travels pinned and behind the work already queued there;
    an ordinary copy would make the host wait until the device has reached it."""
    target = torch.device(device)
    if target.type != "cuda" or value.device.type != "cpu":
        return value.to(target)
    return (value if value.is_pinned() else value.pin_memory()).to(target, non_blocking=True)
