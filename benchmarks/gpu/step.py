"""Whole training steps of a Llama-3.2-1B shape from a Qwen3-4B shape (random weights), optimizer included.

    PYTHONPATH=. python benchmarks/gpu/step.py [--projection W.safetensors] [--only live live_fp8 cached packed]

2,048-token documents, 16,384 tokens per step, float32 parameters under bfloat16 autocast, AdamW, boundary_kl with the
chunk term and cross-entropy, decoder layers compiled. The floor of a row is what the same run measures for its parts:
bodies, forward and (student) backward, and the heads' matrix products; of a cached teacher's, which has no body, also
clipping, the optimizer and sending what is stored. `on_device_ms` is where the device's time goes, `idle_ms` what the
step takes beyond it; `host_ms` is where the host's time goes, of which `wait` is the one for the device. `--tiny` runs
everything small on the CPU.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.common import GIB, aligned_batch, load_projection, make_projection, save_row
from benchmarks.gpu.loss import synchronisations
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.layout import teacher_chunks, with_chunks
from limbeck.data.microbatch import process_microbatch
from limbeck.distributed.device import host_threads
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.models.policy import Policy
from limbeck.teachers.cache.fill import spec_for, write_cache
from limbeck.teachers.cached import CachedTeacher
from limbeck.teachers.live import LiveTeacher
from limbeck.utils.timer import Timer

ROPE = {"rope_theta": 500_000.0, "rope_type": "default"}
SHAPES: dict[str, dict[str, Any]] = {
    "student": {
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    },
    "teacher": {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
}  # fmt: skip
TINY = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
LENGTH, DOCUMENTS = 2048, 8
PUBLISHED = 1840
"""Tokens per second and GPU that the published implementation reports for a 1B student with 3.8B and 3B teachers."""


class Setup:
    """Student, teacher and loss; `tiny`: toy sizes, float32, on whatever device there is; `fp8`: of the teacher;
    `dynamic`: one compiled graph for all lengths."""

    def __init__(
        self,
        projection: str | None,
        *,
        tiny: bool,
        attention: str | None = None,
        fp8: bool = False,
        dynamic: bool = False,
    ) -> None:
        self.tiny, self.attention, self.fp8 = tiny, attention, fp8
        self.dynamic = dynamic or attention is not None
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.length = 24 if tiny else LENGTH
        self.sizes = (300, 300) if tiny else (128_256, 151_936)
        self.student = self.policy("student", trained=True)
        self.teacher = self.policy("teacher", trained=False)
        found = make_projection(300, 300) if tiny else load_projection(projection)
        self.loss_fn = CrossTokenizerDistillationLossFn(
            {"mode": "boundary_kl", "teacher_vocab_size": self.sizes[1]}, projections=[found]
        ).to(self.device)

    def policy(self, side: str, *, trained: bool) -> Policy:
        """A model with random weights; side: student or teacher."""
        from transformers import AutoConfig, AutoModelForCausalLM

        shape = SHAPES[side] | (TINY if self.tiny else {})
        precision = "float32" if self.tiny else "bfloat16"
        if self.fp8 and not trained:
            precision = "fp8"
        cfg = {
            "precision": precision, "train_micro_batch_size": DOCUMENTS, "logprob_batch_size": 4,
            "sequence_packing": {"enabled": self.attention is not None, "train_mb_tokens": DOCUMENTS * self.length},
            "compile": {"enabled": not self.tiny, "dynamic": self.dynamic or None},
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-5, "weight_decay": 0.0,
                                                                  "fused": self.device == "cuda"}},
        }  # fmt: skip
        base = AutoConfig.for_model(**shape, tie_word_embeddings=True, max_position_embeddings=8192)
        dtype = torch.float32 if trained or self.tiny else torch.bfloat16
        options = {} if self.attention is None else {"attn_implementation": self.attention}
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(base, dtype=dtype, **options)
        return Policy(cfg, None, name=side, device=self.device, init_optimizer=trained, model=model)

    def batch(self, seed: int) -> BatchedDataDict:
        """Documents of full length."""
        return laid_out(aligned_batch(DOCUMENTS, self.length - 1, *self.sizes, seed=seed))

    def mixed_batch(self, seed: int) -> BatchedDataDict:
        """Documents of 100 to 2,048 tokens, uniformly; about as many tokens as `batch`."""
        rng = np.random.default_rng(seed)
        low = max(self.length // 20, 4)
        lengths: list[int] = []
        while sum(lengths) < DOCUMENTS * self.length * 0.99:
            room = DOCUMENTS * self.length - sum(lengths)
            lengths.append(min(int(rng.integers(low, self.length + 1)), room))
        full = aligned_batch(len(lengths), self.length - 1, *self.sizes, seed=seed)
        sizes = torch.tensor(lengths)
        for prefix in ("", "teacher_"):
            full[f"{prefix}input_lengths"] = sizes.clone()
        for key in ("alignment_student_chunk_id", "alignment_teacher_chunk_id"):
            full[key][torch.arange(self.length) >= sizes[:, None]] = -1
        return laid_out(full)


def laid_out(batch: dict[str, Any], teachers: int = 1) -> BatchedDataDict:
    """A batch as the loader's processes hand it over: its chunks laid out once."""
    whole: BatchedDataDict = BatchedDataDict(batch)
    chunks = [teacher_chunks(whole, i, same_vocabulary=False, allow_inexact=False) for i in range(teachers)]
    return with_chunks(whole, chunks)


def _sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(run: Callable[[int], Any], steps: int, warmup: int) -> float:
    """Seconds per call of `run(number)`, host and device together."""
    for number in range(warmup):
        run(number)
    _sync()
    start = time.perf_counter()
    for number in range(steps):
        run(number)
    _sync()
    return (time.perf_counter() - start) / max(steps, 1)


def compiled_graphs() -> int:
    """Graphs that torch.compile has made so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def step_row(setup: Setup, source: Any, batches: list[BatchedDataDict], steps: int, warmup: int) -> dict[str, Any]:
    """Tokens per second of `Policy.train` over fresh batches, the host with as many threads as in a run."""
    with host_threads(torch.device(setup.device)):
        return _step_row(setup, source, batches, steps, warmup)


def _step_row(setup: Setup, source: Any, batches: list[BatchedDataDict], steps: int, warmup: int) -> dict[str, Any]:
    losses: list[float] = []
    sections = Timer()

    def run(number: int) -> None:
        batch = batches[number % len(batches)]
        done = setup.student.train(batch, setup.loss_fn, teachers=[source], timer=sections)
        losses.append(float(done["loss"]))

    timed(run, 0, warmup)
    sections.reset()
    graphs, before = compiled_graphs(), 0
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    seconds = timed(run, steps, 0)
    tokens = sum(int(b["input_lengths"].sum()) for b in batches) / len(batches)
    row = {"ms": round(seconds * 1e3, 1), "tokens_per_s": round(tokens / seconds), "tokens": tokens, "loss": losses[-1]}
    row["recompiled"] = compiled_graphs() - graphs
    row["host_ms"] = {name: round(s * 1e3 / steps, 2) for name, s in sections.get_timing_metrics("sum").items()}
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        row |= {"peak_gib": round(peak / GIB, 1), "extra_gib": round((peak - before) / GIB, 1)}
        row["synchronisations"] = synchronisations(lambda: run(0))
        row["on_device_ms"] = on_device(run)
        row["idle_ms"] = round(row["ms"] - sum(row["on_device_ms"].values()), 1)
    return row


GROUPS = {
    "products": r"gemm|nvjet|cutlass|xmma|cublas|splitK",
    "attention": r"flash|fmha",
    "optimizer": r"[Aa]dam|multi_tensor",
    "loss": r"^_\w+_kernel",
    "compiled_layers": r"^triton_",
    "copies": r"^Mem(cpy|set)",
}
"""Kinds of kernels by their names; the others are torch's own."""


def on_device(run: Callable[[int], Any], steps: int = 3) -> dict[str, float]:
    """Milliseconds of the device per call, by kind of kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for number in range(steps):
            run(number)
        _sync()
    total = dict.fromkeys((*GROUPS, "others"), 0.0)
    for event in found.key_averages():
        kind = next((name for name, form in GROUPS.items() if re.search(form, event.key)), "others")
        total[kind] += event.self_device_time_total / 1e3 / steps
    return {name: round(ms, 2) for name, ms in total.items()}


def floors(setup: Setup, batch: BatchedDataDict) -> dict[str, float]:
    """Milliseconds of the parts alone: teacher body forward, student body forward and backward, the heads' products."""
    data, repeat, warmup = {}, 5, 2
    for name, policy, prefix in (("student", setup.student, ""), ("teacher", setup.teacher, "teacher_")):
        data[name] = process_microbatch(batch, None, setup.attention is not None, {}, 1, key_prefix=prefix,
                                        device=policy.device)  # fmt: skip

    def teacher(_: int) -> None:
        with torch.no_grad():
            setup.teacher.forward_hidden(data["teacher"])

    grad: list[torch.Tensor] = []

    def student(_: int) -> None:
        hidden = setup.student.forward_hidden(data["student"])
        if not grad:
            grad.append(torch.randn_like(hidden) * 1e-4)
        hidden.backward(grad[0])
        setup.student.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def heads(_: int) -> None:
        dtype = torch.float32 if setup.tiny else torch.bfloat16
        weight, t_weight, hidden = weights["student"], weights["teacher"], hiddens["student"].to(dtype)
        assert weight is not None
        assert t_weight is not None
        logits = hidden @ weight.t()
        logits @ weight
        logits.t() @ hidden
        hiddens["teacher"].to(dtype) @ t_weight.to(dtype).t()

    setup.student.model.train()
    setup.teacher.model.eval()
    out = {"teacher_ms": timed(teacher, repeat, warmup), "student_ms": timed(student, repeat, warmup)}
    with torch.no_grad():
        both = {"student": setup.student, "teacher": setup.teacher}
        weights = {name: policy.head().weight for name, policy in both.items()}
        hiddens = {name: policy.forward_hidden(data[name]) for name, policy in both.items()}
    out["heads_ms"] = timed(heads, repeat, warmup)
    return {name: round(value * 1e3, 2) for name, value in out.items()}


def cached_parts(setup: Setup, parts: dict[str, float], *, hidden: bool) -> dict[str, float]:
    """Milliseconds of the parts of a step without a teacher's body. What is stored is sent from pinned memory; the
    teacher's head takes part where hidden states are stored, not where lists are."""
    tokens, dtype = DOCUMENTS * setup.length, torch.float32 if setup.tiny else torch.bfloat16
    weight, width = setup.student.head().weight, setup.student.model.config.hidden_size
    assert weight is not None
    rows, head = torch.randn(tokens, width, device=setup.device, dtype=dtype), weight.detach().to(dtype)
    size = tokens * (2 * setup.teacher.model.config.hidden_size if hidden else 128 * 6 + 4)
    stored = torch.empty(size, dtype=torch.uint8, pin_memory=setup.device == "cuda")
    optimizer, weights = setup.student.optimizer, list(setup.student.model.parameters())
    assert optimizer is not None
    for value in weights:
        value.grad = torch.zeros_like(value)

    @torch.no_grad()
    def products(_: int) -> None:
        logits = rows @ head.t()
        logits @ head
        logits.t() @ rows

    def update(_: int) -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()

    found = {
        "products_ms": timed(products, 5, 2),
        "sent_ms": timed(lambda _: stored.to(setup.device, non_blocking=True), 5, 2),
        "optimizer_ms": timed(update, 5, 2),
    }
    for value in weights:
        value.grad = None
    out = {"student_ms": parts["student_ms"]} | {name: round(value * 1e3, 2) for name, value in found.items()}
    if hidden:
        out["products_ms"] = parts["heads_ms"]
    return out


def report(name: str, row: dict[str, Any], goal: float) -> None:
    row["goal"] = goal
    print(f"{name}: {row}", flush=True)
    if torch.cuda.is_available():
        save_row(name, row)


def parts_of(setup: Setup, batch: BatchedDataDict) -> dict[str, float]:
    """The parts alone, and how long they took to compile."""
    start = time.perf_counter()
    parts = floors(setup, batch)
    print(f"parts: {parts} (compiled in {time.perf_counter() - start:.0f} s)", flush=True)
    return parts


def live(
    args: argparse.Namespace,
    setup: Setup,
    batches: list[BatchedDataDict],
    parts: dict[str, float],
    name: str,
    goal: float,
) -> float:
    """A row of steps with the teacher in memory; its tokens per second."""
    row = step_row(setup, LiveTeacher(setup.teacher), batches, args.steps, 3)
    rate = float(row["tokens_per_s"])
    row["floor"] = round(DOCUMENTS * setup.length / sum(parts.values()) * 1e3)
    row |= {"share_of_floor": round(rate / row["floor"], 3), "parts": parts, "reference": PUBLISHED}
    report(name, row, goal)
    if args.profile and torch.cuda.is_available():
        from benchmarks.gpu.loss import profile

        source = LiveTeacher(setup.teacher)
        profile(lambda: setup.student.train(batches[0], setup.loss_fn, teachers=[source]), name, 30)
    return rate


def live_fp8(args: argparse.Namespace) -> None:
    """Row `step_live_fp8`: as `step_live`, with the teacher's layers in fp8."""
    setup = Setup(args.projection, tiny=args.tiny, fp8=True)
    batches = [setup.batch(seed) for seed in range(3)]
    live(args, setup, batches, parts_of(setup, batches[0]), name="step_live_fp8", goal=37_000)


def live_and_cached(args: argparse.Namespace, kinds: list[str]) -> float | None:
    """Rows `step_live`, `step_cached` and `step_cached_hidden`; the live rate for comparison."""
    setup = Setup(args.projection, tiny=args.tiny)
    batches = [setup.batch(seed) for seed in range(3)]
    parts = parts_of(setup, batches[0])
    tokens = DOCUMENTS * setup.length
    rate = live(args, setup, batches, parts, name="step_live", goal=25_000) if "live" in kinds else None
    if "cached" not in kinds:
        return rate
    with tempfile.TemporaryDirectory() as folder:
        for name, options, goal in (
            ("step_cached", {"k": 128}, 45_000),
            ("step_cached_hidden", {"hidden": True}, 45_000),
        ):
            try:
                spec = spec_for(setup.teacher, **options)  # type: ignore[arg-type]
                write_cache(setup.teacher, batches, f"{folder}/{name}", spec)
                source = CachedTeacher(f"{folder}/{name}")
                row = step_row(setup, source, batches, args.steps, 3)
                own = cached_parts(setup, parts, hidden="hidden" in options)
                row |= {"floor": round(tokens / sum(own.values()) * 1e3), "parts": own, "reference": PUBLISHED}
                row["share_of_floor"] = round(row["tokens_per_s"] / row["floor"], 3)
                report(name, row, goal)
            except Exception:
                traceback.print_exc()
    return rate


def packed(args: argparse.Namespace, unpadded: float | None) -> None:
    """Row `step_packed`: mixed lengths, packed, against full documents without padding; reference: the same, padded."""
    attention = "eager"
    if not args.tiny:
        from limbeck.models.attention import register_varlen_attention

        attention = register_varlen_attention()
    setup = Setup(args.projection, tiny=args.tiny, attention=attention)
    source = LiveTeacher(setup.teacher)
    full = step_row(setup, source, [setup.batch(seed) for seed in range(2)], args.steps, 3)
    mixed = [setup.mixed_batch(seed) for seed in range(4)]
    row = step_row(setup, source, mixed, args.steps, 4)
    row |= {"full_documents_packed": full["tokens_per_s"], "full_documents_padded": unpadded}
    row["floor"] = max(full["tokens_per_s"], unpadded or 0)
    row["share_of_unpadded"] = round(row["tokens_per_s"] / row["floor"], 3)
    row["reference"] = padded_rate(args)
    report("step_packed", row, 0.9)


def padded_rate(args: argparse.Namespace) -> int:
    """Real tokens per second of the mixed lengths where every document is padded to the longest."""
    torch.cuda.empty_cache()
    setup = Setup(args.projection, tiny=args.tiny)
    mixed = [setup.mixed_batch(seed) for seed in range(2)]
    return int(step_row(setup, LiveTeacher(setup.teacher), mixed, max(args.steps // 3, 1), 2)["tokens_per_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--projection", help="stored projection of Llama-3.2 -> Qwen3; default: a random one")
    parser.add_argument("--only", nargs="*", default=["live", "live_fp8", "cached", "packed"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    rate: float | None = None
    for kinds in (("live", "cached"), ("live_fp8",), ("packed",)):
        wanted = [k for k in args.only if k in kinds]
        if not wanted:
            continue
        try:
            if "live_fp8" in kinds:
                live_fp8(args)
            elif "packed" in kinds:
                packed(args, rate)
            else:
                rate = live_and_cached(args, wanted)
        except Exception:  # one failing part must not lose the others
            traceback.print_exc()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
