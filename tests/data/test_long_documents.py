"""Long documents: in pieces that every side can hold, with nothing lost, doubled or changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from limbeck.algorithms.build import BYTES_PER_TOKEN, count_truncated, load_datasets, make_collator, reading_of
from limbeck.config import merge
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.data.sources import ReadingConfig, RecordDataset
from limbeck.data.spans import fitting_spans
from limbeck.errors import DataError
from limbeck.tokens import ByteVocab
from tests.helpers import runs
from tests.helpers.tokenizers import tiny
from tests.texts import TEXTS, unicode_text

STUDENT, TEACHER, COARSE = 300, 340, 420
PROSE = "\n".join(f"Line {n} tells of the alembic, of 2011 and of the café; 蒸馏 is old." for n in range(12))


def collator(**options: Any) -> CrossTokenizerCollator:
    made = {"ctx_length_student": 32, "ctx_length_teacher": 24, "long_documents": "split"} | options
    sizes = made.pop("teachers", TEACHER)
    tokenizers = [None if size is None else tiny(size) for size in sizes] if isinstance(sizes, list) else tiny(sizes)
    return CrossTokenizerCollator(student_tokenizer=tiny(STUDENT), teacher_tokenizer=tokenizers, **made)


def row_bytes(batch: Any, size: int, prefix: str = "") -> list[bytes]:
    """What the tokens of each row spell."""
    vocab = ByteVocab.from_tokenizer(tiny(size))
    rows = zip(batch[f"{prefix}input_ids"].tolist(), batch[f"{prefix}input_lengths"].tolist(), strict=True)
    return [vocab.join([i for i in ids[:n] if not vocab.special[i]]) for ids, n in rows]


# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contexts", [(32, 24), (24, 96), (96, 16)])
def test_rows_of_a_long_text_are_the_text(contexts: tuple[int, int]) -> None:
    student, teacher = contexts
    batch = collator(ctx_length_student=student, ctx_length_teacher=teacher)([{"text": PROSE, "idx": 7}])
    pieces = row_bytes(batch, STUDENT)
    assert b"".join(pieces) == PROSE.encode()
    assert pieces == row_bytes(batch, TEACHER, "teacher_")
    assert int(batch["input_lengths"].max()) <= student
    assert int(batch["teacher_input_lengths"].max()) <= teacher
    assert set(batch["idx"]) == {7}
    assert not any(batch["skipped"])
    # similar sizes: no last row of a word or two
    assert min(map(len, pieces)) * 3 > max(map(len, pieces))


def test_every_piece_is_tokenized_as_a_text_of_its_own() -> None:
    split = collator()([{"text": PROSE}])
    alone = collator(long_documents="cut")([{"text": piece.decode()} for piece in row_bytes(split, STUDENT)])
    for key, value in alone.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, split[key]), key


def test_a_text_that_fits_is_left_as_it_is() -> None:
    records = [{"text": "short"}, {"text": ""}, {"text": "In 2011 there were three."}]
    split, cut = (collator(long_documents=how)(records) for how in ("split", "cut"))
    assert split.keys() == cut.keys()
    for key, value in cut.items():
        assert torch.equal(value, split[key]) if isinstance(value, torch.Tensor) else value == split[key], key


def test_several_teachers_bound_the_pieces_together() -> None:
    make = collator(teachers=[TEACHER, None, COARSE], ctx_length_student=64, ctx_length_teacher=[64, 64, 12])
    batch = make([{"text": PROSE}, {"text": "short"}])
    assert b"".join(row_bytes(batch, STUDENT)[:-1]) == PROSE.encode()
    assert int(batch["teacher_2_input_lengths"].max()) <= 12
    assert (
        row_bytes(batch, TEACHER, "teacher_0_") == row_bytes(batch, COARSE, "teacher_2_") == row_bytes(batch, STUDENT)
    )


def test_the_last_piece_alone_ends_the_document() -> None:
    make = collator(append_eos=True)
    end = make.student.encoder.eos_id

    def ended(records: list[Any]) -> list[bool]:
        batch = make(records)
        lengths = batch["input_lengths"].tolist()
        return [ids[n - 1] == end for ids, n in zip(batch["input_ids"].tolist(), lengths, strict=True)]

    whole = ended([{"text": PROSE}])
    assert len(whole) > 3
    assert whole == [False] * (len(whole) - 1) + [True]
    assert not any(ended([{"text": PROSE, "continues": True}]))
    assert ended([{"text": "a", "continues": True}, {"text": "b"}]) == [False, True]


@given(text=unicode_text(400), student=st.integers(4, 24), teacher=st.integers(4, 24))
@settings(max_examples=60, deadline=None)
def test_any_text_comes_back(text: str, student: int, teacher: int) -> None:
    batch = collator(ctx_length_student=student, ctx_length_teacher=teacher)([{"text": text}])
    assert int(batch["input_lengths"].max()) <= student
    assert int(batch["teacher_input_lengths"].max()) <= teacher
    if not any("truncated" in counts for counts in batch["skipped"]):  # a character of more tokens than a context
        assert b"".join(row_bytes(batch, STUDENT)) == text.encode()


def test_a_character_that_no_context_holds_is_counted() -> None:
    batch = collator(ctx_length_student=2, ctx_length_teacher=2)([{"text": "a\U00010348b"}])
    assert sum(counts.get("truncated", 0) for counts in batch["skipped"]) == 1
    assert int(batch["input_lengths"].max()) <= 2


def test_cut_skip_and_error() -> None:
    records = [{"text": PROSE, "source": "a.txt:1"}, {"text": "short"}]
    cut = collator(long_documents="cut")(records)
    assert cut["skipped"][0]["truncated"] == 1
    assert PROSE.encode().startswith(row_bytes(cut, STUDENT)[0])
    skipped = collator(long_documents="skip")(records)
    assert skipped["skipped"][0]["too_long"] == 1
    assert skipped["sample_mask"].tolist() == [0.0, 1.0]
    with pytest.raises(DataError, match=r"a\.txt:1 .*context of 32 .*long_documents"):
        collator(long_documents="error")(records)


@given(text=st.text(min_size=1, max_size=200), room=st.integers(1, 20))
@settings(max_examples=80, deadline=None)
def test_spans_cover_the_text_between_characters(text: str, room: int) -> None:
    data = text.encode("utf-8", "replace")
    bytewise = np.arange(1, len(data) + 1)
    spans = fitting_spans(data, [bytewise, bytewise[3::4]], [room, room])
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == len(data)
    for start, end in spans:
        assert len(data[start:end].decode()) <= max(room, 1)


def test_spans_end_at_lines_or_words() -> None:
    data = TEXTS["code"].encode() * 4
    spans = fitting_spans(data, [np.arange(1, len(data) + 1)], [100])
    assert all(data[end - 1 : end] == b"\n" or data[end : end + 1] == b" " for _, end in spans[:-1])


# ---- records ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "parquet"])
def test_pieces_of_a_document_say_that_it_goes_on(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    if suffix == "txt":
        path.write_text(f"{PROSE}\n\nshort\n", encoding="utf-8")
    elif suffix == "jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in (PROSE, "short")), encoding="utf-8")
    else:
        pq.write_table(pa.table({"text": [PROSE, "short"]}), path)
    options = ReadingConfig(max_document_bytes=256, split_documents="blank_lines", cache_dir=str(tmp_path / "cache"))
    records = list(RecordDataset(str(path), options))
    *pieces, last = records
    assert "".join(record["text"] for record in pieces) == PROSE
    assert [record.get("continues", False) for record in records] == [True] * (len(pieces) - 1) + [False, False]
    assert last["text"].strip() == "short"


def test_records_are_as_long_as_the_contexts_ask_for(tmp_path: Path) -> None:
    runs.write_tokenizers(tmp_path)
    (tmp_path / "book.txt").write_text(PROSE * 9, encoding="utf-8")
    values = runs.settings(tmp_path, tmp_path / "run", data={"train": str(tmp_path / "book.txt"), "validation": None})
    values["checkpointing"].pop("metric_name")
    data = {"max_input_seq_length": 48, "max_teacher_seq_length": 64, "long_documents": "split"}
    config = runs.resolved(merge(values, {"data": data}))
    assert reading_of(config).max_document_bytes == 48 * BYTES_PER_TOKEN
    train, _ = load_datasets(config)
    # a text file without a blank line is no single record
    assert len(train) > 10
    assert "".join(record["text"] for record in train) == PROSE * 9
    batch = make_collator(config, tiny(STUDENT), [tiny(TEACHER)])(list(train))
    assert b"".join(row_bytes(batch, STUDENT)).decode() == PROSE * 9
    assert count_truncated(config, tiny(STUDENT), [tiny(TEACHER)], train) is None
    for other in ({"long_documents": "cut"}, {"max_document_bytes": 1 << 20}, {"mode": "chat"}):
        given = runs.resolved(merge(values, {"data": data | other})).data.model_copy(update=other)
        assert reading_of(config.model_copy(update={"data": given})).max_document_bytes == given.max_document_bytes
    losing = config.model_copy(update={"data": config.data.model_copy(update={"long_documents": "cut"})})
    whole, _ = load_datasets(losing)
    told = count_truncated(losing, tiny(STUDENT), [tiny(TEACHER)], whole)
    assert told is not None
    assert "cuts off 9" in told
    assert "long_documents: split" in told


def test_the_default_written_out_is_the_same_data(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n', encoding="utf-8")
    prints = {
        RecordDataset(str(path), options).fingerprint
        for options in ({}, {"max_document_bytes": 1 << 20}, {"long_documents": "cut"})
    }
    assert len(prints) == 1
    assert RecordDataset(str(path), {"max_document_bytes": 64}).fingerprint not in prints
