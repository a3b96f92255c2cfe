"""Traces for the collator's tests, and the checks that every batch must pass."""

from __future__ import annotations

import unicodedata
from typing import Any

import torch
from hypothesis import strategies as st

from limbeck.tokens import ByteVocab
from limbeck.traces.collate.batch import ComposerBatch
from limbeck.traces.schema import Message, ToolCall, Trace

TOOL_TEMPLATES = ("llama3_2", "qwen3", "qwen2_5", "mistral_nemo", "gptoss", "deepseek_v3")
"""Templates of the zoo that write tool calls and results."""

ALPHABET = st.sampled_from("abcXYZ0189 \n.,'\"{}<>|_-/äßéñ中文日本🙂")
SPECIALS = st.sampled_from(["<|im_end|>", "<|eot_id|>", "</s>", "[INST]", "<end_of_turn>", "<think>", "<|end|>"])


@st.composite
def texts(draw: st.DrawFn, specials: bool = True) -> str:
    """NFC text without white space at its edges; now and then with what some tokenizer takes for a special token."""
    parts = draw(st.lists(st.one_of(st.text(ALPHABET, min_size=1, max_size=12), SPECIALS if specials else ALPHABET)))
    text = unicodedata.normalize("NFC", "".join(parts)).strip()
    return text or "x"


@st.composite
def text_traces(draw: st.DrawFn) -> Trace:
    """A trace whose calls are written in the text, as any chat template can show it; one or more results failed."""
    messages = [Message(role="user", content=draw(texts()))]
    rounds = draw(st.integers(1, 4))
    failed = draw(st.sets(st.integers(0, rounds - 1), min_size=1))
    for number in range(rounds):
        call = ToolCall(id=f"call{number:05d}", name="run", arguments={}, in_content=True)
        messages.append(Message(role="assistant", content=draw(texts()), tool_calls=[call]))
        error = {"is_error": True, "error_kind": "nonzero_exit"} if number in failed else {}
        messages.append(Message(role="tool", content=draw(texts()), tool_call_id=call.id, **error))
    messages.append(Message(role="assistant", content=draw(texts())))
    return Trace(id="random", messages=messages, final_reward=1.0)


@st.composite
def tool_traces(draw: st.DrawFn) -> Trace:
    """A trace with real tool calls, one per message."""
    plain = draw(text_traces())
    messages = []
    for message in plain.messages:
        calls = [
            ToolCall(id=call.id, name="run", arguments={"command": draw(texts(specials=False))})
            for call in message.tool_calls
        ]
        messages.append(message.model_copy(update={"tool_calls": calls, "content": "" if calls else message.content}))
    return plain.model_copy(update={"messages": messages})


def gather(ids: torch.Tensor, index: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Entries of ids ``[N, T]`` at index ``[N, K]``; -100 where not valid."""
    return ids.gather(1, index.clamp(min=0)).masked_fill(~valid, -100)


def check_hint_rows(batch: ComposerBatch) -> None:
    """What must hold of every hint row of a self-teacher."""
    valid = batch["student_response_valid"]
    assert torch.equal(valid, batch["teacher_response_valid"])
    for ids, side in (("sdpo_student_input_ids", "student"), ("ctx_teacher_input_ids", "teacher")):
        index = batch[f"{side}_response_idx"]
        assert torch.equal(gather(batch[ids], index, valid), batch["target_ids"])
        assert torch.equal(batch[f"{side}_pred_pos"][valid], index[valid] - 1)
        assert bool((index[valid] >= 1).all())
        lengths = batch["sdpo_student_lengths" if side == "student" else "ctx_teacher_lengths"]
        assert torch.equal(index.max(1).values + 1, lengths), "a sequence ends with its target"
    assert torch.equal(batch["sdpo_loss_mask"].sum(1), valid.sum(1))
    assert torch.allclose(batch["weights"].sum(1), batch["site_weight"])
    for n in range(len(valid)):
        length = int(batch["sdpo_student_lengths"][n])
        student = batch["sdpo_student_input_ids"][n, :length]
        if batch["site_in_row"][n]:
            assert torch.equal(student, batch["input_ids"][batch["site_row"][n], :length])
        chunks = batch["sdpo_alignment_student_chunk_id"][n]
        assert torch.equal((chunks >= 0).nonzero().squeeze(1), batch["student_response_idx"][n][valid[n]])


def target_text(tokenizer: Any, batch: ComposerBatch, row: int) -> str:
    """Text of a hint row's target, special tokens left out."""
    ids = batch["target_ids"][row]
    return ByteVocab.from_tokenizer(tokenizer).join(ids[ids >= 0].tolist()).decode()


def teacher_text(tokenizer: Any, batch: ComposerBatch, row: int) -> str:
    ids = batch["ctx_teacher_input_ids"][row, : int(batch["ctx_teacher_lengths"][row])]
    return ByteVocab.from_tokenizer(tokenizer).join(ids.tolist()).decode()


def student_text(tokenizer: Any, batch: ComposerBatch, row: int) -> str:
    ids = batch["sdpo_student_input_ids"][row, : int(batch["sdpo_student_lengths"][row])]
    return ByteVocab.from_tokenizer(tokenizer).join(ids.tolist()).decode()
