"""Pages of runs: complete, self-contained, safe against what data says, and whole when files are not."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from limbeck.errors import ConfigError
from limbeck.report.comparison import comparison_page
from limbeck.report.run_data import read_run
from limbeck.report.run_page import run_page, write_comparison, write_report
from tests.report.runs import config, rows, write_run

_VOID = {"meta", "br", "line", "circle", "polyline", "input"}


class _Checker(HTMLParser):
    """Fails on tags that do not nest, and collects attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.text += data


def _check(page: str) -> _Checker:
    checker = _Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert not [a for a in checker.attributes if a[0] in ("src", "href", "srcset") or a[0].startswith("on")]
    assert not re.search(r"url\(|@import|https?://", page)
    return checker


def test_a_whole_run_becomes_one_self_contained_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "first")
    page = write_report(run)
    assert page == run / "report.html"
    text = _check(page.read_text(encoding="utf-8")).text
    for expected in ("first", "SmolLM2-135M-Instruct", "boundary_kl", "400 of 400", "2.13.0", "42"):
        assert expected in text
    assert "3.450 → 2.517" in text
    assert "1.248" in text
    assert "42% of the student's gap closed" in text
    for section in ("Gradient norm", "Learning rate", "Validation", "What was left out", "Alignment of a sample"):
        assert section in text
    assert "records cut at the last boundary" in text
    assert "teacher 1: chunks whose bytes differ" in text
    assert "max_num_steps: 400" in text
    assert "chunk_kl" in text, "metrics without a chart of their own are shown too"


def test_curves_hold_the_values_of_the_metrics(tmp_path: Path) -> None:
    page = run_page(read_run(write_run(tmp_path / "run"))).render()
    data = [json.loads(d) for d in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    bits = next(d for d in data if [s["name"] for s in d["series"]] == ["student", "teacher"])
    assert [s["dashed"] for s in bits["series"]] == [False, True]
    expected = [(r["step"], r["val/bpb"]) for r in rows() if "val/bpb" in r]
    student, teacher = bits["series"]
    assert [p[0] for p in student["points"]] == [step for step, _ in expected]
    assert [float(p[1]) for p in student["points"]] == pytest.approx([v for _, v in expected], abs=6e-4)
    assert teacher["points"] == [[0, 1.248], [400, 1.248]]


def test_what_data_says_is_never_markup(tmp_path: Path) -> None:
    evil = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'
    run = write_run(tmp_path / "run")
    (run / "dropped.json").write_text(json.dumps({evil: 3}))
    (run / "versions.json").write_text(json.dumps({"torch": evil, "seed": evil}))
    config = {"policy": {"model_name": evil}, "teachers": [{"model_name": evil}, {"model_name": evil}]}
    (run / "config.yaml").write_text(json.dumps({**config, "loss_fn": {"mode": evil}}))
    row = {"step": 1, f"train/{evil}": 1.0, "val/bpb": 2.0, "val/teacher_0_bpb": 1.0, "val/teacher_1_bpb": 1.5}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    view = json.loads((run / "alignment_sample.json").read_text())
    view["chunks"][0]["student_tokens"] = [evil]
    (run / "alignment_sample.json").write_text(json.dumps(view))
    pages = [
        run_page(read_run(run)).render(),
        write_comparison([run, run], tmp_path / "c.html").read_text(encoding="utf-8"),
    ]
    for page in pages:
        assert evil not in page
        assert page.count("<script>") == 1
        checker = _Checker()
        checker.feed(page)
        assert checker.open == []
        assert not [a for a in checker.attributes if a[0] in ("src", "onerror")]


@pytest.mark.parametrize("missing", ["config.yaml", "versions.json", "metrics.jsonl", "dropped.json", "checkpoints"])
def test_any_file_may_be_missing(tmp_path: Path, missing: str) -> None:
    run = write_run(tmp_path / "run")
    target = run / missing
    target.rename(tmp_path / "elsewhere")
    text = _check(run_page(read_run(run)).render()).text
    assert ("There are no metrics yet" in text) == (missing == "metrics.jsonl")
    assert ("Not counted yet" in text) == (missing == "dropped.json")


@pytest.mark.parametrize("damaged", ["config.yaml", "versions.json", "dropped.json", "alignment_sample.json"])
@pytest.mark.parametrize("content", ["[1, 2", "[1]", "\x00{"])
def test_damaged_files_are_named_on_the_page(tmp_path: Path, damaged: str, content: str) -> None:
    run = write_run(tmp_path / "run")
    (run / damaged).write_text(content)
    text = _check(run_page(read_run(run)).render()).text
    assert damaged in text or (damaged == "config.yaml" and content == "[1]")
    assert "Gradient norm" in text


def test_an_alignment_of_another_form_is_no_crash(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "alignment_sample.json").write_text('{"chunks": [{"kind": "2:2"}]}')
    assert "alignment_sample.json cannot be shown" in _check(run_page(read_run(run)).render()).text


def test_a_killed_run_shows_what_it_logged(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    good: list[dict[str, Any]] = [{"step": 1, "train/loss": 3.0}, {"step": 2, "train/loss": 2.0, "val/bpb": 2.5}]
    lines = [json.dumps(good[0]), "not json", '{"no": "step"}', json.dumps(good[1])]
    nan = '{"step": 3, "train/loss": NaN, "train/grad_norm": Infinity, "train/lr": null, "train/x": "text"}'
    (run / "metrics.jsonl").write_text("\n".join([*lines, nan, '{"step": 4, "train/lo']))
    (run / "failed_batch_step_3").mkdir()
    data = read_run(run)
    assert [row["step"] for row in data.rows] == [1, 2, 3]
    assert data.points("train/loss") == [(1, 3.0), (2, 2.0)]
    text = _check(run_page(data).render()).text
    assert "metrics.jsonl has 2 damaged lines" in text
    assert "Step 3 failed" in text


ODD = ["NaN", "-Infinity", "1e308", "1e400", f"-1{'0' * 400}", f"1{'0' * 30}", "5e-324", "true", '"x"', "[]", "{}"]


@pytest.mark.parametrize("odd", ODD)
def test_odd_values_anywhere_are_no_crash(tmp_path: Path, odd: str) -> None:
    run = write_run(tmp_path / "run", steps=60)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    for key in ("step", "train/loss", "train/tokens_per_s", "train/seconds", "val/bpb", "val/teacher_bpb", "train/new"):
        changed = [f"{line[:-1]}, {json.dumps(key)}: {odd}}}" for line in lines]
        for mixed in (changed, [*lines[:-1], changed[-1]]):
            (run / "metrics.jsonl").write_text("\n".join(mixed) + "\n")
            data = read_run(run)
            _check(run_page(data).render())
            _check(comparison_page([data, data]).render())
    for name in ("versions.json", "dropped.json", "alignment_sample.json", "config.yaml"):
        text = (run / name).read_text() if name != "config.yaml" else json.dumps(config())
        for old in (key for key, value in json.loads(text).items() if not isinstance(value, str | list)):
            (run / name).write_text(json.dumps({**json.loads(text), old: "@"}).replace('"@"', odd))
            _check(run_page(read_run(run)).render())


def test_a_configuration_without_end_is_one_sentence_on_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=50)
    lines = [f"l{n}: &l{n} {{{', '.join(f'k{i}: *l{n - 1}' for i in range(10))}}}" for n in range(1, 12)]
    (run / "config.yaml").write_text("l0: &l0 {x: 1}\n" + "\n".join(lines))
    data = read_run(run)
    for page in (run_page(data), comparison_page([data, data])):
        assert "with its aliases written out the value on line" in _check(page.render()).text
    (run / "config.yaml").write_bytes(bytes(range(256)))
    assert "config.yaml cannot be read" in _check(run_page(read_run(run)).render()).text
    (run / "versions.json").write_text("[" * 100_000)
    assert "versions.json is damaged" in _check(run_page(read_run(run)).render()).text


def test_only_a_config_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("policy: {model_name: a}\n")
    assert "There are no metrics yet" in _check(write_report(tmp_path).read_text(encoding="utf-8")).text


def test_several_runs_are_laid_over_each_other(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "ce", mode="ce", gain=0.8), write_run(tmp_path / "kd", gain=0.95, seed=1)]
    page = write_comparison(folders, tmp_path / "compare.html").read_text(encoding="utf-8")
    text = _check(page).text
    assert "2 runs compared" in text
    assert "cross-entropy alone" in text
    assert "teacher.model_name" in text
    assert '<span class="best">2.517</span>' in page
    data = [json.loads(d) for d in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    assert [s["name"] for s in data[0]["series"]] == ["ce", "kd", "teacher"]


def test_one_run_wants_a_logarithmic_axis_and_another_has_a_zero(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, steps=60) for name in ("wide", "zero")]
    lines = [json.loads(line) for line in (folders[1] / "metrics.jsonl").read_text().splitlines()]
    lines[9]["train/grad_norm"] = 0.0
    (folders[1] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "Gradient norm" in _check(comparison_page([read_run(folder) for folder in folders]).render()).text


def test_a_folder_of_runs_stands_for_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / "demo" / name, steps=50)
    page = write_report(tmp_path / "demo")
    assert page == tmp_path / "demo" / "report.html"
    assert "2 runs compared" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "why"), [("none", "does not exist"), ("empty", "holds no run"), ("file", "is a file")]
)
def test_what_is_no_run_folder_is_refused(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=f"{why}; expected a run folder"):
        write_report(tmp_path / name)


def test_a_page_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=50)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(run, tmp_path / "file" / "report.html")
