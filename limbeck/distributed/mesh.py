"""Which process does what: data, context and tensor parallel ranks, planned from the run file before anything loads.

Ranks are numbered with tensor parallelism innermost, then context, then data: the processes that exchange most lie
next to each other. All ranks of one data-parallel place (tensor x context) read the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from limbeck.distributed.comm import Comm
from limbeck.distributed.tensor_parallel import plan_of
from limbeck.utils.errors import ConfigError

DATA, CONTEXT, TENSOR, REDUCE, ROWS = "data", "context", "tensor", "reduce", "rows"

CONTEXT_MODELS = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Model types whose attention context parallelism knows."""


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


def plan_mesh(layout: Mapping[str, Any], world: int, *, name: str = "policy") -> MeshShape:
    """Shape of the mesh for ``dtensor_cfg``: data parallelism takes what tensor and context parallelism leave.

    Raises:
        ConfigError: the sizes do not divide the number of processes, or a way to attend is asked for that is gone.
    """
    if layout.get("context_parallel_attention") == "ring":
        raise ConfigError(
            f"{name}: dtensor_cfg.context_parallel_attention is 'ring', which stood on private functions of torch and "
            "was removed; set it to 'gather' (what 'auto' means) or leave it out"
        )
    tensor, context = int(layout["tensor_parallel_size"]), int(layout["context_parallel_size"])
    if world % (tensor * context):
        raise ConfigError(
            f"{name}: tensor_parallel_size {tensor} x context_parallel_size {context} = {tensor * context} does not "
            f"divide the {world} process{'es' if world > 1 else ''} of this run; change the sizes or start "
            f"a multiple of {tensor * context} processes"
        )
    return MeshShape(world // (tensor * context), context, tensor)


def plan_cluster(cluster: Any, world: int) -> None:
    """Refuse a run whose number of processes is not what the ``cluster`` section promises."""
    gpus = getattr(cluster, "gpus_per_node", None)
    # under Ray the number of workers is a setting of its own
    local = getattr(cluster, "launcher", "local") == "local"
    if gpus and local and world > 1 and gpus * cluster.num_nodes != world:
        raise ConfigError(
            f"cluster.num_nodes {cluster.num_nodes} x gpus_per_node {gpus} = {gpus * cluster.num_nodes}, but {world} "
            "processes were started; correct the run file or the launcher"
        )


def data_rank_and_world(layout: Any) -> tuple[int, int]:
    """This process's place among the readers of data, and their number, for a policy's ``dtensor_cfg``."""
    settings = layout if isinstance(layout, Mapping) else layout.model_dump()
    shape = plan_mesh(settings, current_world())
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
    if shape.tensor > 1 and plan_of(kind) is None:
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


_MESHES: dict[tuple[str, MeshShape, int], ParallelMesh] = {}


class ParallelMesh:
    """Process groups of one mesh shape. Made once per shape and process group; every rank must ask for it.

    ``groups``: ``data`` (ranks with other rows), ``context``, ``tensor``; ``reduce``: data x context, over which
    gradients, losses and metrics are summed. A group of one rank is None.
    """

    def __init__(self, shape: MeshShape, device_type: str) -> None:
        self.shape = shape
        self.device_mesh: DeviceMesh = init_device_mesh(
            device_type, (shape.data, shape.context, shape.tensor), mesh_dim_names=(DATA, CONTEXT, TENSOR)
        )
        # parameters know only two ways: over data x context together, and over tensor ranks
        self.shard_mesh: DeviceMesh = init_device_mesh(
            device_type, (shape.data * shape.context, shape.tensor), mesh_dim_names=(REDUCE, TENSOR)
        )
        self.data_rank, self.context_rank, self.tensor_rank = shape.place(dist.get_rank())
        self._rows_group: Any = None

    @classmethod
    def get(cls, shape: MeshShape, device_type: str) -> ParallelMesh:
        """The mesh of this shape; groups are created at the first call, which all ranks must make."""
        key = (device_type, shape, id(dist.group.WORLD))
        if key not in _MESHES:
            _MESHES[key] = cls(shape, device_type)
        return _MESHES[key]

    def _group(self, mesh: DeviceMesh, size: int) -> Any:
        return mesh.get_group() if size > 1 else None

    @property
    def data_group(self) -> Any:
        return self._group(self.device_mesh[DATA], self.shape.data)

    @property
    def context_group(self) -> Any:
        return self._group(self.device_mesh[CONTEXT], self.shape.context)

    @property
    def tensor_group(self) -> Any:
        return self._group(self.shard_mesh[TENSOR], self.shape.tensor)

    @property
    def rows_group(self) -> Any:
        """Ranks that read the same rows, context x tensor. Made at the first use, which all ranks must share."""
        shape = self.shape
        if shape.context == 1 or shape.tensor == 1:
            return self.tensor_group if shape.context == 1 else self.context_group
        if self._rows_group is None:
            device_type = self.device_mesh.device_type
            mesh = init_device_mesh(device_type, (shape.data, shape.same_rows), mesh_dim_names=(DATA, ROWS))
            self._rows_group = mesh[ROWS].get_group()
        return self._rows_group

    @property
    def reduce_group(self) -> Any:
        return self._group(self.reduce_mesh, self.shape.data * self.shape.context)

    @property
    def reduce_mesh(self) -> DeviceMesh:
        return self.shard_mesh[REDUCE]

    @property
    def tensor_mesh(self) -> DeviceMesh:
        return self.shard_mesh[TENSOR]
