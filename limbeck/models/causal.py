"""A causal model of transformers, plain or inside peft's wrapper: its parts, and the numbers of its configuration.

Whatever differs between models and versions of these libraries is asked here and nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from limbeck.errors import ConfigError, LossError
from limbeck.losses.signals import Head


def setting(config: Any, *names: str) -> Any:
    """The first of some settings that a transformers configuration has, and that is not empty; otherwise None."""
    return next((value for name in names if (value := getattr(config, name, None))), None)


def is_lora(model: nn.Module) -> bool:
    """Whether the model carries adapters."""
    peft = sys.modules.get("peft")  # whoever made such a model has imported it
    return peft is not None and isinstance(model, peft.PeftModel)


def unwrap(model: nn.Module) -> Any:
    """The transformers causal model inside a peft wrapper, or the model itself."""
    wrapped: Any = model
    return wrapped.get_base_model() if is_lora(model) else model


def _is_transformers(model: Any) -> bool:
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def body_of(model: nn.Module) -> nn.Module:
    """The part of a causal model that ends in hidden states, without the head."""
    causal = unwrap(model)
    # base_model of a model without a body of its own is the model itself
    if not _is_transformers(causal) or causal.base_model is causal:
        raise ConfigError(f"{type(causal).__name__} has no separate body; give a transformers causal language model")
    body: nn.Module = causal.base_model
    return body


def layers_of(body: nn.Module) -> Iterable[nn.Module]:
    """The layers of a body that lists them under that name; otherwise the body itself."""
    layers = dict(body.named_children()).get("layers")
    return layers if isinstance(layers, nn.ModuleList) else [body]


def head_of(model: nn.Module, vocab_size: int | None = None) -> Head:
    """The head of a causal model. vocab_size: tokenizer ids; default: all rows of the head."""
    causal = unwrap(model)
    output = causal.get_output_embeddings() if _is_transformers(causal) else None
    if output is None:
        raise LossError(f"{type(model).__name__} has no output embeddings; pass a causal language model")
    config = causal.config.get_text_config()
    scale = float(setting(config, "logit_scale", "lm_head_multiplier") or 1.0)
    scale /= float(setting(config, "logits_scaling") or 1.0)
    softcap = setting(config, "final_logit_softcapping")
    # packed weights of few bits have another shape
    rows = output.out_features if isinstance(output, nn.Linear) else output.weight.shape[0]
    size = rows if vocab_size is None else min(vocab_size, rows)
    # exactly: a subclass, such as a quantised map, computes more than weight and bias tell
    if type(output) is nn.Linear:
        return Head(size, weight=output.weight, bias=output.bias, softcap=softcap, scale=scale)
    return Head(size, module=output, softcap=softcap, scale=scale)
