"""A teacher behind a server and a student on several ranks: the numbers, and the requests, of one process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.algorithms.config import MasterConfig
from limbeck.algorithms.validation import teacher_bits
from limbeck.algorithms.xtoken_off_policy_distillation import run
from limbeck.config import load_config, resolve
from limbeck.errors import LimbeckError
from limbeck.teachers.server.client import ServerConfig
from limbeck.teachers.server.teacher import ServerTeacher
from tests.distributed.cases import Case, batch, close, loss_of, student_of, together
from tests.helpers import runs, tiny
from tests.helpers.servers import ScoringServer, serving
from tests.patience import WAIT_SECONDS

pytestmark = pytest.mark.slow

CASE = Case({"mode": "boundary_kl"})
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"tensor_parallel_size": 2},
    "context": {"context_parallel_size": 2},
}
SPOILT = 4
"""A row that the server refuses in the runs with failures; one of the second data-parallel rank's."""


def one_run(layout: dict[str, Any], rows: tuple[int, ...], url: str, on_failure: str) -> dict[str, Any]:
    """A held-out pass, a step and the teacher's bits per byte; or the error that ended it."""
    student = student_of(CASE, layout)
    settings = ServerConfig(
        url=url,
        k=40,
        prompts_per_request=2,
        timeout=WAIT_SECONDS,
        on_failure=on_failure,  # type: ignore[arg-type]
    )
    data = batch(CASE, rows)
    try:
        teacher = ServerTeacher(settings, tiny.tokenizer(340), group=student.dims.rows)
        held = student.train(data, loss_of(CASE), teachers=[teacher], mbs=2, eval_mode=True)
        out = student.train(data, loss_of(CASE), teachers=[teacher], mbs=2)
        bits = teacher_bits(student, [teacher], [data])
    except LimbeckError as error:
        return {"error": str(error)}
    numbers = {name: out[name] for name in ("loss", "grad_norm", "tokens")}
    return {
        **numbers,
        "held_out": held["loss"],
        "metrics": out["metrics"],
        "bits": bits,
        "requests": teacher.client.counts["requests"],
        "failures": sum(teacher.failures.values()),
    }


def work(rank: int, world: int, url: str, on_failure: str, layouts: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in layouts:
        rows = CASE.rows[rank] if name == "data" else CASE.rows[0] + CASE.rows[1]
        out[name] = one_run(LAYOUTS[name], rows, url, on_failure)
    return out


def refuse(number: int, body: dict[str, Any], answer: tuple[int, Any]) -> Any:
    ids = batch(CASE, (SPOILT,))["teacher_input_ids"][0].tolist()
    bad = isinstance(body["prompt"], list) and ids in body["prompt"]
    return (400, {"error": {"message": "not this one"}}) if bad else None


@contextmanager
def server(lie: Any = None) -> Iterator[ScoringServer]:
    torch.set_num_threads(1)
    with serving(ScoringServer(tiny.teacher(), max_k=400)) as found:
        found.lie = lie
        yield found


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in ("loss", "held_out", "grad_norm", "tokens"):
        close(found[key], expected[key], key)
    for key in ("metrics", "bits"):
        assert set(found[key]) == set(expected[key])
        for inner, value in expected[key].items():
            close(found[key][inner], value, inner)


def test_ranks_that_share_rows_share_the_answers(tmp_path: Path) -> None:
    with server() as far:
        alone = one_run({}, CASE.rows[0] + CASE.rows[1], far.url, "stop")
        results = together(2, work, tmp_path, far.url, "stop", ["data", "tensor", "context"])
    assert alone["requests"] > 5
    for name in LAYOUTS:
        for result in results:
            compare(result[name], alone)
    for name in ("tensor", "context"):
        assert [result[name]["requests"] for result in results] == [alone["requests"], 0]


def test_ranks_that_share_rows_share_the_failures(tmp_path: Path) -> None:
    with server(refuse) as far:
        alone = one_run({}, CASE.rows[0] + CASE.rows[1], far.url, "skip")
        skipped = together(2, work, tmp_path / "skip", far.url, "skip", ["data", "tensor", "context"])
        stopped = together(2, work, tmp_path / "stop", far.url, "stop", ["tensor", "data"])
    assert alone["failures"] > 0
    assert alone["metrics"]["teacher_0/rows_failed"] == (1.0, 6.0)
    for name in LAYOUTS:
        for result in skipped:
            compare(result[name], alone)
    for name in ("tensor", "data"):
        first, second = (result[name]["error"] for result in stopped)
        # whoever did not meet the error says which rank did
        assert re.sub(r"^rank \d: ", "", first) == re.sub(r"^rank \d: ", "", second)
        assert "gave no scores for a row" in first
        assert "http_400: not this one" in first


def test_a_key_that_is_refused_ends_all_ranks(tmp_path: Path) -> None:
    with server() as far:
        far.key = "another"
        first, second = together(2, work, tmp_path, far.url, "stop", ["tensor"])
    assert first == second
    assert "LIMBECK_API_KEY, which is not set" in first["tensor"]["error"]


def whole_run(rank: int, world: int, path: str, overrides: list[str]) -> None:
    run(resolve(MasterConfig, load_config(Path(path), overrides)))


def test_a_whole_run_of_two_ranks_asks_what_one_process_asks(tmp_path: Path) -> None:
    steps = {"num_prompts_per_step": 4, "max_num_steps": 2, "val_at_start": False, "val_batch_size": 4}
    path = runs.write_run(tmp_path, distillation=steps)
    asked = []
    with server() as far:
        for name, layout in (("one", {}), ("two", {"tensor_parallel_size": 2})):
            overrides = [
                f"teacher.server.url={far.url}",
                f"teacher.server.timeout={WAIT_SECONDS}",
                f"data.validation={tmp_path / 'train.jsonl'}",
                f"logger.log_dir={tmp_path / name}",
                *(f"policy.dtensor_cfg.{key}={value}" for key, value in layout.items()),
            ]
            before = len(far.requests)
            if layout:
                together(2, whole_run, tmp_path / "ranks", str(path), overrides)
            else:
                whole_run(0, 1, str(path), overrides)
            asked.append(len(far.requests) - before)
    assert asked[0] == asked[1] > 10
    for one, two in zip(runs.rows(tmp_path / "one"), runs.rows(tmp_path / "two"), strict=True):
        assert set(one) == set(two)
        for key in (name for name in one if name.endswith(("loss", "bpb"))):
            assert two[key] == pytest.approx(one[key], rel=1e-4), key
