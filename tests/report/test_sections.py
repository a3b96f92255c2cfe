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
