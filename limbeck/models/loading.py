"""Causal language models from a folder, a hub id, a GGUF file, or a configuration with random weights.

A model that is to be sharded is read by rank 0 alone. The others build it without weights and get their parts.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from safetensors import SafetensorError, safe_open
from torch import nn
from typing_extensions import Self

from limbeck.config import FREE, resolve
from limbeck.data.microbatch import MicrobatchConfig
from limbeck.distributed.comm import Comm
from limbeck.distributed.device import default_device
from limbeck.distributed.mesh import MeshShape, ParallelDims, check_model, current_world, mesh_shape_for
from limbeck.distributed.sharding import WholeWeights, whole_tensor
from limbeck.distributed.tensor_parallel import probe
from limbeck.errors import ConfigError, one_line
from limbeck.key_names import near_name
from limbeck.models.attention import register_varlen_attention
from limbeck.models.causal import body_of, head_of, unwrap
from limbeck.models.fp8 import MULTIPLE, convert_layers, lacking
from limbeck.models.lora import LoraConfig, apply_lora
from limbeck.models.quantization import (
    Quantization,
    loading_options,
    method_of,
    quantized_as,
    quantized_in,
    refuse_layout,
    require_library,
)
from limbeck.tokens import ByteVocab
from limbeck.utils.files import kept_conversion
from limbeck.utils.hub import HubId, kept_files, locate, model_files
from limbeck.utils.progress import say, stage

ModelT = TypeVar("ModelT", bound="ModelConfig")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Keys that do not change what a model computes, or that other versions of transformers write differently.
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")
_SAMPLES = 4096
_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


Dtype = Literal["float32", "bfloat16", "float16"]
Precision = Literal["auto", "float32", "bfloat16", "float16", "fp8"]


class TokenizerConfig(BaseModel):
    """Where the tokenizer comes from; default: the model's own."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    name: str | None = None
    """Folder, file, hub id or ``package:NAME/FILE``; default: the model's own."""
    chat_template: str | None = None
    """Template text, or a path to a ``.jinja`` file; default: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments for the chat template, such as ``{enable_thinking: false}``."""
    bos: Literal["auto"] | bool = "auto"
    """Put the BOS token in front of every text, or none; ``auto``: as the tokenizer does by itself."""


class CompileConfig(BaseModel):
    """torch.compile of the model's body. Round lengths up (``sequence_length_round``) to bound recompilation."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    enabled: bool | None = None
    """Compile from the start on; ``compile: true`` is short for this. null: a run on an accelerator compiles behind its
    first step where it is long enough to gain by it."""
    mode: str | None = None
    """torch.compile's mode, such as ``max-autotune``."""
    dynamic: bool | None = None
    """torch.compile's dynamic shapes; default: as it chooses."""


def parse_dtype(name: str) -> torch.dtype:
    """``float32``, ``bfloat16`` or ``float16``."""
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; use one of {sorted(DTYPES)}")
    return DTYPES[name]


class ModelConfig(MicrobatchConfig):
    """A causal language model and how to score with it."""

    model_name: str | None = None
    """Folder, hub id (``owner/name``, ``owner/name@revision``), GGUF file, or the folder of a run, whose newest
    checkpoint is meant; with ``init: random`` also a folder or hub id that only gives the configuration."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The model's tokenizer and chat template."""
    init: Literal["pretrained", "random"] = "pretrained"
    """``random`` draws new weights instead of loading them."""
    model_overrides: dict[str, Any] = Field(default_factory=dict)
    """Keys of the transformers configuration; with ``init: random`` and no ``model_name`` it must hold model_type."""
    logprob_batch_size: int | None = Field(default=None, ge=1, json_schema_extra=FREE)
    """Rows per forward pass where the model only scores; null: as many tokens as its memory takes."""
    max_total_sequence_length: int = Field(default=2048, ge=1)
    """Longest sequence of this model in tokens; more than its positions is an error."""
    precision: Precision = "auto"
    """Type of the computation; ``auto``: bfloat16 on an accelerator that has it, float32 elsewhere. bfloat16 over
    float32 parameters runs under autocast. ``fp8``: of a frozen model, the linear maps of its layers in e4m3, the rest
    in bfloat16; a device that cannot takes what ``auto`` means there, and says so."""
    param_dtype: Dtype | None = None
    """Type of the parameters; default: float32 where they are trained, ``precision`` where they are frozen."""
    quantization: Quantization = "none"
    """Weights of a frozen model's layers in 8 or 4 bits (bitsandbytes, ``pip install 'limbeck[quantized]'``); its
    embedding and head keep their type. A model that is stored quantised is loaded as it is, with ``none``."""
    attn_implementation: str | None = None
    """Attention of transformers: ``sdpa``, ``flex_attention``, ``flash_attention_2``, ``eager``; default: as it
    chooses."""
    trust_remote_code: bool = False
    """Run Python code from the model's folder; only for models that you trust."""
    allow_missing: bool = False
    """Load a folder whose weights do not fit the model: what it lacks is random, what it has too much is ignored."""
    make_sequence_length_divisible_by: int = Field(default=1, ge=1)
    """Widths of batches are rounded up to a multiple of this."""
    compile: CompileConfig = CompileConfig()
    """torch.compile of the model's layers; default: where the run is long enough to gain by it."""

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(data.get("compile"), bool):
            data = {**data, "compile": {"enabled": data["compile"]}}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        drawn = self.init == "random" and "model_type" in self.model_overrides
        if self.needs_model and self.model_name is None and not drawn:
            raise ValueError("model_name is missing; give a model, or init: random with model_overrides.model_type")
        if self.dynamic_batching.enabled and self.sequence_packing.enabled:
            raise ValueError("dynamic_batching and sequence_packing are both enabled; switch one of them off")
        return self

    @property
    def shown_name(self) -> str:
        if self.model_name is None:
            return f"(random {self.model_overrides['model_type']})"
        is_path = self.model_name.startswith(("/", "~", "package:"))
        short = Path(self.model_name).name if is_path else self.model_name
        return f"{short} (random weights)" if self.init == "random" else short

    @property
    def needs_model(self) -> bool:
        """Whether there must be a model."""
        return True

    @property
    def adapters(self) -> LoraConfig | None:
        """The adapters that are trained instead of the weights."""
        return None

    def parameter_type(self, trained: bool) -> torch.dtype:
        if self.param_dtype is not None:
            return parse_dtype(self.param_dtype)
        return torch.float32 if trained else self.compute_type()

    def compute_type(self) -> torch.dtype:
        """Type of the computation; around the linear maps where those are in fp8."""
        name = self.settled(default_device()).precision
        return torch.bfloat16 if name == "fp8" else parse_dtype(name)

    def settled(self, device: torch.device) -> Self:
        """The same with the precision that ``auto`` means on a device."""
        if self.precision != "auto":
            return self
        narrow = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return self.model_copy(update={"precision": "bfloat16" if narrow else "float32"})


def fit_to_device(cfg: ModelT, device: torch.device) -> tuple[ModelT, list[str]]:
    """Settings that a device can follow in place of those that it cannot, or only at a crawl, and what they replace.

    Where a device does not multiply fp8: what ``auto`` means there. On the CPU: float32 for bfloat16, layers as they
    are for compiled ones, torch's own attention for flex, flash and variable-length attention.
    """
    update: dict[str, Any] = {}
    messages: list[str] = []
    if cfg.precision == "fp8" and (needed := lacking(device)) is not None:
        plain = cfg.model_copy(update={"precision": "auto"}).settled(device).precision
        update["precision"] = plain
        messages.append(f"{plain} in place of fp8, which needs {needed}")
    if device.type != "cpu":
        return cfg.model_copy(update=update), messages
    if cfg.precision == "bfloat16":
        update["precision"] = "float32"
        messages.append("float32 in place of bfloat16")
    if cfg.compile.enabled:
        update["compile"] = cfg.compile.model_copy(update={"enabled": False})
        messages.append("no compilation")
    name = cfg.attn_implementation
    if name is not None and name.startswith(("flex_", "flash_", "limbeck_varlen")):
        update["attn_implementation"] = None
        messages.append(f"torch's own attention in place of {name}")
    return cfg.model_copy(update=update), messages


META = torch.device("meta")
"""Device of a model that is made without weights: names, shapes and types are read, no number is."""


def load_model(
    config: ModelConfig | Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    vocab_size: int | None = None,
    seed: int | None = None,
) -> Any:
    """A transformers causal language model in evaluation mode, parameters in ``dtype``.

    ``config``: its model_name, init, model_overrides, attn_implementation and trust_remote_code count here.
    ``vocab_size``: tokenizer ids; a random model gets as many rows unless the overrides say so, and a model with fewer
    embeddings than ids is refused. ``seed``: of random weights, drawn without touching the global generator. The type
    is given to the loader, because converting a loaded model would also round its RoPE buffers.
    """
    cfg = resolve(ModelConfig, config)
    target = torch.device(device) if device is not None else default_device()
    if cfg.init == "random":
        model = _random(cfg, dtype, target, vocab_size, seed)
    else:
        model = _pretrained(cfg, dtype, target)
    rows = model.get_input_embeddings().weight.shape[0]
    # one id more than rows is tolerated with a wider tokenizer (Gemma has a special id without an embedding)
    if vocab_size is not None and vocab_size > rows + 1:
        raise ConfigError(
            f"model {cfg.model_name!r} has {rows} embeddings but its tokenizer has {vocab_size} ids; "
            "give the tokenizer that belongs to it"
        )
    if device is not None:
        model = model.to(device=device)
    return model.eval()


def _auto() -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoConfig, AutoModelForCausalLM


def _extras(cfg: ModelConfig) -> dict[str, Any]:
    if cfg.attn_implementation == "limbeck_varlen":
        register_varlen_attention()
    # given even where it is None, so that no configuration names one, see _folder_config
    return {
        "trust_remote_code": cfg.trust_remote_code,
        "attn_implementation": cfg.attn_implementation,
        "experts_implementation": None,
    }


def _refuse_other_file(name: str, path: Path) -> None:
    """Refuse a file that no model is read from."""
    if path.suffix != ".gguf":
        raise ConfigError(f"model {name!r} is a file but no .gguf; give a model folder, a hub id or a GGUF file")


def _pretrained(cfg: ModelConfig, dtype: torch.dtype, device: torch.device) -> Any:
    name = cfg.model_name
    if not name:
        raise ConfigError("policy.model_name is missing; give a model folder, a hub id or a GGUF file")
    path = model_files(name, "weights", code=cfg.trust_remote_code)
    source = str(path)
    kwargs: dict[str, Any] = {"dtype": dtype, **_extras(cfg)}
    if path.is_file():
        _refuse_other_file(name, path)
        folder = None if cfg.allow_missing else _unpacked(path)
        if folder is not None:
            path, source = folder, str(folder)
        else:
            source = str(path.parent)
            kwargs["gguf_file"] = path.name
            kwargs.update(_gguf_options() | cfg.model_overrides)
    if not path.is_file():
        # weights in any other format are pickles
        kwargs["use_safetensors"] = True
        _check_folder(path)
        config = _folder_config(cfg, path)
        kwargs["config"] = config
        if (
            not cfg.allow_missing
            and device != META
            and cfg.quantization == "none"
            and not quantized_in([path / "config.json"])
        ):
            # what does not fit is filled with random numbers, however many a configuration asks for
            outline = {**kwargs, "config": deepcopy(config), "device_map": META}
            _refuse_misfits(name, _loaded(name, source, outline)[1])
    if device == META:
        kwargs["device_map"] = META
    elif cfg.quantization != "none":
        if path.is_file():
            raise ConfigError(
                f"model {name!r} can only be quantised once it is unpacked, for which the cache has no room; free "
                "some disk, or leave quantization out"
            )
        kwargs.update(loading_options(cfg.quantization, device, cfg.compute_type()))
    model, loading_info = _loaded(name, source, kwargs)
    if not cfg.allow_missing:
        _refuse_misfits(name, loading_info)
    if isinstance(locate(name), HubId):
        # what is made of the model, such as an adapter, names the repository, not a folder of this machine's cache
        model.name_or_path = model.config.name_or_path = name
    return model


def _folder_config(cfg: ModelConfig, folder: Path) -> Any:
    """The transformers configuration of a model folder.

    It may name an attention of its own, such as a kernel that would be fetched and run: ours goes before it.
    """
    config = _overridden(str(cfg.model_name), folder, cfg.trust_remote_code, cfg.model_overrides)
    config._attn_implementation = cfg.attn_implementation
    config._experts_implementation = None
    return config


def _overridden(name: str, folder: Path, trust: bool, overrides: Mapping[str, Any]) -> Any:
    """The transformers configuration of a folder, with ``overrides``; those that it has no keys for are refused."""
    try:
        config, unused = _auto()[0].from_pretrained(
            str(folder), trust_remote_code=trust, return_unused_kwargs=True, **overrides
        )
    except Exception as e:  # as in _loaded
        raise ConfigError(f"model {name!r} cannot be loaded: {one_line(e)}") from e
    _refuse_unknown(unused, config)
    return config


def _refuse_unknown(overrides: Iterable[str], config: Any) -> None:
    for key in overrides:
        near = near_name(key, vars(config))
        hint = f"did you mean {near!r}?" if near else "give keys of the model's config.json"
        raise ConfigError(f"unknown key 'model_overrides.{key}': {type(config).__name__} has none of that name; {hint}")


def _loaded(name: str, source: str, options: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """A model of a folder or a file, and what did not fit."""
    try:
        # other shapes are reported together with all else that does not fit, see `_refuse_misfits`
        model, loading_info = _auto()[1].from_pretrained(
            source, **options, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except MemoryError:  # an Exception that says nothing about the folder
        raise
    except Exception as e:  # a stranger's folder: its numbers may be of any type and size
        raise ConfigError(f"model {name!r} cannot be loaded: {one_line(e)}") from e
    return model, loading_info


def _check_folder(folder: Path) -> None:
    """Refuse a model folder that has weights from elsewhere or in another format than safetensors, an adapter, or a
    configuration of more layers than its weights have tensors."""
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"the model folder {str(folder)!r} also holds an adapter (adapter_config.json), which would be applied to "
            "it; merge the adapter into the model, or take it out of the folder"
        )
    config = _json_object(folder / "config.json")
    indices = sorted(folder.glob("*.index.json"))
    named = [(path.name, name) for path in indices for name in set(_weight_map(path).values())]
    # transformers reads the file that this key names in place of the folder's usual ones
    if (name := config.get("transformers_weights")) is not None:
        named.append(("config.json", name))
    for where, name in named:
        if not isinstance(name, str) or not name.endswith((".safetensors", ".safetensors.index.json")):
            raise ConfigError(f"{where} in {str(folder)!r} names {name!r} as weights; expected a .safetensors file")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConfigError(
                f"{where} in {str(folder)!r} names {name!r} as weights, outside of the folder; put the file into it"
            )
    sizes = [_tensor_sizes(path) for path in folder.glob("*.safetensors")]
    tensors, longest = sum(number for number, _ in sizes), max((size for _, size in sizes), default=0)
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key, value in section.items():
            # what has no weights is filled with random numbers: one figure in a small file could fill the memory
            most = tensors if key in _LAYER_KEYS else max(tensors, longest) if key in _EXPERT_KEYS else None
            if sizes and most is not None and isinstance(value, int) and value > most:
                raise ConfigError(
                    f"config.json in {str(folder)!r} has {key} {value}, but its weights are {tensors} tensors; give "
                    "the configuration that belongs to them"
                )


def _weight_map(index: Path) -> dict[str, Any]:
    names = _json_object(index).get("weight_map")
    return names if isinstance(names, dict) else {}


def _json_object(path: Path) -> dict[str, Any]:
    """Content of a JSON file; nothing where it is absent or holds something else, which its reader will say."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):  # the last: a file may nest deeper than Python follows
        return {}
    return content if isinstance(content, dict) else {}


def _tensor_sizes(path: Path) -> tuple[int, int]:
    """Tensors in a file of weights and the longest side of one of them, by its header."""
    try:
        with safe_open(str(path), framework="pt") as weights:
            names = list(weights.keys())
            return len(names), max((max(weights.get_slice(n).get_shape(), default=0) for n in names), default=0)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"weights {str(path)!r} cannot be loaded: {one_line(error)}") from error


def _unpacked(path: Path) -> Path | None:
    """A GGUF file as a model folder in the cache, for its numbers take long to unpack; None where there is no room.

    The folder holds float32, of which other types are made as they are of the file.
    """

    def convert(folder: Path) -> None:
        with stage(f"unpacking {path.name}, once"):
            options = {"gguf_file": path.name, "dtype": torch.float32, **_gguf_options()}
            model, loading_info = _auto()[1].from_pretrained(
                str(path.parent), **options, output_loading_info=True, ignore_mismatched_sizes=True
            )
            _refuse_misfits(str(path), loading_info)
            model.save_pretrained(folder)

    version = f"1 transformers {importlib.metadata.version('transformers')}"
    try:
        # two bits a number at the least, four bytes unpacked
        return kept_conversion("models", path, version, convert, needs=16 * path.stat().st_size)
    except (MemoryError, ConfigError):
        raise
    except Exception as e:  # as below
        raise ConfigError(f"model {str(path)!r} cannot be loaded: {one_line(e)}") from e


def _refuse_misfits(name: str, loading_info: Mapping[str, Any]) -> None:
    """transformers fills what a folder lacks with random numbers; a tied head, which need not be stored, it leaves out
    of its account."""
    shapes = [f"{key} {list(stored)} for {list(wanted)}" for key, stored, wanted in loading_info["mismatched_keys"]]
    lists = {
        "are missing": loading_info["missing_keys"],
        "have another shape": shapes,
        "are unknown": loading_info["unexpected_keys"],
    }
    said = [f"{len(keys)} {what} ({_few(keys)})" for what, keys in lists.items() if keys]
    if said:
        raise ConfigError(
            f"the weights of model {name!r} do not fit it: {'; '.join(said)}; give the whole model, or set "
            "allow_missing: true (limbeck eval: --allow-missing) where random numbers in their place are meant"
        )


def _few(names: Collection[str], limit: int = 4) -> str:
    first = sorted(names)[:limit]
    return ", ".join(first) + (", ..." if len(names) > limit else "")


def _gguf_options() -> dict[str, Any]:
    try:
        from transformers import GgufConfig
    except ImportError:
        # older versions always dequantise
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _random(
    cfg: ModelConfig, dtype: torch.dtype, device: torch.device, vocab_size: int | None, seed: int | None
) -> Any:
    auto_config, auto_model = _auto()
    overrides = dict(cfg.model_overrides)
    if vocab_size is not None:
        overrides.setdefault("vocab_size", vocab_size)
    try:
        if cfg.model_name:
            overrides.pop("model_type", None)
            path = model_files(cfg.model_name, "config", code=cfg.trust_remote_code)
            base = _overridden(cfg.model_name, path, cfg.trust_remote_code, overrides)
        else:
            base = auto_config.for_model(**overrides)
            usual = type(base)()
            # any key becomes an attribute, older names of others do not; keys of other families are read past
            unknown = [key for key in overrides if key in vars(base) and key not in vars(usual)]
            _refuse_unknown([key for key in unknown if difflib.get_close_matches(key, vars(usual), 1, 0.8)], usual)
        # only the CPU's generator draws; by default those of all GPUs would be saved, too
        with torch.random.fork_rng(devices=[]), device if device == META else nullcontext():
            if seed is not None:
                torch.manual_seed(seed)
            return auto_model.from_config(base, dtype=dtype, **_extras(cfg))
    except (MemoryError, ConfigError):
        raise
    except Exception as e:  # as above
        raise ConfigError(f"no model can be made from {cfg.model_name or overrides}: {one_line(e)}") from e


def empty_model(cfg: ModelConfig, numbers: dict[str, Any], dtype: torch.dtype) -> Any:
    """A model as ``load_model`` makes it, with whatever weights, of a transformers configuration's own keys."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[numbers["model_type"]].from_dict(numbers)
    return _auto()[1].from_config(config, dtype=dtype, **_extras(cfg))


@torch.no_grad()
def check_head(model: Any, vocab_size: int | None) -> None:
    """Body and head apart must give what the whole model gives: some models scale or cap in between."""
    head = head_of(model, vocab_size)
    ids = torch.arange(8, device=next(model.parameters()).device)[None] % head.vocab_size
    whole = model(input_ids=ids, use_cache=False).logits[0, :, : head.vocab_size].float()
    hidden = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state[0]
    apart = head.logits(hidden).float()
    if not bool(whole.isfinite().all()):
        raise ConfigError(
            f"the logits of {type(model).__name__} for its first {ids.shape[1]} tokens are not finite; its weights "
            "hold NaN or infinity, or overflow in this precision"
        )
    difference = float((whole - apart).abs().max() / whole.abs().max().clamp(min=1e-6))
    # negated, so that NaN is refused too
    if not difference <= (1e-4 if whole.dtype == model.dtype else 5e-2):
        refuse_weights_behind_body(model)
        raise ConfigError(
            f"{type(model).__name__} does more between its body and its logits than a linear head, scale and "
            f"softcap (its logits differ by {difference:.2g}); this model cannot be used yet"
        )


def refuse_weights_behind_body(model: Any) -> None:
    """Refuse a model with weights between its body and its linear head, which `check_head` would find by its logits."""
    parts = [body_of(model), unwrap(model).get_output_embeddings()]
    known = {id(p) for part in parts if part is not None for p in part.parameters()}
    others = [name for name, p in unwrap(model).named_parameters() if id(p) not in known]
    if others:
        raise ConfigError(
            f"{type(model).__name__} does more between its body and its logits than a linear head ({others[0]}); this "
            "model cannot be used yet"
        )


def model_numbers(config: ModelConfig | Mapping[str, Any], vocab_size: int | None = None) -> Any:
    """Configuration of the model that ``load_model`` would give, without reading weights: an object or a mapping.

    None where only the weights' file knows (GGUF).
    """
    cfg = resolve(ModelConfig, config)
    overrides = dict(cfg.model_overrides)
    if cfg.init == "random" and vocab_size is not None:
        overrides.setdefault("vocab_size", vocab_size)
    if not cfg.model_name:
        return overrides
    path = model_files(cfg.model_name, "config", code=cfg.trust_remote_code)
    if path.is_file():
        _refuse_other_file(cfg.model_name, path)
        return None
    overrides.pop("model_type", None)
    return _overridden(cfg.model_name, path, cfg.trust_remote_code, overrides)


def weight_files(config: ModelConfig | Mapping[str, Any]) -> list[Path]:
    """Files on this machine that a model's weights and sizes come from; none for one of random weights."""
    cfg = resolve(ModelConfig, config)
    if cfg.init == "random" or not cfg.model_name:
        return []
    path = kept_files(cfg.model_name)
    if path is None or path.is_file():
        return [] if path is None else [path]
    return sorted(p for p in path.glob("*") if p.name == "config.json" or p.suffix == ".safetensors")


def model_identity(model: nn.Module) -> dict[str, str]:
    """Identity of a teacher: hashes of its configuration and of its weights.

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


# -- one model of a policy, on one rank or all -------------------------------------------------------------------------


def tokenizer_size(tokenizer: object) -> int | None:
    """Number of token ids of a tokenizer, holes included; None without one."""
    if tokenizer is None:
        return None
    return int(ByteVocab.from_tokenizer(tokenizer).size)


def refuse_unsupported(cfg: ModelConfig, name: str, trained: bool) -> None:
    """Settings that would be read and then not followed."""
    layout = cfg.dtensor_cfg
    if layout.cpu_offload and not layout.fsdp:
        raise ConfigError(
            f"{name}: dtensor_cfg.cpu_offload keeps the shards of fsdp in main memory, but fsdp is off; switch it on"
        )
    if layout.sequence_parallel and layout.tensor_parallel_size == 1:
        raise ConfigError(
            f"{name}: dtensor_cfg.sequence_parallel splits sequences over tensor-parallel ranks, but "
            "tensor_parallel_size is 1; raise it or use context_parallel_size"
        )
    sizes = (layout.tensor_parallel_size, layout.context_parallel_size)
    if trained and cfg.adapters is not None and cfg.adapters.modules_to_save and (layout.fsdp or max(sizes) > 1):
        raise ConfigError(
            f"{name}: lora.modules_to_save does not go with a sharded layout; leave it out or use one process"
        )
    if trained and torch.float16 in (cfg.compute_type(), cfg.parameter_type(trained)):
        raise ConfigError("training in float16 loses small gradients; set policy.precision to bfloat16 or float32")


def refuse_quantized(cfg: ModelConfig, name: str, trained: bool, model: nn.Module | None = None) -> None:
    """Sentence about what a model of few bits cannot do, and what it needs. ``model``: one that is loaded already."""
    stored = quantized_in(weight_files(cfg)) if model is None else quantized_as(unwrap(model).config)
    if cfg.precision == "fp8":
        _refuse_fp8(cfg, name, trained, stored)
    if cfg.quantization == "none" and stored is None:
        return
    what = f"{name}: quantization is {cfg.quantization}" if stored is None else f"{name} is stored quantised"
    if trained:
        raise ConfigError(f"{what}, and quantised weights cannot be trained; give the student in full precision")
    refuse_layout(what, cfg.dtensor_cfg)
    if cfg.quantization == "none":
        assert stored is not None
        if method_of(stored) == "bitsandbytes" and model is None:
            require_library(f"{name}, which is stored quantised,")
        return
    if stored is not None:
        raise ConfigError(
            f"{what} ({method_of(stored)}) and cannot be quantised again; leave out its quantization "
            f"({cfg.quantization})"
        )
    if cfg.init == "random":
        raise ConfigError(f"{what}, but its weights are random; quantise a model that is loaded")
    require_library(f"{name}: quantization {cfg.quantization}")


def _refuse_fp8(cfg: ModelConfig, name: str, trained: bool, stored: Mapping[str, Any] | None) -> None:
    if trained:
        raise ConfigError(
            f"{name}: precision is fp8, in which only a frozen model computes; set bfloat16, float32 or auto"
        )
    refuse_layout(f"{name}: precision is fp8", cfg.dtensor_cfg)
    if cfg.quantization != "none" or stored is not None:
        how = (
            f"quantization is {cfg.quantization}" if stored is None else f"it is stored quantised ({method_of(stored)})"
        )
        raise ConfigError(f"{name}: precision is fp8, but {how}, which is a type of its own; leave one of them out")


def check_layout(cfg: ModelConfig, name: str, model: nn.Module | None, size: int | None) -> MeshShape:
    """The mesh that ``dtensor_cfg`` asks for, checked against the model's numbers before any weight is read."""
    layout = cfg.dtensor_cfg
    shape = mesh_shape_for(layout, current_world(), name=name)
    if shape.same_rows > 1:
        check_model(model_numbers(cfg, size) if model is None else model.config, shape, name=name)
    if layout.cpu_offload and shape.data * shape.context == 1:
        raise ConfigError(
            f"{name}: dtensor_cfg.cpu_offload needs several data- or context-parallel processes, whose shards it keeps "
            "in main memory; leave it off"
        )
    return shape


def positions(numbers: Any) -> int | None:
    """Positions for which a model was made, by its transformers configuration; None where that does not say."""
    values = numbers if isinstance(numbers, Mapping) else vars(numbers)
    most = values.get("max_position_embeddings") or values.get("n_positions")
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if not isinstance(most, int):
        return None
    # some models say how far a stretched RoPE reaches, others only from where and how far it is stretched
    return max(most, int(original * factor)) if original and factor else most


def check_length(
    settings: ModelConfig | Mapping[str, Any],
    length: int,
    *,
    name: str,
    keys: str = "data.max_input_seq_length and data.max_teacher_seq_length",
    model: nn.Module | None = None,
) -> None:
    """Refuse sequences of up to ``length`` tokens for a model with fewer positions. ``keys``: what else bounds them;
    ``model``: one that is loaded already."""
    numbers = model_numbers(settings) if model is None else model.config
    most = None if numbers is None else positions(numbers)
    if most is not None and length > most:
        raise ConfigError(
            f"{name} has {most} positions, but its sequences may have {length} tokens; lower its "
            f"max_total_sequence_length, or {keys}"
        )


def check_settings(
    settings: ModelConfig | Mapping[str, Any],
    tokenizer: object,
    *,
    name: str,
    trained: bool,
    model: nn.Module | None = None,
) -> None:
    """Refuse what a policy of these settings would refuse, without making it: before the first of several is loaded."""
    cfg = resolve(ModelConfig, settings)
    refuse_unsupported(cfg, name, trained)
    refuse_quantized(cfg, name, trained, model)
    check_layout(cfg, name, model, tokenizer_size(tokenizer))


def make_dims(
    cfg: ModelConfig, name: str, device: torch.device, model: nn.Module | None, size: int | None, replicas: Comm
) -> ParallelDims:
    """The ranks of a policy. ``replicas``: those that share the work where no layout splits the model."""
    shape = check_layout(cfg, name, model, size)
    if shape.same_rows == 1 and not (cfg.dtensor_cfg.fsdp and shape.world > 1):
        return ParallelDims.replicas(replicas)
    return ParallelDims.sharded(shape, device.type)


class ModelBuilder:
    """Reads or builds one policy's model.

    Args:
        cfg: configuration of the model.
        trained: whether it gets an optimizer.
        size: ids of the tokenizer.
        weights: folder of ``save_checkpoint`` to read instead of ``model_name``.
    """

    def __init__(
        self, cfg: ModelConfig, *, trained: bool, size: int | None, seed: int | None, weights: str | Path | None
    ) -> None:
        self.cfg, self.trained, self.size, self.seed = cfg, trained, size, seed
        self.adapters = cfg.adapters if trained else None
        # the exported weights of an adapter run are merged: it goes on from its base model plus the stored adapters
        self.weights = None if cfg.adapters is not None else weights

    def build(
        self, model: nn.Module | None, dims: ParallelDims, device: torch.device
    ) -> tuple[Any, WholeWeights | None]:
        """The model with its adapters, or (with a source of its weights) one on the meta device. ``model``: a given
        one."""
        source: WholeWeights | None = None
        if model is None and dims.is_sharded and not self.cfg.trust_remote_code:
            model, source = self._read_once(dims.shape.tensor)
        else:
            if model is None:
                model = self._read(self.cfg, device)
            elif self.weights is not None:
                model.load_state_dict(self._read(self.cfg).state_dict())
            check_head(model.to(device=device), self.size)
        if self.adapters is not None:
            model = apply_lora(model, self.adapters, seed=self.seed)
            if source is not None and source.model is not None:
                # adapters are weights, too: all ranks get parts of those that the reader draws
                source.model = unwrap(apply_lora(source.model, self.adapters, seed=self.seed))
        if not self.trained:
            model.requires_grad_(False)
        if self.cfg.precision == "fp8":
            self._to_fp8(model, device)
        return model, source

    def outline(self) -> Any:
        """The model with its adapters on the meta device: what its settings and its files' headers cannot make is
        refused as ``build`` refuses it, and nothing is read beyond them."""
        model = self._read(self.cfg, META)
        head_of(model, self.size)
        return model if self.adapters is None else apply_lora(model, self.adapters, seed=self.seed)

    def _to_fp8(self, model: nn.Module, device: torch.device) -> None:
        name, converted = self.cfg.shown_name, convert_layers(body_of(model), device)
        if not converted.fp8:
            raise ConfigError(
                f"{name}: precision is fp8, but none of its layers has a linear map whose sizes are multiples of "
                f"{MULTIPLE}; set bfloat16 or auto"
            )
        if converted.plain:
            count = f"{len(converted.plain)} of {len(converted.plain) + len(converted.fp8)} linear maps"
            say(
                f"{name}: {count} stay in bfloat16, for their sizes are no multiples of {MULTIPLE} "
                f"({_few(converted.plain)})"
            )

    def _read(self, cfg: ModelConfig, device: torch.device | None = None) -> Any:
        if self.weights is not None:
            update = {
                "model_name": str(self.weights),
                "init": "pretrained",
                "model_overrides": {},
                "allow_missing": False,
            }
            cfg = cfg.model_copy(update=update)
        dtype = cfg.parameter_type(self.trained)
        model = load_model(cfg, dtype=dtype, device=device, vocab_size=self.size, seed=self.seed)
        if cfg.quantization == "none":
            # a model that was fetched just now may turn out to be stored quantised
            refuse_quantized(cfg, cfg.shown_name, self.trained, model)
        return model

    def _read_once(self, tensor: int) -> tuple[Any, WholeWeights]:
        """(a model without weights, where they are). Every rank must call it; an error of rank 0 is raised on all."""
        world, source, numbers = Comm.world(), WholeWeights(), None
        with world.fail_together():
            if world.rank == 0:
                # it only runs in main memory, where not every way to attend does
                source.model = self._read(self.cfg.model_copy(update={"attn_implementation": None}))
                check_head(source.model, self.size)
                source.hidden = probe(body_of(source.model), tensor, "cpu") if tensor > 1 else None
                numbers = json.loads(source.model.config.to_json_string(use_diff=False))
        # rank 0 to all, once per model: what only the reader of a file knows, such as a GGUF's sizes
        numbers = world.broadcast_json(numbers)
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = empty_model(self.cfg, numbers, self.cfg.parameter_type(self.trained))
        model.tie_weights()
        return model.eval(), source
