"""A causal model split over a mesh: tensor-parallel layers, FSDP2 shards, a head that the block loss can use.

The body is split by torch's own engines (``parallelize_module``, ``fully_shard``). The head never runs as a module: the
block loss reads its weight, so it is gathered over the data-parallel shards once per step (tensor parallelism keeps its
slice of the vocabulary), the loss's gradients collect in that copy, and one reduce-scatter takes them home.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from limbeck.distributed.attention import GatheredAttention
from limbeck.distributed.comm import Comm
from limbeck.distributed.mesh import LOSS, TENSOR, ParallelDims
from limbeck.distributed.tensor_parallel import TensorSplit, check_probe, probe
from limbeck.errors import ConfigError


class Sharding(ABC):
    """Work that the ranks of one model do together around its forward and backward passes: `NoSharding` for a model
    that is whole in every process, `ShardedModel` for one on a mesh. Every rank of `dims` makes the same calls."""

    fsdp = False
    """Whether ranks that read other rows gather shards from each other, and so must take as many forward passes."""

    def __init__(self, model: Any, body: Any, dims: ParallelDims) -> None:
        self.model, self.body, self.dims = model, body, dims

    @property
    def is_sharded(self) -> bool:
        """Whether every forward pass is one of several ranks."""
        return self.dims.is_sharded

    @abstractmethod
    def run(self, kwargs: dict[str, Any], cu_seqlens_host: Sequence[int] | None = None) -> Tensor:
        """Last hidden states `[B, T, h]` of whole sequences, from inputs of the body that every rank has;
        cu_seqlens_host: of packed documents, on the host."""

    @abstractmethod
    def head_weight(self, weight: Tensor, *, whole: bool = False) -> Tensor:
        """The rows of the model's head `weight` for the block loss: all of them, or this rank's slice of the vocabulary
        under tensor parallelism; whole: all of them in any case, without gradient."""

    @abstractmethod
    def release(self, *, gradient: bool = False) -> None:
        """Forget what was gathered for a step. A head in which a gradient waits for `collect` is kept, unless
        ``gradient`` asks to drop it too."""

    @abstractmethod
    def collect(self, params: Sequence[Tensor]) -> None:
        """Make every gradient the sum over the whole run."""

    @abstractmethod
    def clip(self, params: Sequence[Tensor], limit: float) -> Tensor:
        """Norm of all gradients; scales them down where it exceeds ``limit``."""

    @abstractmethod
    def full_state(self) -> dict[str, Tensor] | None:
        """All weights, whole, in main memory of rank 0; None where the model's own are whole, and on other ranks."""


class NoSharding(Sharding):
    """A whole model in every process, alone or as one of several replicas."""

    def run(self, kwargs: dict[str, Any], cu_seqlens_host: Sequence[int] | None = None) -> Tensor:
        hidden: Tensor = self.body(**kwargs).last_hidden_state
        return hidden

    def head_weight(self, weight: Tensor, *, whole: bool = False) -> Tensor:
        return weight

    def release(self, *, gradient: bool = False) -> None:
        pass

    @torch.no_grad()
    def collect(self, params: Sequence[Tensor]) -> None:
        if self.dims.data.size == 1:
            return
        # replicas, once per step: all gradients, in few large pieces
        self.dims.data.sum_(*(_settle(p) for p in params))

    def clip(self, params: Sequence[Tensor], limit: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(params, limit)

    def full_state(self) -> dict[str, Tensor] | None:
        return None


def shard_model(
    model: Any,
    body: Any,
    dims: ParallelDims,
    *,
    fsdp: bool = False,
    param_dtype: torch.dtype | None = None,
    sequence_parallel: bool = False,
    cpu_offload: bool = False,
    source: WholeWeights | None = None,
) -> Sharding:
    """Lay a model out over its ranks, after loading and before the optimizer; for the arguments see `ShardedModel`."""
    if not dims.is_sharded:
        return NoSharding(model, body, dims)
    return ShardedModel(
        model,
        body,
        dims,
        fsdp=fsdp,
        param_dtype=param_dtype,
        sequence_parallel=sequence_parallel,
        cpu_offload=cpu_offload,
        source=source,
    )


class ShardedModel(Sharding):
    """One model on one mesh.

    Args:
        model: transformers causal model; its linear maps may carry adapters.
        body: its part that ends in hidden states, with ``layers``.
        fsdp: shard parameters, gradients and optimizer state over data x context.
        param_dtype: type in which sharded parameters are gathered for the computation; None: their own.
        sequence_parallel: split hidden states between layers over the tensor-parallel ranks.
        cpu_offload: keep FSDP's shards, their gradients and optimizer state in main memory.
        source: where the weights of a model on the meta device come from.
    """

    def __init__(
        self,
        model: Any,
        body: Any,
        dims: ParallelDims,
        *,
        fsdp: bool,
        param_dtype: torch.dtype | None = None,
        sequence_parallel: bool = False,
        cpu_offload: bool = False,
        source: WholeWeights | None = None,
    ) -> None:
        super().__init__(model, body, dims)
        assert dims.mesh is not None
        self.mesh: DeviceMesh = dims.mesh
        self.fsdp = fsdp and dims.loss.size > 1
        self._head: Any = model.get_output_embeddings()
        if type(self._head) is not nn.Linear or self._head.bias is not None:
            raise ConfigError(f"{type(model).__name__} has no plain head, which a sharded model needs; use one process")
        self._check_adapters()
        self._partial: set[int] = set()
        self._split_weights(param_dtype, sequence_parallel, cpu_offload, source)
        self._context: GatheredAttention | None = None
        if dims.context.size > 1:
            self._context = GatheredAttention(dims.context)
            self._context.install(body)
        self._leaf: Tensor | None = None
        self._whole: Tensor | None = None

    # ---- splitting ----

    def _split_weights(
        self, param_dtype: torch.dtype | None, sequence: bool, cpu_offload: bool, source: WholeWeights | None
    ) -> None:
        model, body, mesh = self.model, self.body, self.mesh
        ranks, device = self.dims.shape.tensor, mesh.device_type
        # tied weights are cut once, as the embedding; the head, which never runs as a module, reads that afterwards
        tied = self._head.weight is model.get_input_embeddings().weight
        expected = probe(body, ranks, device) if ranks > 1 and source is None else None
        partial: set[str] = set()
        if ranks > 1:
            partial = TensorSplit(body, mesh[TENSOR], sequence=sequence).partial
            if not tied:
                self._set_head(distribute_tensor(self._head.weight.detach(), mesh[TENSOR], [Shard(0)]))
        # after tensor parallelism: FSDP shards the slices that this leaves, never the other way round
        if self.fsdp:
            self._shard(param_dtype, tied, cpu_offload)
        if tied:
            self._head.weight = None
        if source is not None:
            source.fill(model, device, offload=cpu_offload)
        if tied:
            self._head.weight = model.get_input_embeddings().weight
        self._partial = {id(p) for name, p in body.named_parameters() if name in partial}
        if ranks > 1:
            outputs = probe(body, ranks, device)
            expected = source.expected(outputs) if source is not None else expected
            assert expected is not None
            check_probe(body, expected, outputs, exact=body.dtype == torch.float32 and param_dtype is None)
        if source is not None:
            source.model = None

    def _check_adapters(self) -> None:
        for name, module in self.model.named_modules():
            base = getattr(module, "base_layer", None)
            if base is not None and type(base) is not nn.Linear:
                raise ConfigError(
                    f"lora.target_modules includes {name!r}, a {type(base).__name__}; a sharded model takes adapters "
                    "on linear maps only"
                )

    def _shard(self, param_dtype: torch.dtype | None, tied: bool, cpu_offload: bool) -> None:
        # gradients arrive divided by the counts of the global batch: bfloat16 loses the small ones when they are summed
        policy = MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=None if param_dtype is None else torch.float32
        )
        options: dict[str, Any] = {"mesh": self.mesh[LOSS], "mp_policy": policy, "reshard_after_forward": True}
        options["shard_placement_fn"] = _other_dimension
        if cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.mesh.device_type == "cuda")
        # a narrow adapter that tensor parallelism has split already cannot be cut evenly: it stays as it is
        ranks = self.dims.loss.size
        narrow = {
            p
            for name, p in self.body.named_parameters()
            if ".lora_" in name and _other_dimension(p) is not None and p.shape[1] % ranks
        }
        if narrow and cpu_offload:
            raise ConfigError(f"lora.r must be a multiple of {ranks} for shards in main memory; change it")
        # from the inside out, as FSDP wants it: each takes the parameters that none inside of it has taken
        for module in (*self.body.layers, self.body):
            fully_shard(module, ignored_params=narrow, **options)
        if not tied:
            # cut like all others, without the hooks of a module that runs
            holder: Any = nn.Module()
            holder.weight = self._head.weight
            fully_shard(holder, **options)
            self._head.weight = holder.weight
        for module in self.body.modules():
            if isinstance(module, FSDPModule):
                # losses are divided by global counts already: gradients add up, they are not averaged
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def _set_head(self, weight: Tensor) -> None:
        self._head.weight = nn.Parameter(weight, requires_grad=self._head.weight.requires_grad)

    # ---- forward ----

    def run(self, kwargs: dict[str, Any], cu_seqlens_host: Sequence[int] | None = None) -> Tensor:
        if self._context is not None:
            return self._context.run(self.body, kwargs, cu_seqlens_host)
        hidden: Tensor = self.body(**kwargs).last_hidden_state
        return hidden

    # ---- the head ----

    def head_weight(self, weight: Tensor, *, whole: bool = False) -> Tensor:
        # Gathered at the first call of a step over data x context ranks (whole: over tensor ranks too, for a student
        # that splits its vocabulary otherwise): V h numbers, or V h / t. Gradients collect in this copy until
        # `collect`. Between steps the memory is worth more.
        if not isinstance(weight, DTensor):
            return weight
        if whole:
            return self._whole_head(weight)
        if self._leaf is None:
            gathered: Any = _on_device(weight).detach()
            gathered = gathered.redistribute(placements=self._gathered(weight, Replicate()))
            self._leaf = gathered.to_local().requires_grad_(weight.requires_grad)
        return self._leaf

    @torch.no_grad()
    def _whole_head(self, weight: DTensor) -> Tensor:
        if self._whole is None:
            self._whole = _on_device(weight).redistribute(placements=[Replicate()] * weight.device_mesh.ndim).to_local()
        return self._whole

    def release(self, *, gradient: bool = False) -> None:
        self._whole = None
        if gradient or self._leaf is None or self._leaf.grad is None:
            self._leaf = None

    def _gathered(self, weight: DTensor, over_shards: Placement) -> list[Placement]:
        names = weight.device_mesh.mesh_dim_names or ()
        return [p if name == TENSOR else over_shards for name, p in zip(names, weight.placements, strict=True)]

    def _collect_head(self) -> None:
        if self._leaf is None or self._leaf.grad is None:
            return
        weight = self._head.weight
        part = DTensor.from_local(
            self._leaf.grad, weight.device_mesh, self._gathered(weight, Partial()), run_check=False
        )
        # data x context ranks, once per step: a reduce-scatter of V h / t numbers takes them home
        grad = part.redistribute(placements=weight.placements)
        _local(_settle(weight)).add_(_local(grad).to(weight.device))
        self._leaf = None

    # ---- gradients ----

    @torch.no_grad()
    def collect(self, params: Sequence[Tensor]) -> None:
        self._collect_head()
        grads = [(p, _local(_settle(p))) for p in params]
        # data x context ranks: gradients of parameters that FSDP has not sharded, and so not reduced
        self.dims.loss.sum_(*(grad for p, grad in grads if not _split_over(p)[0]))
        # tensor-parallel ranks: those of norms of single heads, and of what saw a part of the sequence; h numbers each
        self.dims.tensor.sum_(*(grad for p, grad in grads if id(p) in self._partial))

    @torch.no_grad()
    def clip(self, params: Sequence[Tensor], limit: float) -> Tensor:
        kinds: dict[tuple[bool, bool, str], list[Tensor]] = {}
        for p in params:
            if p.grad is not None:
                kinds.setdefault((*_split_over(p), p.device.type), []).append(_local(p.grad))
        total: Tensor | float = 0.0
        # sorted: every kind is a collective, which all ranks must reach in one order
        for kind in sorted(kinds):
            # float64 from here on: the square of a norm that float32 still holds may overflow it
            square = torch.stack([g.float().norm().double() for g in kinds[kind]]).square().sum()
            square = square.to(self.mesh.device_type)
            # one number per way of splitting: each rank has the squares of its shards
            for split, ranks in zip(kind[:2], (self.dims.loss, self.dims.tensor), strict=True):
                if split:
                    square = ranks.sum(square)
            total = total + square
        norm = torch.as_tensor(total).sqrt()
        # always multiplied, also by 1: to ask whether the norm exceeds the limit would wait for the device
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        for grads in kinds.values():
            for grad in grads:
                grad.mul_(scale.to(grad))
        return norm

    # ---- state ----

    @torch.no_grad()
    def full_state(self) -> dict[str, Tensor] | None:
        out: dict[str, Tensor] = {}
        whole: dict[int, Tensor] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            # tied weights have two names and are gathered once
            if id(value) not in whole:
                # every rank must ask for every weight, though only rank 0 keeps them
                full = whole_tensor(value)
                whole[id(value)] = full.cpu() if Comm.world().rank == 0 else full.new_empty(0)
            out[name] = whole[id(value)]
        return out if Comm.world().rank == 0 else None


def _other_dimension(p: nn.Parameter) -> Shard | None:
    """FSDP cuts the dimension that tensor parallelism left whole: slices of slices cannot be read back simply."""
    if isinstance(p, DTensor) and p.ndim > 1 and p.placements[0] == Shard(0):
        return Shard(1)
    return None


def _settle(p: Tensor) -> Tensor:
    """A parameter's gradient, laid out like the parameter."""
    if p.grad is None:
        # a parameter that this rank's rows did not reach still takes part, with zeros
        p.grad = torch.zeros_like(p)
    elif isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
        # an embedding's gradient comes whole, or as a sum still to be made
        p.grad = p.grad.redistribute(placements=p.placements)
    assert p.grad is not None
    return p.grad


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def whole_tensor(value: Tensor) -> Tensor:
    """A weight as one plain tensor, gathered where it is sharded; every rank of its mesh must ask."""
    return (_on_device(value).full_tensor() if isinstance(value, DTensor) else value).detach()


def _on_device(value: DTensor) -> DTensor:
    """A sharded tensor on the device of its mesh, also where its shards are kept in main memory."""
    if value.device.type == value.device_mesh.device_type:
        return value
    shape, stride = value.shape, value.stride()
    local = value.to_local().to(value.device_mesh.device_type)
    # shape and stride are given, since uneven shards do not tell the size of the whole
    return DTensor.from_local(local, value.device_mesh, value.placements, run_check=False, shape=shape, stride=stride)


def _split_over(p: Tensor) -> tuple[bool, bool]:
    """Whether a parameter is split over data x context, and over tensor ranks."""
    if not isinstance(p, DTensor):
        return False, False
    names = p.device_mesh.mesh_dim_names or ()
    # a bias that both ways cut has a placement of its own, which does not call itself a shard
    split = {name for name, placement in zip(names, p.placements, strict=True) if hasattr(placement, "dim")}
    return bool(split - {TENSOR}), TENSOR in split


def group_by_layout(params: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters of one mesh together: optimizers update many at once, which only works within one layout."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for p in params:
        key = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
        groups.setdefault(key, []).append(p)
    return list(groups.values())


# ---- weights that one process has read, handed to the shards of all ----


@dataclass
class WholeWeights:
    """The whole model in main memory of rank 0; None on the others. Every rank makes the same calls.

    `hidden`: its hidden states for the tokens of `probe`, where a check was wanted; on rank 0 too.
    """

    model: Any = None
    hidden: Tensor | None = None

    @torch.no_grad()
    def fill(self, model: nn.Module, device: str, *, offload: bool = False) -> None:
        """Give memory to a model without any, and every shard its part; one tensor at a time is whole on the device.

        Args:
            model: on the meta device, split already; its names are the source's.
            offload: parameters stay in main memory (buffers do not).
        """
        model.to_empty(device="cpu" if offload else device)
        whole = {} if self.model is None else self.model.state_dict(keep_vars=True)
        done: set[int] = set()
        for name, p in model.state_dict(keep_vars=True).items():
            if id(p) not in done and isinstance(p, nn.Parameter):
                done.add(id(p))
                local = p.to_local() if isinstance(p, DTensor) else p
                local.copy_(_piece(self._send(whole.get(name), p, device), p))
        # what no state dict holds: tables of rotary embeddings and the like
        for name, module in model.named_modules():
            layer = None if self.model is None else self.model.get_submodule(name)
            # some versions of transformers keep such tables as plain attributes
            for store in ("_buffers", "__dict__"):
                for key, value in list(getattr(module, store).items()):
                    if isinstance(value, Tensor):
                        there = None if layer is None else getattr(layer, store)[key]
                        getattr(module, store)[key] = _like(self._send(there, value, device), value)

    def expected(self, like: Tensor) -> Tensor:
        """`hidden` on every rank."""
        return self._send(self.hidden, like, like.device.type)

    def _send(self, whole: Tensor | None, like: Tensor, device: str) -> Tensor:
        out = torch.empty(like.shape, dtype=like.dtype, device=device) if whole is None else whole.detach().to(device)
        out = out.to(like.dtype).contiguous()
        # rank 0 to all, one weight at a time: each keeps its part, so a whole model is in one process's memory only
        return Comm.world().broadcast_(out)


def _piece(whole: Tensor, p: Tensor) -> Tensor:
    """This rank's part of a whole tensor, laid out as `p` is: cut over tensor-parallel ranks, then over shards."""
    if not isinstance(p, DTensor):
        return whole
    coordinate: Any = p.device_mesh.get_coordinate()
    for i in reversed(range(p.device_mesh.ndim)):
        dim = getattr(p.placements[i], "dim", None)
        if dim is not None:
            parts = whole.chunk(p.device_mesh.size(i), dim)
            # `chunk` may give fewer parts than there are ranks: the last ones have nothing
            whole = parts[coordinate[i]] if coordinate[i] < len(parts) else whole.narrow(dim, 0, 0)
    return whole


def _like(whole: Tensor, value: Tensor) -> Tensor:
    if isinstance(value, DTensor):
        return DTensor.from_local(whole, value.device_mesh, value.placements, run_check=False)
    return whole
