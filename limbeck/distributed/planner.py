"""Memory and time of a run under every layout of N devices, from formulas; nothing is loaded.

Bytes per device are split as: parameters, gradients, optimizer, gathered copies, activations, head blocks, teachers,
reserve. Time per step is the larger of arithmetic and data transfer per part, summed; it serves to compare layouts.

P: parameters, of which P' are trained; L layers, h hidden size, f intermediate size, q and kv: width of queries and
keys; V_s, V_t: vocabularies; t: tensor parallel, c: context parallel, S: shards (data x context under FSDP, otherwise
1); b_p, b_c: bytes of a parameter and of the computation; T: tokens of a micro-batch.

| part | bytes |
|---|---|
| parameters | P b_p / (t S) |
| gradients | P' b_p / (t S) |
| optimizer | 2 P' b_p / (t S) for Adam |
| gathered copies under FSDP | (2 P/L b_c + V_s h (b_c + 4)) / t |
| activations | L T/c b_c (5 h + (q + 2 kv + 4 f)/t); with checkpointing L T/c b_c h and one layer in full |
| gathered keys and values | packed and c > 1: 2 T kv b_c / t per layer whose activations are kept |
| head and loss | kernels: 128 KiB T/c; plain path: 5 x 4 x `block_rows` (V_s + V_t) / t |
| live teacher | P_t b / (t S), two gathered layers and its head under FSDP, one layer's activations |
| cached or served teacher | T x (12 + 6 k) bytes, or T x 2 h |
| reserve | 1.5 GiB and 5% of the sum |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from limbeck.distributed.mesh import MeshShape

GIB = 1 << 30

# Measured with Llama-3.2-1B from Qwen3-4B on one H200 (benchmarks/gpu/results.json), head gradient taken off: the plain
# path holds about five float32 blocks of both vocabularies, the kernels about 128 KiB per row whatever the vocabulary.
_PLAIN_BLOCKS = 5
_KERNEL_BYTES_PER_ROW = 1 << 17

FULL = {"cpu": 2_048, "cuda": 32_768}
"""Tokens of a micro-batch that keep a device as busy as more of them would, by its kind: on a CPU what caches hold, on
an accelerator what hides the launches of a pass."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model; ``parameters`` counts everything, ``vocab`` the rows of the head."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False

    @property
    def head_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, from what embedding and head leave."""
        outside = self.head_parameters * (1 if self.tied else 2)
        return max(self.parameters - outside, 0) // max(self.layers, 1)


@dataclass(frozen=True)
class TeacherMemory:
    """A teacher: ``live`` (weights on the devices), ``cache`` or ``server``. ``signal_bytes``: per token, for a cache
    or a server: what is read or sent. ``sharded``: FSDP2 over the student's data x context. ``layer_bytes``: per
    parameter of the layers, where they are quantised; every device then has a copy."""

    kind: str
    shape: ModelShape | None = None
    param_bytes: int = 2
    tokens_ratio: float = 1.0
    signal_bytes: float = 0.0
    sharded: bool = True
    layer_bytes: float | None = None

    @property
    def live(self) -> bool:
        return self.kind == "live" and self.shape is not None

    @property
    def weight_bytes(self) -> float:
        """Bytes of a live teacher's weights, all of them."""
        if self.shape is None:
            return 0.0
        if self.layer_bytes is None:
            return self.shape.parameters * self.param_bytes
        inside = self.shape.layers * self.shape.layer_parameters
        return inside * self.layer_bytes + (self.shape.parameters - inside) * self.param_bytes

    def tensor(self, mesh: MeshShape) -> int:
        """Ranks that a live teacher's layers are split over: as the student's, where its sizes allow it."""
        if self.shape is None or self.layer_bytes is not None:
            return 1
        sizes = (self.shape.heads, self.shape.kv_heads, self.shape.intermediate, self.shape.vocab)
        return max(n for n in _powers(mesh.tensor) if not any(size % n for size in sizes))


@dataclass(frozen=True)
class Workload:
    """Sizes of one step. Token counts are the student's; bytes are per element; ``kernels``: whether head and loss
    run in their kernels (a CUDA device, one live teacher, a mode that they cover). ``microbatch_found``: the tokens of
    a micro-batch are the most that a run may choose."""

    student: ModelShape
    teachers: tuple[TeacherMemory, ...] = ()
    sequences_per_step: int = 32
    tokens_per_sequence: int = 2048
    microbatch_tokens: int = 2048
    microbatch_found: bool = False
    block_rows: int = 512
    kernels: bool = False
    param_bytes: int = 4
    compute_bytes: int = 4
    trained: int | None = None
    optimizer_bytes: int = 8
    checkpointing: bool = False

    @property
    def trained_parameters(self) -> int:
        return self.student.parameters if self.trained is None else self.trained

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_step * self.tokens_per_sequence


@dataclass(frozen=True)
class Machine:
    """One device and its links. Rates are bytes and operations per second; ``utilisation``: share of ``flops`` that
    large matrix products reach in practice; ``latency``: seconds until a collective moves its first byte."""

    memory: float = 80 * GIB
    flops: float = 989e12
    utilisation: float = 0.4
    devices_per_node: int = 8
    node_link: float = 450e9
    network_link: float = 50e9
    latency: float = 2e-5
    price_per_hour: float = 3.0


@dataclass(frozen=True)
class Layout:
    """How devices share the work; ``sharded``: FSDP2 over data x context."""

    mesh: MeshShape
    sharded: bool

    @property
    def shards(self) -> int:
        return self.mesh.data * self.mesh.context if self.sharded else 1

    @property
    def name(self) -> str:
        kind = "FSDP" if self.sharded else "DP"
        parts = [f"{kind} {self.mesh.data}"]
        parts += [f"TP {self.mesh.tensor}"] if self.mesh.tensor > 1 else []
        parts += [f"CP {self.mesh.context}"] if self.mesh.context > 1 else []
        return " x ".join(parts)


@dataclass
class Estimate:
    """One layout: bytes by part, seconds by part, and whether it can be used."""

    layout: Layout
    memory: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    problem: str = ""
    teachers: tuple[TeacherMemory, ...] = ()

    @property
    def total(self) -> float:
        return sum(self.memory.values())

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    def to_dict(self) -> dict[str, Any]:
        mesh = asdict(self.layout.mesh)
        return {
            "layout": self.layout.name,
            **mesh,
            "fsdp": self.layout.sharded,
            "gib": {k: round(v / GIB, 3) for k, v in self.memory.items()},
            "total_gib": round(self.total / GIB, 3),
            "seconds": {k: round(v, 6) for k, v in self.seconds.items()},
            "step_seconds": round(self.step_seconds, 6),
            "fits": not self.problem,
            "problem": self.problem,
        }


# ---- memory ----------------------------------------------------------------------------------------------------------


def layer_activation_bytes(shape: ModelShape, compute_bytes: int, tensor: int = 1) -> float:
    """Bytes that one layer keeps per token for its backward pass (attention without its matrix).

    Norms and residuals (5 h) are whole on every tensor-parallel rank; queries, keys, values and the four
    intermediates of the gated MLP are split.
    """
    split = shape.heads * shape.head_dim + 2 * shape.kv_heads * shape.head_dim + 4 * shape.intermediate
    return compute_bytes * (5 * shape.hidden + split / tensor)


def memory_of(work: Workload, layout: Layout) -> dict[str, float]:
    """Bytes per device by part."""
    s, tensor, shards = work.student, layout.mesh.tensor, layout.shards
    split = tensor * shards
    tokens = work.microbatch_tokens / layout.mesh.context
    per_layer = tokens * layer_activation_bytes(s, work.compute_bytes, tensor)
    kept = tokens * s.hidden * work.compute_bytes
    if layout.mesh.context > 1:
        # queries attend to gathered keys and values, which the backward pass wants again
        per_layer += work.microbatch_tokens * 2 * s.kv_heads * s.head_dim * work.compute_bytes / tensor
    activations = s.layers * kept + per_layer if work.checkpointing else s.layers * per_layer
    out = {
        "parameters": s.parameters * work.param_bytes / split,
        "gradients": work.trained_parameters * work.param_bytes / split,
        "optimizer": work.trained_parameters * work.optimizer_bytes / split,
        "gathered": _gathered(work, layout),
        "activations": activations + tokens * s.hidden * (work.compute_bytes + 4),
        "head_blocks": _head_blocks(work, layout),
    }
    for number, teacher in enumerate(work.teachers):
        out[f"teacher_{number}"] = _teacher_bytes(teacher, work, layout)
    # the device's context, communication buffers, and what an allocator loses to fragments
    out["reserve"] = 1.5 * GIB + 0.05 * sum(out.values())
    return out


def _gathered(work: Workload, layout: Layout) -> float:
    """Working copies: two layers at a time under FSDP; the head, whole over the shards, with its gradient."""
    s, tensor = work.student, layout.mesh.tensor
    if not layout.sharded:
        # under autocast each weight is converted when it is used
        return s.head_parameters * work.compute_bytes / tensor if work.compute_bytes < work.param_bytes else 0.0
    return (2 * s.layer_parameters * work.compute_bytes + s.head_parameters * (work.compute_bytes + 4)) / tensor


def _head_blocks(work: Workload, layout: Layout) -> float:
    """Bytes that head and loss hold beside hidden states and the head's gradient."""
    if work.kernels and layout.mesh.tensor == 1:
        return _KERNEL_BYTES_PER_ROW * work.microbatch_tokens / layout.mesh.context
    teachers = [t.shape.vocab for t in work.teachers if t.kind == "live" and t.shape is not None]
    columns = work.student.vocab + max(teachers, default=0)
    return _PLAIN_BLOCKS * work.block_rows * 4.0 * columns / layout.mesh.tensor


def _teacher_bytes(teacher: TeacherMemory, work: Workload, layout: Layout) -> float:
    tokens = work.microbatch_tokens * teacher.tokens_ratio / layout.mesh.context
    if teacher.shape is None or not teacher.live:
        return tokens * teacher.signal_bytes
    t, tensor = teacher.shape, teacher.tensor(layout.mesh)
    shards = layout.shards if teacher.sharded else 1
    weights = teacher.weight_bytes / (tensor * shards)
    gathered = (2 * t.layer_parameters + t.head_parameters) * teacher.param_bytes / tensor if shards > 1 else 0.0
    # one layer at a time, and the hidden states that the loss reads
    passing = tokens * (layer_activation_bytes(t, teacher.param_bytes, tensor) + t.hidden * teacher.param_bytes)
    return weights + gathered + passing


# ---- time ------------------------------------------------------------------------------------------------------------


def seconds_of(work: Workload, layout: Layout, machine: Machine) -> dict[str, float]:
    """Seconds per step by part: arithmetic, and of the transfers what arithmetic does not hide."""
    mesh, s = layout.mesh, work.student
    tokens = work.tokens_per_step / mesh.data
    rate = machine.flops * machine.utilisation * mesh.tensor * mesh.context
    # operations per parameter and token: 2 forward, 4 backward, and 2 for what is computed again
    passes = 8 if work.checkpointing else 6
    student = passes * s.parameters * tokens / rate
    # attention's own products: 12 h per token and earlier token, half of them masked
    student += passes * s.layers * s.hidden * work.tokens_per_sequence * tokens / rate
    teachers = sum(
        # ranks that do not share a teacher's layers repeat its work
        2 * t.shape.parameters * tokens * t.tokens_ratio * mesh.tensor / t.tensor(mesh) / rate
        for t in work.teachers
        if t.shape is not None and t.live
    )
    microbatches = max(tokens / work.microbatch_tokens, 1.0)
    moved = _sharding_bytes(work, layout, microbatches) / _link(machine, mesh.world, mesh.tensor)
    # FSDP gathers and reduces beside the arithmetic; plain data parallelism sums gradients after it
    out = {"student": student, "teachers": teachers, "sharding": max(0.0, moved - student) if layout.sharded else moved}
    width = tokens / mesh.context * s.hidden * work.compute_bytes
    if mesh.tensor > 1:
        # four all-reduces per layer (two forward, two backward), which nothing hides
        share = 2 * (mesh.tensor - 1) / mesh.tensor
        out["tensor"] = 4 * s.layers * width * share / _link(machine, mesh.tensor)
    if mesh.context > 1:
        kv = 2 * s.kv_heads * s.head_dim / s.hidden
        out["context"] = 3 * s.layers * width * kv * (mesh.context - 1) / _link(machine, mesh.same_rows, mesh.tensor)
    out["latency"] = machine.latency * _collectives(work, layout, microbatches)
    signals = sum(t.signal_bytes * t.tokens_ratio for t in work.teachers if t.kind != "live")
    if signals:
        out["signals"] = max(0.0, tokens * signals / machine.network_link - student)
    return out


def _collectives(work: Workload, layout: Layout, microbatches: float) -> float:
    """Number of collectives per step that somebody waits for."""
    mesh, layers = layout.mesh, work.student.layers
    per_microbatch = (4 * layers if mesh.tensor > 1 else 0) + (3 * layers * (mesh.context - 1))
    if layout.sharded:
        # gathered for the forward and the backward pass, and gradients reduced
        per_microbatch += 3 * layers
    return microbatches * per_microbatch + (mesh.data * mesh.context > 1)


def _sharding_bytes(work: Workload, layout: Layout, microbatches: float) -> float:
    """Bytes per device and step: weights gathered for forward and backward of each micro-batch, gradients reduced."""
    ways = layout.mesh.data * layout.mesh.context
    if ways == 1:
        return 0.0
    share = (ways - 1) / ways / layout.mesh.tensor
    gradients = work.trained_parameters * work.param_bytes
    if not layout.sharded:
        # an all-reduce moves what a reduce-scatter and an all-gather move
        return 2 * share * gradients
    weights = 2 * work.student.parameters * work.compute_bytes
    teachers = sum(t.weight_bytes for t in work.teachers if t.live and t.sharded)
    return share * (microbatches * (weights + gradients + teachers))


def _link(machine: Machine, span: int, inner: int = 1) -> float:
    """Rate of a collective over ranks that span ``span`` neighbours; ``inner`` ranks between two members."""
    return machine.node_link if span <= machine.devices_per_node and inner <= span else machine.network_link


# ---- choice ----------------------------------------------------------------------------------------------------------


def layouts(devices: int) -> list[Layout]:
    """All meshes of powers of two whose product is ``devices``, plain and sharded."""
    out = []
    for tensor in _powers(devices):
        for context in _powers(devices // tensor):
            mesh = MeshShape(devices // (tensor * context), context, tensor)
            if mesh.world == devices:
                out += [Layout(mesh, sharded) for sharded in ((False, True) if devices > tensor else (False,))]
    return out


def _powers(limit: int) -> list[int]:
    return [1 << i for i in range(max(limit, 1).bit_length()) if 1 << i <= limit]


def problem_of(work: Workload, layout: Layout, machine: Machine) -> str:
    """Why a layout cannot be used, memory aside; empty where it can."""
    mesh, s = layout.mesh, work.student
    if work.sequences_per_step % mesh.data:
        return f"{work.sequences_per_step} records per step cannot be dealt to {mesh.data} data-parallel ranks"
    if mesh.tensor > machine.devices_per_node:
        return f"tensor parallelism over {mesh.tensor} devices leaves the node of {machine.devices_per_node}"
    for name, value in (("heads", s.heads), ("key-value heads", s.kv_heads), ("intermediate size", s.intermediate)):
        if value % mesh.tensor:
            return f"{value} {name} cannot be split {mesh.tensor} ways"
    if work.tokens_per_sequence // mesh.context < 512 and mesh.context > 1:
        return f"{work.tokens_per_sequence} tokens are too few to split {mesh.context} ways"
    return ""


def plan(work: Workload, devices: int, machine: Machine) -> list[Estimate]:
    """Estimates of all layouts, the best first: those that fit by time per step, then the others by memory.

    Live teachers are sharded too where a layout does not fit without it.
    """
    shared = replace(
        work,
        teachers=tuple(replace(t, sharded=True) if t.live and t.layer_bytes is None else t for t in work.teachers),
    )
    out = []
    for layout in layouts(devices):
        estimate = _estimate(work, layout, machine)
        if estimate.problem and layout.sharded and shared != work:
            other = _estimate(shared, layout, machine)
            estimate = min(estimate, other, key=lambda e: (bool(e.problem), e.total))
        out.append(estimate)
    return sorted(out, key=lambda e: (bool(e.problem), e.step_seconds if not e.problem else e.total))


def with_found_microbatch(work: Workload, layout: Layout, memory: float) -> Workload:
    """The same with a micro-batch of as many tokens as find room, and of one sequence at least."""
    least, tokens = work.tokens_per_sequence, work.microbatch_tokens
    if not work.microbatch_found:
        return work
    tokens = max(min(tokens, work.tokens_per_step // layout.mesh.data), least)
    while tokens > least and sum(memory_of(replace(work, microbatch_tokens=tokens), layout).values()) > memory:
        tokens = max(tokens // 2, least)
    return replace(work, microbatch_tokens=tokens)


def _estimate(work: Workload, layout: Layout, machine: Machine) -> Estimate:
    work = with_found_microbatch(work, layout, machine.memory)
    estimate = Estimate(layout, memory_of(work, layout), seconds_of(work, layout, machine), teachers=work.teachers)
    estimate.problem = problem_of(work, layout, machine)
    if not estimate.problem and estimate.total > machine.memory:
        estimate.problem = f"needs {estimate.total / GIB:.1f} GiB of {machine.memory / GIB:.1f}"
    return estimate


def fitting(estimates: Sequence[Estimate]) -> Estimate | None:
    """The best layout that fits, if any."""
    return next((e for e in estimates if not e.problem), None)
