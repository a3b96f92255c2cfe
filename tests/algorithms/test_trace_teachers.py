"""A hinted teacher that is another model, behind a server or split over processes: the same steps as here and whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from limbeck.algorithms.trace_distillation import TraceStep, run
from limbeck.errors import ConfigError, ServerError
from limbeck.models.policy import Policy
from limbeck.teachers.server.teacher import ServerTeacher
from limbeck.utils.logger import read_metrics
from tests.distributed.cases import together
from tests.helpers.servers import ScoringServer, serving
from tests.helpers.tokenizers import workshop
from tests.helpers.trace_runs import config, settings, tokenizer_folder

TENSOR = {"dtensor_cfg": {"tensor_parallel_size": 2}}


def made(
    where: Path,
    name: str,
    teacher: dict[str, Any] | None = None,
    policy: dict[str, Any] | None = None,
    **more: Any,
) -> Any:
    base = {**settings(where)["policy"], "tokenizer": {"name": tokenizer_folder(where, 330)}, **(teacher or {})}
    del base["optimizer"], base["train_micro_batch_size"]
    sections = {
        "teacher": base,
        "policy": {
            "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.5}},
            "train_micro_batch_size": 1,
            **(policy or {}),
        },
        "traces": {"channels": {"preference": False}, "shuffle": False},
        "distillation": {"max_num_steps": 2, "num_prompts_per_step": 2},
        "logger": {"log_dir": str(where / name)},
    }
    return config(where, **{**sections, **more})


def compare(one: Path, two: Path) -> None:
    rows = [read_metrics(folder / "metrics.jsonl") for folder in (one, two)]
    assert len(rows[0]) == len(rows[1]) == 2
    assert rows[0][0]["train/hint/loss"] > 0
    for a, b in zip(*rows, strict=True):
        for key in (k for k in a if k.endswith(("loss", "grad_norm", "sites")) and "/time/" not in k):
            assert b[key] == pytest.approx(a[key], rel=1e-4, abs=2e-6), key


def served(rank: int, world: int, where: str, far: dict[str, Any]) -> None:
    run(made(Path(where), "served", far, TENSOR))


def events(patch: pytest.MonkeyPatch) -> list[str]:
    """What happens from now on: rows asked for ahead, steps taken."""
    order: list[str] = []

    def noted(kind: type, name: str, event: str) -> None:
        call = getattr(kind, name)
        patch.setattr(kind, name, lambda *args, **more: (order.append(event), call(*args, **more))[1])

    noted(ServerTeacher, "ask_ahead", "asked")
    noted(TraceStep, "__call__", "step")
    return order


@pytest.mark.slow
def test_a_hinted_teacher_behind_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near = made(tmp_path, "near")
    policy = Policy(
        near.teacher,
        workshop(330),
        device="cpu",
        init_optimizer=False,
        seed=near.distillation.seed + 1,
    )
    run(near)
    with serving(ScoringServer(policy, max_k=400)) as server:
        far = {"server": {"url": server.url, "k": 330}}
        with pytest.raises(ServerError, match="takes up to 255 tokens"):
            run(made(tmp_path, "short", far))
        server.max_model_len, short = 5000, len(server.requests)
        with monkeypatch.context() as patch:
            order = events(patch)
            run(made(tmp_path, "far", far))
        # of two steps the second's rows are asked for before the first is taken
        assert order == ["asked", "asked", "step", "asked", "step"]
        compare(tmp_path / "near", tmp_path / "far")
        asked = len(server.requests)
        together(2, served, tmp_path / "ranks", str(tmp_path), far)
        compare(tmp_path / "near", tmp_path / "served")
        assert len(server.requests) - asked == asked - short
        start = len(server.requests)

        def refuse(number: int, body: dict[str, Any], answer: Any) -> Any:
            """The probe's two requests pass, and those that score one text twice."""
            return (400, {}) if number >= start + 4 else None

        server.lie = refuse
        with pytest.raises(ServerError, match="gave no scores for a row"):
            run(made(tmp_path, "stopped", far))
        start = len(server.requests)
        run(made(tmp_path, "skipped", {"server": {**far["server"], "on_failure": "skip"}}))
    skipped = read_metrics(tmp_path / "skipped" / "metrics.jsonl")
    assert skipped[0]["train/teacher_0/rows_failed"] == 1.0
    assert skipped[0]["train/count/sites"] == 0


def split(rank: int, world: int, where: str) -> None:
    run(made(Path(where), "split", TENSOR))


@pytest.mark.slow
def test_a_hinted_teacher_on_a_mesh_of_its_own(tmp_path: Path) -> None:
    run(made(tmp_path, "whole"))
    together(2, split, tmp_path / "ranks", str(tmp_path))
    compare(tmp_path / "whole", tmp_path / "split")


def test_what_a_server_cannot_give(tmp_path: Path) -> None:
    server = {"server": {"url": "http://127.0.0.1:9/v1"}}
    for hint in ({"temperature": 2.0}, {"topk": 8}):
        with pytest.raises(ConfigError, match="at temperature 1"):
            made(tmp_path, "run", server, loss={"hint": hint})
    with pytest.raises(ConfigError, match=r"a cache .*teacher\.source"):
        made(tmp_path, "run", {"cache": "somewhere"})
