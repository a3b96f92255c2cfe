"""What the published page of the cross-tokenizer collator states, by two small tokenizers."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from limbeck.align import TokenAligner
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.losses.distillation import CrossTokenizerDistillationLossFn
from limbeck.teachers.live import LiveTeacher
from tests.helpers import tiny
from tests.helpers.tokenizers import workshop

STUDENT, TEACHER = tiny.tokenizer(300), tiny.tokenizer(340)
TEXTS = ["the alembic is a still", "a vessel in which spirits are distilled, and then distilled again", "a"]
RECORDS: Any = [{"text": text, "idx": 7 + i, "loss_multiplier": 1.0 - i / 4} for i, text in enumerate(TEXTS)]
SIDES = pytest.mark.parametrize(("prefix", "tokenizer"), [("", STUDENT), ("teacher_", TEACHER)], ids=["mine", "theirs"])


def collator(**more: Any) -> CrossTokenizerCollator:
    published: dict[str, Any] = {
        "student_tokenizer": STUDENT,
        "teacher_tokenizer": TEACHER,
        "aligner": TokenAligner(STUDENT, TEACHER),
        "ctx_length_student": 64,
        "ctx_length_teacher": 80,
    }
    return CrossTokenizerCollator(**{**published, **more})


def test_all_arguments_go_by_name_alone() -> None:
    parameters = inspect.signature(CrossTokenizerCollator).parameters
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())
    assert parameters["make_seq_div_by_student"].default == parameters["make_seq_div_by_teacher"].default == 1
    for name in ("student_tokenizer", "ctx_length_student"):
        assert parameters[name].default is inspect.Parameter.empty


def test_it_takes_tokenizers_of_transformers() -> None:
    assert isinstance(STUDENT, PreTrainedTokenizerBase)
    assert collator()(RECORDS).size == 3


def test_records_become_one_flat_batch_of_tensors() -> None:
    batch = collator()(RECORDS)
    assert isinstance(batch, BatchedDataDict)
    for key in ("input_ids", "input_lengths", "token_mask", "sample_mask", "teacher_input_ids", "teacher_token_mask"):
        assert isinstance(batch[key], torch.Tensor), key
        assert len(batch[key]) == 3


@SIDES
def test_one_text_is_tokenized_by_each_side_without_a_template(prefix: str, tokenizer: Any) -> None:
    batch = collator()(RECORDS)
    for row, text in enumerate(TEXTS):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        length = int(batch[f"{prefix}input_lengths"][row])
        assert batch[f"{prefix}input_ids"][row, :length].tolist() == ids
        assert batch[f"{prefix}token_mask"][row].tolist() == [1] * length + [0] * (
            batch[f"{prefix}token_mask"].shape[1] - length
        )


def test_text_that_spells_a_special_token_stays_text() -> None:
    tokenizer = workshop(400)
    special = tokenizer.all_special_tokens[0]
    batch = collator(student_tokenizer=tokenizer, teacher_tokenizer=None, aligner=None)([{"text": f"a {special} b"}])
    ids = batch["input_ids"][0, : int(batch["input_lengths"][0])]
    assert tokenizer.convert_tokens_to_ids(special) not in ids.tolist()
    assert tokenizer.decode(ids) == f"a {special} b"


@SIDES
def test_ids_and_masks_have_one_shape_and_integer_types(prefix: str, tokenizer: Any) -> None:
    batch = collator()(RECORDS)
    ids, mask, lengths = (batch[prefix + name] for name in ("input_ids", "token_mask", "input_lengths"))
    assert ids.shape == mask.shape
    assert (ids.dtype, lengths.dtype, lengths.shape) == (torch.int64, torch.int64, (3,))
    assert bool((lengths <= ids.shape[1]).all())


def test_the_context_lengths_are_hard_caps() -> None:
    batch = collator(ctx_length_student=9, ctx_length_teacher=6)(RECORDS)
    assert int(batch["input_lengths"].max()) <= 9
    assert int(batch["teacher_input_lengths"].max()) <= 6
    assert batch["input_ids"].shape[1] <= 9
    assert batch["teacher_input_ids"].shape[1] <= 6


@pytest.mark.parametrize("pad_to", ["longest", "max"])
def test_widths_are_the_longest_row_or_where_asked_the_caps(pad_to: str) -> None:
    batch = collator(pad_to=pad_to)(RECORDS)
    for prefix, cap in (("", 64), ("teacher_", 80)):
        longest = int(batch[f"{prefix}input_lengths"].max())
        assert batch[f"{prefix}input_ids"].shape[1] == (cap if pad_to == "max" else longest)


def test_each_sides_width_is_a_multiple_of_its_own_number() -> None:
    batch = collator(make_seq_div_by_student=8, make_seq_div_by_teacher=10)(RECORDS)
    for prefix, multiple in (("", 8), ("teacher_", 10)):
        width = batch[f"{prefix}input_ids"].shape[1]
        assert width % multiple == 0
        assert width - int(batch[f"{prefix}input_lengths"].max()) < multiple


def test_rows_carry_the_records_numbers_and_weights() -> None:
    batch = collator()(RECORDS)
    assert list(batch["idx"]) == [7, 8, 9]
    assert batch["sample_mask"].tolist() == [1.0, 0.75, 0.0], "one token has no predictor: its row has no weight"


def test_the_alignment_is_the_aligners_of_the_same_ids() -> None:
    aligner, batch = TokenAligner(STUDENT, TEACHER), collator()(RECORDS)
    masks = [
        torch.arange(batch[f"{prefix}input_ids"].shape[1]) < batch[f"{prefix}input_lengths"][:, None]
        for prefix in ("", "teacher_")
    ]
    found = aligner.align(
        batch["input_ids"],
        batch["teacher_input_ids"],
        student_attention_mask=masks[0],
        teacher_attention_mask=masks[1],
    )
    for key, value in found.as_dict().items():
        assert torch.equal(batch[key], value), key


def test_the_alignment_is_dense_and_as_wide_as_each_side() -> None:
    batch = collator(make_seq_div_by_student=8)(RECORDS)
    rows, chunks = batch["alignment_pair_valid"].shape
    assert rows == 3
    assert batch["alignment_pair_is_correct"].shape == (3, chunks)
    assert chunks >= int(batch["alignment_num_chunks"].max())
    for side, prefix in (("student", ""), ("teacher", "teacher_")):
        for name in ("exact_partition_mask", "chunk_id"):
            assert batch[f"alignment_{side}_{name}"].shape == batch[f"{prefix}input_ids"].shape


@pytest.mark.parametrize("flags", [(False, False), (True, False), (True, True)], ids=["p_kl", "gold", "h_kl"])
def test_one_batch_serves_all_three_losses(flags: tuple[bool, bool]) -> None:
    settings = {"gold_loss": flags[0], "xtoken_loss": flags[1]}
    loss = CrossTokenizerDistillationLossFn(settings, projections=[tiny.projection()])
    result = tiny.student().train(collator()(RECORDS), loss, teachers=[LiveTeacher(tiny.teacher())], eval_mode=True)
    assert result["loss"] > 0
    assert loss.cfg.mode == {(False, False): "p_kl", (True, False): "gold", (True, True): "h_kl"}[flags]


def test_nothing_of_the_loss_is_in_the_batch() -> None:
    """Ids, masks and alignments: no logits, no projection, no loss."""
    batch = collator(aligner=TokenAligner(STUDENT, TEACHER, projection_matrix_path="not-there.pt"))(RECORDS)
    allowed = ("input_ids", "input_lengths", "token_mask", "target_bytes", "sample_mask", "idx", "skipped")
    assert {key for key in batch if not key.startswith(("alignment_", "teacher_"))} == set(allowed)
    assert not any(value.is_floating_point() for key, value in batch.items() if key.startswith("alignment_"))


def test_it_runs_in_a_worker_of_a_data_loader() -> None:
    make = collator()
    again = pickle.loads(pickle.dumps(make))(RECORDS)
    loader = DataLoader(RECORDS, batch_size=3, collate_fn=make, num_workers=1)
    (worked,) = list(loader)
    for key, value in make(RECORDS).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, worked[key]), key
            assert torch.equal(value, again[key]), key


def test_tokenize_batch_is_static_and_gives_ids_and_mask() -> None:
    assert isinstance(inspect.getattr_static(CrossTokenizerCollator, "_tokenize_batch"), staticmethod)
    ids, mask = CrossTokenizerCollator._tokenize_batch(TEXTS, STUDENT, 16, 5)
    assert ids.shape == mask.shape
    assert ids.shape[1] % 5 == 0
    assert int(mask.sum(1).max()) <= 16
    for row, text in enumerate(TEXTS):
        want = STUDENT(text, add_special_tokens=False)["input_ids"][:16]
        assert ids[row, : len(want)].tolist() == want
        assert mask[row].tolist() == [1] * len(want) + [0] * (ids.shape[1] - len(want))


def test_several_teachers_are_numbered_and_the_plain_keys_are_the_firsts() -> None:
    batch = collator(teacher_tokenizer=[TEACHER, tiny.tokenizer(400)], aligner=None, ctx_length_teacher=[80, 80])(
        RECORDS
    )
    for name in ("input_ids", "input_lengths", "token_mask"):
        assert torch.equal(batch[f"teacher_{name}"], batch[f"teacher_0_{name}"])
        assert f"teacher_1_{name}" in batch
    assert torch.equal(batch["alignment_student_chunk_id"], batch["alignment_0_student_chunk_id"])
    assert batch["alignment_1_teacher_chunk_id"].shape == batch["teacher_1_input_ids"].shape
    single = collator()(RECORDS)
    assert torch.equal(single["alignment_num_chunks"], batch["alignment_num_chunks"])
