"""Chat data under the keys that people use, and what a file holds by its first record."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from limbeck.data.forms import FORMS, chat_form
from limbeck.data.sources import DataConfig, RecordDataset, build_dataset
from limbeck.errors import DataError

ASKED = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
SYSTEM = {"role": "system", "content": "Be brief."}

RECORDS = {
    "messages": {"messages": ASKED},
    "prompt and completion": {"prompt": "Two and two?", "completion": "Four."},
    "prompt and completion in messages": {"prompt": ASKED[:1], "completion": ASKED[1:]},
    "prompt and response": {"prompt": "Two and two?", "response": "Four."},
    "Alpaca": {"instruction": "Two and two?", "input": "", "output": "Four."},
    "instruction and response": {"instruction": "Two and two?", "response": "Four."},
    "ShareGPT": {"conversations": [{"from": "human", "value": "Two and two?"}, {"from": "gpt", "value": "Four."}]},
    "ShareGPT with roles": {"conversations": ASKED},
    "question and answer": {"question": "Two and two?", "answer": "Four.", "id": 3},
}


def written(folder: Path, *records: object, name: str = "data.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize("form", RECORDS)
@pytest.mark.parametrize("mode", ["auto", "chat"])
def test_every_form_is_the_same_conversation(tmp_path: Path, caplog, form: str, mode: str) -> None:
    path = written(tmp_path, RECORDS[form], RECORDS[form])
    with caplog.at_level(logging.WARNING):
        data = RecordDataset(path, {"mode": mode}).prepare()
    assert [record["messages"] for record in data] == [ASKED, ASKED]
    said = [record.message for record in caplog.records]
    assert len(said) == (mode == "auto")
    assert all("is read as conversations" in line for line in said)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("form", ["Alpaca", "ShareGPT", "prompt and completion in messages"])
def test_columnar_files_give_the_columns_of_their_form(tmp_path: Path, kind: str, form: str) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.feather
    import pyarrow.parquet

    table, path = pa.Table.from_pylist([{**RECORDS[form], "other": 1}] * 2), str(tmp_path / f"data.{kind}")
    write = pyarrow.parquet.write_table if kind == "parquet" else pyarrow.feather.write_feather
    write(table, path, **({} if kind == "parquet" else {"compression": "uncompressed"}))
    data = RecordDataset(path, {"cache_dir": str(tmp_path / "cache")}).prepare()
    assert [record["messages"] for record in data] == [ASKED, ASKED]


def test_what_else_a_form_holds(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"instruction": "Add.", "input": "2, 2", "output": "4", "system": "Be brief."},
        {"instruction": "Say hi.", "input": None, "output": "hi"},
    )
    first, second = (record["messages"] for record in RecordDataset(path))
    assert first[:2] == [SYSTEM, {"role": "user", "content": "Add.\n\n2, 2"}]
    assert [message["content"] for message in second] == ["Say hi.", "hi"]


@pytest.mark.parametrize(
    ("record", "mode"),
    [
        ({"text": "words"}, "text"),
        ({"body": "words"}, "text"),
        ({"question": "?", "choices": ["a", "b"], "answer": 0}, "text"),
        ({"prompt": "?", "chosen": "a", "rejected": "b", "completion": "a"}, "text"),
        ({"message_log": ASKED}, "text"),
    ],
)
def test_what_is_no_conversation_stays_text(tmp_path: Path, record: dict, mode: str) -> None:
    assert RecordDataset(written(tmp_path, record)).options.mode == mode


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": "words", "messages": ASKED}, r"has text \('text'\) and a conversation \('messages'\); set data.mode"),
        ({"text": "words", "prompt": "a", "completion": "b"}, "set data.mode to text or to chat"),
        ({"prompt": "a", "completion": "b", "question": "a", "answer": "b"}, "more than one form of chat data"),
    ],
)
def test_what_is_ambiguous_is_refused_until_it_is_said(tmp_path: Path, record: dict, said: str) -> None:
    path = written(tmp_path, record)
    with pytest.raises(DataError, match=said):
        RecordDataset(path)
    if "text" in record:
        assert RecordDataset(path, {"mode": "text"})[0]["text"] == "words"


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": 3, "completion": "b"}, r"data.jsonl:2: 'prompt' is a int, neither text nor a list of messages"),
        ({"prompt": "a"}, r"data.jsonl:2: the record has no 'messages', only prompt"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "turn 0 of 'conversations' is from 'alien'"),
        ({"conversations": "no json"}, "'conversations' is text but not valid JSON"),
        ({"instruction": "a", "input": 3, "output": "b"}, "'input' is a int, not text"),
    ],
)
def test_damaged_records_name_file_and_line(tmp_path: Path, record: dict, said: str) -> None:
    data = RecordDataset(written(tmp_path, {"messages": ASKED}, record))
    with pytest.raises(DataError, match=said):
        data.prepare()


def test_an_empty_answer_is_a_counted_skip(tmp_path: Path) -> None:
    path = written(tmp_path, {"question": "a", "answer": "b"}, {"question": "a", "answer": ""})
    data = RecordDataset(path).prepare()
    assert (len(data), dict(data.skipped)) == (1, {"empty": 1})


def test_validation_is_read_as_training_is(tmp_path: Path) -> None:
    train, val = written(tmp_path, RECORDS["Alpaca"]), written(tmp_path, RECORDS["ShareGPT"], name="val.jsonl")
    config = DataConfig(train=train, validation=val)
    assert config.detected_mode() == "chat"
    assert [build_dataset(config, split)[0]["messages"] for split in ("train", "validation")] == [ASKED, ASKED]


def test_the_fingerprint_of_text_is_what_it_was(tmp_path: Path) -> None:
    path = written(tmp_path, {"text": "words"})
    assert RecordDataset(path).fingerprint == RecordDataset(path, {"mode": "text"}).fingerprint


def test_forms_tell_each_other_apart() -> None:
    for form in FORMS:
        assert chat_form([*form.needed, *form.optional], "here") is form
