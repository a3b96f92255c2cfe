"""Files to records: every format, every kind of bad input with its file and line, exact order and resume."""

from __future__ import annotations

import bz2
import gc
import gzip
import json
import lzma
import os
import pickle
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limbeck.data import readers
from limbeck.data import spans as spans_module
from limbeck.data.readers import OPEN_FILES, RandomAccessFile, SpanIndex, expand
from limbeck.data.sources import (
    PAD_INDEX,
    DataConfig,
    ReadingConfig,
    RecordDataset,
    build_dataset,
    flatten_documents,
)
from limbeck.data.spans import LINE_BLOCK, Lines, Paragraphs, Whole, find_spans, split_spans
from limbeck.errors import ConfigError, DataError

TEXTS = ["one", "zwei\nzeilen", "三 个", "four 🙂", "five"]
CHAT = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], "tools": [{"name": "f"}]},
    {"messages": [{"role": "user", "content": "2"}]},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMBECK_CACHE", str(tmp_path / "cache"))


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def zst(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(data)
    return sink.getvalue().to_pybytes()


def arrow(path: Path, table: pa.Table, stream: bool) -> str:
    with pa.OSFile(str(path), "wb") as sink:
        make = pa.ipc.new_stream if stream else pa.ipc.new_file
        with make(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return str(path)


def parquet(path: Path, table: pa.Table) -> str:
    pq.write_table(table, path, row_group_size=2)
    return str(path)


def texts(data: RecordDataset) -> list[str]:
    return [record["text"] for record in data]


ROWS = [{"text": text, "other": 1} for text in TEXTS]
MAKERS: dict[str, Callable[[Path], str]] = {
    "jsonl": lambda p: write(p / "a.jsonl", lines(ROWS)),
    "no_last_newline": lambda p: write(p / "a.jsonl", lines(ROWS)[:-1]),
    "crlf_and_blank_lines": lambda p: write(p / "a.jsonl", lines(ROWS).replace(b"\n", b"\r\n\r\n\n")),
    "byte_order_mark": lambda p: write(p / "a.jsonl", b"\xef\xbb\xbf" + lines(ROWS)),
    "json_array": lambda p: write(p / "a.json", json.dumps(ROWS, indent=1).encode()),
    "gz": lambda p: write(p / "a.jsonl.gz", gzip.compress(lines(ROWS))),
    "json_gz": lambda p: write(p / "a.json.gz", gzip.compress(lines(ROWS))),
    "bz2": lambda p: write(p / "a.jsonl.bz2", bz2.compress(lines(ROWS))),
    "xz": lambda p: write(p / "a.jsonl.xz", lzma.compress(lines(ROWS))),
    "zst": lambda p: write(p / "a.jsonl.zst", zst(lines(ROWS))),
    "parquet": lambda p: parquet(p / "a.parquet", pa.Table.from_pylist(ROWS)),
    "arrow_file": lambda p: arrow(p / "a.arrow", pa.Table.from_pylist(ROWS), stream=False),
    "arrow_stream": lambda p: arrow(p / "a.arrow", pa.Table.from_pylist(ROWS), stream=True),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("check", ["at_start", "on_read"])
def test_every_format_gives_the_same_records(kind: str, check: Any, tmp_path: Path) -> None:
    path = MAKERS[kind](tmp_path)
    data = RecordDataset(path, ReadingConfig(check_records=check))
    assert texts(data) == TEXTS
    assert data[3]["idx"] == 3
    assert data[3]["loss_multiplier"] == 1.0
    assert data[3]["source"].startswith(path + ":")
    copy = pickle.loads(pickle.dumps(data))
    assert texts(copy) == TEXTS
    assert copy.fingerprint == data.fingerprint
    assert texts(RecordDataset(path)) == TEXTS  # from the unpacked copy


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_share_is_held_out_by_documents(split: str, tmp_path: Path) -> None:
    """Both parts together are the data, none twice; pieces of a long document stay together; nothing is drawn anew."""
    texts = [f"{i} " + "word " * (60 if i % 5 == 0 else 2) for i in range(30)]
    path = write(tmp_path / "d.jsonl", lines([{"text": text} for text in texts]))
    section = {"train": path, "holdout": 0.2, "max_document_bytes": 100}
    parts = {name: build_dataset(section, name) for name in ("train", "validation")}
    whole = RecordDataset(path, {"max_document_bytes": 100})
    number = {name: {row["source"] for row in own} for name, own in parts.items()}
    assert len(number["validation"]) == 6
    assert number["train"] | number["validation"] == {row["source"] for row in whole}
    assert not number["train"] & number["validation"]
    assert sum(map(len, parts.values())) == len(whole)
    again = build_dataset(section, split)  # type: ignore[arg-type]
    assert [row["text"] for row in again] == [row["text"] for row in parts[split]]
    assert again.fingerprint == parts[split].fingerprint
    assert len({own.fingerprint for own in (*parts.values(), whole)}) == 3


def test_what_cannot_be_held_out(tmp_path: Path) -> None:
    path = write(tmp_path / "book.txt", b"One.\n\nTwo.\n")
    with pytest.raises(DataError, match=r"data\.holdout is 0\.1, .*book\.txt"):
        len(build_dataset({"train": path, "holdout": 0.1}))
    assert len(build_dataset({"train": path, "holdout": 0.1, "split_documents": "blank_lines"}, "validation")) == 1
    with pytest.raises(ConfigError, match=r"validation and holdout 0.1 are both given"):
        build_dataset({"train": path, "holdout": 0.1, "validation": path})


def test_line_numbers_count_blank_lines(tmp_path: Path) -> None:
    data = RecordDataset(write(tmp_path / "a.jsonl", b'\n{"text":"x"}\r\n\r\n\n{"text":"y"}'))
    assert [record["source"].rsplit(":", 1)[1] for record in data] == ["2", "5"]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py"])
def test_plain_text_by_file_and_by_paragraph(name: str, tmp_path: Path) -> None:
    content = "a b\nc\n\n\r\n  \nd\n\ne é"
    path = write(tmp_path / name, b"\xef\xbb\xbf" + content.encode())
    assert texts(RecordDataset(path)) == [content]
    data = RecordDataset(path, ReadingConfig(split_documents="blank_lines"))
    assert texts(data) == ["a b\nc", "d", "e é"]
    assert [record["source"] for record in data] == [f"{path}:1", f"{path}:6", f"{path}:8"]


def test_files_globs_folders(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for number, name in enumerate(["b.jsonl", "a.jsonl", "sub/c.txt"]):
        write(tmp_path / name, lines([{"text": str(number)}]))
    write(tmp_path / "sub/notes.bin", b"")
    assert texts(RecordDataset(str(tmp_path / "*.jsonl"))) == ["1", "0"]
    assert [Path(path).name for path in expand(str(tmp_path))] == ["a.jsonl", "b.jsonl", "c.txt"]
    assert len(expand([str(tmp_path / "a.jsonl"), str(tmp_path / "*.jsonl")])) == 2
    with pytest.raises(DataError, match=r"/\*\.zip'"):
        expand(str(tmp_path / "*.zip"))
    with pytest.raises(DataError, match=r"'no/such' does not exist.*write hf:no/such"):
        expand("no/such")
    with pytest.raises(DataError, match=r"notes\.bin .*data\.format"):
        len(RecordDataset(str(tmp_path / "sub/notes.bin")))
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"/none .*\.jsonl"):
        expand(str(tmp_path / "none"))


def test_saved_datasets_folder(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    assert texts(RecordDataset(str(tmp_path / "saved"))) == TEXTS


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "json_text"])
def test_conversations(kind: str, tmp_path: Path) -> None:
    if kind == "jsonl":
        path = write(tmp_path / "c.jsonl", lines(CHAT))
    elif kind == "parquet":
        rows = [{"messages": row["messages"], "tools": row.get("tools")} for row in CHAT]
        rows[1]["messages"] = [{"role": "user", "content": "2", "name": "u"}]
        path = parquet(tmp_path / "c.parquet", pa.Table.from_pylist(rows))
    else:
        path = write(
            tmp_path / "c.jsonl",
            lines([{k: json.dumps(v) for k, v in row.items()} for row in CHAT]),
        )
    data = RecordDataset(path, ReadingConfig(mode="chat"))
    first, second = data[0], data[1]
    assert first["messages"] == CHAT[0]["messages"]
    assert first["tools"] == [{"name": "f"}]
    assert first["text"] is None
    assert second["tools"] is None
    assert second["messages"][0]["content"] == "2"


BAD: dict[str, tuple[bytes, str, str]] = {
    "invalid_utf8": (b'{"text":"a\xff"}', "invalid_utf8", "byte 10 of the line is not valid UTF-8"),
    "malformed": (b'{"text":', "malformed_json", "not valid JSON"),
    "deep": (b"[" * 100_000, "malformed_json", "not valid JSON"),
    "array": (b"[1]", "not_an_object", "a JSON list, not an object"),
    "missing": (b'{"txt":"a"}', "missing_key", "no 'text', only txt"),
    "null": (b'{"text":null}', "missing_key", "no 'text'"),
    "type": (b'{"text":7}', "wrong_type", "'text' is a int, not a string"),
    "surrogate": (b'{"text":"ab\\ud800"}', "invalid_unicode", "half a surrogate pair at character 2"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("check", ["at_start", "on_read"])
def test_bad_records_stop_with_file_and_line_or_are_counted(kind: str, check: Any, tmp_path: Path) -> None:
    line, reason, message = BAD[kind]
    path = write(tmp_path / "a.jsonl", b'{"text":"good"}\n\n' + line + b'\n{"text":"too"}\n')
    with pytest.raises(DataError, match="on_bad_record=skip") as caught:
        list(RecordDataset(path, ReadingConfig(check_records=check)))
    assert f"{path}:3: " in str(caught.value)
    assert message in str(caught.value)
    data = RecordDataset(path, ReadingConfig(check_records=check, on_bad_record="skip"))
    records = list(data)
    assert data.skipped == {reason: 1}
    if check == "at_start":
        assert [record["text"] for record in records] == ["good", "too"]
    else:
        assert [record["loss_multiplier"] for record in records] == [1.0, 0.0, 1.0]
        assert records[1]["skip_reason"] == reason
        assert records[1]["text"] == ""


BAD_CHATS = {
    "wrong_type": {"messages": 3},
    "bad_message": {"messages": [{"role": "user", "content": "x"}, {"content": "y"}]},
    "malformed_json": {"messages": "hello"},
    "invalid_unicode": {"messages": [{"role": "user", "content": "\ud800"}]},
    "missing_key": {"conversation": []},
}


@pytest.mark.parametrize("reason", BAD_CHATS)
def test_bad_conversations(reason: str, tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", lines([*CHAT, BAD_CHATS[reason]]))
    with pytest.raises(DataError, match=r"c\.jsonl:3: "):
        len(RecordDataset(path, ReadingConfig(mode="chat")))
    data = RecordDataset(path, ReadingConfig(mode="chat", on_bad_record="skip"))
    assert len(data) == 2
    assert data.skipped == {reason: 1}


def test_tools_of_the_wrong_type(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", lines([{**CHAT[0], "tools": 5}]))
    with pytest.raises(DataError, match=r"c\.jsonl:1: 'tools' is a int"):
        len(RecordDataset(path, ReadingConfig(mode="chat")))
    assert RecordDataset(path, ReadingConfig(mode="chat", tools_key=None))[0]["tools"] is None


def test_empty_documents_are_counted_and_never_stop_a_run(tmp_path: Path) -> None:
    data = RecordDataset(write(tmp_path / "a.jsonl", lines([{"text": " \n"}, {"text": "x"}]) + b"   \n"))
    assert texts(data) == ["x"]
    assert data.skipped == {"empty": 2}
    with pytest.raises(DataError, match=r"b\.jsonl\.$"):
        len(RecordDataset(write(tmp_path / "b.jsonl", b"")))
    with pytest.raises(DataError, match=r"no usable record .*\(skipped: {'empty': 1}\)"):
        len(RecordDataset(write(tmp_path / "b.txt", b"\n\n")))


def test_invalid_utf8_in_plain_text_names_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"one\n\ntwo\nbad \xff here\n")
    with pytest.raises(DataError, match=r"a\.txt:1: line 4 is not valid UTF-8"):
        len(RecordDataset(path))
    with pytest.raises(DataError, match=r"a\.txt:3: line 4 is not valid UTF-8"):
        len(RecordDataset(path, ReadingConfig(split_documents="blank_lines")))


def test_invalid_utf8_in_arrow(tmp_path: Path) -> None:
    values = pa.array([b"ok", b"\xff\xfe"], pa.binary())
    # Files from other writers may carry such bytes in a string column; build one without validation.
    column = pa.Array.from_buffers(pa.string(), 2, values.buffers())
    path = arrow(tmp_path / "a.arrow", pa.table({"text": column}), stream=False)
    with pytest.raises(DataError, match=r"a\.arrow:2: byte 0 .*UTF-8"):
        len(RecordDataset(path))


def test_files_that_are_not_what_they_seem(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(DataError, match=rf"{name} .*readable"):
            len(RecordDataset(write(tmp_path / name, b"not columns")))
    for name, packed in [("g.jsonl.gz", gzip.compress(lines(ROWS))), ("x.jsonl.xz", lzma.compress(lines(ROWS)))]:
        with pytest.raises(DataError, match=rf"{name} .*compressed"):
            len(RecordDataset(write(tmp_path / name, packed[:-12])))
    with pytest.raises(DataError, match=r"z\.jsonl\.zst .*compressed"):
        len(RecordDataset(write(tmp_path / "z.jsonl.zst", b"not zstd at all")))
    with pytest.raises(DataError, match=r"b\.parquet .*'text'; it has a"):
        len(RecordDataset(parquet(tmp_path / "b.parquet", pa.table({"a": [1]}))))
    twice = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    for file in (parquet(tmp_path / "two.parquet", twice), arrow(tmp_path / "two.arrow", twice, stream=False)):
        with pytest.raises(DataError, match=r"two\.\w+ .*one column 'text'"):
            len(RecordDataset(file))
    with pytest.raises(DataError, match=r"t\.json .*JSON array"):
        len(RecordDataset(write(tmp_path / "t.json", b'[{"text": "a"},')))
    with pytest.raises(ConfigError, match=r"a\.txt .*data\.mode=text"):
        len(RecordDataset(write(tmp_path / "a.txt", b"x"), ReadingConfig(mode="chat")))


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines(ROWS))
    data = RecordDataset(path).prepare()
    write(tmp_path / "a.jsonl", b"")
    with pytest.raises(DataError, match=r"a\.jsonl .*shorter"):
        data[4]


@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet"])
def test_a_huge_document_is_split_between_characters(kind: str, tmp_path: Path) -> None:
    body = "漢字とemoji🙂 " * 200_000
    if kind == "jsonl":
        path = write(tmp_path / "a.jsonl", lines([{"text": "first"}, {"text": body}, {"text": "last"}]))
    elif kind == "txt":
        path = write(tmp_path / "a.txt", body.encode())
    else:
        path = parquet(tmp_path / "a.parquet", pa.table({"text": ["first", body, "last"]}))
    data = RecordDataset(path, ReadingConfig(max_document_bytes=1 << 16))
    found = texts(data)
    if kind != "txt":
        assert (found[0], found[-1]) == ("first", "last")
        found = found[1:-1]
    assert "".join(found) == body
    assert max(len(piece.encode()) for piece in found) <= 1 << 16
    assert len(found) < 1.2 * len(body.encode()) / (1 << 16)


def test_long_documents_by_policy(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines([{"text": "short"}, {"text": "x" * 100}, {"text": "é" * 9}]))
    data = RecordDataset(path, ReadingConfig(max_document_bytes=64, long_documents="skip"))
    # The escaped line of the third document is longer than the limit, the document itself is not.
    assert texts(data) == ["short", "é" * 9]
    assert data.skipped == {"too_long": 1}
    with pytest.raises(DataError, match=r"a\.jsonl:2: .*100 bytes.*long_documents=skip"):
        len(RecordDataset(path, ReadingConfig(max_document_bytes=64, long_documents="error")))
    chat = write(tmp_path / "c.jsonl", lines([*CHAT, {"messages": [{"role": "user", "content": "x" * 200}]}]))
    data = RecordDataset(chat, ReadingConfig(mode="chat", max_document_bytes=128))
    assert len(data) == 2
    assert data.skipped == {"too_long": 1}


@given(text=st.text(max_size=300), limit=st.integers(16, 40))
@settings(max_examples=100, deadline=None)
def test_spans_cover_the_text_and_stay_valid(text: str, limit: int) -> None:
    data = text.encode()
    pieces = [data[start:end] for start, end in split_spans(data, 0, len(data), limit)]
    assert b"".join(pieces) == data
    assert all(len(piece) <= limit for piece in pieces)
    assert "".join(piece.decode() for piece in pieces) == text


@given(raw=st.lists(st.sampled_from(["a", "bb", "", "\r", " ", "\n"]), max_size=20))
@settings(max_examples=100, deadline=None)
def test_line_index_agrees_with_splitting(raw: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    content = "\n".join(raw).encode()
    path = tmp_path_factory.mktemp("index") / "a"
    path.write_bytes(content)
    index = SpanIndex(str(path), Lines, None)
    wanted = [(n, line) for n, line in enumerate(content.split(b"\n"), 1) if line not in (b"", b"\r")]
    file = RandomAccessFile(str(path))
    found = [(index.line(i), file.read(*index.span(i))) for i in range(len(index))]
    assert found == wanted


PIECES = ["a", "bb ", "\n", "\n\n", "\r\n", "\r", " ", "\t", "\n \n", "\ufeff", "word word word"]


def paragraphs_by_regex(content: bytes, limit: int) -> list[tuple[int, int]]:
    """Blank lines as an expression, over the whole text at once."""
    start, spans = 3 if content.startswith(b"\xef\xbb\xbf") else 0, []
    for gap in re.finditer(rb"\r?\n(?:[ \t\r]*\n)+", content):
        if gap.start() > start:
            spans.append((start, gap.start()))
        start = gap.end()
    if start < len(content):
        spans.append((start, len(content)))
    return [piece for begin, end in spans for piece in split_spans(content, begin, end, limit)]


@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=40),
    block=st.integers(3, 40),
    limit=st.sampled_from([16, 20, 1000]),
)
@settings(max_examples=300, deadline=None)
def test_records_do_not_depend_on_the_blocks_that_a_file_is_read_in(
    pieces: list[str], block: int, limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = "".join(pieces).encode()
    path = tmp_path_factory.mktemp("blocks") / "a"
    path.write_bytes(content)

    def found(scanner: type, most: int | None = None) -> list[tuple[int, int]]:
        parts = [spans for spans, _ in find_spans(str(path), scanner(), most)]
        return [(int(a), int(b)) for starts, ends in parts for a, b in zip(starts, ends, strict=True)]

    with pytest.MonkeyPatch.context() as patch:
        whole = [found(scanner) for scanner in (Lines, Paragraphs, Whole)]
        patch.setattr(spans_module, "BLOCK", block)
        assert [found(scanner) for scanner in (Lines, Paragraphs, Whole)] == whole
        assert found(Paragraphs, limit) == paragraphs_by_regex(content, limit)


def test_a_large_files_index_lies_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens the file again, or gets the reader by pickle, reads it there; a changed file has another."""
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_text("".join(f"paragraph {i}\n\n" for i in range(5000)))
    options = ReadingConfig(split_documents="blank_lines", cache_dir=str(cache))
    small = RecordDataset(str(path), options)
    expected = [small[i] for i in (0, 1, 2500, 4999)]
    assert not cache.exists()
    monkeypatch.setattr(readers, "INDEX_ON_DISK", 1000)
    large = RecordDataset(str(path), options)
    assert large.fingerprint == small.fingerprint
    (stored,) = cache.iterdir()
    assert stored.stat().st_size == 16 * 5000 + 8 * -(-path.stat().st_size // LINE_BLOCK)
    assert len(pickle.dumps(large.prepare())) < 20_000
    for data in (large, pickle.loads(pickle.dumps(large)), RecordDataset(str(path), options)):
        assert [data[i] for i in (0, 1, 2500, 4999)] == expected
    assert list(cache.iterdir()) == [stored]
    path.write_text("other\n\ntext, and enough of it\n\n" * 500)
    assert RecordDataset(str(path), options)[999]["source"] == f"{path}:1999"
    assert len(list(cache.iterdir())) == 2


def test_an_index_that_cannot_be_stored_is_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").write_text("no folder")
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo\n\nthree")
    monkeypatch.setattr(readers, "INDEX_ON_DISK", 1)
    options = ReadingConfig(split_documents="blank_lines", cache_dir=str(tmp_path / "taken"))
    assert [r["text"] for r in RecordDataset(str(path), options)] == ["one", "two", "three"]


def test_many_records_take_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays is less than a byte of each, and finding them takes the memory of some blocks."""
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{n:>20}\n\n" for n in range(100_000)))
    monkeypatch.setattr(readers, "INDEX_ON_DISK", 1 << 20)
    options = ReadingConfig(split_documents="blank_lines", cache_dir=str(tmp_path / "cache"), check_records="on_read")
    RecordDataset(__file__, options).prepare()
    gc.collect()
    tracemalloc.start()
    data = RecordDataset(str(path), options).prepare()
    assert data.fingerprint
    stays, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(data), data[76_543]["text"].strip()) == (100_000, "76543")
    assert data[76_543]["source"] == f"{path}:{2 * 76_543 + 1}"
    assert stays < 100_000
    assert most < 24 << 20


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=30), limit=st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_joined_records_keep_documents_apart(
    sizes: list[int], limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("join") / "a.txt"
    path.write_text("\n\n".join("x" * size for size in sizes))
    data = RecordDataset(str(path), ReadingConfig(split_documents="blank_lines", join_to_bytes=limit))
    records = list(data)
    rows = flatten_documents(records)
    assert [len(row["text"]) for row in rows] == sizes
    assert [row["idx"] for row in rows] == list(range(len(sizes)))
    totals = [sum(len(row["text"]) for row in record["documents"]) for record in records]
    assert all(t <= limit or len(r["documents"]) == 1 for t, r in zip(totals, records, strict=True))
    # Greedy: a group and the next document never fit together.
    firsts = [len(record["documents"][0]["text"]) for record in records]
    assert all(total + first > limit for total, first in zip(totals, firsts[1:], strict=False))


def test_padding_index_gives_a_record_that_counts_for_nothing(tmp_path: Path) -> None:
    data = RecordDataset(write(tmp_path / "a.jsonl", lines(ROWS)))
    assert data[PAD_INDEX]["loss_multiplier"] == 0.0
    with pytest.raises(IndexError, match=r"Record 5 .* 5 records"):
        data[5]


def test_fingerprint_follows_the_data(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines(ROWS))
    first = RecordDataset(path).fingerprint
    assert RecordDataset(path).fingerprint == first
    assert RecordDataset(path, ReadingConfig(cache_dir=str(tmp_path))).fingerprint == first
    assert RecordDataset(path, ReadingConfig(join_to_bytes=9)).fingerprint != first
    write(tmp_path / "a.jsonl", lines([{"text": "ONE", "other": 1}, *ROWS[1:]]))
    assert RecordDataset(path).fingerprint != first


def test_memory_holds_offsets_not_text(tmp_path: Path) -> None:
    body = "x" * 4000
    path = write(tmp_path / "a.jsonl", lines([{"text": body}] * 500))
    data = RecordDataset(path).prepare()
    list(data)
    assert len(pickle.dumps(data)) < 500 * 64


def test_build_from_a_config(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines([{"body": "x"}]))
    config = DataConfig(train=[path], text_key="body")
    assert texts(build_dataset(config)) == ["x"]
    assert texts(build_dataset({"train": path, "text_key": "body"})) == ["x"]
    assert build_dataset(DataConfig(train=path, tools_key=None)).options.tools_key is None
    with pytest.raises(ConfigError, match=r"data\.validation"):
        build_dataset(config, "validation")


def test_cache_folders_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LIMBECK_CACHE", "~/shared")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines([{"text": "one"}])))
    for option, folder in ((None, tmp_path / "shared" / "data"), ("~/own", tmp_path / "own")):
        assert texts(RecordDataset(str(tmp_path / "a.jsonl.gz"), {"cache_dir": option})) == ["one"]
        assert list(folder.iterdir())


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"text": "a"}\n'))
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "below", "/proc/limbeck"):
        with pytest.raises(DataError, match=r"unpacked .*data\.cache_dir"):
            RecordDataset(str(packed), ReadingConfig(cache_dir=str(folder))).prepare()


def test_an_arrow_file_that_asks_for_more_memory_than_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(source: Any) -> None:
        raise pa.ArrowMemoryError("malloc of size 562949953421440 failed")

    path = tmp_path / "a.arrow"
    path.write_bytes(b"ARROW1")
    monkeypatch.setattr(pa.ipc, "open_file", exhausted)
    with pytest.raises(DataError, match=r"a\.arrow .*562949953421440"):
        RecordDataset(str(path)).prepare()


def test_an_arrow_file_whose_columns_have_no_names(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, pa.schema({"text": pa.string()})) as writer:
        writer.write_table(pa.table({"text": ["a"]}))
    whole = path.read_bytes()
    assert whole.count(b"text") == 1
    path.write_bytes(whole.replace(b"text", b"te\xfft"))
    with pytest.raises(DataError, match="Arrow file: 'utf-8' codec"):
        RecordDataset(str(path)).prepare()


def test_a_damaged_arrow_file_is_an_error(tmp_path: Path) -> None:
    """Offsets that point outside of the buffers: Arrow would follow them."""
    path = tmp_path / "a.arrow"
    table = pa.table({"text": TEXTS})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    offsets = np.cumsum([0, *(len(text.encode()) for text in TEXTS)]).astype("<i4").tobytes()
    raw = path.read_bytes()
    assert raw.count(offsets) == 1
    at = raw.index(offsets) + 4
    path.write_bytes(raw[:at] + (1 << 30).to_bytes(4, "little") + raw[at + 4 :])
    with pytest.raises(DataError, match=r"a\.arrow .*damaged"):
        len(RecordDataset(str(path)))


@pytest.mark.parametrize("suffix", ["jsonl", "txt", "arrow"])
def test_few_of_many_files_are_open_at_once(tmp_path: Path, suffix: str) -> None:
    count = 300
    for i in range(count):
        path = tmp_path / f"{i:03d}.{suffix}"
        if suffix == "arrow":
            arrow(path, pa.table({"text": [f"text {i}"]}), stream=False)
        else:
            path.write_text(json.dumps({"text": f"text {i}"}) + "\n" if suffix == "jsonl" else f"text {i}")
    before = len(os.listdir("/proc/self/fd"))
    dataset = RecordDataset(str(tmp_path / f"*.{suffix}"))
    assert [dataset[i]["text"] for i in range(count)] == [f"text {i}" for i in range(count)]
    assert len(os.listdir("/proc/self/fd")) - before <= OPEN_FILES


def test_a_file_that_is_named_twice_is_read_once_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n', encoding="utf-8")
    config = DataConfig(train=[str(path), str(tmp_path / "*.jsonl")])
    assert config.detected_mode() == "text"
    assert len(RecordDataset(config.train, config.reading("train")).prepare()) == 2
    (told,) = caplog.messages
    assert told == f"data files that are named more than once are read once: {path}"


def test_a_packed_file_that_fills_the_disk_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("limbeck.utils.jsonl._EXPANSION_FREE", 1 << 20)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b" " * (8 << 20) + b'{"text": "x"}\n'))
    with pytest.raises(DataError):
        RecordDataset(str(tmp_path / "a.jsonl.gz"), {"cache_dir": str(tmp_path / "cache")})
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]


@pytest.mark.parametrize("column", ["text", "messages"])
def test_a_parquet_file_that_fills_the_disk_is_refused(tmp_path: Path, monkeypatch, column: str) -> None:
    monkeypatch.setattr("limbeck.utils.jsonl._EXPANSION_FREE", 1 << 20)
    path, text = tmp_path / "a.parquet", "a" * (1 << 16)
    rows = [text] * 200 if column == "text" else [[{"role": "user", "content": text}]] * 200
    pq.write_table(pa.table({column: rows}), path, compression="zstd", use_dictionary=False)
    options = {"cache_dir": str(tmp_path / "cache")}
    with pytest.raises(DataError):
        RecordDataset(str(path), options).prepare()
    assert not [one for one in (tmp_path / "cache").rglob("*") if one.is_file() and one.stat().st_size > 1 << 20]
    # a column that is not read costs nothing
    pq.write_table(pa.table({"text": ["one", "two"] * 50, "other": [text] * 100}), path, use_dictionary=False)
    assert len(RecordDataset(str(path), options).prepare()) == 100
