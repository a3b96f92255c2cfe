"""Context that only a teacher reads: the student's side and the targets stay what they are, the teacher's rows grow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.continuations import Continuation, ContinuationCollator, Prompt
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.data.sources import ReadingConfig, RecordDataset
from limbeck.errors import DataError
from limbeck.tokens.chat.teacher_context import add_context
from tests.helpers.tokenizers import tiny, workshop
from tests.texts import TEXTS, unicode_text
from tests.zoo import tokenizer

PAIRS = [("llama3_2", "qwen3"), ("qwen3", "llama3_2"), ("smollm2", "gemma3"), ("gemma3", "smollm2")]
CHAT = [
    {"role": "user", "content": "What is 2011 + 1?"},
    {"role": "assistant", "content": "It is 2012."},
    {"role": "user", "content": "And the café?"},
    {"role": "assistant", "content": "Closed since 2011, 蒸馏!"},
]
EXAMPLE = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "It is 2."}]


def collator(student: Any, teacher: Any, **options: Any) -> CrossTokenizerCollator:
    lengths = {"ctx_length_student": 512, "ctx_length_teacher": 512}
    return CrossTokenizerCollator(
        student_tokenizer=student, teacher_tokenizer=teacher, chunks_as="layout", **{**lengths, **options}
    )


def same(a: Mapping[str, Any], b: Mapping[str, Any], keys: list[str]) -> bool:
    return all(torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key] for key in keys)


def check_teacher_rows_alone_change(plain: BatchedDataDict[Any], told: BatchedDataDict[Any]) -> int:
    """Tokens by which the context makes the first row longer."""
    own = [key for key in plain if not key.startswith(("teacher", "chunks", "alignment"))]
    assert same(plain, told, own)
    a, b = plain["chunks_0"], told["chunks_0"]
    for name in ("student_ids_M", "teacher_ids_Q", "student_chunk_M", "teacher_chunk_Q"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert torch.equal(plain["teacher_token_mask"].sum(1), told["teacher_token_mask"].sum(1)), "context is no target"
    return int(told["teacher_input_lengths"][0] - plain["teacher_input_lengths"][0])


@pytest.mark.parametrize("own", [[], [{"role": "system", "content": "Be brief."}]])
def test_a_template_that_leaves_instructions_out_has_the_context_in_the_question(own: list[dict[str, str]]) -> None:
    """Mistral's shows them only where a question is last, which no conversation with an answer is."""
    made = collator(tokenizer("qwen3"), tokenizer("mistral_nemo"), mode="chat")
    record = {"messages": [*own, *CHAT]}
    plain, told = made([record]), made([{**record, "teacher_context": "  It closed in 2011.\n"}])
    length = int(told["teacher_input_lengths"][0])
    ids = told["teacher_input_ids"][0, :length].tolist()
    shown = made.teachers[0].encoder.vocab.join(ids).decode()  # type: ignore[union-attr]
    assert shown.count("It closed in 2011.") == 1
    assert shown.index("It closed in 2011.") < shown.index("What is 2011 + 1?")
    assert torch.equal(plain["teacher_token_mask"].sum(1), told["teacher_token_mask"].sum(1)), "context is no target"
    assert told["skipped"][0]["context_in_question"] == 1
    assert "context_in_question" not in plain["skipped"][0]


@pytest.mark.parametrize(("s", "t"), PAIRS)
@settings(max_examples=25, deadline=None)
@given(text=unicode_text(200), context=unicode_text(200))
def test_a_text_is_aligned_as_without_context(s: str, t: str, text: str, context: str) -> None:
    made = collator(tokenizer(s), tokenizer(t), append_eos=True)
    # a first token that nothing predicts counts with context only, so that both sides have one in front here
    plain, told = made([{"text": text}]), made([{"text": text, "teacher_context": context}])
    more = check_teacher_rows_alone_change(plain, told)
    assert (more > 0) == bool(context)
    if more:
        size = int(plain["teacher_input_lengths"][0])
        begin = int(made.teachers[0].encoder.adds_bos)  # type: ignore[union-attr]
        want = plain["teacher_input_ids"][0, begin:size]
        assert torch.equal(told["teacher_input_ids"][0, begin + more : size + more], want)


@pytest.mark.parametrize("form", ["system", "user", "hint"])
@pytest.mark.parametrize("context", ["The café closed in 2011. <|im_end|>", EXAMPLE], ids=["text", "messages"])
@pytest.mark.parametrize(("s", "t"), PAIRS[:3])
def test_a_conversation_is_aligned_as_without_context(s: str, t: str, context: Any, form: Any) -> None:
    made = collator(tokenizer(s), tokenizer(t), mode="chat", context_as=form)
    for start in ([], [{"role": "system", "content": "Be brief."}]):
        record = {"messages": [*start, *CHAT]}
        told = made([{**record, "teacher_context": context}])
        assert check_teacher_rows_alone_change(made([record]), told) > 0
        assert told["skipped"] == made([record])["skipped"]


@pytest.mark.parametrize("empty", ["", None, []])
@pytest.mark.parametrize("mode", ["text", "chat"])
def test_empty_context_is_none_to_the_bit(empty: Any, mode: Any) -> None:
    record: dict[str, Any] = {"text": "It is 2012."} if mode == "text" else {"messages": CHAT}
    for teacher in (workshop(500), None):
        made = collator(workshop(400), teacher, mode=mode)
        plain, told = made([record]), made([{**record, "teacher_context": empty}])
        assert plain.keys() == told.keys()
        assert same(plain, told, [key for key in plain if key != "chunks_0"])


@pytest.mark.parametrize("mode", ["text", "chat"])
def test_a_teacher_with_the_students_tokenizer_has_rows_of_its_own_where_a_record_has_context(mode: Any) -> None:
    record: dict[str, Any] = {"text": "It is 2012."} if mode == "text" else {"messages": CHAT}
    made = collator(workshop(400), None, mode=mode)
    alone, told = made([record]), made([record, {**record, "teacher_context": "Count."}])
    assert "teacher_input_ids" not in alone
    size = int(alone["input_lengths"][0])
    # one without context is read as the student reads it
    assert torch.equal(told["teacher_input_ids"][0, :size], alone["input_ids"][0])
    assert int(told["teacher_input_lengths"][0]) == size < int(told["teacher_input_lengths"][1])
    chunks = told["chunks_0"]
    assert torch.equal(chunks.student_ids_M, chunks.teacher_ids_Q)


def test_neighbours_of_one_role_are_joined_and_examples_are_no_targets() -> None:
    own = workshop(400)
    from_text = add_context([{"role": "system", "content": "A"}, *CHAT[:2]], "B", "system", own)
    assert from_text.messages[0]["content"] == "A\n\nB"
    assert from_text.origin == [0, 1, 2]
    in_front = add_context(CHAT[:2], "B", "user", own)
    assert [m["role"] for m in in_front.messages] == ["user", "assistant"]
    assert in_front.messages[0]["content"] == "B\n\nWhat is 2011 + 1?"
    shown = add_context(CHAT[:2], EXAMPLE, "system", own)
    assert [m["content"] for m in shown.messages[:2]] == ["What is 1 + 1?", "It is 2."]
    assert shown.origin == [-1, -1, 0, 1]
    assert shown.messages[1]["supervise"] is False
    hinted = add_context(CHAT[:3], "B", "hint", own, to_come=True)
    assert hinted.messages[:2] == CHAT[:2], "before the answer that follows, not before an earlier one"
    assert "B" in hinted.messages[-1]["content"]
    parts = [{"type": "text", "text": "A"}]
    joined = add_context([{"role": "system", "content": parts}], "B", "system", own)
    assert joined.messages[0]["content"] == [*parts, {"type": "text", "text": "B"}]


@pytest.mark.parametrize("mode", ["text", "chat"])
def test_context_that_leaves_no_room_is_counted_and_leaves_its_record_out(mode: Any) -> None:
    record: dict[str, Any] = {"text": "It is 2012."} if mode == "text" else {"messages": CHAT[:2]}
    for teacher in (tiny(340) if mode == "text" else workshop(500), None):
        for more in ({}, {"long_documents": "split"}):
            made = collator(workshop(400), teacher, mode=mode, ctx_length_teacher=60, **more)
            batch = made([{**record, "teacher_context": "many words " * 60}, record])
            assert batch["sample_mask"].tolist() == [0, 1]
            assert batch["skipped"][0]["context_too_long"] == 1
        made = collator(workshop(400), teacher, mode=mode, ctx_length_teacher=60, long_documents="error")
        with pytest.raises(DataError):
            made([{**record, "teacher_context": "many words " * 60}])


@settings(max_examples=20, deadline=None)
@given(words=st.integers(1, 3))
def test_a_long_text_is_split_so_that_every_piece_fits_behind_the_context(words: int) -> None:
    text = " ".join(TEXTS.values())
    made = collator(tiny(300), tiny(340), ctx_length_student=48, ctx_length_teacher=48, long_documents="split")
    batch = made([{"text": text, "teacher_context": "a word " * words}])
    assert batch.size > 1
    assert int(batch["teacher_input_lengths"].max()) <= 48
    assert not any("truncated_tokens" in counts or "context_too_long" in counts for counts in batch["skipped"])
    ids = [batch["input_ids"][i, : batch["input_lengths"][i]].tolist() for i in range(batch.size)]
    joined = b"".join(made.student.encoder.vocab.join(own) for own in ids)
    assert joined == text.encode()


# ---- on what a student writes ----------------------------------------------------------------------------------------


def prompt_of(made: ContinuationCollator, record: dict[str, Any]) -> Prompt:
    (found,), skipped = made.prompts([record])
    assert not skipped
    return found


@pytest.mark.parametrize("same_tokens", [False, True])
@pytest.mark.parametrize("mode", ["text", "chat"])
def test_a_continuation_is_read_behind_the_context_by_teachers_alone(mode: Any, same_tokens: bool) -> None:
    teacher = None if same_tokens else workshop(500)
    own = collator(workshop(400), teacher, mode=mode)
    made = ContinuationCollator(own, prompt_tokens=6, max_new_tokens=40)
    record: dict[str, Any] = {"text": "The store counts parts."} if mode == "text" else {"messages": CHAT[:1]}
    ids = np.append(own.student.encoder.encode("look up 2012").ids, made.end_ids[-1])
    plain = prompt_of(made, record)
    told = prompt_of(made, {**record, "teacher_context": "It is secret."})
    assert (told.data, told.student.ids.tolist()) == (plain.data, plain.student.ids.tolist())
    told = Prompt.from_json(json.loads(json.dumps(told.as_json())))
    before, after = (made.batch([Continuation(p, ids, ended=True)]) for p in (plain, told))
    assert torch.equal(before["input_ids"], after["input_ids"])
    chunks = after["chunks_0"]
    side = made.apart.collator.teachers[0]
    assert side is not None
    size = int(after["teacher_input_lengths"][0])
    read = side.encoder.vocab.join(after["teacher_input_ids"][0, :size].tolist())
    assert b"It is secret." in read
    assert b"It is secret." not in own.student.encoder.vocab.join(after["input_ids"][0].tolist())
    if same_tokens:
        assert after["teacher_input_ids"][0, size - len(ids) : size].tolist() == ids.tolist()
    else:
        assert torch.equal(chunks.teacher_ids_Q, before["chunks_0"].teacher_ids_Q)
        assert torch.equal(chunks.student_ids_M, before["chunks_0"].student_ids_M)


def test_a_prompt_whose_context_leaves_no_room_is_counted() -> None:
    made = ContinuationCollator(
        collator(workshop(400), workshop(500), mode="chat", ctx_length_teacher=40), prompt_tokens=6, max_new_tokens=40
    )
    found, skipped = made.prompts([{"messages": CHAT[:1], "teacher_context": "many words " * 60}])
    assert (found, dict(skipped)) == ([], {"context_too_long": 1})


# ---- records ---------------------------------------------------------------------------------------------------------


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_records_keep_their_context(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question": "2+2?", "answer": "4", "solution": "Add."},
        {"question": "3", "answer": "3"},
    ]
    chat = RecordDataset(write(tmp_path / "c.jsonl", rows), ReadingConfig(teacher_context_key="solution"))
    assert [record.get("teacher_context") for record in chat] == ["Add.", None]
    texts = [{"text": "word " * 40, "teacher_context": "Know."}, {"text": "a", "teacher_context": " "}]
    path = write(tmp_path / "t.jsonl", texts)
    pieces = RecordDataset(path, ReadingConfig(max_document_bytes=64))
    assert [record.get("teacher_context") for record in pieces] == ["Know."] * (len(pieces) - 1) + [None]
    assert not any(
        "teacher_context" in record for record in RecordDataset(path, ReadingConfig(teacher_context_key=None))
    )


def test_columns_hold_context_too(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a", "b"], "teacher_context": ["x", None]}), tmp_path / "a.parquet")
    found = RecordDataset(str(tmp_path / "a.parquet"), ReadingConfig(cache_dir=str(tmp_path / "cache")))
    assert [record.get("teacher_context") for record in found] == ["x", None]


@pytest.mark.parametrize("value", [3, [{"content": "no role"}], {"a": 1}, ["a"]])
def test_context_of_another_kind_is_refused_with_its_line(tmp_path: Path, value: Any) -> None:
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT, "teacher_context": value}])
    with pytest.raises(DataError) as told:
        RecordDataset(path).prepare()
    assert f"{path}:1" in str(told.value)
    assert "teacher_context" in str(told.value)


def test_messages_in_front_of_a_text_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "a", "teacher_context": EXAMPLE}])
    with pytest.raises(DataError):
        RecordDataset(path).prepare()
    with pytest.raises(DataError):
        collator(tiny(300), tiny(340))([{"text": "a", "teacher_context": EXAMPLE}])
