"""Trace training under every layout: each takes the steps that one process takes (float32, 1e-5 relative)."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from limbeck.algorithms.trace_distillation import TraceRun, setup
from tests.distributed.cases import close, together, whole
from tests.helpers.trace_runs import MODEL, config, short_traces, tokenizer_folder

pytestmark = pytest.mark.slow

TENSOR, CONTEXT, FSDP = {"tensor_parallel_size": 2}, {"context_parallel_size": 2}, {"fsdp": True}
FACTORS = {"policy": 0.7, "hint": 1.3, "preference": 0.4}
# the third has neither error site nor pair
NAMES = ("store-count-1", "store-count-2", "store-count-3", "files-todo-2")
SGD = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.5}}


@dataclass(frozen=True)
class Case:
    """Sections of a run file, and the traces of the first and the second data-parallel rank."""

    loss: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    teacher: tuple[int, int] | None = None
    """Another model reads the hints: ids of its tokenizer (the student's has 400) and rows of its head."""
    whole_teacher: bool = False
    ratio: bool = False
    """The log holds the sampling policy's log-probs."""
    rows: tuple[tuple[int, ...], tuple[int, ...]] = ((0, 2), (1, 3))


# weights wide enough for predictions that a hint changes
LLAMA = {**MODEL, "initializer_range": 0.15}
QWEN = {**LLAMA, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True}
CASES: dict[str, Case] = {
    "average, one row at a time": Case(
        {"hint": {"self_teacher": "ema", "ema_decay": 0.5, "divergence": "jsd"}, "preference": {"kind": "ipo"}},
        {"train_micro_batch_size": 1},
    ),
    "trust region, packed": Case(
        {
            "hint": {"self_teacher": "trust_region", "trust_region": 0.3, "topk": 9, "temperature": 1.5},
            "preference": {"kind": "simpo"},
        },
        {"sequence_packing": {"enabled": True, "train_mb_tokens": 1100}, "model_overrides": QWEN},
    ),
    "present self, by token budget": Case(
        {"hint": {"self_teacher": "live", "divergence": "forward", "entry_clip": 1.0}},
        {"dynamic_batching": {"enabled": True, "train_mb_tokens": 1100}},
    ),
    "another tokenizer": Case(teacher=(460, 460)),
    "ratios, a rank without sites or pairs": Case(ratio=True, rows=((0, 1, 3), (2,))),
    "adapters, an empty rank": Case(
        {"hint": {"self_teacher": "ema"}}, {"lora": {"r": 4, "alpha": 8.0}}, rows=((0, 1, 2, 3), ())
    ),
    "heads of other widths": Case({}, {"model_overrides": {**LLAMA, "vocab_size": 404}}, teacher=(400, 408)),
    "heads of other widths, whole teacher": Case(
        {}, {"model_overrides": {**LLAMA, "vocab_size": 404}}, teacher=(400, 408), whole_teacher=True
    ),
}
AVERAGE, PACKED, LIVE, OTHER, LACKING, EMPTY, WIDE, WHOLE = CASES

# name: (processes, layout, cases)
LAYOUTS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "fsdp": (2, FSDP, [AVERAGE, PACKED, LIVE, OTHER, LACKING, EMPTY]),
    "tensor": (2, TENSOR, [AVERAGE, PACKED, OTHER, LACKING, WIDE, WHOLE]),
    "context": (2, CONTEXT, [PACKED, LIVE, OTHER, LACKING]),
    "data x tensor": (4, TENSOR, [AVERAGE, EMPTY]),
    "fsdp x tensor": (4, {**FSDP, **TENSOR, "sequence_parallel": True}, [LACKING]),
    "fsdp x context": (4, {**FSDP, **CONTEXT}, [LACKING]),
    "context x tensor": (4, {**CONTEXT, **TENSOR}, [OTHER]),
}
VALIDATED = [AVERAGE, LACKING]


def prepared(case: Case, layout: dict[str, Any], folder: Path, name: str) -> TraceRun:
    sections: dict[str, Any] = {}
    if case.teacher is not None:
        size, head = case.teacher
        sections["teacher"] = {
            "init": "random",
            "model_overrides": {**QWEN, "vocab_size": head},
            "tokenizer": {"name": tokenizer_folder(folder, size)},
            "dtensor_cfg": {} if case.whole_teacher else layout,
        }
    made = config(
        folder,
        policy={"model_overrides": LLAMA, "optimizer": SGD, "dtensor_cfg": layout, **case.policy},
        traces={"train": short_traces(folder, NAMES)},
        loss=case.loss,
        distillation={"num_prompts_per_step": 4, "monitor": {"rows": 10_000, "generate": 2, "max_new_tokens": 3}},
        logger={"log_dir": str(folder / name)},
        **sections,
    )
    run = setup(made)
    run.logger.close()
    if run.step.reference is not None:
        # another start than the student's own: margins of exactly 0 have no sign
        run.step.reference.values += torch.linspace(-1, 1, run.step.reference.values.numel()).view(-1, 2)
    return run


def batch_of(run: TraceRun, case: Case, rows: tuple[int, ...]) -> Any:
    batch = run.loader.collate_fn([run.loader.dataset[i] for i in rows])
    if case.ratio:
        loss = run.loss_fn.policy
        given = {"mode": "dr_grpo", "normalisation": "constant", "clip_low": 0.05, "clip_high": 0.05}
        loss.active = loss.active.model_copy(update=given)
        batch["behavior_logprobs"] = -6.0 + 0.1 * torch.cos(batch["input_ids"].double()).float()
    return batch


def steps(case: Case, layout: dict[str, Any], rows: tuple[int, ...], folder: Path, name: str) -> dict[str, Any]:
    """Two steps over ``rows``: the figures of both, the gradients of the first; of some cases a validation."""
    run = prepared(case, layout, folder, name)
    gradients: dict[str, torch.Tensor] = {}
    names = {id(p): n for n, p in run.student.model.named_parameters()}

    def keep(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            found = {names[id(p)]: whole(p.grad).clone() for p in group["params"]}
            gradients.update({n: g for n, g in found.items() if n not in gradients})

    assert run.student.optimizer is not None
    run.student.optimizer.register_step_pre_hook(keep)
    batch = batch_of(run, case, rows)
    out: dict[str, Any] = {"gradients": gradients}
    for number in (1, 2):
        result = run.step(batch, FACTORS, monitored=True)
        out[f"metrics_{number}"] = result["metrics"]
        out[f"numbers_{number}"] = [result[k] for k in ("loss", "grad_norm", "tokens")]
    out["validation"] = run.validation.measure() if any(case is CASES[known] for known in VALIDATED) else {}
    out["average"] = {n: whole(v) for n, v in run.step.teachers[0].state_dict().get("ema", {}).items()}
    return out


def work(rank: int, world: int, root: str) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for name, (processes, layout, cases) in LAYOUTS.items():
        if processes != world:
            continue
        readers = world // (layout.get("tensor_parallel_size", 1) * layout.get("context_parallel_size", 1))
        for case_name in cases:
            case = CASES[case_name]
            rows = case.rows[0] + case.rows[1] if readers == 1 else case.rows[rank * readers // world]
            folder = Path(root)
            out.setdefault(name, {})[case_name] = steps(case, layout, rows, folder, f"{world} {name} {case_name}")
            dist.barrier()
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    where = tmp_path_factory.mktemp("traces")
    for size in (400, 460):
        tokenizer_folder(where, size)
    short_traces(where, NAMES)
    return where


@pytest.fixture(scope="module")
def outcome(folder: Path) -> dict[int, list[dict[str, dict[str, Any]]]]:
    return {world: together(world, work, folder / str(world), str(folder)) for world in (2, 4)}


@functools.cache
def alone(case_name: str, folder: Path) -> dict[str, Any]:
    case = CASES[case_name]
    return steps(case, {}, case.rows[0] + case.rows[1], folder, f"alone {case_name}")


@pytest.mark.parametrize(("layout", "case"), [(n, c) for n, entry in LAYOUTS.items() for c in entry[2]])
def test_every_layout_takes_the_same_steps(outcome: Any, folder: Path, layout: str, case: str) -> None:
    expected = alone(case, folder)
    assert bool(expected["average"]) == (CASES[case].loss.get("hint", {}).get("self_teacher") == "ema")
    for rank, results in enumerate(outcome[LAYOUTS[layout][0]]):
        found = results[layout][case]
        for part, values in expected.items():
            if not isinstance(values, dict):
                close(found[part], values, f"rank {rank}: {part}")
                continue
            assert set(found[part]) == set(values)
            for name, value in values.items():
                # sums and counts one by one; small divergences are differences of large numbers
                pairs = zip(found[part][name], value, strict=True) if isinstance(value, tuple) else ()
                for a, b in pairs or ((found[part][name], value),):
                    close(a, b, f"rank {rank}: {part} {name}", 2e-6 if pairs else 1e-9)
