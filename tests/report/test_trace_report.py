"""The page of a run on traces: its own figures in front, and the truth about its teacher."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from limbeck.config import dump_yaml
from limbeck.report.run_data import read_run
from limbeck.report.run_page import run_page
from tests.report.test_run_page import _check

MONITORS = {
    f"train/monitor/{channel}/{name}": 0.1
    for channel in ("policy", "hint")
    for name in ("entropy", "format_mass", "early_end_mass")
}


def write_trace_run(folder: Path, **sections: Any) -> Path:
    folder.mkdir()
    config = {
        "algorithm": "trace_distillation",
        "policy": {"model_name": "models/small"},
        "traces": {"train": "t.jsonl"},
        "loss": {"hint": {"self_teacher": "ema"}, "alpha": {"value": 1.0}},
        "distillation": {"max_num_steps": 3},
        **sections,
    }
    (folder / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
    rows = []
    for step in range(4):
        row: dict[str, Any] = {"step": step, "train/loss": 1.0 / (step + 1), "train/other": 1.0}
        row |= {f"train/{name}/loss": 0.5 + step for name in ("policy", "hint", "preference")}
        row |= MONITORS
        row |= {f"train/monitor/hint/kl_{name}": 0.2 for name in ("special", "word")} | {"train/monitor/hint/jsd": 0.05}
        row |= {"val/erroneous_logprob": -70.0 - step, "val/erroneous_logprob_hinted": -60.0 - step}
        row |= {"val/chosen_logprob": -64.0 + step, "val/rejected_logprob": -70.0 - step, "val/response_length": 7.0}
        rows.append(row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def charts(page: str) -> dict[str, list[str]]:
    """Titles of the charts that are not folded away, with the names of their curves."""
    open_part = page.partition("further metrics</summary>")[0]
    pattern = r"<figcaption><b>(.*?)</b>.*?<script type=\"application/json\">(.*?)</script>"
    figures = re.findall(pattern, open_part, re.DOTALL)
    return {title: [s["name"] for s in json.loads(data)["series"]] for title, data in figures}


def test_the_figures_of_traces_stand_in_front(tmp_path: Path) -> None:
    page = run_page(read_run(write_trace_run(tmp_path / "run"))).render()
    text = _check(page).text
    found = charts(page)
    names = ["failed messages", "the same behind hints", "chosen of pairs", "rejected of pairs"]
    assert found["Log-probability of messages"] == names
    assert found["Losses of the channels"] == ["policy", "hint", "preference"]
    assert found["Entropy"] == found["Mass on format tokens"] == found["Mass on an early end"] == ["policy", "hint"]
    assert found["KL to the hinted teacher by token class"] == ["special", "word"]
    assert "JSD to the hinted teacher" in found
    assert "1 further metrics" in text, "only what has no chart of its own is folded away"
    assert "-70.00 → -73.00" in text
    assert "log p, chosen" in text
    assert "run: run on agent traces" in page


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, "taught by itself, behind hints (ema)"),
        ({"loss": {}}, "taught by itself, behind hints (frozen)"),
        ({"teacher": {"model_name": "models/large"}}, "distilled from large"),
        ({"loss": {"alpha": 0}}, "trained without a teacher"),
        ({"traces": {"channels": {"hint": False}}}, "trained without a teacher"),
    ],
)
def test_who_taught_is_told_as_it_is(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    page = run_page(read_run(write_trace_run(tmp_path / "run", **sections))).render()
    assert said in _check(page).text
    assert ("trained without a teacher" in page) == (said == "trained without a teacher")
