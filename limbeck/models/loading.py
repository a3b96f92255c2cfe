"""Causal language models from a folder, a hub id, a GGUF file, or a configuration with random weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from limbeck.distributed.sharding import whole_tensor
from limbeck.losses.signals import Head
from limbeck.models.settings import plain_settings
from limbeck.utils.errors import ConfigError
from limbeck.utils.files import package_file

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Keys that do not change what a model computes, or that other versions of transformers write differently.
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")
_SAMPLES = 4096


def parse_dtype(name: str) -> torch.dtype:
    """``float32``, ``bfloat16`` or ``float16``."""
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; use one of {sorted(DTYPES)}")
    return DTYPES[name]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def load_model(
    config: Any,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    vocab_size: int | None = None,
    seed: int | None = None,
) -> Any:
    """A transformers causal language model in evaluation mode, parameters in ``dtype``.

    ``config``: ``PolicyConfig`` or mapping (model_name, init, model_overrides, attn_implementation,
    trust_remote_code). ``vocab_size``: tokenizer ids; a random model gets as many rows unless the overrides say so, and
    a model with fewer embeddings than ids is refused. ``seed``: of random weights, drawn without touching the global
    generator. The type is given to the loader, because converting a loaded model would also round its RoPE buffers.
    """
    cfg = plain_settings(config)
    model = _random(cfg, dtype, vocab_size, seed) if cfg["init"] == "random" else _pretrained(cfg, dtype)
    rows = model.get_input_embeddings().weight.shape[0]
    # one id more than rows is tolerated with a wider tokenizer (Gemma has a special id without an embedding)
    if vocab_size is not None and vocab_size > rows + 1:
        raise ConfigError(
            f"model {cfg['model_name']!r} has {rows} embeddings but its tokenizer has {vocab_size} ids; "
            "give the tokenizer that belongs to it"
        )
    if device is not None:
        model = model.to(device=device)
    return model.eval()


def _auto() -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoConfig, AutoModelForCausalLM


def _extras(cfg: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"trust_remote_code": bool(cfg["trust_remote_code"])}
    if cfg["attn_implementation"] is not None:
        if cfg["attn_implementation"] == "limbeck_varlen":
            from limbeck.models.varlen import register_varlen_attention

            register_varlen_attention()
        out["attn_implementation"] = cfg["attn_implementation"]
    return out


def _pretrained(cfg: dict[str, Any], dtype: torch.dtype) -> Any:
    name = cfg["model_name"]
    if not name:
        raise ConfigError("policy.model_name is missing; give a model folder, a hub id or a GGUF file")
    name = package_file(name)
    path = Path(str(name)).expanduser()
    source: Any = str(path) if path.exists() else str(name)
    kwargs: dict[str, Any] = {"dtype": dtype, **_extras(cfg), **cfg["model_overrides"]}
    if not path.exists() and (path.suffix == ".gguf" or str(name).startswith(("/", ".", "~"))):
        raise ConfigError(f"model {str(name)!r} does not exist; give a model folder, a hub id or a GGUF file")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(
                f"model {str(name)!r} is a file but no .gguf; give a model folder, a hub id or a GGUF file"
            )
        source = str(path.parent)
        kwargs["gguf_file"] = path.name
        kwargs.update(_gguf_options())
    try:
        return _auto()[1].from_pretrained(source, **kwargs)
    except (OSError, ValueError, KeyError, ImportError) as e:
        raise ConfigError(f"model {str(name)!r} cannot be loaded: {_one_line(e)}") from e


def _gguf_options() -> dict[str, Any]:
    try:
        from transformers import GgufConfig
    except ImportError:
        # older versions always dequantise
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _random(cfg: dict[str, Any], dtype: torch.dtype, vocab_size: int | None, seed: int | None) -> Any:
    auto_config, auto_model = _auto()
    overrides = dict(cfg["model_overrides"])
    if vocab_size is not None:
        overrides.setdefault("vocab_size", vocab_size)
    try:
        if cfg["model_name"]:
            overrides.pop("model_type", None)
            trust = bool(cfg["trust_remote_code"])
            base = auto_config.from_pretrained(str(cfg["model_name"]), trust_remote_code=trust, **overrides)
        else:
            base = auto_config.for_model(**overrides)
        with torch.random.fork_rng(devices=[]):
            if seed is not None:
                torch.manual_seed(seed)
            return auto_model.from_config(base, dtype=dtype, **_extras(cfg))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"no model can be made from {cfg['model_name'] or overrides}: {_one_line(e)}") from e


def empty_model(cfg: dict[str, Any], numbers: dict[str, Any], dtype: torch.dtype) -> Any:
    """A model as ``load_model`` makes it, with whatever weights, of a transformers configuration's own keys."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[numbers["model_type"]].from_dict(numbers)
    return _auto()[1].from_config(config, dtype=dtype, **_extras(cfg))


@torch.no_grad()
def check_head(model: Any, vocab_size: int | None) -> None:
    """Body and head apart must give what the whole model gives: some models scale or cap in between."""
    head = Head.from_model(model, vocab_size)
    ids = torch.arange(8, device=next(model.parameters()).device)[None] % head.vocab_size
    whole = model(input_ids=ids, use_cache=False).logits[0, :, : head.vocab_size].float()
    hidden = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state[0]
    apart = head.logits(hidden).float()
    difference = float((whole - apart).abs().max() / whole.abs().max().clamp(min=1e-6))
    if not difference <= (1e-4 if whole.dtype == model.dtype else 5e-2):
        raise ConfigError(
            f"{type(model).__name__} does more between its body and its logits than a linear head, scale and "
            f"softcap (its logits differ by {difference:.2g}); this model cannot be used yet"
        )


def model_numbers(config: Any, vocab_size: int | None = None) -> Any:
    """Configuration of the model that ``load_model`` would give, without reading weights: an object or a mapping.

    None where only the weights' file knows (GGUF).
    """
    cfg = plain_settings(config)
    overrides = dict(cfg["model_overrides"])
    if cfg["init"] == "random" and vocab_size is not None:
        overrides.setdefault("vocab_size", vocab_size)
    if not cfg["model_name"]:
        return overrides
    path = Path(str(package_file(cfg["model_name"]))).expanduser()
    if path.is_file():
        return None
    overrides.pop("model_type", None)
    source = str(path) if path.exists() else str(cfg["model_name"])
    try:
        return _auto()[0].from_pretrained(source, trust_remote_code=bool(cfg["trust_remote_code"]), **overrides)
    except (OSError, ValueError, KeyError) as e:
        raise ConfigError(f"model {cfg['model_name']!r} cannot be loaded: {_one_line(e)}") from e


def unwrap(model: nn.Module) -> Any:
    """The transformers causal model inside a peft wrapper, or the model itself."""
    inner: Any = getattr(model, "get_base_model", None)
    return model if inner is None else inner()


def body_of(model: nn.Module) -> nn.Module:
    """The part of a causal model that ends in hidden states, without the head."""
    causal = unwrap(model)
    body = getattr(causal, "base_model", None)
    if body is None or body is causal:
        raise ConfigError(f"{type(causal).__name__} has no separate body; give a transformers causal language model")
    return body


def model_identity(model: nn.Module) -> dict[str, str]:
    """What makes a teacher the same teacher: hashes of its configuration and of its weights.

    The weights' hash covers each parameter's name and shape and up to 4,096 evenly spaced values (as float32), so it
    takes a moment even for large models, does not depend on the device, and changes with any training. A model that is
    split over ranks has the hash of the whole one; all of them must ask.
    """
    causal = unwrap(model)
    config = {k: v for k, v in causal.config.to_dict().items() if k not in _VOLATILE}
    text = json.dumps(config, sort_keys=True, default=str)
    digest = hashlib.sha256()
    for name, value in sorted(causal.state_dict().items()):
        digest.update(f"{name}:{tuple(value.shape)};".encode())
        flat = whole_tensor(value).reshape(-1)
        step = max(1, flat.numel() // _SAMPLES)
        digest.update(flat[::step].float().cpu().numpy().tobytes())
    return {"config": hashlib.sha256(text.encode()).hexdigest()[:32], "weights": digest.hexdigest()[:32]}
