"""Records and batches in the published form: ``message_log``, rows without lengths or masks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from limbeck.algorithms.xtoken_off_policy_distillation import XTOKEN_NON_STUDENT_SEQ_KEYS, check_widths
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.data.microbatch import get_microbatch_iterator, process_global_batch, process_microbatch
from limbeck.data.sources import ReadingConfig, RecordDataset
from limbeck.errors import DataError
from tests.helpers import tiny
from tests.helpers.tokenizers import workshop

LOG = [
    {"role": "user", "content": "What is an alembic? ", "token_ids": torch.tensor([1, 2, 3])},
    {"role": "assistant", "content": "A still.", "token_ids": torch.tensor([4])},
]
TEXT = "What is an alembic? A still."
PLAIN = [{"role": m["role"], "content": m["content"]} for m in LOG]


def test_a_record_is_read_as_text() -> None:
    """Its contents end to end; ids of one tokenizer are left aside."""
    rest = {"idx": 7, "loss_multiplier": 0.5, "length": 4, "extra_env_info": None}
    published = tiny.collator()([{"message_log": LOG, **rest}])
    own = tiny.collator()([{"text": TEXT, **rest}])
    for key in ("input_ids", "teacher_input_ids", "alignment_student_chunk_id", "sample_mask"):
        assert torch.equal(published[key], own[key])
    assert published["idx"] == [7]


def test_a_record_is_read_as_a_conversation() -> None:
    collate = CrossTokenizerCollator(
        student_tokenizer=workshop(400),
        teacher_tokenizer=None,
        ctx_length_student=256,
        ctx_length_teacher=256,
        mode="chat",
    )
    assert torch.equal(collate([{"message_log": LOG}])["input_ids"], collate([{"messages": PLAIN}])["input_ids"])


@pytest.mark.parametrize("mode", ["text", "chat"])
def test_files_may_hold_such_records(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"message_log": PLAIN, "task_name": "x"}) + "\n")
    (record,) = RecordDataset(str(path), ReadingConfig(mode=mode))
    assert (record["text"], record["messages"]) == ((TEXT, None) if mode == "text" else (None, PLAIN))


@pytest.mark.parametrize("log", ["no JSON", [], [{"content": "no role"}], [{"role": "user", "content": ["?"]}]])
def test_a_record_that_is_none_is_refused_or_skipped(log: object) -> None:
    with pytest.raises(DataError, match="message_log"):
        tiny.collator()([{"message_log": log, "idx": 3}])
    lenient = CrossTokenizerCollator(
        student_tokenizer=tiny.tokenizer(300),
        teacher_tokenizer=None,
        ctx_length_student=64,
        ctx_length_teacher=64,
        on_error="skip",
    )
    batch = lenient([{"message_log": log, "idx": 3}, {"text": "a still"}])
    assert batch["sample_mask"].tolist() == [0.0, 1.0]
    assert batch["skipped"][0]["skipped_record"] == 1


def test_rows_without_lengths_are_full() -> None:
    ids = torch.arange(12).reshape(3, 4)
    inputs = process_microbatch(BatchedDataDict(input_ids=ids), None, False, {}, 1)
    assert torch.equal(inputs.input_ids, ids)
    assert inputs.attention_mask is not None
    assert bool(inputs.attention_mask.all())
    made, count = get_microbatch_iterator(BatchedDataDict(input_ids=ids), {}, 2, None, None)
    assert count == 2
    assert [mb.processed_inputs.input_ids.shape[0] for mb in made] == [2, 1]
    with pytest.raises(DataError, match="has no 'input_lengths'"):
        process_microbatch(BatchedDataDict(input_ids=ids), None, True, {}, 1)


def test_without_a_token_mask_every_token_with_a_predictor_counts() -> None:
    mask = torch.tensor([1.0, 0.0, 1.0])
    batch = BatchedDataDict(input_ids=torch.zeros(3, 5, dtype=torch.long), sample_mask=mask)
    counted = process_global_batch(batch, None, None, batch_idx=0, batch_size=3)
    assert (float(counted["global_valid_seqs"]), float(counted["global_valid_toks"])) == (2.0, 8.0)
    batch["input_lengths"] = torch.tensor([2, 5, 1])
    counted = process_global_batch(batch, None, None, batch_idx=0, batch_size=3)
    assert float(counted["global_valid_toks"]) == 1.0


def test_what_lies_along_the_students_sequence_is_as_wide_as_it() -> None:
    batch = tiny.batch([0, 1])
    check_widths(batch)
    assert set(batch) > XTOKEN_NON_STUDENT_SEQ_KEYS
    widths = {batch[key].shape[1] for key in XTOKEN_NON_STUDENT_SEQ_KEYS}
    assert widths != {batch["input_ids"].shape[1]}
    batch["token_mask"] = batch["token_mask"][:, :-1]
    with pytest.raises(DataError, match="the batch entry 'token_mask' is"):
        check_widths(batch)
