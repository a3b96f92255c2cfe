"""Weights as a standard transformers folder that ``from_pretrained`` loads, tokenizer included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from limbeck.models.lora import is_lora, merged_model


@contextmanager
def _quiet() -> Iterator[None]:
    """The library's own bar would tear the run's progress bar apart."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def save_weights(
    model: nn.Module,
    path: str | Path,
    tokenizer: Any = None,
    tokenizer_path: str | Path | None = None,
    *,
    state: dict[str, Tensor] | None = None,
) -> None:
    """Save a causal model in the type of its parameters; adapters are merged, the model itself stays as it is.

    ``state``: whole weights by name, for a model whose own are shards.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    plain: Any = merged_model(model, state) if is_lora(model) else model
    with _quiet():
        plain.save_pretrained(folder, **({} if state is None or is_lora(model) else {"state_dict": state}))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder if tokenizer_path is None else tokenizer_path)
