"""From a policy's settings to its model: what cannot be done, the mesh, the weights, the adapters.

A model that is to be sharded is read by rank 0 alone. The others build it without weights and get their parts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from limbeck.distributed.comm import Comm
from limbeck.distributed.mesh import MeshShape, ParallelDims, check_model, current_world, plan_mesh
from limbeck.distributed.sharding import Source
from limbeck.distributed.tensor_parallel import probe
from limbeck.models.loading import body_of, check_head, empty_model, load_model, model_numbers, parse_dtype, unwrap
from limbeck.models.lora import apply_lora
from limbeck.models.settings import plain_settings
from limbeck.utils.errors import ConfigError


def tokenizer_size(tokenizer: Any) -> int | None:
    """Number of token ids of a tokenizer, holes included; None without one."""
    if tokenizer is None:
        return None
    from limbeck.tokens import ByteVocab

    return int(ByteVocab.from_tokenizer(tokenizer).size)


def trains_adapters(cfg: dict[str, Any], trained: bool) -> bool:
    """Whether a policy trains adapters instead of its weights."""
    return trained and cfg["lora"] is not None and cfg["lora"].get("enabled", True)


def param_dtype(cfg: dict[str, Any], trained: bool) -> torch.dtype:
    """Type of the parameters."""
    if cfg["param_dtype"] is not None:
        return parse_dtype(cfg["param_dtype"])
    return torch.float32 if trained else parse_dtype(cfg["precision"])


def refuse_unsupported(cfg: dict[str, Any], name: str, trained: bool) -> None:
    """Settings that would be read and then not followed."""
    layout = cfg["dtensor_cfg"]
    if layout["cpu_offload"] and not layout["fsdp"]:
        raise ConfigError(
            f"{name}: dtensor_cfg.cpu_offload keeps the shards of fsdp in main memory, but fsdp is off; switch it on"
        )
    if layout["sequence_parallel"] and layout["tensor_parallel_size"] == 1:
        raise ConfigError(
            f"{name}: dtensor_cfg.sequence_parallel splits sequences over tensor-parallel ranks, but "
            "tensor_parallel_size is 1; raise it or use context_parallel_size"
        )
    sizes = (layout["tensor_parallel_size"], layout["context_parallel_size"])
    if trains_adapters(cfg, trained) and cfg["lora"].get("modules_to_save") and (layout["fsdp"] or max(sizes) > 1):
        raise ConfigError(
            f"{name}: lora.modules_to_save does not go with a sharded layout; leave it out or use one process"
        )
    if trained and torch.float16 in (parse_dtype(cfg["precision"]), param_dtype(cfg, trained)):
        raise ConfigError("training in float16 loses small gradients; set policy.precision to bfloat16 or float32")


def check_layout(cfg: dict[str, Any], name: str, model: nn.Module | None, size: int | None) -> MeshShape:
    """The mesh that ``dtensor_cfg`` asks for, checked against the model's numbers before any weight is read."""
    layout = cfg["dtensor_cfg"]
    shape = plan_mesh(layout, current_world(), name=name)
    if shape.same_rows > 1:
        check_model(model_numbers(cfg, size) if model is None else model.config, shape, name=name)
    if layout["cpu_offload"] and shape.data * shape.context == 1:
        raise ConfigError(
            f"{name}: dtensor_cfg.cpu_offload needs several data- or context-parallel processes, whose shards it keeps "
            "in main memory; leave it off"
        )
    return shape


def check_settings(settings: Any, tokenizer: Any, *, name: str, trained: bool) -> None:
    """Refuse what a policy of these settings would refuse, without making it: before the first of several is loaded."""
    cfg = plain_settings(settings)
    refuse_unsupported(cfg, name, trained)
    check_layout(cfg, name, None, tokenizer_size(tokenizer))


def make_dims(
    cfg: dict[str, Any], name: str, device: torch.device, model: nn.Module | None, size: int | None, replicas: Comm
) -> ParallelDims:
    """The ranks of a policy. ``replicas``: those that share the work where no layout splits the model."""
    shape = check_layout(cfg, name, model, size)
    if shape.same_rows == 1 and not (cfg["dtensor_cfg"]["fsdp"] and shape.world > 1):
        return ParallelDims.replicas(replicas)
    return ParallelDims.sharded(shape, device.type)


class ModelBuilder:
    """Reads or builds one policy's model.

    Args:
        cfg: plain settings of the policy.
        trained: whether it gets an optimizer.
        size: ids of the tokenizer.
        weights: folder of ``save_checkpoint`` to read instead of ``model_name``.
    """

    def __init__(
        self, cfg: dict[str, Any], *, trained: bool, size: int | None, seed: int | None, weights: str | Path | None
    ) -> None:
        self.cfg, self.trained, self.size, self.seed = cfg, trained, size, seed
        self.adapters = trains_adapters(cfg, trained)
        # the exported weights of an adapter run are merged: it goes on from its base model plus the stored adapters
        self.weights = None if trains_adapters(cfg, True) else weights

    def build(self, model: nn.Module | None, dims: ParallelDims, device: torch.device) -> tuple[Any, Source | None]:
        """The model with its adapters, or (with a source of its weights) one on the meta device. ``model``: a given
        one."""
        source: Source | None = None
        if model is None and dims.is_sharded and not self.cfg["trust_remote_code"]:
            model, source = self._read_once(dims.shape.tensor)
        else:
            model = self._read(self.cfg) if model is None else model
            check_head(model.to(device=device), self.size)
        if self.adapters:
            model = apply_lora(model, self.cfg["lora"], seed=self.seed)
            if source is not None and source.model is not None:
                source.model = unwrap(apply_lora(source.model, self.cfg["lora"], seed=self.seed))
        if not self.trained:
            model.requires_grad_(False)
        return model, source

    def _read(self, cfg: dict[str, Any]) -> Any:
        if self.weights is not None:
            cfg = {**cfg, "model_name": str(self.weights), "init": "pretrained", "model_overrides": {}}
        return load_model(cfg, dtype=param_dtype(cfg, self.trained), vocab_size=self.size, seed=self.seed)

    def _read_once(self, tensor: int) -> tuple[Any, Source]:
        """(a model without weights, where they are). Every rank must call it; an error of rank 0 is raised on all."""
        world, source, numbers = Comm.world(), Source(), None
        with world.fail_together():
            if world.rank == 0:
                # it only runs in main memory, where not every way to attend does
                source.model = self._read({**self.cfg, "attn_implementation": None})
                check_head(source.model, self.size)
                source.hidden = probe(body_of(source.model), tensor, "cpu") if tensor > 1 else None
                numbers = json.loads(source.model.config.to_json_string(use_diff=False))
        # rank 0 to all, once per model: what only the reader of a file knows, such as a GGUF's sizes
        numbers = world.broadcast_json(numbers)
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = empty_model(self.cfg, numbers, param_dtype(self.cfg, self.trained))
        model.tie_weights()
        return model.eval(), source
