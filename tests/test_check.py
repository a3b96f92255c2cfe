"""The audit of a pair: what it measures by hand, what it skips, and what it advises."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from limbeck.check import MODE, check_pair, chunk_bits, verdict
from limbeck.errors import ExitCode
from limbeck.tokens import ByteTokenizer
from tests.cli.command import run
from tests.helpers.tokenizers import byte_level, tiny

CHAT = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
SPECIALS = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMBECK_CACHE", str(tmp_path / "cache"))


def save(folder: Path, tokenizer: Any, template: str | None = None) -> str:
    """A tokenizer as a model folder holds it; written here, since the core has no transformers to do it."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(ByteTokenizer.of(tokenizer).describe()), encoding="utf-8")
    config = {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    words = {"s": ["201", "the", "中"], "t": ["the", "中国"]}
    student, teacher = (save(tmp_path / n, byte_level(own, specials=SPECIALS), CHAT) for n, own in words.items())
    return student, teacher


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return str(path)


def test_tokenizers_alone_give_half_of_the_audit(pair: tuple[str, str], tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", [{"text": "the 201"}, {"text": "中国"}])
    report = check_pair(*pair, [data])
    alignment = report["alignment"]
    # the | space | 201 against 2 0 1; 中 国(3 bytes) against 中国
    assert alignment["kinds"] == {"1:1": 2, "1:n": 1, "n:1": 1, "n:m": 0}
    assert alignment["strict"] == pytest.approx(0.5)
    assert alignment["classes"]["digits"] == {"chunks": 1, "one_to_one": 0}
    assert alignment["coverage"] == 1.0
    assert report["vocabulary"]["uncovered_mass"] == pytest.approx(1 / 4)
    assert report["headroom"] is report["estimate"] is None
    assert set(report["skipped"]) == {"headroom", "memory and time"}
    assert report["verdict"]["worth"]
    assert "25% of the teacher" in report["verdict"]["sentence"]
    by_what = {finding["what"]: finding for finding in report["findings"]}
    assert by_what["digits"]["level"] == "note"
    assert "<|im_end|>" in by_what["end of turn"]["found"]


def test_conversations_need_templates_on_both_sides(pair: tuple[str, str], tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", [{"question": "the?", "answer": "the 201"}])
    report = check_pair(*pair, [data])
    assert report["templates"]["needed"]
    assert report["templates"]["student"]["text"].startswith("[start_of_turn]user")
    assert report["verdict"]["worth"]
    refused = check_pair(pair[0], save(tmp_path / "bare", tiny(300)), [data])
    assert not refused["verdict"]["worth"]
    assert refused["alignment"]["refused_rows"] == 1


def test_the_same_tokenizer_needs_no_projection(pair: tuple[str, str], tmp_path: Path) -> None:
    report = check_pair(pair[0], pair[0], [write(tmp_path / "d.jsonl", [{"text": "the 201"}])])
    assert report["tokenizers"]["same"]
    assert report["alignment"]["strict"] == 1.0
    assert "reach" not in report["verdict"]["sentence"]


def chunk(data: bytes, student: float, teacher: float, **more: Any) -> dict[str, Any]:
    scores = {
        "student_logprob": student,
        "teacher_logprob": teacher,
        "divergence": 1.0,
        "uncovered_by_projection": 0.5,
        "uncovered_by_cells": 0.0,
    }
    return {"bytes": data.hex(), "exact": True, "role": False, **scores, **more}


def test_bits_of_chunks_by_hand() -> None:
    chunks = [chunk(b"ab", -2.0, -1.0), chunk(b"12", -4.0, -5.0), chunk(b"zz", -9.0, -9.0, exact=False)]
    found = chunk_bits(
        [{"chunks": [*chunks, chunk(b"", -9.0, -9.0, role=True), chunk(b"q", -1.0, -1.0) | {"student_logprob": None}]}]
    )
    assert found["bytes"] == 4
    assert found["student"] == pytest.approx(6 / math.log(2) / 4)
    assert found["gap"] == pytest.approx(0.0)
    assert found["classes"]["digits"]["gap"] == pytest.approx(-1 / math.log(2) / 2)
    assert found["uncovered_by_projection"] == 0.5


@pytest.mark.parametrize(
    ("change", "worth", "words"),
    [
        ({}, True, "says little"),
        ({"gap": 0.01}, True, "Worth little"),
        ({"gap": -0.1}, False, "Not worth a run as it is: on this text"),
        ({"uncovered": 0.3}, True, "30% of the teacher"),
        ({"coverage": 0.2}, False, "only 20% of the supervised bytes"),
        ({"usable": False}, False, "no chat template"),
        ({"same": True, "uncovered": 0.3}, True, "ahead by 0.40"),
        ({"pilot": {"choice": "either", "sentence": "Level."}}, True, "Level."),
        ({"pilot": {"choice": "cross_entropy", "sentence": "Alone."}, "gap": 0.5}, False, "Alone."),
        ({"pilot": {"choice": "distil", "sentence": "Both."}, "gap": -0.1}, True, "Both."),
        ({"pilot": {"choice": "distil", "sentence": "Both."}, "usable": False}, False, "no chat template"),
    ],
)
def test_verdicts(change: dict[str, Any], worth: bool, words: str) -> None:
    values = {"gap": 0.4, "uncovered": 0.0, "coverage": 1.0, "usable": True, "same": False, "pilot": None, **change}
    report = {
        "tokenizers": {"same": values["same"]},
        "headroom": {
            "gap": values["gap"],
            "student": 1.0,
            "teacher": 1 - values["gap"],
            "uncovered_by_projection": values["uncovered"],
        },
        "alignment": {"coverage": values["coverage"]},
        "templates": {"needed": True, "student": {"usable": True}, "teacher": {"usable": values["usable"]}},
        "vocabulary": {"uncovered_mass": 0.0},
        "pilot": values["pilot"],
    }
    found = verdict(report)
    assert found["worth"] == worth
    assert words in found["sentence"]


def test_the_command_fits_eighty_columns_and_writes_a_page(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "<script>document.title=1</script>"
    data = write(tmp_path / "d.jsonl", [{"text": evil}, {"text": "中国 " * 40}])
    page = tmp_path / "check.html"
    code, out, _ = run(capsys, "check", *pair, "--data", data, "--html", page)
    assert code == 0
    assert max(map(len, out.splitlines()[:-1])) <= 80
    assert "use loss_fn.mode: tree_kl" in " ".join(out.split())
    html = page.read_text(encoding="utf-8")
    assert html.count("<script>") == 1
    assert "By class of text" in html
    code, out, _ = run(capsys, "check", *pair, "--data", data, "--json")
    assert json.loads(out)["verdict"]["mode"] == "tree_kl"


@pytest.mark.train
def test_the_loss_to_use_is_a_runs_default() -> None:
    from limbeck.losses.distillation import CrossTokenizerDistillationLossConfig

    assert CrossTokenizerDistillationLossConfig.model_validate({}).mode == MODE


@pytest.mark.train
@pytest.mark.slow
def test_a_teacher_that_is_no_better_ends_with_its_own_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.helpers import tiny as models

    for name, policy in (("s", models.student()), ("t", models.teacher())):
        policy.save_checkpoint(tmp_path / name)
        policy.tokenizer.save_pretrained(tmp_path / name)  # type: ignore[attr-defined]
    data = write(tmp_path / "d.jsonl", [{"text": text} for text in models.TEXTS])
    # a run folder stands for the student of its newest checkpoint
    weights = tmp_path / "run" / "checkpoints" / "step_1" / "policy" / "weights"
    weights.parent.mkdir(parents=True)
    (tmp_path / "s").rename(weights)
    (tmp_path / "run" / "config.yaml").touch()
    sides = [str(tmp_path / "run"), str(tmp_path / "t")]
    codes = {}
    for order in (sides, sides[::-1]):
        code, out, _ = run(capsys, "check", *order, "--data", data, "--json")
        report = json.loads(out)
        codes[report["headroom"]["gap"] > 0] = code
        assert report["estimate"]["student_parameters"] > 1000
        assert report["skipped"] == {}
    assert codes == {True: ExitCode.DONE, False: ExitCode.NOT_WORTH_IT}
