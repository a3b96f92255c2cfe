"""Sections of a run's page that only some runs have."""

from __future__ import annotations

from pathlib import Path

from limbeck.report.run_data import read_run
from limbeck.report.run_page import run_page
from tests.report.runs import write_run
from tests.report.test_run_page import change_rows


def test_sources_of_validation_have_charts_and_columns_of_their_own(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=60)
    page = run_page(
        read_run(change_rows(run, **{"val/math/bpb": 1.5, "val/math/teacher_bpb": 1.0, "val/code/bpb": 2.0}))
    )
    charts = {c["title"]: [s["name"] for s in c["plot"]["series"]] for c in page.data["sections"][0]["charts"]}
    assert charts["Bits per byte, math"] == ["student", "teacher"]
    assert charts["Bits per byte, code"] == ["student"]
    assert page.data["validation"]["columns"][-2:] == ["math", "code"]


def test_text_that_the_student_writes_has_a_section(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=60)
    assert "Sampled text" not in [section["title"] for section in run_page(read_run(run)).data["sections"]]
    change_rows(run, **{f"train/sample/{name}": 0.5 for name in ("length", "ended", "cut", "reward")})
    (section,) = [s for s in run_page(read_run(run)).data["sections"] if s["title"] == "Sampled text"]
    charts = {c["title"]: [s["name"] for s in c["plot"]["series"]] for c in section["charts"]}
    assert charts == {"Length of samples": ["tokens"], "Shares of samples": ["ended", "cut off"], "Reward": ["mean"]}


def test_the_distillation_loss_by_kind_of_chunk_and_class_of_token(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=60)
    kinds = {f"val/teacher_0/kl_loss/{name}": 0.5 for name in ("one_to_one", "many_to_one", "digits")}
    change_rows(run, **kinds, **{"val/ce_loss/digits": 1.0, "val/ce_loss/code": 2.0, "val/ce_loss/cjk": 0.0})
    page = run_page(read_run(run))
    charts = {c["title"]: c for section in page.data["sections"] for c in section["charts"]}
    names = {title: [s["name"] for s in c["plot"]["series"]] for title, c in charts.items()}
    assert names["Distillation loss by kind of chunk"] == [
        "one to one",
        "several of the student's, one of the teacher's",
    ]
    assert "Distillation loss by class of token" not in names  # one class is no comparison
    assert names["Cross-entropy by class of token"] == ["digits", "code"]
    assert not any("kl_loss/" in c["title"] for c in page.data["further_charts"])


def test_what_was_left_out_and_memory_over_time(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=60)
    skipped = {f"train/skipped/reason_{i}": float(i) for i in range(1, 11)}
    change_rows(run, **skipped, **{"train/memory/resident_gib": 2.0, "train/memory/device_gib": 7.0})
    page = run_page(read_run(run))
    charts = {c["title"]: c for section in page.data["sections"] for c in section["charts"]}
    shown = [s["name"] for s in charts["Left out so far"]["plot"]["series"]]
    assert shown == [f"reason {i}" for i in range(10, 2, -1)]
    assert [s["name"] for s in charts["Memory"]["plot"]["series"]] == [
        "resident in main memory",
        "accelerator, most so far",
    ]
