"""Rows of what a student wrote: its ids as sampled, the same bytes on both sides, everything else counted."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from limbeck.data.continuations import Continuation, ContinuationCollator, Prompt
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.errors import DataError
from limbeck.tokens import ByteTokenizer
from tests import zoo
from tests.helpers.tokenizers import TEXTS, tiny, workshop

STUDENT, TEACHER = ByteTokenizer.of(tiny(300)), ByteTokenizer.of(tiny(340))


def rows(teachers: Any = None, *, mode: Any = "text", size: int = 64, **more: Any) -> ContinuationCollator:
    student, others = (workshop(500), workshop(600)) if mode == "chat" else (tiny(300), tiny(340))
    collator = CrossTokenizerCollator(
        student_tokenizer=student,
        teacher_tokenizer=[others] if teachers is None else teachers,
        ctx_length_student=size,
        ctx_length_teacher=size,
        mode=mode,
        chunks_as="layout",
    )
    return ContinuationCollator(collator, **{"prompt_tokens": 8, "max_new_tokens": 24, **more})


def prompt(made: ContinuationCollator, text: str) -> Prompt:
    (found,), skipped = made.prompts([{"text": text, "idx": 3}])
    assert not skipped
    return found


def spelled(tokenizer: ByteTokenizer, ids: Any) -> bytes:
    return tokenizer.vocab.join([int(i) for i in ids])


def chunk_texts(batch: Any, made: ContinuationCollator) -> list[tuple[bytes, bytes]]:
    """Bytes of both sides of every chunk."""
    chunks = batch["chunks_0"]
    mine, theirs = made.vocab, made.collator.teachers[0].encoder.vocab  # type: ignore[union-attr]
    return [
        (
            mine.join(chunks.student_ids_M[chunks.student_chunk_M == c].tolist()),
            theirs.join(chunks.teacher_ids_Q[chunks.teacher_chunk_Q == c].tolist()),
        )
        for c in range(chunks.num_chunks)
    ]


def test_ids_are_kept_as_sampled_also_where_no_tokenizer_writes_them() -> None:
    made = rows()
    begin = prompt(made, TEXTS[0])
    # one token per byte: never what the tokenizer itself writes
    ids = np.array([STUDENT.vocab.token_bytes.index(bytes([b])) for b in b"the dog, "])
    assert ids.tolist() != STUDENT.encode("the dog, ").ids.tolist()
    batch = made.batch([Continuation(begin, ids, ended=False)])
    size = len(begin.student)
    assert batch["input_ids"][0, size:].tolist() == ids.tolist()
    assert batch["token_mask"][0, :size].sum() == 0
    texts = chunk_texts(batch, made)
    assert all(a == b for a, b in texts)
    whole = spelled(TEACHER, batch["teacher_input_ids"][0, : batch["teacher_input_lengths"][0]])
    assert whole == begin.data + b"the dog, "


def test_the_end_is_compared_by_its_role_or_not_at_all() -> None:
    for compare in (True, False):
        made = rows(compare_stops=compare)
        ids = np.append(STUDENT.encode(" and so on").ids, STUDENT.eos_id)
        batch = made.batch([Continuation(prompt(made, TEXTS[4]), ids, ended=True)])
        chunks = batch["chunks_0"]
        ends = [(int(chunks.student_ids_M[-1]), int(chunks.teacher_ids_Q[-1]))]
        assert (ends == [(STUDENT.eos_id, TEACHER.eos_id)]) == compare
        assert STUDENT.eos_id != TEACHER.eos_id
        assert bool(batch["token_mask"][0, -1]) == compare


def test_an_end_that_the_teacher_has_no_token_for_is_counted() -> None:
    made = rows()
    made.teacher_ends = [None]
    ids = np.append(STUDENT.encode(" and so on").ids, STUDENT.eos_id)
    batch = made.batch([Continuation(prompt(made, TEXTS[4]), ids, ended=True)])
    assert batch["skipped"][0]["stop_without_partner"] == 1
    assert STUDENT.eos_id not in batch["chunks_0"].student_ids_M.tolist()
    # it is still the student's own
    assert int(batch["input_ids"][0, -1]) == STUDENT.eos_id


def test_a_cut_answer_has_no_end_and_its_last_chunk_is_left_out() -> None:
    made = rows()
    begin, ids = prompt(made, TEXTS[0]), STUDENT.encode(" over the lazy dog").ids
    whole = made.batch([Continuation(begin, ids, ended=True)])
    cut = made.batch([Continuation(begin, ids, ended=False)])
    assert cut["chunks_0"].num_chunks == whole["chunks_0"].num_chunks - 1
    assert cut["skipped"][0]["cut_chunks"] == 1
    assert int(cut["teacher_input_ids"][0, -1]) != TEACHER.eos_id


def test_blanks_are_masked_and_counted() -> None:
    ids = np.concatenate([STUDENT.encode("a").ids, STUDENT.encode("    ").ids, STUDENT.encode("\nb").ids])
    found, counted = {}, {}
    for mask in (True, False):
        made = rows(mask_blanks=mask)
        batch = made.batch([Continuation(prompt(made, TEXTS[4]), ids, ended=True)])
        found[mask] = [a for a, _ in chunk_texts(batch, made)]
        counted[mask] = batch["skipped"][0].get("blank_chunks", 0)
    assert counted == {True: len(found[False]) - len(found[True]), False: 0}
    assert counted[True] > 0
    assert b"    " in b"".join(found[False])
    assert not any(text and not text.strip(b" \t") for text in found[True])
    assert [t for t in found[False] if t.strip(b" \t")] == found[True]


def test_blanks_are_compared_where_the_tokenizer_is_the_same() -> None:
    student = ByteTokenizer.of(workshop(500))
    ids = np.concatenate([student.encode("a").ids, student.encode("    ").ids, student.encode("\nb").ids])
    talk = [{"role": "user", "content": "Where is it?"}]
    blank = {}
    for size in (500, 600):
        made = rows([workshop(size)], mode="chat", size=96)
        (asked,), _ = made.prompts([{"messages": talk, "idx": 0}])
        batch = made.batch([Continuation(asked, ids, ended=True)])
        blank[size] = [a for a, _ in chunk_texts(batch, made) if a and not a.strip(b" \t")]
        assert bool(batch["skipped"][0].get("blank_chunks")) == (size == 600)
        # what is masked for a teacher is still the student's own text
        assert batch["token_mask"][0, len(asked.student) :].tolist() == [1] * len(ids)
    assert b"".join(blank[500]) == b"    "
    assert blank[600] == []


def test_bytes_that_are_no_text_are_spelled_and_a_special_inside_ends_the_comparison() -> None:
    made = rows()
    begin = prompt(made, TEXTS[3])
    byte = {b: STUDENT.vocab.token_bytes.index(bytes([b])) for b in (0xC3, 0xFF, 0x41)}
    batch = made.batch([Continuation(begin, np.array([byte[0x41], byte[0xFF], byte[0xC3], byte[0x41]]), ended=True)])
    assert b"".join(a for a, _ in chunk_texts(batch, made)) == b"A\xff\xc3A"
    inside = np.array([byte[0x41], STUDENT.eos_id, byte[0x41]])
    batch = made.batch([Continuation(begin, inside, ended=False)])
    assert batch["skipped"][0]["special_in_answer"] == 1
    assert [a for a, _ in chunk_texts(batch, made)] == [b"A"]
    assert batch["input_ids"][0, -3:].tolist() == inside.tolist()


def test_a_teacher_of_the_same_tokenizer_reads_the_ids_themselves() -> None:
    made = rows([None])
    ids = np.array([5, 9, 40, 7])
    batch = made.batch([Continuation(prompt(made, TEXTS[0]), ids, ended=False)])
    assert "teacher_input_ids" not in batch
    assert batch["token_mask"][0, -4:].tolist() == [1] * 4


def test_a_text_may_be_read_by_its_bytes_by_the_same_tokenizer_too() -> None:
    made = rows([tiny(300)])
    written = Continuation(prompt(made, TEXTS[0]), STUDENT.encode(" and more").ids, False)
    assert all(mine == theirs for mine, theirs in chunk_texts(made.batch([written]), made))


def test_a_conversation_is_answered_under_each_sides_own_template() -> None:
    made = rows(mode="chat", size=96, mask_blanks=False)
    talk = [{"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": "There."}]
    (found,), skipped = made.prompts([{"messages": talk, "idx": 0}])
    assert not skipped
    student, teacher = made.collator.student.encoder, made.collator.teachers[0].encoder  # type: ignore[union-attr]
    end = made.end_ids[0]
    ids = np.append(student.encode("Here it is.").ids, end)
    batch = made.batch([Continuation(found, ids, ended=True)])
    texts = chunk_texts(batch, made)
    assert b"".join(a for a, _ in texts) == b"Here it is."
    assert all(a == b for a, b in texts)
    header = teacher.vocab.join(found.teachers[0].ids.tolist())  # type: ignore[union-attr]
    assert b"assistant" in header
    assert b"There." not in header
    assert int(batch["chunks_0"].teacher_ids_Q[-1]) == made.teacher_ends[0]


def test_prompts_that_cannot_be_continued() -> None:
    with pytest.raises(DataError, match="record 7 is empty"):
        rows().prompts([{"text": "", "idx": 7}])
    chat = rows(mode="chat", size=96)
    with pytest.raises(DataError, match=r"record 1 .*answer"):
        chat.prompts([{"messages": [{"role": "assistant", "content": "x"}], "idx": 1}])
    long = [{"role": "user", "content": "word " * 200}]
    assert chat.prompts([{"messages": long, "idx": 1}]) == ([], Counter(prompt_too_long=1))
    chat.collator.skip_errors = True
    assert chat.prompts([{"messages": [], "idx": 1}])[1]["skipped_record"] == 1


def test_a_long_conversation_loses_its_earliest_messages_and_they_are_counted() -> None:
    made = rows(mode="chat", size=160)
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "shelf"}}}
    talk: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "word " * 60},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "oak " * 60},
        {"role": "assistant", "content": "Nothing there."},
        {"role": "user", "content": "Look again."},
    ]
    (found,), skipped = made.prompts([{"messages": talk, "idx": 0}])
    assert skipped == Counter(cut_messages=3)
    assert list(found.messages) == [talk[0], *talk[4:]]
    assert len(found.student) <= made.room
    # both sides read the same
    for side in (found.student, found.teachers[0]):
        assert side is not None
        assert b"Be brief." in side.source
        assert b"Look again." in side.source
        assert b"oak" not in side.source
    assert made.prompts([{"messages": talk[:4], "idx": 0}]) == ([], Counter(prompt_too_long=1))


def test_every_turn_of_a_conversation_is_a_prompt_behind_what_was_said_before_it() -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "shelf"}}}
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "An oak box."},
        {"role": "assistant", "content": "In the box."},
        {"role": "user", "content": "And the key?"},
        {"role": "assistant", "content": "There."},
        {"role": "assistant", "content": "Or there."},
    ]
    (last,), _ = rows(mode="chat", size=192).prompts([{"messages": talk, "idx": 5}])
    assert (list(last.messages), last.turn) == (talk[:5], 0)
    made = rows(mode="chat", size=192, turns="all", mask_blanks=False)
    found, skipped = made.prompts([{"messages": talk, "idx": 5}, {"messages": talk[:1], "idx": 6}])
    assert [list(prompt.messages) for prompt in found] == [talk[:1], talk[:3], talk[:5], talk[:1]]
    assert [(prompt.idx, prompt.turn) for prompt in found] == [(5, 0), (5, 1), (5, 2), (6, 0)]
    assert not skipped
    # each answer stands behind its own beginning on both sides, and nothing of the record's answer is a target
    student = made.collator.student.encoder
    ids = np.append(student.encode("Here it is.").ids, made.end_ids[0])
    batch = made.batch([Continuation(prompt, ids, ended=True) for prompt in found])
    chunks, teacher = batch["chunks_0"], made.collator.teachers[0].encoder.vocab  # type: ignore[union-attr]
    for row, prompt in enumerate(found):
        mine, theirs = (
            (chunks.student_ids_M, chunks.sample_C[chunks.student_chunk_M] == row),
            (chunks.teacher_ids_Q, chunks.sample_C[chunks.teacher_chunk_Q] == row),
        )
        assert made.vocab.join(mine[0][mine[1]].tolist()) == b"Here it is."
        assert teacher.join(theirs[0][theirs[1]].tolist()) == b"Here it is."
        size = len(prompt.student)
        assert batch["token_mask"][row].nonzero().flatten().tolist() == list(range(size, size + len(ids)))
    again = Prompt.from_json(json.loads(json.dumps(found[1].as_json())))
    assert again.turn == 1


@pytest.mark.parametrize("mode", ["text", "chat"])
def test_a_prompt_is_the_same_in_another_process(mode: str) -> None:
    made = rows(mode=mode, size=96)
    talk = [{"role": "user", "content": "Wo ist der Hörsaal?"}]
    (here,), _ = made.prompts([{"text": TEXTS[3], "messages": talk, "idx": 4, "loss_multiplier": 0.5}])
    there = Prompt.from_json(json.loads(json.dumps(here.as_json())))
    ids = np.append(made.collator.student.encoder.encode("Hier ist er.").ids, made.end_ids[0])
    one, other = (made.batch([Continuation(p, ids, ended=True)]) for p in (here, there))
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert repr(value) == repr(other[name]), name


def test_no_rows_are_a_batch_too() -> None:
    batch = rows().batch([])
    assert batch.size == 0
    assert torch.equal(batch["input_lengths"], torch.zeros(0, dtype=torch.int64))


# -- tool calls --------------------------------------------------------------------------------------------------------

WEATHER = {
    "name": "get_weather",
    "description": "Weather of a place.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
CALLED = {
    "qwen3": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>',
    "llama3_2": '{"name": "get_weather", "parameters": {"city": "Zürich", "days": 3}}',
    "mistral_nemo": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}, '
    '"id": "call00000"}]',
}
ENDS = {"qwen3": "<|im_end|>", "llama3_2": "<|eot_id|>", "mistral_nemo": "</s>"}
MARKER = "[TOOL_CALLS]"
"""A special token of Mistral's: it has no bytes that another tokenizer could read."""


class Calls:
    """An answer with a tool call, sampled by one family and read by others."""

    def __init__(self, student: str, teachers: list[str], **more: Any) -> None:
        self.student = zoo.tokenizer(student)
        collator = CrossTokenizerCollator(
            student_tokenizer=self.student,
            teacher_tokenizer=[zoo.tokenizer(name) for name in teachers],
            ctx_length_student=700,
            ctx_length_teacher=700,
            mode="chat",
            chunks_as="layout",
        )
        self.made = ContinuationCollator(collator, prompt_tokens=8, max_new_tokens=128, **more)
        self.end = self.student.convert_tokens_to_ids(ENDS[student])

    def batch(self, answer: str, *, ended: bool = True, **record: Any) -> Any:
        talk = [{"role": "user", "content": "How is the weather in Zürich?"}, {"role": "assistant", "content": "."}]
        tools = [{"type": "function", "function": WEATHER}]
        (asked,), _ = self.made.prompts([{"messages": talk, "tools": tools, "idx": 0, **record}])
        # as it comes from another rank
        asked = Prompt.from_json(json.loads(json.dumps(asked.as_json())))
        parts = [ByteTokenizer.of(self.student).encode(part).ids.tolist() for part in answer.split(MARKER)]
        marker = [self.student.convert_tokens_to_ids(MARKER)]
        said = [token for part in parts for token in (*marker, *part)][1:]
        ids = np.array([*said, self.end] if ended else said)
        batch = self.made.batch([Continuation(asked, ids, ended=ended)])
        size = len(asked.student)
        assert batch["input_ids"][0, size : size + len(ids)].tolist() == ids.tolist()
        return batch


@pytest.mark.parametrize(
    ("student", "teacher"),
    [("qwen3", "llama3_2"), ("llama3_2", "qwen3"), ("qwen3", "mistral_nemo"), ("mistral_nemo", "llama3_2")],
)
def test_a_teacher_reads_a_call_in_its_own_markup_and_is_asked_about_its_fields(student: str, teacher: str) -> None:
    calls = Calls(student, [teacher])
    plain = {"template_kwargs": {"enable_thinking": False}}
    batch = calls.batch(CALLED[student], **plain)
    read = zoo.tokenizer(teacher).decode(batch["teacher_input_ids"][0, : batch["teacher_input_lengths"][0]])
    assert read.rstrip("\n").endswith(CALLED[teacher] + ENDS[teacher])
    texts = chunk_texts(batch, calls.made)
    assert all(mine == theirs for mine, theirs in texts)
    said = b"".join(mine for mine, _ in texts)
    for part in (b"get_weather", b"city", "Zürich".encode(), b"days", b"3"):
        assert part in said
    # what only one side writes is not compared
    assert not any(word in said for word in (b"parameters", b"tool_call", b"TOOL_CALLS", b"call00000"))
    assert (b"arguments" in said) == ("llama3_2" not in (student, teacher))
    assert texts[-1] == (b"", b"")
    assert set(batch["skipped"][0]) == {"blank_chunks"}


def test_reasoning_and_content_in_front_of_a_call_are_told_from_it() -> None:
    calls = Calls("qwen3", ["llama3_2"])
    for front in ("<think>\nI need it.\n</think>\n\n", "<think>\nI need it.\n</think>\n\nLet me see.\n"):
        batch = calls.batch(front + CALLED["qwen3"])
        # this teacher's template writes neither
        assert batch["skipped"][0]["segment_missing"] >= 1
        assert "calls_in_student_markup" not in batch["skipped"][0]
        assert b"get" in b"".join(mine for mine, _ in chunk_texts(batch, calls.made))


def test_a_call_that_no_template_writes_is_read_as_it_is_and_counted() -> None:
    calls = Calls("qwen3", ["llama3_2"])
    batch = calls.batch(CALLED["qwen3"].replace(", ", ","), template_kwargs={"enable_thinking": False})
    assert batch["skipped"][0]["calls_in_student_markup"] == 1
    assert (b"</tool_call>", b"</tool_call>") in chunk_texts(batch, calls.made)


def test_a_teacher_with_the_students_tokenizer_reads_its_ids_beside_one_with_other_markup() -> None:
    calls = Calls("qwen3", ["llama3_2", "qwen3"], compare_stops=False)
    batch = calls.batch(CALLED["qwen3"], template_kwargs={"enable_thinking": False})
    first, second = batch["chunks_0"], batch["chunks_1"]
    assert second.num_chunks > first.num_chunks > 10
    assert second.student_ids_M.tolist() == second.teacher_ids_Q.tolist()
    assert calls.end not in second.student_ids_M.tolist() + first.student_ids_M.tolist()


def test_the_id_that_a_student_gave_its_call_is_kept() -> None:
    calls = Calls("mistral_nemo", ["qwen3"])
    other = CALLED["mistral_nemo"].replace("call00000", "Xy7abcde9")
    assert "special_in_answer" not in calls.batch(other)["skipped"][0]
    # an id that its own template would refuse
    counts = calls.batch(CALLED["mistral_nemo"].replace("call00000", "short"))["skipped"][0]
    assert counts["special_in_answer"] == counts["calls_in_student_markup"] == 1


def test_a_marker_where_no_template_puts_it_ends_the_comparison_with_other_tokenizers() -> None:
    calls = Calls("mistral_nemo", ["qwen3"])
    said = CALLED["mistral_nemo"].removeprefix(MARKER)
    for answer, read in ((f"Wait.{MARKER}{said}", b"Wait."), (said[:9] + MARKER + said[9:], said[:9].encode())):
        batch = calls.batch(answer)
        assert batch["skipped"][0]["special_in_answer"] == 1
        assert b"".join(mine for mine, _ in chunk_texts(batch, calls.made)) == read
    batch = calls.batch(CALLED["mistral_nemo"][:40], ended=False)
    assert batch["skipped"][0]["special_in_answer"] == 1
    assert batch["chunks_0"].num_chunks == 0


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("answer", [CALLED["mistral_nemo"], f"Wait. {MARKER}[no call"])
def test_a_teacher_with_the_students_tokenizer_is_asked_about_markers_too(answer: str, ended: bool) -> None:
    calls = Calls("mistral_nemo", ["qwen3", "mistral_nemo"], mask_blanks=False)
    chunks = calls.batch(answer, ended=ended)["chunks_1"]
    expected = calls.student(answer, add_special_tokens=False)["input_ids"]
    # the last chunk of an answer that was cut off is left out
    expected = [*expected, calls.end] if ended else expected[:-1]
    begin = calls.student.bos_token_id
    assert chunks.student_ids_M.tolist() == chunks.teacher_ids_Q.tolist() == [begin, *expected]
    assert chunks.num_chunks == len(expected) + 1


@pytest.mark.parametrize(("student", "teacher"), [("qwen3", "llama3_2"), ("llama3_2", "qwen3")])
def test_whatever_ends_a_students_turn_stands_against_the_end_of_its_teachers(student: str, teacher: str) -> None:
    calls = Calls(student, [teacher])
    ends = {calls.student.convert_ids_to_tokens(i): i for i in calls.made.end_ids}
    end_of_text = {"qwen3": "<|endoftext|>", "llama3_2": "<|end_of_text|>"}[student]
    assert set(ends) >= {ENDS[student], end_of_text}
    theirs = zoo.tokenizer(teacher).convert_tokens_to_ids(ENDS[teacher])
    for calls.end in ends.values():
        batch = calls.batch("It rains.", template_kwargs={"enable_thinking": False})
        chunks = batch["chunks_0"]
        assert (int(chunks.student_ids_M[-1]), int(chunks.teacher_ids_Q[-1])) == (calls.end, theirs)
        assert "stop_without_partner" not in batch["skipped"][0]
