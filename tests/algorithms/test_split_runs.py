"""Runs on documents that are longer than the context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from limbeck.algorithms.caching import cache_teachers
from limbeck.algorithms.xtoken_off_policy_distillation import run
from limbeck.config import merge
from tests.distributed.cases import CASES, batch, loss_of, student_of, teachers_of, together
from tests.helpers import runs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stuff(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizers, and documents of up to four contexts."""
    folder = tmp_path_factory.mktemp("stuff")
    runs.write_tokenizers(folder)
    for name, count, seed in (("train", 12, 1), ("val", 3, 2)):
        parts = runs.documents(4 * count, seed)
        texts = [" ".join(parts[4 * n : 4 * n + 1 + n % 4]) for n in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    return folder


def settings(stuff: Path, run_dir: Path, **more: Any) -> dict[str, Any]:
    data = {"max_input_seq_length": 40, "append_eos": True, "long_documents": "split"}
    return merge(runs.settings(stuff, run_dir, data=data), more)


def left_out(run_dir: Path) -> set[str]:
    return set(json.loads((run_dir / "skipped.json").read_text()))


@pytest.mark.parametrize("layout", [{}, {"sequence_packing": {"enabled": True, "train_mb_tokens": 128}}])
def test_a_cache_holds_every_row_that_training_reads(stuff: Path, tmp_path: Path, layout: dict[str, Any]) -> None:
    values = settings(stuff, tmp_path / "live", policy=layout)
    run(runs.resolved(values))
    cached = merge(values, {"teacher": {"cache": str(tmp_path / "cache"), "cache_kind": "hidden"}})
    cached["logger"]["log_dir"] = str(tmp_path / "cached")
    said: list[str] = []
    (told,) = cache_teachers(runs.resolved(cached), say=said.append)
    assert told["documents"] > 15
    assert said[-1].endswith("serve 15 records: a text that is longer than a context is stored in pieces")
    run(runs.resolved(cached))
    for live, stored in zip(runs.rows(tmp_path / "live"), runs.rows(tmp_path / "cached"), strict=True):
        assert live.get("train/loss", 0) == pytest.approx(stored.get("train/loss", 0), rel=1e-2)
    assert not left_out(tmp_path / "live") & {"truncated", "truncated_tokens"}


def test_a_resumed_run_reads_the_same_pieces(stuff: Path, tmp_path: Path) -> None:
    run(runs.resolved(settings(stuff, tmp_path / "whole")))
    for steps in (3, 8):
        run(runs.resolved(settings(stuff, tmp_path / "parts", distillation={"max_num_steps": steps})))
    assert runs.weight_bytes(tmp_path / "parts", 8) == runs.weight_bytes(tmp_path / "whole", 8)


def test_a_step_in_several_updates(stuff: Path, tmp_path: Path) -> None:
    values = settings(stuff, tmp_path / "run", policy={"train_global_batch_size": 2})
    run(runs.resolved(values))
    assert not left_out(tmp_path / "run") & {"truncated", "truncated_tokens"}


def _uneven(rank: int, world: int) -> dict[str, Any]:
    case = CASES["boundary_kl"]
    rows = (0, 1, 2, 3, 4) if rank == 0 else (5,)
    student, teachers = student_of(case, {}), teachers_of(case, {})
    out = student.train(batch(case, rows), loss_of(case), teachers=teachers, gbs=4)
    return {"tokens": out["tokens"], "steps": student.steps}


def test_ranks_with_unequal_rows_take_the_same_updates(tmp_path: Path) -> None:
    first, second = together(2, _uneven, tmp_path)
    # 5 rows of the first rank, 2 at a time
    assert first["steps"] == second["steps"] == 3
    assert first["tokens"] == second["tokens"]
