"""How a model attends to packed documents: functions for transformers, and the check that no document reaches another.

A dense mask over a packed sequence costs the square of its whole length; this costs the sum of the documents' squares.
Needs a CUDA device, a narrow type and a torch with `torch.nn.attention.varlen`. Models that can use it do so by
themselves; `policy.attn_implementation: limbeck_varlen` demands it. `paged_attention` is the same for answers that
continuous batching has in work. `flex_attention` is transformers' own for inputs of one type.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import MicrobatchConfig, process_microbatch
from limbeck.distributed.attention import varlen_kernel
from limbeck.distributed.mesh import ParallelConfig
from limbeck.errors import ConfigError
from limbeck.models.causal import setting

NAME = "limbeck_varlen"
FLEX = "limbeck_flex"
PAGED = "limbeck_flash"
"""Name of `paged_attention`; transformers builds masks for, and keeps CUDA graphs from, other names than flash."""
log = logging.getLogger(__name__)


def varlen_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of query `[B, H, T, D]` to key, value `[B, H_kv, T, D]` -> (`[B, T, H, D]`, None).

    With `cu_seq_lens_q` (packed inputs, B = 1) every document sees itself alone; without, every row is a document.
    """
    rows, length = query.shape[0], query.shape[2]
    # a window as wide as the row hides nothing: then plain causal attention will do, also where kernels know no windows
    window = None if sliding_window is None or sliding_window >= length else sliding_window
    if cu_seq_lens_q is None or max_length_q is None:
        if window is None:
            grouped = query.shape[1] != key.shape[1]
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=grouped
            )
            return out.transpose(1, 2).contiguous(), None
        cu_seq_lens_q = torch.arange(rows + 1, device=query.device, dtype=torch.int32) * length
        max_length_q = length
    kernel = varlen_kernel()
    assert kernel is not None
    if window is not None and not kernel.takes_windows:
        raise ConfigError(
            f"the variable-length attention of torch {torch.__version__} knows no sliding window of {window} tokens; "
            "leave attn_implementation at its default"
        )
    # rounded up, so that a longer document seldom means another graph
    longest = -(-max_length_q // 512) * 512
    # rotary embeddings leave queries and keys wide under autocast; the kernel takes none but narrow types
    flat = [x.transpose(1, 2).flatten(0, 1).to(value.dtype) for x in (query, key, value)]
    cu_seqlens = (cu_seq_lens_q, cu_seq_lens_q)
    out = kernel(flat[0], flat[1], flat[2], cu_seqlens, (longest, longest), scale=scaling, window=window)
    return out.unflatten(0, (rows, length)), None


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    *,
    cache: Any,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **more: Any,
) -> tuple[Tensor, None]:
    """Causal attention of the new tokens of many answers, query `[1, H, T, D]`, to all keys of their own answers, of
    which `cache`, that of transformers' continuous batching, has the earlier ones -> (`[1, T, H, D]`, None)."""
    kernel = varlen_kernel()
    assert kernel is not None
    # also chooses this layer's entries of `more`
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=more)
    flat = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]
    cu_seqlens = (cu_seq_lens_q, more["cu_seq_lens_k"])
    longest = (max_length_q, more["max_length_k"])
    out = kernel(flat[0], flat[1], flat[2], cu_seqlens, longest, scale=scaling, window=sliding_window)
    return out.unsqueeze(0), None


def flex_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' flex attention, with queries and keys in the values' type.

    Under autocast rotary embeddings leave queries and keys in float32 beside values in bfloat16. For such a mixture
    torch's kernels before 2.12 compute something else: outputs are wrong by a third of their size, and depend on
    documents that the mask excludes.
    """
    from transformers.integrations.flex_attention import flex_attention_forward

    return flex_attention_forward(module, query.to(value.dtype), key.to(value.dtype), value, attention_mask, **more)


def register_flex_attention() -> str:
    """Make `flex_attention` known to transformers and return its name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flex_attention_mask

    AttentionInterface.register(FLEX, flex_attention)
    AttentionMaskInterface.register(FLEX, flex_attention_mask)
    return FLEX


def choose_attention(model: Any, wanted: str | None, precision: torch.dtype, device: torch.device) -> None:
    """Let a model attend by this function where it can and nothing else is `wanted`: packed documents cost what they
    are, and rows are not searched for documents, which makes the host wait for the device in every forward pass.

    Only models that would use torch's scaled_dot_product_attention change: others may need more than it gives. Flex
    attention is given queries, keys and values of one type.
    """
    if model.config._attn_implementation == "flex_attention":
        model.set_attn_implementation(register_flex_attention())
    if wanted is None and model.config._attn_implementation == "sdpa" and fits_varlen(model.config, precision, device):
        model.set_attn_implementation(register_varlen_attention())


def fits_varlen(config: Any, precision: torch.dtype, device: torch.device) -> bool:
    """Whether torch's variable-length kernel is there and can attend as a model of this configuration does."""
    kernel = varlen_kernel()
    if kernel is None or device.type != "cuda" or precision == torch.float32:
        return False
    known = set(setting(config, "layer_types") or []) <= {"full_attention", "sliding_attention"}
    return known and (kernel.takes_windows or setting(config, "sliding_window") is None)


def register_paged_attention() -> str:
    """Make `paged_attention` known to transformers and return its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED, paged_attention)
    return PAGED


@contextmanager
def cached_attention(model: Any) -> Iterator[None]:
    """With torch's own attention in place of this function, which knows neither padding in front of a row nor keys of
    earlier passes."""
    if model.config._attn_implementation != NAME:
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(NAME)


def register_varlen_attention() -> str:
    """Make the function known to transformers and return its name for `attn_implementation`."""
    if varlen_kernel() is None:
        raise ConfigError(
            f"torch {torch.__version__} has no variable-length attention; leave attn_implementation at its default"
        )
    from transformers import AttentionInterface

    # no mask function beside it: transformers then makes no mask, and does not wait for the device to see if it must
    AttentionInterface.register(NAME, varlen_attention)
    return NAME


# -- documents of a packed sequence ------------------------------------------------------------------------------------


@torch.no_grad()
def verify_document_isolation(
    model: Any,
    *,
    vocab_size: int,
    tolerance: float = 0.0,
    run: Callable[[dict[str, Any]], torch.Tensor] | None = None,
    layout: ParallelConfig | None = None,
    device: torch.device | None = None,
) -> float:
    """Check on three short packed documents that none of them reaches another.

    Models whose layers carry state along the sequence (linear attention, state spaces) or that build their own masks
    mix packed documents without a word. All but the last token of the first document are changed: how much the other
    documents' outputs move is measured against how much that last token's own output moves, which only attention can
    move. Two forward passes of a few dozen tokens (on an accelerator a few hundred, past which attention has other
    kernels); run it once where packing is switched on.

    Args:
        model: takes ``ProcessedInputs.model_kwargs()`` and returns logits or hidden states first, as those of
            transformers do.
        vocab_size: ids below this are drawn.
        tolerance: allowed share of the reference movement. A mixing model shows about 1, an isolated one exactly 0: no
            row is computed from another. Only scales that rows share (fp8, 8 bits) need more.
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
    lengths = [12, 1, 19] if device.type == "cpu" else [120, 1, 199]
    cfg = MicrobatchConfig(dtensor_cfg=layout or ParallelConfig())

    def outputs(rows: torch.Tensor) -> torch.Tensor:
        batch: BatchedDataDict = BatchedDataDict(input_ids=rows, input_lengths=torch.tensor(lengths))
        ranks = cfg.dtensor_cfg.context_parallel_size
        kwargs = process_microbatch(batch, None, True, cfg, ranks, device=device).model_kwargs()
        states: torch.Tensor = model(**kwargs)[0] if run is None else run(kwargs)
        return states[0].float()

    ids, changed = _documents(lengths, vocab_size)
    was_training = model.training
    # dropout would move every document's outputs
    model.eval()
    try:
        moved = (outputs(ids) - outputs(changed)).abs().amax(dim=-1)
    finally:
        model.train(was_training)
    reference, leak = float(moved[lengths[0] - 1]), float(moved[lengths[0] :].max())
    if reference == 0 and leak == 0:
        log.warning(
            "%s shows no effect of attention at its precision; packing could not be checked.", type(model).__name__
        )
        return 0.0
    share = leak / reference if reference else math.inf
    # negated, so that NaN is refused too
    if not share <= tolerance:
        raise ConfigError(
            f"{type(model).__name__} mixes packed documents (a neighbour moves outputs {share:.2g} times as much as "
            f"the document itself, allowed {tolerance:.2g}); switch sequence_packing.enabled off for it and use "
            "dynamic_batching instead."
        )
    return share


def _documents(lengths: list[int], vocab_size: int) -> tuple[Tensor, Tensor]:
    """Ids of documents, and the same with all but the last token of the first one changed."""
    # of its own: a check must not shift the random numbers of a run
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (len(lengths), max(lengths)), generator=generator)
    changed = ids.clone()
    changed[0, : lengths[0] - 1] = (ids[0, : lengths[0] - 1] + 1 + vocab_size // 2) % vocab_size
    return ids, changed
