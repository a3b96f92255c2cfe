"""Attention within documents of a packed sequence: explicit masks, and a probe that a model respects them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import ProcessedInputs, process_microbatch
from limbeck.utils.errors import ConfigError

log = logging.getLogger(__name__)


def document_causal_mask(
    document_ids: torch.Tensor, *, sliding_window: int | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Mask ``[B, 1, T, T]`` that lets a token see itself and earlier tokens of its own document.

    Args:
        document_ids: ``[B, T]``, one number per document.
        sliding_window: how many tokens back (itself included) a token sees; None for all.
        dtype: None gives a bool mask (True = may look, for sdpa); a float type gives an additive one (for eager).
    """
    places = torch.arange(document_ids.shape[-1], device=document_ids.device)
    distance = places[:, None] - places[None, :]
    allowed = distance >= 0
    if sliding_window is not None:
        allowed = allowed & (distance < sliding_window)
    mask = ((document_ids[:, :, None] == document_ids[:, None, :]) & allowed)[:, None]
    if dtype is None:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def explicit_attention_mask(
    inputs: ProcessedInputs, config: Any, *, dtype: torch.dtype | None = None
) -> torch.Tensor | dict[str, torch.Tensor]:
    """The packed inputs' mask for a model that does not find documents from positions by itself.

    A config with sliding-window layers gets one mask per layer type, as transformers models accept; a single 4-D mask
    would silently widen those layers' window.
    """
    if inputs.document_ids is None:
        raise ConfigError("These inputs are not packed, so they have no documents to mask; use their attention_mask.")
    kinds = set(getattr(config, "layer_types", None) or [])
    full = document_causal_mask(inputs.document_ids, dtype=dtype)
    if "sliding_attention" not in kinds:
        return full
    window = document_causal_mask(inputs.document_ids, sliding_window=config.sliding_window, dtype=dtype)
    return {"full_attention": full, "sliding_attention": window}


@torch.no_grad()
def verify_document_isolation(
    model: Any,
    *,
    vocab_size: int,
    tolerance: float = 0.05,
    run: Callable[[dict[str, Any]], torch.Tensor] | None = None,
    layout: Mapping[str, Any] | None = None,
    device: torch.device | None = None,
) -> float:
    """Check on three tiny packed documents that none of them reaches another.

    Models whose layers carry state along the sequence (linear attention, state spaces) or that build their own masks
    mix packed documents without a word. All but the last token of the first document are changed: how much the other
    documents' outputs move is measured against how much that last token's own output moves, which only attention can
    move. Two forward passes of a few dozen tokens; run it once where packing is switched on.

    Args:
        model: a causal model that takes ``ProcessedInputs.model_kwargs()`` and returns logits or hidden states.
        vocab_size: ids below this are drawn.
        tolerance: allowed share of the reference movement; mixing models show about 1, isolated ones 0 up to rounding.
        run: from the model's keyword arguments to its hidden states ``[1, T, h]``, for a model that is not simply
            called, such as one whose sequences are split over ranks (all of which must make this check).
        layout: the policy's ``dtensor_cfg``, which says into how many pieces a sequence must be cut.
        device: where the model computes; default: where its parameters are.

    Returns:
        The measured share.

    Raises:
        ConfigError: the outputs of a document depend on its neighbours.
    """
    device = next(model.parameters()).device if device is None else device
    # together a length that layouts with split sequences can cut
    lengths = [12, 1, 19]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (3, max(lengths)), generator=generator)
    other = ids.clone()
    other[0, : lengths[0] - 1] = (ids[0, : lengths[0] - 1] + 1 + vocab_size // 2) % vocab_size

    def outputs(rows: torch.Tensor) -> torch.Tensor:
        batch: BatchedDataDict = BatchedDataDict(input_ids=rows, input_lengths=torch.tensor(lengths))
        cfg, ranks = {"dtensor_cfg": layout or {}}, int((layout or {}).get("context_parallel_size", 1))
        kwargs = process_microbatch(batch, None, True, cfg, ranks, device=device).model_kwargs()
        if run is not None:
            return run(kwargs)[0].float()
        result = model(**kwargs)
        states = result.logits if getattr(result, "logits", None) is not None else result.last_hidden_state
        return states[0].float()

    was_training = model.training
    model.eval()
    try:
        moved = (outputs(ids) - outputs(other)).abs().amax(dim=-1)
    finally:
        model.train(was_training)
    reference, leak = float(moved[lengths[0] - 1]), float(moved[lengths[0] :].max())
    if reference == 0 and leak == 0:
        log.warning(
            "%s shows no effect of attention at its precision; packing could not be checked.", type(model).__name__
        )
        return 0.0
    share = leak / reference if reference else math.inf
    if not share <= tolerance:
        raise ConfigError(
            f"{type(model).__name__} mixes packed documents (a neighbour moves outputs {share:.2g} times as much as "
            f"the document itself, allowed {tolerance:.2g}); switch sequence_packing.enabled off for it and use "
            "dynamic_batching instead."
        )
    return share
