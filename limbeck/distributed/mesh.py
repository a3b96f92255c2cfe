"""Which process does what: data, context and tensor parallel ranks, planned from the run file before anything loads.

Ranks are numbered with tensor parallelism innermost, then context, then data: the processes that exchange most lie
next to each other. All ranks of one data-parallel place (tensor x context) read the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from limbeck.distributed.comm import Comm
from limbeck.distributed.tensor_parallel import tp_plan_of
from limbeck.errors import ConfigError

DATA, CONTEXT, TENSOR, LOSS, ROWS = "data", "context", "tensor", "loss", "rows"

CONTEXT_MODELS = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Model types whose attention context parallelism knows."""


class ParallelConfig(BaseModel):
    """Parallel layout of a model: the section ``dtensor_cfg``."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    enabled: bool = True
    """Published key without effect: the sizes below decide."""
    cpu_offload: bool = False
    """With ``fsdp``: keep shards, gradients and optimizer state in main memory."""
    sequence_parallel: bool = False
    """With tensor parallelism: split hidden states between attention and MLP along the sequence."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, about a third more time."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that share each layer's weights."""
    context_parallel_size: int = Field(default=1, ge=1)
    """Devices that share each sequence."""
    fsdp: bool = False
    """Shard parameters, gradients and optimizer state over the data- and context-parallel processes (FSDP2)."""


@dataclass(frozen=True)
class MeshShape:
    """Number of ranks along each way of splitting the work; their product is the number of processes."""

    data: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def same_rows(self) -> int:
        """Ranks that read the same rows."""
        return self.context * self.tensor

    @property
    def world(self) -> int:
        return self.data * self.same_rows

    def place(self, rank: int) -> tuple[int, int, int]:
        """(data, context, tensor) coordinates of a rank."""
        return rank // self.same_rows, rank // self.tensor % self.context, rank % self.tensor


def current_world() -> int:
    """Number of processes that have joined; 1 without torch.distributed."""
    return Comm.world().size


def mesh_shape_for(layout: ParallelConfig, world: int, *, name: str = "policy") -> MeshShape:
    """Shape of the mesh of ``world`` processes: data parallelism takes what tensor and context parallelism leave.

    Raises:
        ConfigError: the sizes do not divide the number of processes.
    """
    tensor, context = layout.tensor_parallel_size, layout.context_parallel_size
    if world % (tensor * context):
        raise ConfigError(
            f"{name}: tensor_parallel_size {tensor} x context_parallel_size {context} = {tensor * context} does not "
            f"divide the {world} process{'es' if world > 1 else ''} of this run; change the sizes or start "
            f"a multiple of {tensor * context} processes"
        )
    return MeshShape(world // (tensor * context), context, tensor)


def data_rank_and_world(layout: ParallelConfig) -> tuple[int, int]:
    """This process's place among the readers of data, and their number, under a policy's layout."""
    shape = mesh_shape_for(layout, current_world())
    return Comm.world().rank // shape.same_rows, shape.data


def check_model(config: Any, shape: MeshShape, *, vocab_rows: int | None = None, name: str = "policy") -> None:
    """Refuse a model that the mesh cannot split.

    Args:
        config: a transformers configuration, or a mapping with its keys.
        vocab_rows: rows of the embedding; default: the configuration's ``vocab_size``.
    """
    if shape.same_rows == 1:
        return
    read = config.get if isinstance(config, Mapping) else lambda key, default=None: getattr(config, key, default)
    kind = read("model_type")
    if shape.context > 1 and kind not in CONTEXT_MODELS:
        raise ConfigError(
            f"{name}: context parallelism does not know models of type {kind!r}, only {', '.join(CONTEXT_MODELS)}; "
            "set context_parallel_size to 1 and use dtensor_cfg.fsdp"
        )
    if shape.tensor > 1 and tp_plan_of(kind) is None:
        raise ConfigError(
            f"{name}: tensor parallelism does not know models of type {kind!r}, for which transformers has no plan of "
            "plain column and row splits; set tensor_parallel_size to 1 and use dtensor_cfg.fsdp"
        )
    odd = sorted(set(read("layer_types") or ()) - {"full_attention", "sliding_attention"})
    if shape.context > 1 and odd:
        raise ConfigError(
            f"{name}: context parallelism knows full and sliding-window attention, not layers of type {odd[0]!r}; "
            "set context_parallel_size to 1"
        )
    heads = read("num_attention_heads")
    numbers = {
        "num_attention_heads": heads,
        "num_key_value_heads": read("num_key_value_heads") or heads,
        "intermediate_size": read("intermediate_size"),
        "vocabulary": vocab_rows or read("vocab_size"),
    }
    for what, number in numbers.items():
        if number is not None and int(number) % shape.tensor:
            raise ConfigError(
                f"{name}: tensor_parallel_size {shape.tensor} does not divide the model's {what} {number}; "
                "choose a size that does"
            )


@dataclass(frozen=True)
class ParallelDims:
    """This rank's place: who it works with along every way of splitting the work; all of them `alone` on one process.

    Attributes:
        data: ranks that read other rows.
        context: ranks that hold other parts of the same sequences.
        tensor: ranks that hold other parts of the same weights and vocabulary.
        rows: context x tensor, the ranks that read the same rows.
        loss: data x context, over which gradients, losses and metrics are summed.
        mesh: (loss, tensor), over which parameters are laid out; None where each rank has all of them.
    """

    shape: MeshShape = MeshShape()
    data: Comm = field(default_factory=Comm.alone)
    context: Comm = field(default_factory=Comm.alone)
    tensor: Comm = field(default_factory=Comm.alone)
    rows: Comm = field(default_factory=Comm.alone)
    loss: Comm = field(default_factory=Comm.alone)
    mesh: DeviceMesh | None = None

    @classmethod
    def alone(cls) -> ParallelDims:
        return cls()

    @classmethod
    def replicas(cls, ranks: Comm) -> ParallelDims:
        """Plain data parallelism: every rank has the whole model and rows of its own."""
        return cls(MeshShape(data=ranks.size), data=ranks, loss=ranks)

    @classmethod
    def sharded(cls, shape: MeshShape, device_type: str) -> ParallelDims:
        """Parameters laid out over a mesh of this shape. Made once per shape; every process of the run must ask."""
        # a process group that is closed and joined again is another one: meshes of the old one must not be found
        key = (device_type, shape, id(dist.group.WORLD))
        if key not in _DIMS:
            _DIMS[key] = cls._made(shape, device_type)
        return _DIMS[key]

    @classmethod
    def _made(cls, shape: MeshShape, device_type: str) -> ParallelDims:
        names = {DATA: shape.data, CONTEXT: shape.context, TENSOR: shape.tensor}
        work = init_device_mesh(device_type, tuple(names.values()), mesh_dim_names=tuple(names))
        # parameters know only two ways: over data x context together, and over tensor ranks
        mesh = init_device_mesh(device_type, (shape.data * shape.context, shape.tensor), mesh_dim_names=(LOSS, TENSOR))
        rows = init_device_mesh(device_type, (shape.data, shape.same_rows), mesh_dim_names=(DATA, ROWS))
        return cls(
            shape,
            data=Comm.of(work[DATA]),
            context=Comm.of(work[CONTEXT]),
            tensor=Comm.of(mesh[TENSOR]),
            rows=Comm.of(rows[ROWS]),
            loss=Comm.of(mesh[LOSS]),
            mesh=mesh,
        )

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are laid out over a mesh."""
        return self.mesh is not None

    @property
    def owns_rows(self) -> bool:
        """Whether this rank speaks for its rows in a sum over `loss`: one of those that hold parts of them does."""
        return self.context.rank == 0

    @property
    def owns_records(self) -> bool:
        """Whether this rank speaks for the records it reads in a sum over all processes."""
        return self.rows.rank == 0


_DIMS: dict[tuple[str, MeshShape, int], ParallelDims] = {}
