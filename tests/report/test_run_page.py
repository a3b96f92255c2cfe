"""Pages of runs: complete, self-contained, safe against what data says, and whole when files are not."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from limbeck.algorithms.config import MasterConfig
from limbeck.config import resolve
from limbeck.errors import ConfigError
from limbeck.report.comparison import comparison_page
from limbeck.report.run_data import History, read_run
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
    within = [a for a in checker.attributes if a[0] != "href" or not (a[1] or "").startswith("#")]
    assert not [a for a in within if a[0] in ("src", "href", "srcset") or a[0].startswith("on")]
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
    assert "closed" not in text, "without a baseline nobody knows what the teacher was worth"
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


def change_rows(run: Path, **changes: Any) -> Path:
    """Rows of a run with other values, or further ones of teachers and times; None takes a metric away."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in lines:
        for key, value in changes.items():
            if value is None:
                row.pop(key, None)
            elif key in row or (key.count("/") > 1 and any(name.startswith(key[:4]) for name in row)):
                row[key] = value
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return run


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        (1.248, None),
        (3.6, "is worse than the student was at the start: 3.600 against 3.450"),
        (3.0, "is now worse than"),
    ],
)
def test_a_teacher_that_is_worse_is_said_first(tmp_path: Path, teacher: float, said: str | None) -> None:
    run = change_rows(write_run(tmp_path / "run"), **{"val/teacher_bpb": teacher})
    page = run_page(read_run(run))
    banners = page.data["banners"]
    assert len(banners) == bool(said)
    assert all(said and said in banner for banner in banners)
    assert page.render().count('role="alert"') == len(banners)
    card = page.data["cards"][0]
    assert (card["change"], card["kind"]) == ("-27.0%", "" if teacher > 3.45 else "good")


def test_a_change_too_small_to_show_is_neither_good_nor_bad(tmp_path: Path) -> None:
    card = run_page(read_run(write_run(tmp_path / "run", gain=1e-7))).data["cards"][0]
    assert (card["change"], card["kind"]) == ("no change", "")


def test_a_student_that_got_worse_is_said_first(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", gain=-0.5)
    assert (
        run_page(read_run(run)).data["banners"][0].startswith("The student got worse: 3.450 bits per byte at the start")
    )


def test_cross_entropy_alone_is_called_so(tmp_path: Path) -> None:
    page = run_page(read_run(write_run(tmp_path / "run", mode="ce")))
    text = _check(page.render()).text
    assert ("loss", "cross-entropy alone") in page.data["facts"]
    assert "Distillation loss" not in text
    assert "boundary_kl" not in text.partition("Resolved configuration")[0]
    assert [s["title"] for s in page.data["sections"]] == ["Quality", "Losses", "Reach", "Optimizer", "Time and memory"]
    assert [c["title"] for c in page.data["sections"][1]["charts"]] == ["Cross-entropy"]


def test_text_of_the_students_own_is_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert not any(name == "own text" for name, _ in run_page(read_run(run)).data["facts"])
    own: dict[str, Any] = {"fraction": 0.5, "loss_fn": {"mode": "boundary_kl", "direction": "jsd"}}
    config |= {"algorithm": "on_policy_distillation", "on_policy": own}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    page = run_page(read_run(run)).data
    assert ("own text", "50%, boundary_kl, jsd") in page["facts"]
    assert page["self_teacher"] is None
    config["on_policy"] |= {"fraction": 1, "policy_gradient": {}, "failed_states": {"self_teacher": "ema"}}
    del config["teacher"]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    page = run_page(read_run(run)).data
    assert ("own text", "100%, policy gradient") in page["facts"]
    assert page["self_teacher"] == "ema"


def test_without_validation_there_are_no_columns_for_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=60)
    held_out = [key for key in rows(60)[0] if key.startswith("val/")]
    change_rows(run, **dict.fromkeys(held_out))
    page = run_page(read_run(run))
    assert page.data["validation"] is None
    assert not any("byte" in card["title"] for card in page.data["cards"])
    columns = comparison_page([read_run(run)] * 2).data["figures"]["columns"]
    assert columns == ["run", "loss", "steps", "last training loss", "tokens/s"]


def test_what_a_loss_does_not_reach_is_in_cards_table_and_charts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=60)
    parts = {"val/teacher_0/uncovered_mass": 0.23, "val/teacher_0/boundary_kl": 1.5, "val/teacher_0/chunk_kl": 0.5}
    page = run_page(read_run(change_rows(run, **parts)))
    assert {"title": "Not covered", "value": "23.0%", "below": "of the teacher's probability"} in page.data["cards"]
    assert "uncovered mass" in page.data["validation"]["columns"]
    sections = {section["title"]: [c["title"] for c in section["charts"]] for section in page.data["sections"]}
    assert "Uncovered probability" in sections["Reach"]
    assert "Parts of the distillation loss" in sections["Losses"]
    assert not [c for c in page.data["further_charts"] if c["title"].startswith("teacher_0/")]


def test_time_is_shown_in_its_parts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=60)
    page = run_page(read_run(change_rows(run, **{"train/time/data": 0.4, "train/time/odd": 0.1})))
    charts = {c["title"]: c["plot"] for section in page.data["sections"] for c in section["charts"]}
    parts = charts["Where a step's time goes"]
    assert parts["stack"]
    assert [s["name"] for s in parts["series"]] == ["waiting for data", "forward", "odd", "other"]
    whole = [sum(values) for values in zip(*([y for _, y in s["points"]] for s in parts["series"]), strict=True)]
    assert whole == pytest.approx([1.6] * 60)
    (waiting,) = charts["Waiting"]["series"]
    assert waiting["points"][0][1] == pytest.approx(25)


def write_samples(run: Path, text: str = " and so on", prompt: str = "Once") -> Path:
    def row(step: int, writer: str, **more: Any) -> dict[str, Any]:
        return {
            "step": step,
            "writer": writer,
            "number": 0,
            "prompt": prompt,
            "text": f"{text} {writer} {step}",
            **more,
        }

    found = [row(0, "student", ended=False), row(0, "teacher"), row(0, "data"), row(50, "student"), row(100, "student")]
    found.append(row(100, "student", kind="rollout", reward=0.25))
    (run / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    return run


def test_samples_stand_side_by_side(tmp_path: Path) -> None:
    page = run_page(read_run(write_samples(write_run(tmp_path / "run", steps=60))))
    (one,) = page.data["samples"]["prompts"]
    assert [(c["who"], c["text"]) for c in one["columns"]] == [
        ("Student, step 0", " and so on student 0"),
        ("Student, step 100", " and so on student 100"),
        ("Teacher", " and so on teacher 0"),
        ("How the text goes on", " and so on data 0"),
    ]
    assert [row["step"] for row in one["between"]] == [50]
    (kind,) = page.data["samples"]["kinds"]
    assert (kind["kind"], kind["rows"][0]["figures"]) == ("rollout", [("reward", "0.2500")])
    assert "Samples: rollout" in _check(page.render()).text


@pytest.mark.parametrize(("text", "seen"), [("\n\n \t", "⏎⏎·⇥"), ("", "(nothing)"), (" a\n", " a\n")])
def test_a_sample_of_white_space_can_be_seen(tmp_path: Path, text: str, seen: str) -> None:
    run = write_run(tmp_path / "run", steps=50)
    row = {"step": 50, "writer": "student", "number": 0, "prompt": "Once", "text": text, "tokens": 4, "ended": False}
    (run / "samples.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "kind": "rollout"}) + "\n")
    page = run_page(read_run(run))
    assert page.data["samples"]["prompts"][0]["columns"][0]["text"] == seen
    assert page.data["samples"]["kinds"][0]["rows"][0]["text"] == seen
    assert seen in _check(page.render()).text


@pytest.mark.parametrize("line", ['{"step": 1}', "[]", "nothing", '{"step": 1, "text": 3, "prompt": []}'])
def test_odd_samples_are_no_crash(tmp_path: Path, line: str) -> None:
    run = write_samples(write_run(tmp_path / "run", steps=50))
    with (run / "samples.jsonl").open("a") as stream:
        stream.write(f"{line}\n")
    data = read_run(run)
    assert len(run_page(data).data["samples"]["prompts"]) == 1
    assert bool(data.problems) == (line in ("[]", "nothing"))


def test_a_run_that_goes_on_is_read_on_and_one_that_was_resumed_anew(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=50)
    whole = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(whole[:20]) + whole[20][:15])
    data = read_run(run)
    assert data.last_step == 19
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write(whole[20][15:] + "".join(whole[21:]))
    data = read_run(run, data)
    assert data.steps == read_run(run).steps
    assert data.points("train/loss") == read_run(run).points("train/loss")
    (tmp_path / "resumed").write_text("".join(whole[:11]))
    (tmp_path / "resumed").replace(run / "metrics.jsonl")
    assert read_run(run, data).last_step == 10


def test_what_data_says_is_never_markup(tmp_path: Path) -> None:
    evil = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'
    run = write_run(tmp_path / "run")
    (run / "skipped.json").write_text(json.dumps({evil: 3}))
    (run / "versions.json").write_text(json.dumps({"torch": evil, "seed": evil}))
    config = {"policy": {"model_name": evil}, "teachers": [{"model_name": evil}, {"model_name": evil}]}
    (run / "config.yaml").write_text(json.dumps({**config, "loss_fn": {"mode": evil}}))
    row = {"step": 1, f"train/{evil}": 1.0, "val/bpb": 2.0, "val/teacher_0_bpb": 1.0, "val/teacher_1_bpb": 1.5}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    view = json.loads((run / "alignment_sample.json").read_text())
    view["chunks"][0]["student_tokens"] = [evil]
    (run / "alignment_sample.json").write_text(json.dumps(view))
    write_samples(run, evil, evil)
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


@pytest.mark.parametrize("missing", ["config.yaml", "versions.json", "metrics.jsonl", "skipped.json", "checkpoints"])
def test_any_file_may_be_missing(tmp_path: Path, missing: str) -> None:
    run = write_run(tmp_path / "run")
    target = run / missing
    target.rename(tmp_path / "elsewhere")
    text = _check(run_page(read_run(run)).render()).text
    assert ("There are no metrics yet" in text) == (missing == "metrics.jsonl")
    assert ("Not counted yet" in text) == (missing == "skipped.json")


@pytest.mark.parametrize("damaged", ["config.yaml", "versions.json", "skipped.json", "alignment_sample.json"])
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
    assert data.steps == [1, 2, 3]
    assert data.points("train/loss") == [(1, 3.0), (2, 2.0)]
    text = _check(run_page(data).render()).text
    assert "metrics.jsonl has 2 damaged lines" in text
    assert data.files["metrics.jsonl"].cut
    assert "metrics.jsonl ends inside a line" in text
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
    for name in ("versions.json", "skipped.json", "alignment_sample.json", "config.yaml"):
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


def test_divergences_of_different_definitions_share_no_axis(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / name, mode=mode, steps=60) for name, mode in (("a", "boundary_kl"), ("b", "tree_kl"))
    ]
    folders += [write_run(tmp_path / "c", steps=60), write_run(tmp_path / "d", mode="ce", steps=60)]
    page = comparison_page([read_run(folder) for folder in folders])
    drawn = [(c["title"], c["note"], [s["name"] for s in c["plot"]["series"]]) for c in page.data["charts"]]
    assert ("Distillation loss, validation", "boundary_kl", ["a", "c"]) in drawn
    assert ("Distillation loss, validation", "tree_kl", ["b"]) in drawn
    assert ("Training loss", "boundary_kl + cross-entropy", ["a", "c"]) in drawn
    assert ("Cross-entropy, validation", "nats per token", ["a", "b", "c", "d"]) in drawn
    assert not [title for title, _, names in drawn if title == "Training loss" and "d" in names]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_teacher_of_weight_0_is_no_part_of_the_loss_whatever_scales_it(tmp_path: Path, dynamic: bool) -> None:
    """As `MasterConfig.all_teachers` has it: such a run asks no teacher."""
    loss = {"mode": "tree_kl", "kl_loss_weight": 0.0, "ce_loss_scale": 1.0, "dynamic_loss_scaling": dynamic}
    teacher = {"init": "random", "tokenizer": {"name": "t"}, "model_overrides": {"model_type": "llama"}}
    values = {**config(steps=50), "loss_fn": loss, "teacher": teacher, "checkpointing": {}}
    folder = write_run(tmp_path, steps=50)
    for weight, asked in ((0.0, 0), (0.5, 1)):
        loss["kl_loss_weight"] = weight
        (folder / "config.yaml").write_text(json.dumps(values))
        assert len(resolve(MasterConfig, values).all_teachers) == asked
        run = read_run(folder)
        assert (run.divergence is not None) == bool(asked)
        assert (run.objective == "cross-entropy alone") == (not asked)


def test_a_section_that_one_run_lacks_is_one_row(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "ce", mode="ce", steps=50), write_run(tmp_path / "kd", steps=50)]
    many = {**config(steps=50), "teacher": {"model_name": "models/big", **{f"key_{i}": i for i in range(40)}}}
    (folders[1] / "config.yaml").write_text(json.dumps(many))
    page = comparison_page([read_run(folder) for folder in folders])
    found = page.data["settings"]
    assert found == {"rows": [["teacher.model_name", "-", "models/big, 41 settings"]], "folded": []}
    other = write_run(tmp_path / "other", steps=50)
    changed = {**many, "teacher": {"model_name": "x", **{f"key_{i}": -i for i in range(40)}}}
    (other / "config.yaml").write_text(json.dumps(changed))
    page = comparison_page([read_run(folder) for folder in (folders[1], other)])
    assert page.data["settings"]["rows"] == []
    assert [(g["section"], len(g["rows"])) for g in page.data["settings"]["folded"]] == [("teacher", 40)]
    assert "40 settings of teacher" in _check(page.render()).text


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
    with pytest.raises(ConfigError, match=f"{name}' {why};"):
        write_report(tmp_path / name)


def test_a_page_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=50)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"file/report\.html"):
        write_report(run, tmp_path / "file" / "report.html")


def test_names_of_earlier_logs_are_read_as_todays() -> None:
    history = History()
    history.add({"step": 1, "val/teacher_0/unreached_mass": 0.4, "train/dropped/too_long": 2})
    history.add({"step": 2, "val/teacher_0/uncovered_mass": 0.3, "val/teacher_1/excluded_mass_student": 0.1})
    assert history.points("val/teacher_0/uncovered_mass") == [(1, 0.4), (2, 0.3)]
    assert history.points("train/skipped/too_long") == [(1, 2.0)]
    assert history.names()[-1] == "val/teacher_1/uncovered_root_student"


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (["b2", "c3"], "boundary_kl + cross-entropy"),
        (["a1"], "token by token + cross-entropy"),
        (["b2", "a1"], "boundary_kl, teacher 1 token by token + cross-entropy"),
        ("damaged", "boundary_kl + cross-entropy"),
    ],
)
def test_a_teacher_with_the_students_tokenizer_is_not_compared_by_the_mode(
    tmp_path: Path, theirs: object, said: str
) -> None:
    run = write_run(tmp_path / "run", steps=60)
    (run / "versions.json").write_text(json.dumps({"student_fingerprint": "a1", "teacher_fingerprints": theirs}))
    assert read_run(run).objective == said
