"""``limbeck align`` as a user meets it: output, JSON, pages, and one clear line on bad input."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.cli.command import run
from tests.zoo import tokenizer_dir


def sides(student: str = "gpt2", teacher: str = "smollm2") -> list[str]:
    return ["--student", str(tokenizer_dir(student)), "--teacher", str(tokenizer_dir(teacher))]


def test_align_prints_both_sides_and_a_summary(capsys) -> None:
    code, out, _ = run(capsys, "align", *sides(), "In 2011 a café opened.")
    assert code == 0
    assert "1:n" in out or "n:1" in out or "n:m" in out
    assert "target bytes covered (100.0%)" in out
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
    first = view["chunks"][0]
    assert (first["exact"], first["same_text"]) == (False, True)  # the prefix space of the teacher
    assert view["summary"]["left_out"]["added_space_chunks"] == 1


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


def test_models_and_text_in_one_breath(capsys) -> None:
    student, teacher = str(tokenizer_dir("gpt2")), str(tokenizer_dir("smollm2"))
    code, out, _ = run(capsys, "align", student, teacher, "In 2011 a café opened.", "--json")
    assert code == 0
    assert json.loads(out) == json.loads(run(capsys, "align", *sides(), "In 2011 a café opened.", "--json")[1])
    assert "the teacher is missing" in run(capsys, "align", student)[2]
    assert "quote a text" in run(capsys, "align", student, teacher, "two", "words")[2]


def test_rows_of_data_files_are_aligned_together(capsys, tmp_path) -> None:
    rows = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " Hello there.\n"}]}]
    rows += [{"question": "1 + 1?", "answer": "2"}, {"text": "A plain text of 2011."}]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    page = tmp_path / "page.html"
    arguments = ("align", *sides("smollm2", "qwen3"), "--data", data, "--html", page)
    view = json.loads(run(capsys, *arguments, "--json")[1])
    assert [row["source"].rpartition(":")[2] for row in view["rows"]] == ["1", "2", "3"]
    assert view["summary"]["chunks"] == sum(row["summary"]["chunks"] for row in view["rows"])
    said = ["".join(chunk["text"] for chunk in row["chunks"]) for row in view["rows"]]
    assert [text.strip() for text in said] == ["Hello there.", "2", "A plain text of 2011."]
    out = run(capsys, *arguments)[1]
    assert "rows.jsonl:2" in out
    assert "3 rows" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give exactly one of"),
        (["a", "--data", "b.jsonl"], "give exactly one of"),
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
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, "align", *sides(), "x", "--html", tmp_path / "file" / "page.html")
    assert code == 1
    assert re.fullmatch(r"limbeck: the page '.*page\.html' cannot be written: .*; give another place\.\n", err)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes((tokenizer_dir("gpt2") / "tokenizer.json").read_bytes())
    before = tokenizer.read_bytes()
    code, _, err = run(capsys, "align", "--student", tokenizer, "--teacher", tokenizer, "x", "--html", tokenizer)
    assert (code, "it is also the input" in err, tokenizer.read_bytes() == before) == (1, True, True)
    code, _, err = run(capsys, "align", "--student", tmp_path / "none", "--teacher", tmp_path, "x")
    assert code == 1
    assert "does not exist" in err
