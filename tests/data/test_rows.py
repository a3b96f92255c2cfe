"""Rows for looking at: spread over files, texts and conversations alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from limbeck.data.rows import sample_rows
from limbeck.errors import DataError


def write(path: Path, records: list[object]) -> str:
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return str(path)


def test_rows_are_spread_over_the_files(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [{"text": f"a{i}"} for i in range(11)])
    second = write(tmp_path / "b.jsonl", [{"text": f"b{i}"} for i in range(3)])
    assert [row.text for row in sample_rows(first, 3)] == ["a0", "a5", "a10"]
    assert [row.text for row in sample_rows([first, second], 4)] == ["a0", "a10", "b0", "b2"]
    assert len(sample_rows(first, 100)) == 11


def test_texts_are_cut_at_whole_characters(tmp_path: Path) -> None:
    (row,) = sample_rows(write(tmp_path / "a.jsonl", [{"text": "é" * 40}]), 1, max_bytes=9)
    assert row.text == "é" * 4
    plain = tmp_path / "a.txt"
    plain.write_text("line of text\n" * 40, encoding="utf-8")
    pieces = sample_rows(str(plain), 100, max_bytes=130)
    assert "".join(str(row.text) for row in pieces) == "line of text\n" * 40
    assert len(pieces) > 2


def test_questions_with_answers_are_conversations(tmp_path: Path) -> None:
    records = [
        {"question": "q", "answer": "a"},
        {"instruction": "do", "input": "this", "output": "done"},
        {"messages": [{"role": "user", "content": "m"}], "tools": [{"name": "t"}]},
    ]
    rows = sample_rows(write(tmp_path / "a.jsonl", records), 3)
    assert [[m["content"] for m in row.messages or ()] for row in rows] == [["q", "a"], ["do\n\nthis", "done"], ["m"]]
    assert rows[2].tools == [{"name": "t"}]


@pytest.mark.parametrize(
    ("records", "message"),
    [([{"body": "x"}], "'body'; name the column"), ([3], "is a JSON int"), ([{"messages": []}], "neither a text")],
)
def test_records_that_are_no_rows_are_named(tmp_path: Path, records: list[object], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        sample_rows(write(tmp_path / "bad.jsonl", records), 5)
    assert "bad.jsonl:1" in str(caught.value)


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"empty\.jsonl"):
        sample_rows(write(tmp_path / "empty.jsonl", []), 5)
