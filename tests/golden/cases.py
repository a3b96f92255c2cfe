"""What is recorded: training steps and whole runs in every kind that the library has.

This is the one module of the golden tests that imports from limbeck. It keeps to the outer surface (Policy.train, the
collator and the loss of the tiny material, set-up and loop of the recipes), so that code may move below it.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from limbeck.algorithms import trace_distillation
from limbeck.algorithms.dispatch import resolve_run
from limbeck.config import merge
from limbeck.models.policy import Policy
from limbeck.teachers.cache.fill import spec_for, write_cache
from limbeck.teachers.cached import CachedTeacher
from limbeck.teachers.live import LiveTeacher
from limbeck.teachers.server.client import ServerConfig
from limbeck.teachers.server.teacher import ServerTeacher
from tests.distributed.cases import Case as BatchOf
from tests.distributed.cases import batch as batch_of
from tests.distributed.cases import loss_of
from tests.golden.digest import Record, Watch, record_of, watching
from tests.helpers import runs, trace_runs
from tests.helpers.interpreter import interpreter_fault
from tests.helpers.servers import ScoringServer, serving
from tests.helpers.tiny import LLAMA, QWEN3, config, tokenizer
from tests.helpers.tokenizers import workshop

STEPS = 3
SGD = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.05}}
# eps: without it the first step is the sign of the gradient, whose last bits then decide
ADAMW = {"name": "torch.optim.AdamW", "kwargs": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3}}
# RoPE and RMSNorm compute in float32 whatever they are given; GPT-2 has neither, so its float64 is float64 throughout.
GPT2 = {
    **LLAMA,
    "model_type": "gpt2",
    **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
}
ARCHITECTURES = {"float32": {"student": LLAMA, "cross": QWEN3, "same": LLAMA}}
ARCHITECTURES["float64"] = dict.fromkeys(ARCHITECTURES["float32"], GPT2)
BOTH = ("float32", "float64")
LAYOUTS: dict[str, dict[str, Any]] = {
    "rows of 1": {"train_micro_batch_size": 1},
    "rows of 4": {"train_micro_batch_size": 4},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 128}},
}


@dataclass(frozen=True)
class StepCase:
    """Steps of ``Policy.train`` on one batch. ``teachers``: ``cross`` (another tokenizer) or ``same``."""

    loss: Mapping[str, Any] = field(default_factory=dict)
    teachers: tuple[str, ...] = ("cross",)
    policy: Mapping[str, Any] = field(default_factory=lambda: LAYOUTS["rows of 4"])
    source: str = "live"
    """Where the first teacher's signals come from: ``live``, ``topk`` or ``hidden`` (caches), ``server``."""
    dtypes: tuple[str, ...] = BOTH
    kernels: bool = False
    rows: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    steps: int = STEPS


@dataclass(frozen=True)
class RunCase:
    """A whole run from its settings; what it logs is compared too."""

    settings: Callable[[Path], dict[str, Any]]
    dtypes: tuple[str, ...] = ("float32",)
    kernels: bool = False


@dataclass(frozen=True)
class TraceCase:
    """Trace training on the channels that are named, with these settings of their losses."""

    channels: tuple[str, ...]
    loss: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = BOTH
    kernels: bool = False


Case = StepCase | RunCase | TraceCase
Played = tuple[list[dict[str, Any]], Watch]
"""Figures of each step, and what the optimizer saw."""

MODES: dict[str, dict[str, Any]] = {
    "boundary_kl": {},
    # weighted so that they are no mere trace beside cross-entropy
    "alm": {"mode": "alm", "kl_loss_weight": 30.0},
    "uld": {"mode": "uld", "kl_loss_weight": 5.0},
    "p_kl": {"mode": "p_kl", "vocab_topk": 64},
    "gold": {"mode": "gold", "uncommon_topk": 50},
    "h_kl": {"mode": "h_kl", "temperature": 2.0},
}


def _cases() -> Iterator[tuple[str, Case]]:
    for layout, policy in LAYOUTS.items():
        dtypes = BOTH if layout == "rows of 4" else ("float32",)
        for mode, loss in MODES.items():
            yield f"{mode}, 1 teacher, {layout}", StepCase(loss, policy=policy, dtypes=dtypes)
            yield f"{mode}, 2 teachers, {layout}", StepCase(loss, ("cross", "same"), policy, dtypes=dtypes)
        yield f"same vocabulary, {layout}", StepCase(teachers=("same",), policy=policy, dtypes=dtypes)
        yield f"cross-entropy alone, {layout}", StepCase(teachers=(), policy=policy, dtypes=dtypes)
    yield from _trees()
    yield from _losses()
    yield from _teachers()
    yield from _policies()
    yield from _kernels()
    yield from _runs()
    yield from _traces()


def _trees() -> Iterator[tuple[str, Case]]:
    tree: dict[str, Any] = {"mode": "tree_kl", "ce_loss_scale": 1.0}
    for layout, policy in LAYOUTS.items():
        dtypes = BOTH if layout == "rows of 4" else ("float32",)
        yield f"tree_kl, 1 teacher, {layout}", StepCase(tree, policy=policy, dtypes=dtypes)
    yield "tree_kl, 2 teachers", StepCase(tree, ("cross", "same"))
    yield "tree_kl, reverse", StepCase({**tree, "direction": "reverse"})
    yield "tree_kl, top-k cache", StepCase(tree, source="topk")


def _losses() -> Iterator[tuple[str, Case]]:
    for direction in ("reverse", "jsd"):
        yield f"boundary_kl, {direction}", StepCase({"direction": direction})
        yield f"same vocabulary, {direction}", StepCase({"direction": direction}, ("same",))
    yield "same vocabulary, top 9 and tail", StepCase({"topk": 9, "temperature": 1.5}, ("same",))
    yield (
        "same vocabulary, JSD at .9, clipped",
        StepCase({"direction": "jsd", "jsd_beta": 0.9, "jsd_rescale": True, "entry_clip": 0.01}, ("same",)),
    )
    yield "p_kl, reverse, exact chunks", StepCase({**MODES["p_kl"], "reverse_kl": True, "exact_token_match_only": True})
    yield "boundary_kl, inexact chunks", StepCase({"allow_inexact": True, "chunk_weight": 0.3, "temperature": 1.5})
    yield "weighted terms", StepCase({"kl_loss_weight": 0.7, "ce_loss_scale": 0.2})
    yield "dynamic scaling, running", StepCase({"dynamic_loss_scaling": True}, policy=LAYOUTS["rows of 1"])
    for how in ("averaged_logits", "select_teacher"):
        yield f"same vocabulary, {how}", StepCase({"teacher_combination": how}, ("same", "same"))
    for score in ("ce", "entropy", "max_prob"):
        yield f"teachers scored by {score}", StepCase({"teacher_scoring": score}, ("cross", "same"))
    yield "teachers weighted", StepCase({"teacher_weights": [0.8, 0.2]}, ("cross", "same"))


def _teachers() -> Iterator[tuple[str, Case]]:
    for layout, policy in LAYOUTS.items():
        yield f"top-k cache, {layout}", StepCase(policy=policy, source="topk")
        yield f"hidden-state cache, {layout}", StepCase(policy=policy, source="hidden", dtypes=("float32",))
        yield f"server, {layout}", StepCase(policy=policy, source="server")
    yield "top-k cache, alm", StepCase(MODES["alm"], source="topk")
    yield "top-k cache and a live teacher", StepCase(teachers=("cross", "same"), source="topk")


def _policies() -> Iterator[tuple[str, Case]]:
    lora = {"lora": {"r": 4, "alpha": 8, "target_modules": "all-linear"}}
    for layout, policy in LAYOUTS.items():
        yield f"LoRA, {layout}", StepCase(policy={**lora, **policy})
    dynamic = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 160, "sequence_length_round": 8}}
    yield "dynamic batching", StepCase(policy=dynamic)
    yield "clipped", StepCase(policy={"max_grad_norm": 0.1})
    yield (
        "AdamW and a schedule",
        StepCase(
            policy={
                "optimizer": ADAMW,
                "scheduler": {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 5}},
            }
        ),
    )
    yield "activation checkpointing", StepCase(policy={"dtensor_cfg": {"activation_checkpointing": True}})


def _kernels() -> Iterator[tuple[str, Case]]:
    # one short row and one step: the interpreter is slow
    for name, mode, teacher, source in (
        ("boundary_kl", "boundary_kl", "cross", "live"),
        ("alm", "alm", "cross", "live"),
        ("p_kl", "p_kl", "cross", "live"),
        ("top-k cache", "boundary_kl", "cross", "topk"),
        ("same vocabulary", "boundary_kl", "same", "live"),
    ):
        loss = {**MODES[mode], "fast_path": "force"}
        yield (
            f"kernels, {name}",
            StepCase(loss, (teacher,), source=source, dtypes=("float32",), kernels=True, rows=(4,), steps=1),
        )


def _runs() -> Iterator[tuple[str, Case]]:
    yield "run", RunCase(_run)
    yield "run, LoRA and two teachers", RunCase(_lora_run)


def _traces() -> Iterator[tuple[str, Case]]:
    every = ("policy", "hint", "preference")
    yield "traces, policy", TraceCase(("policy",))
    yield "traces, hint", TraceCase(("hint",))
    yield (
        "traces, hint by jsd from an average",
        TraceCase(("hint",), {"hint": {"divergence": "jsd", "self_teacher": "ema", "ema_decay": 0.5}}),
    )
    yield "traces, hint with a trust region", TraceCase(("hint",), {"hint": {"self_teacher": "trust_region"}})
    # reference log-probs are float32, whatever the student is
    yield "traces, preference", TraceCase(("preference",), dtypes=("float32",))
    yield "traces, preference by ipo", TraceCase(("preference",), {"preference": {"kind": "ipo"}}, dtypes=("float32",))
    yield "traces, preference by simpo", TraceCase(("preference",), {"preference": {"kind": "simpo"}})
    weights = {"policy": {"weight": 0.3}, "alpha": {"value": 1.0, "warmup_steps": 2}, "beta": 0.5}
    yield "traces, all channels", TraceCase(every, weights, dtypes=("float32",))
    yield "traces, all channels without a reference", TraceCase(every, {**weights, "preference": {"kind": "simpo"}})
    packed = {"sequence_packing": {"enabled": True, "train_mb_tokens": 2048}}
    yield "traces, all channels, packed", TraceCase(every, weights, packed, dtypes=("float32",))


# ---- playing a case --------------------------------------------------------------------------------------------------


def play(case: Case, dtype: str, folder: Path) -> Record:
    """Everything that is compared: figures step by step, gradients of the first step, how far the weights moved."""
    driver: Any = {StepCase: _play_steps, RunCase: _play_run, TraceCase: _play_traces}[type(case)]
    steps, watch = driver(case, dtype, folder)
    return record_of(steps, watch)


def can_play(case: Case) -> bool:
    """False where a case needs kernels on the CPU and Triton's interpreter is of no use."""
    return not case.kernels or interpreter_fault() is None


@torch.no_grad()
def fill(model: nn.Module, seed: int, dtype: str) -> nn.Module:
    """Weights that are the same bits everywhere, large enough for distributions with a clear order."""
    for name, p in model.named_parameters():
        values = np.random.default_rng([seed, zlib.crc32(name.encode())]).random(tuple(p.shape)) - 0.5
        spread, middle = (0.8, 0.0) if p.dim() > 1 else (0.2, 0.0 if name.endswith("bias") else 1.0)
        p.copy_(torch.from_numpy((values * spread + middle).astype(np.float32)))
    return model.to(getattr(torch, dtype))


@functools.cache
def teacher_policy(kind: str, number: int, dtype: str) -> Policy:
    """A frozen teacher; tests share it."""
    tok = tokenizer(340 if kind == "cross" else 300)
    settings = config(ARCHITECTURES[dtype][kind])
    made = Policy(settings, tok, name="teacher", device="cpu", seed=0, init_optimizer=False)
    fill(made.model, 1 + number, dtype)
    return made


def _far(source: str, data: Any, folder: Path, stack: ExitStack) -> Any:
    """A teacher that is not in this process. Scored in float64, so that what it says rounds to the same everywhere."""
    policy = teacher_policy("cross", 0, "float64")
    if source == "server":
        server = stack.enter_context(serving(ScoringServer(policy, max_k=64)))
        made = ServerTeacher(ServerConfig(url=server.url, k=24), policy.tokenizer)
        stack.callback(made.close)
        return made
    kept = {"k": 24} if source == "topk" else {"hidden": True}
    write_cache(policy, [data], folder, spec_for(policy, **kept))  # type: ignore[arg-type]
    return CachedTeacher(folder)


def _play_steps(case: StepCase, dtype: str, folder: Path) -> Played:
    made_of = BatchOf(dict(case.loss), case.teachers)
    data, loss_fn = batch_of(made_of, case.rows), loss_of(made_of)
    settings = {"optimizer": SGD, "max_grad_norm": 100.0, **case.policy}
    student = Policy(
        config(ARCHITECTURES[dtype]["student"], **settings),
        tokenizer(300),
        name="student",
        device="cpu",
        seed=0,
    )
    fill(student.model, 0, dtype)
    with ExitStack() as stack:
        teachers = [LiveTeacher(teacher_policy(kind, i, dtype)) for i, kind in enumerate(case.teachers)]
        if case.source != "live":
            teachers[0] = _far(case.source, data, folder, stack)
        watch = stack.enter_context(watching(named(student.model)))
        results = [student.train(data, loss_fn, teachers=teachers) for _ in range(case.steps)]
        if case.steps == STEPS:
            results.append(student.train(data, loss_fn, teachers=teachers, eval_mode=True))
    return [_figures(result) for result in results], watch


def _figures(result: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: result[name] for name in ("loss", "grad_norm", "lr", "tokens", "microbatches")}
    return {**kept, **{f"metrics/{name}": pair for name, pair in result["metrics"].items()}}


def named(*modules: nn.Module) -> dict[int, str]:
    """Names of the parameters, by id."""
    return {id(p): name for module in modules for name, p in module.named_parameters()}


def _run(folder: Path) -> dict[str, Any]:
    runs.write_tokenizers(folder)
    runs.write_data(folder)
    return runs.settings(
        folder,
        folder / "run",
        policy={"optimizer": ADAMW},
        distillation={"max_num_steps": STEPS, "val_period": 0},
        checkpointing={"enabled": False},
    )


def _lora_run(folder: Path) -> dict[str, Any]:
    values = merge(_run(folder), {"policy": {"lora": {"r": 4}}, "loss_fn": {"teacher_scoring": "static"}})
    return {**values, "teacher": None, "teachers": [runs.model(folder, name) for name in ("teacher", "student")]}


def _play_run(case: RunCase, dtype: str, folder: Path) -> Played:
    config, run = resolve_run(case.settings(folder))
    with watching() as watch:
        run(config)
    return runs.rows(folder / "run"), watch


def _play_traces(case: TraceCase, dtype: str, folder: Path) -> Played:
    switches = {name: name in case.channels for name in ("policy", "hint", "preference")}
    values = trace_runs.settings(
        folder,
        algorithm="trace_distillation",
        policy={"init": "pretrained", "model_name": _stored_model(folder / "model", dtype), **case.policy},
        traces={"channels": switches},
        loss=case.loss,
        distillation={"max_num_steps": STEPS, "val_at_end": True},
    )
    values["policy"] |= {"model_overrides": {}, "optimizer": SGD}
    made = trace_distillation.setup(resolve_run(values)[0])  # type: ignore[arg-type]
    sources: list[Any] = list(made.step.teachers)
    for source in sources:
        source.policy.model.to(getattr(torch, dtype))
    # away from the start, where preferences are nothing but rounding
    fill(made.student.model, 1, dtype)
    with watching(named(made.student.model)) as watch:
        trace_distillation.train(made)
    return runs.rows(folder / "run"), watch


def _stored_model(folder: Path, dtype: str) -> str:
    """A model folder with :func:`fill`'s weights for the tokenizer of the traces."""
    arch = {**ARCHITECTURES[dtype]["student"], "max_position_embeddings": 2048}
    made = Policy(config(arch), workshop(), name="stored", device="cpu", seed=0, init_optimizer=False)
    fill(made.model, 0, "float32")
    made.save_checkpoint(folder)
    return str(folder)


# ---- recipes ---------------------------------------------------------------------------------------------------------


CASES: dict[str, Case] = dict(_cases())
