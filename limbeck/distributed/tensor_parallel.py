"""How a transformers body is split over tensor-parallel ranks: by the plan that its own configuration class carries.

transformers names for each model type which linear maps are split by columns (outputs) and which by rows (inputs), and
which parameters in between see only a rank's share. Here these names become torch's parallel styles. What the plan does
not name stays whole, and so do hidden states between layers, unless the sequence is split too (`SplitSequence`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from limbeck.distributed.comm import Comm
from limbeck.errors import ConfigError

COLUMNS, ROWS, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
GATHERED = {"colwise_gather_output": COLUMNS, "rowwise_split_input": ROWS}
"""Styles whose inner activations are whole on every rank (fused or normalised over all heads); only weights split."""


def tp_plan_of(model_type: str | None) -> Mapping[str, str] | None:
    """The tensor-parallel plan of a model type; None where there is none, or one with parts that are not known here."""
    from transformers import CONFIG_MAPPING

    if model_type is None or model_type not in CONFIG_MAPPING:
        return None
    plan = getattr(CONFIG_MAPPING[model_type], "base_model_tp_plan", None)
    return plan if plan and set(plan.values()) <= {COLUMNS, ROWS, SUMMED, *GATHERED} else None


class TensorSplit:
    """Splits a body over `mesh` in place. `partial`: names of parameters whose gradients are parts of a sum over ranks.

    Args:
        body: with `layers`, `embed_tokens` and a plan for its model type; linear maps may carry adapters.
        sequence: keep hidden states between layers split along the sequence (`SplitSequence`).
    """

    def __init__(self, body: Any, mesh: DeviceMesh, *, sequence: bool = False) -> None:
        plan = tp_plan_of(body.config.model_type)
        if plan is None:
            raise ConfigError(f"{type(body).__name__} has no tensor-parallel plan; set tensor_parallel_size to 1")
        self.body, self.sequence = body, sequence
        styles = dict(self._named(plan))
        parents = {path.rpartition(".")[0] for path in styles}
        self.partial = self._inside(plan, styles, parents)
        # each rank looks up the ids that are its rows, and what the ranks have found is summed
        split: dict[str, Any] = {"embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}
        for path, style in styles.items():
            split |= self._split(path, style)
        parallelize_module(body, mesh, split)
        if sequence:
            self.partial |= self._on_parts(styles, parents)
            SplitSequence(Comm.of(mesh)).install(body, parents)

    def _named(self, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """(path, style) of the linear maps that the plan splits."""
        for path, _ in self.body.named_modules():
            for pattern, style in plan.items():
                if style != SUMMED and _matches(path, pattern):
                    yield path, style

    def _inside(self, plan: Mapping[str, str], styles: Mapping[str, str], parents: set[str]) -> set[str]:
        """Parameters between column and row maps, such as norms of single heads, which see a rank's share only."""
        names = set()
        for name, p in self.body.named_parameters():
            parent = next((parent for parent in parents if name.startswith(f"{parent}.")), None)
            whole = parent is None or all(s in GATHERED for path, s in styles.items() if path.startswith(f"{parent}."))
            if whole or any(name.startswith(f"{path}.") for path in styles):
                continue
            module = name.rpartition(".")[0]
            known = any(style == SUMMED and _matches(module, pattern) for pattern, style in plan.items())
            if not known and not (module.endswith(("q_norm", "k_norm")) and p.ndim == 1):
                raise ConfigError(
                    f"{type(self.body).__name__} has a parameter {name!r} that tensor parallelism does not know; set "
                    "tensor_parallel_size to 1"
                )
            names.add(name)
        return names

    def _on_parts(self, styles: Mapping[str, str], parents: set[str]) -> set[str]:
        """Parameters that work on a part of the sequence: those between attention and MLP, and what follows a row-wise
        map inside of its module (the second half of an adapter)."""
        inside = (*(f"{parent}." for parent in parents), "embed_tokens.")
        rows = tuple(f"{path}.lora_B." for path, style in styles.items() if GATHERED.get(style, style) == ROWS)
        names = [name for name, _ in self.body.named_parameters()]
        return {name for name in names if not name.startswith(inside) or name.startswith(rows)}

    def _split(self, path: str, style: str) -> dict[str, Any]:
        """Styles of one linear map, or of a map with adapters (B over columns, A over rows, the other whole)."""
        columns = GATHERED.get(style, style) == COLUMNS
        out = Replicate() if style in GATHERED and columns else None
        into = Replicate() if style in GATHERED and not columns else None
        between = Shard(1) if self.sequence else Replicate()

        def make() -> Any:
            if columns:
                return ColwiseParallel(output_layouts=out)
            return RowwiseParallel(input_layouts=into, output_layouts=between)

        module: Any = self.body.get_submodule(path)
        linear: Any = getattr(module, "base_layer", module)
        if not isinstance(linear, nn.Linear):
            raise ConfigError(f"{path!r} is a {type(linear).__name__}, which tensor parallelism cannot split")
        if linear is module:
            return {path: make()}
        inner = "lora_B" if columns else "lora_A"
        return {f"{path}.base_layer": make()} | {f"{path}.{inner}.{name}": make() for name in getattr(module, inner)}


@torch.no_grad()
def probe(body: Any, ranks: int, device: str) -> Tensor:
    """Hidden states of a few tokens, for `check_probe`."""
    rows = body.get_input_embeddings().weight.shape[0]
    # as many for each rank, for sequences may be split; far apart, or all would lie in the first rank's embedding rows
    ids = torch.arange(8 * ranks, device=device)[None] * 7919 % rows
    hidden: Tensor = body(input_ids=ids, use_cache=False).last_hidden_state
    return hidden.float()


def check_probe(body: Any, whole: Tensor, split: Tensor, *, exact: bool) -> None:
    """A few tokens must give the same hidden states before and after: a wrong split computes without a word."""
    off = float((whole - split).abs().max() / whole.abs().max().clamp(min=1e-6))
    # negated, so that NaN is refused too
    if not off <= (1e-3 if exact else 5e-2):
        raise ConfigError(
            f"{type(body).__name__} split over tensor-parallel ranks gives other hidden states (by {off:.2g}); set "
            "tensor_parallel_size to 1 and use dtensor_cfg.fsdp"
        )


def _matches(path: str, pattern: str) -> bool:
    """Whether a module path is named by a pattern with `*` for a layer's number."""
    a, b = path.split("."), pattern.split(".")
    return len(a) == len(b) and all(fnmatchcase(x, y) for x, y in zip(a, b, strict=True))


# ---- hidden states split along the sequence ----


class _Cut(torch.autograd.Function):
    """This rank's part of `[B, T, h]`; gradients are gathered, since every rank needs the whole one."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, split: SplitSequence) -> Tensor:
        ctx.split = split
        return split.cut(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.split.gather(grads[0]), None


class _Gather(torch.autograd.Function):
    """The whole `[B, T, h]` on every rank. What follows ends in gradients that are whole on every rank, too."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, split: SplitSequence) -> Tensor:
        ctx.split = split
        return split.gather(part)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.split.cut(grads[0]), None


class SplitSequence:
    """Between attention and MLP each rank holds T / t positions: norms and residuals are neither stored nor computed
    t times. Attention and MLP gather their input; their row-wise maps scatter the output."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def cut(self, whole: Tensor) -> Tensor:
        if whole.shape[1] % self.comm.size:
            raise ConfigError(
                f"sequences of {whole.shape[1]} tokens cannot be cut into {self.comm.size} equal parts; "
                "sequence_parallel needs lengths that are multiples of tensor_parallel_size"
            )
        return whole.chunk(self.comm.size, 1)[self.comm.rank].contiguous()

    def gather(self, part: Tensor) -> Tensor:
        # tensor-parallel ranks, before attention and MLP of every layer: T / t positions of h numbers from each
        return torch.cat(self.comm.gather(part), 1)

    def install(self, body: Any, parents: set[str]) -> None:
        """Hooks that cut before the first layer, gather before the modules at `parents` and after the last norm."""
        if not hasattr(body, "norm"):
            raise ConfigError(f"sequence_parallel does not know where {type(body).__name__} ends; leave it off")
        body.layers[0].register_forward_pre_hook(self._on_input(_Cut.apply), with_kwargs=True)
        for path in sorted(parents):
            body.get_submodule(path).register_forward_pre_hook(self._on_input(_Gather.apply), with_kwargs=True)
        body.norm.register_forward_hook(lambda _module, _args, out: _Gather.apply(out, self))

    def _on_input(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (change(args[0], self), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"], self)}

        return hook
