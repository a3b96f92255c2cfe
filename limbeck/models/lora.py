"""LoRA through peft: adapters in, merged weights out, the model under training untouched by an export."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from limbeck.config import resolve
from limbeck.errors import ConfigError
from limbeck.key_names import near_name
from limbeck.models.causal import unwrap
from limbeck.utils.plugins import load_package


class LoraConfig(BaseModel):
    """Low-rank adapters through peft; only they are trained, and they are merged on export."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    enabled: bool = True
    """False trains all weights, as without this section."""
    r: int = Field(default=16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(default=32.0, gt=0)
    """Adapters are scaled by alpha / r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the adapters' inputs that is dropped in training."""
    target_modules: str | list[str] = "all-linear"
    """Modules that get an adapter: names, a pattern, or ``all-linear``."""
    modules_to_save: list[str] | None = None
    """Modules that are trained whole beside the adapters, such as ``embed_tokens``."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead."""


def load_peft() -> Any:
    """peft, which is an optional part of the installation."""
    return load_package("peft", "policy.lora needs the package peft; pip install 'limbeck[peft]' or remove lora")


def apply_lora(model: nn.Module, config: LoraConfig | Mapping[str, Any], *, seed: int | None = None) -> Any:
    """Wrap a causal model with adapters; all other parameters are frozen."""
    peft = load_peft()
    cfg = resolve(LoraConfig, config)
    # peft matches the ends of names, and passes over one that nothing has
    names = [name for name, _ in model.named_modules()]
    for wanted in cfg.modules_to_save or ():
        if not any(name.endswith(wanted) for name in names):
            last = sorted({name.rpartition(".")[2] for name in names if name} - set("0123456789"))
            near = near_name(wanted, last)
            raise ConfigError(
                f"lora.modules_to_save names {wanted!r}, which the model does not have; "
                + (f"did you mean {near!r}?" if near else "give names of its modules, such as embed_tokens")
            )
    adapters = peft.LoraConfig(
        r=cfg.r,
        lora_alpha=cfg.alpha,
        lora_dropout=cfg.dropout,
        target_modules=cfg.target_modules,
        modules_to_save=cfg.modules_to_save,
        use_rslora=cfg.use_rslora,
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(devices=[]):
            if seed is not None:
                torch.manual_seed(seed)
            return peft.get_peft_model(model, adapters)
    except re.error as e:
        raise ConfigError(f"lora.target_modules {cfg.target_modules!r} is no pattern: {e}") from e
    except ValueError as e:
        raise ConfigError(f"lora.target_modules {cfg.target_modules!r} does not fit the model: {e}") from e


def adapter_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The trained parameters by name."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def load_adapter_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Put stored adapter weights back; names must match exactly."""
    adapters = adapter_state(model)
    if set(adapters) != set(state):
        odd = sorted(set(adapters).symmetric_difference(state))
        raise ConfigError(f"the stored adapters do not fit this model, first difference {odd[0]!r}; check policy.lora")
    with torch.no_grad():
        for name, value in adapters.items():
            value.copy_(state[name])


@torch.no_grad()
def merged_model(model: nn.Module, whole: Mapping[str, torch.Tensor] | None = None) -> Any:
    """A plain causal model with the adapters added into its weights.

    ``whole``: all weights of the causal model inside by name, where ``model`` holds only shards of them. The result
    shares the tensors that have no adapter with ``model``, which stays as it is: merging in place and taking the
    adapters out again would change the frozen weights in their last bits.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    causal = unwrap(model)
    source = causal.state_dict() if whole is None else whole
    state = {k: v for k, v in source.items() if ".lora_" not in k and ".modules_to_save." not in k}
    for name, module in causal.named_modules():
        if isinstance(module, LoraLayer):
            layer: Any = module
            adapter = layer.active_adapters[0]
            if whole is None:
                delta = layer.get_delta_weight(adapter)
            else:
                down, up = (whole[f"{name}.lora_{side}.{adapter}.weight"] for side in "AB")
                delta = up @ down * layer.scaling[adapter]
            weight = source[f"{name}.base_layer.weight"]
            state[f"{name}.base_layer.weight"] = weight.detach() + delta.to(weight.dtype)
        elif isinstance(module, ModulesToSaveWrapper):
            trained = module.modules_to_save[module.active_adapters[0]]
            state.update({f"{name}.original_module.{k}": v for k, v in trained.state_dict().items()})
    plain = {k.replace(".base_layer.", ".").replace(".original_module.", "."): v for k, v in state.items()}
    # no memory and no random numbers for weights that are replaced at once
    with torch.device("meta"):
        fresh = type(causal)(causal.config)
    fresh.load_state_dict(plain, assign=True, strict=True)
    # assigned under both of their names, tied weights have become two parameters
    fresh.tie_weights()
    for name, buffer in causal.named_buffers():
        # buffers that no state dict holds (RoPE) are still on the meta device
        owner, _, leaf = name.rpartition(".")
        fresh.get_submodule(owner)._buffers[leaf] = buffer
    if causal.can_generate():
        fresh.generation_config = causal.generation_config
    return fresh.eval()
