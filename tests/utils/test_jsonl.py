"""JSON lines as people have them: packed, cut, odd, in one piece, from a pipe."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from limbeck.errors import DataError
from limbeck.utils import jsonl
from limbeck.utils.jsonl import read_records

LINES = b'{"a": 1}\n\n[2]\r\n"\xc3\xa9"\n'
RECORDS = [(1, {"a": 1}), (3, [2]), (4, "é")]


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("x.jsonl", bytes),
        ("x.jsonl.gz", gzip.compress),
        ("x.jsonl.bz2", bz2.compress),
        ("x.jsonl.XZ", lzma.compress),
        ("x.jsonl.zst", lambda raw: pa.compress(raw, codec="zstd", asbytes=True)),
    ],
)
def test_packed_or_plain(tmp_path: Path, name: str, pack) -> None:
    (tmp_path / name).write_bytes(pack(LINES))
    assert list(read_records(tmp_path / name)) == RECORDS
    if name != "x.jsonl":
        (tmp_path / name).write_bytes(pack(LINES * 1000)[:-9])
        with pytest.raises(DataError, match=r"x\.jsonl"):
            list(read_records(tmp_path / name))


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(LINES)))
    assert list(read_records("-")) == RECORDS
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b'{\n"a": 1}')))
    assert list(read_records("-", document=True)) == [(1, {"a": 1})]


def test_lines_that_are_no_json(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\nnonsense\n\xff\n' + b"[" * 100_000 + b'\n{"a": 2}\n')
    with pytest.raises(DataError, match=r"x\.jsonl:2 is not JSON \(Expecting value"):
        list(read_records(path))
    bad: list[int] = []
    assert list(read_records(path, bad=lambda line, why: bad.append(line))) == [(1, {"a": 1}), (5, {"a": 2})]
    assert bad == [2, 3, 4]


def test_one_document_or_lines_after_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("\n[\n1,\n2\n]\n")
    assert list(read_records(path, document=True)) == [(2, [1, 2])]
    path.write_text('{"cut": \n{"a": 1}\n{"a":\n{"a": 2}\n')
    bad: list[int] = []
    found = list(read_records(path, document=True, bad=lambda line, why: bad.append(line)))
    assert found == [(2, {"a": 1}), (4, {"a": 2})]
    assert bad == [1, 3]


def test_what_is_too_long_is_left_out_without_being_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_BYTES", 1 << 20)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'"' + b"x" * (5 << 20) + b'"\n{"a": 1}\n')
    bad: list[tuple[int, str]] = []
    assert list(read_records(path, bad=lambda *found: bad.append(found))) == [(2, {"a": 1})]
    assert bad == [(1, "longer than 1 MiB")]


def test_a_line_that_is_still_being_written(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}')
    assert len(list(read_records(path))) == 2
    assert list(read_records(path, finished=True)) == [(1, {"a": 1})]


def test_lone_surrogates_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"\\ud800": ["\\uDfff", "\\ud83d\\ude00"]}\n')
    assert list(read_records(path)) == [(1, {"\ufffd": ["\ufffd", "😀"]})]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl.*No such file"):
        list(read_records(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(("name", "pack"), [("b.gz", gzip.compress), ("b.bz2", bz2.compress), ("b.xz", lzma.compress)])
def test_a_packed_file_that_fills_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, pack
) -> None:
    monkeypatch.setattr(jsonl, "_EXPANSION_FREE", 1 << 20)
    (tmp_path / name).write_bytes(pack(b'{"x": "' + b"a" * (8 << 20) + b'"}\n'))
    with pytest.raises(DataError):
        list(read_records(tmp_path / name))
    # repeated text is no bomb
    (tmp_path / name).write_bytes(pack(b'{"text": "the same again and again"}\n' * 40_000))
    monkeypatch.setattr(jsonl, "_EXPANSION_FREE", 2 << 20)
    assert len(list(read_records(tmp_path / name))) == 40_000
