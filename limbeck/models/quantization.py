"""Frozen models with weights of 4 or 8 bits, by bitsandbytes through transformers: a teacher that fits.

The linear maps of the layers are quantised; embedding, norms and the head keep the type of the parameters, so a loss
gets the head as it is. Every process holds a whole copy, for packed weights cannot be split over ranks.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from limbeck.distributed.mesh import ParallelConfig
from limbeck.errors import ConfigError

Quantization = Literal["none", "8bit", "4bit"]

BYTES = {"8bit": 1.0, "4bit": 0.5 + 4 / 64}
"""Per quantised parameter; in 4 bits with a float32 scale for every block of 64."""
_LIBRARIES = ("bitsandbytes", "accelerate")


def quantized_as(numbers: Any) -> Mapping[str, Any] | None:
    """How the weights of a transformers configuration (an object or a mapping) are quantised where they are stored."""
    values = numbers if isinstance(numbers, Mapping) else vars(numbers)
    section = values.get("quantization_config")
    if section is None or isinstance(section, Mapping):
        return section
    return dict(section.to_dict())


def quantized_in(files: Iterable[Path]) -> Mapping[str, Any] | None:
    """The same of a model's files, as ``weight_files`` lists them; None for what is no JSON object."""
    for path in files:
        if path.name == "config.json":
            try:
                numbers = json.loads(path.read_bytes())
            except (OSError, ValueError, RecursionError):
                return None
            return quantized_as(numbers) if isinstance(numbers, Mapping) else None
    return None


def rounds_rows_together(numbers: Any) -> bool:
    """Whether products of a configuration's model depend, by their rounding, on the other rows of a batch: in 8 bits
    columns with a large value in any row are computed apart."""
    stored = quantized_as(numbers)
    return stored is not None and bool(stored.get("load_in_8bit"))


def method_of(stored: Mapping[str, Any]) -> str:
    """Name of a stored quantisation, such as ``bitsandbytes`` or ``gptq``."""
    return str(stored.get("quant_method") or "bitsandbytes")


def stored_bytes(stored: Mapping[str, Any]) -> float:
    """Bytes per quantised parameter of a stored quantisation; one where it does not say."""
    if stored.get("load_in_4bit"):
        return BYTES["4bit"]
    bits = stored.get("bits") or stored.get("w_bit")
    return bits / 8 if isinstance(bits, int) else BYTES["8bit"]


def require_library(setting: str) -> None:
    """Refuse where bitsandbytes or accelerate, which it is loaded with, is not there. ``setting``: what asks for it."""
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{setting} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; "
            "pip install 'limbeck[quantized]'"
        )


def refuse_layout(what: str, layout: ParallelConfig) -> None:
    """Refuse to split a quantised model over ranks. ``what``: the model and why it is quantised."""
    split = {
        "fsdp": layout.fsdp,
        "tensor_parallel_size": layout.tensor_parallel_size > 1,
        "context_parallel_size": layout.context_parallel_size > 1,
    }
    keys = [name for name, is_set in split.items() if is_set]
    if keys:
        raise ConfigError(
            f"{what}, and quantised weights cannot be split over ranks; leave out its dtensor_cfg.{keys[0]}, so that "
            "every process has a copy, or do not quantise"
        )


def loading_options(kind: Quantization, device: torch.device, compute: torch.dtype) -> dict[str, Any]:
    """Arguments of transformers' ``from_pretrained`` that quantise while loading, onto the device that will compute."""
    from transformers import BitsAndBytesConfig

    # it says at every product that float32 and bfloat16 inputs are rounded
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if kind == "8bit":
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
    return {"quantization_config": config, "device_map": {"": str(device)}}
