"""The command as a user meets it: output, JSON, pages, and one clear line on bad input."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest

from limbeck.cli import main
from limbeck.tokens import load_tokenizer
from tests.zoo import tokenizer_dir

load_once = functools.cache(load_tokenizer)


@pytest.fixture(autouse=True)
def _tokenizers_once(monkeypatch) -> None:
    """Real tokenizers take seconds to read, and what is derived from one is kept with it: read each once."""
    for user in ("limbeck.tokens", "limbeck.report.doctor"):
        monkeypatch.setattr(f"{user}.load_tokenizer", load_once)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def sides(student: str = "gpt2", teacher: str = "smollm2") -> list[str]:
    return ["--student", str(tokenizer_dir(student)), "--teacher", str(tokenizer_dir(teacher))]


def test_align_prints_both_sides_and_a_summary(capsys) -> None:
    code, out, _ = run(capsys, "align", *sides(), "In 2011 a café opened.")
    assert code == 0
    assert "1:n" in out or "n:1" in out or "n:m" in out
    assert "target bytes covered by exact chunks (100.0%)" in out
    assert "per byte" in out


def test_align_json_is_what_programs_read(capsys) -> None:
    code, out, _ = run(capsys, "align", *sides("gpt2", "llama2"), "2011 e\u0301", "--json")
    view = json.loads(out)
    assert code == 0
    assert set(view) == {"student", "teacher", "chunks", "summary"}
    keys = {"student_ids", "teacher_ids", "text", "kind", "exact"}
    assert all(keys <= set(c) for c in view["chunks"])
    assert "".join(c["text"] for c in view["chunks"]) == "2011 e\u0301"
    assert view["summary"]["chunks"] == len(view["chunks"])
    assert not view["chunks"][0]["exact"]  # the prefix space of the teacher


def test_align_reads_files_and_standard_input_and_writes_a_page(capsys, tmp_path, monkeypatch) -> None:
    (tmp_path / "text.txt").write_text("<b>bold</b> & 12\nnext line", encoding="utf-8")
    page = tmp_path / "page.html"
    assert run(capsys, "align", *sides(), "--file", tmp_path / "text.txt", "--html", page)[0] == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "<b>bold" not in text  # text is escaped
    assert "http" not in text.replace("http-equiv", "")  # self-contained
    monkeypatch.setattr(sys, "stdin", __import__("io").StringIO("from a pipe"))
    assert "pipe" in run(capsys, "align", *sides(), "-")[1]


def test_align_reads_a_conversation(capsys, tmp_path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello there."}]
    (tmp_path / "chat.json").write_text(json.dumps({"messages": messages}), encoding="utf-8")
    code, out, _ = run(capsys, "align", *sides("smollm2", "qwen3"), "--messages", tmp_path / "chat.json", "--json")
    assert code == 0
    chunks = json.loads(out)["chunks"]
    assert "".join(c["text"] for c in chunks) == "Hello there."
    assert chunks[-1]["role"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give exactly one of"),
        (["a", "--file", "b"], "give exactly one of"),
        (["--file", "nowhere.txt"], "nowhere.txt cannot be read"),
    ],
)
def test_align_refuses_in_one_line(capsys, arguments: list[str], message: str) -> None:
    code, out, err = run(capsys, "align", *sides(), *arguments)
    assert code == 1
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not out


def test_bad_files_are_named(capsys, tmp_path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert "not UTF-8 at byte 3" in run(capsys, "align", *sides(), "--file", tmp_path / "latin.txt")[2]
    (tmp_path / "bad.json").write_text("[{]")
    assert "bad.json:1 is no JSON" in run(capsys, "align", *sides(), "--messages", tmp_path / "bad.json")[2]
    (tmp_path / "odd.json").write_text('{"messages": 3}')
    assert "holds no list of messages" in run(capsys, "align", *sides(), "--messages", tmp_path / "odd.json")[2]
    code, _, err = run(capsys, "align", "--student", tmp_path / "none", "--teacher", tmp_path, "x")
    assert code == 1
    assert "does not exist" in err


def test_doctor_checks_the_machine_and_a_model(capsys, tmp_path) -> None:
    code, out, _ = run(capsys, "doctor", tokenizer_dir("qwen3"), "--json")
    assert code == 0
    found = {f["what"].rsplit(": ", 1)[-1]: f for f in json.loads(out)["findings"]}
    assert found["torch"]["level"] == "ok"
    assert found["chat template"]["level"] == "ok"
    assert found["bytes"]["level"] in ("ok", "note")
    assert all(f["remedy"] for f in found.values() if f["level"] == "bad")
    code, out, _ = run(capsys, "doctor", tmp_path / "nothing", "--json")
    assert code == 1
    assert json.loads(out)["findings"][-1]["remedy"] == "give a folder with a tokenizer.json"
    assert "bad" in run(capsys, "doctor", tmp_path / "nothing")[1]


def test_doctor_tells_a_head_that_does_not_fit(capsys, tmp_path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tokenizer_dir("gpt2") / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50304}))
    out = json.loads(run(capsys, "doctor", tmp_path, "--json")[1])
    head = next(f for f in out["findings"] if f["what"].endswith("head"))
    assert "47 rows are no token" in head["found"]


def test_every_verb_has_help_with_an_example(capsys) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for verb in ("align", "project", "cache", "train", "demo", "eval", "report", "plan", "doctor"):
        assert verb in out
        assert "Example" in run(capsys, verb, "--help")[1], verb
    assert run(capsys, "--version")[1].startswith("limbeck ")


def test_module_and_traceback_only_on_request() -> None:
    command = [sys.executable, "-m", "limbeck", "align", "-s", "./none", "-t", "./none", "x"]
    plain = subprocess.run(command, capture_output=True, text=True)
    assert plain.returncode == 1
    assert plain.stderr.startswith("limbeck: ")
    assert "Traceback" not in plain.stderr
    assert "Traceback" in subprocess.run([*command, "--debug"], capture_output=True, text=True).stderr
