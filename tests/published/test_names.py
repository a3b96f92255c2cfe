"""Published names of newer releases: plurals, aliases, a subclass that aligns, the cap as width."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from limbeck.algorithms import xtoken_off_policy_distillation as xtoken
from limbeck.align import AlignmentBatch, TokenAligner
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.data.microbatch import check_sequence_dim
from limbeck.errors import AlignmentError, ConfigError, DataError
from limbeck.models.policy import published_metrics
from limbeck.teachers.live import LiveTeacher
from limbeck.utils.arguments import also_named
from tests.helpers import tiny

TEXTS = ["the alembic is a still", "a vessel in which spirits are distilled, again"]
RECORDS: Any = [{"text": text, "idx": i, "loss_multiplier": 1.0} for i, text in enumerate(TEXTS)]
STUDENT, TEACHER = tiny.tokenizer(300), tiny.tokenizer(340)


def by_plurals(*teachers: Any, aligners: Any = None, **more: Any) -> CrossTokenizerCollator:
    return CrossTokenizerCollator(
        student_tokenizer=STUDENT,
        teacher_tokenizers=list(teachers),
        aligners=aligners,
        ctx_length_student=64,
        ctx_length_teachers=[64] * len(teachers),
        make_seq_div_by_student=8,
        make_seq_div_by_teachers=[16] * len(teachers),
        **more,
    )


def same(a: BatchedDataDict, b: BatchedDataDict) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(value, b[key]) if isinstance(value, torch.Tensor) else value == b[key] for key, value in a.items()
    )


def test_the_collator_by_its_plural_arguments() -> None:
    own = CrossTokenizerCollator(
        student_tokenizer=STUDENT,
        teacher_tokenizer=[TEACHER, TEACHER],
        ctx_length_student=64,
        ctx_length_teacher=[64, 64],
        make_seq_div_by_student=8,
        make_seq_div_by_teacher=[16, 16],
    )
    assert same(by_plurals(TEACHER, TEACHER)(RECORDS), own(RECORDS))


def test_an_aligner_of_none_stands_for_the_students_tokenizer() -> None:
    batch = by_plurals(TEACHER, STUDENT, aligners=[TokenAligner(STUDENT, TEACHER), None])(RECORDS)
    assert "teacher_0_input_ids" in batch
    assert not any(key.startswith(("teacher_1_", "alignment_1_")) for key in batch)


@pytest.mark.parametrize("more", [{"teacher_tokenizer": TEACHER}, {"aligners": [None, None]}])
def test_two_names_of_one_argument_or_lists_of_other_lengths_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        by_plurals(TEACHER, **more)
    with pytest.raises(ConfigError):
        CrossTokenizerCollator(student_tokenizer=STUDENT, ctx_length_student=8)


class Coarse(TokenAligner):
    """Two chunks a row: the first token of each side, and the rest."""

    def align(self, student_ids: Any, teacher_ids: Any, **masks: Any) -> AlignmentBatch:
        labels = []
        for ids in (student_ids, teacher_ids):
            label = torch.ones_like(ids)
            label[:, 0] = 0
            labels.append(label)
        wrong = torch.zeros((len(student_ids), 2), dtype=torch.bool)
        none = [torch.zeros_like(ids, dtype=torch.bool) for ids in (student_ids, teacher_ids)]
        return AlignmentBatch(~wrong, wrong, *none, *labels, torch.full((len(student_ids),), 2))


def test_an_aligner_of_ones_own_is_asked() -> None:
    batch = by_plurals(TEACHER, aligners=[Coarse(STUDENT, TEACHER)])(RECORDS)
    assert batch["alignment_num_chunks"].tolist() == [2, 2]
    for side, width in (("student", "input_lengths"), ("teacher", "teacher_input_lengths")):
        for row, length in enumerate(batch[width].tolist()):
            assert batch[f"alignment_{side}_chunk_id"][row, :length].tolist() == [0] + [1] * (length - 1)
    assert not batch["alignment_pair_is_correct"].any()


def test_an_inherited_align_gives_what_the_base_gives() -> None:
    class Asked(TokenAligner):
        def align(self, *ids: Any, **masks: Any) -> AlignmentBatch:
            return super().align(*ids, **masks)

    asked = by_plurals(TEACHER, aligners=[Asked(STUDENT, TEACHER)])(RECORDS)
    assert same(asked, by_plurals(TEACHER, aligners=[TokenAligner(STUDENT, TEACHER)])(RECORDS))


def test_chunks_that_overlap_or_have_gaps_are_refused() -> None:
    class Torn(Coarse):
        def align(self, student_ids: Any, teacher_ids: Any, **masks: Any) -> AlignmentBatch:
            found = super().align(student_ids, teacher_ids)
            found.student_chunk_id[:, 2] = -1
            return found

    with pytest.raises(AlignmentError):
        by_plurals(TEACHER, aligners=[Torn(STUDENT, TEACHER)])(RECORDS)


def test_tokenize_batch_pads_to_the_cap_where_asked() -> None:
    tokenize = CrossTokenizerCollator._tokenize_batch
    ids, mask = tokenize(TEXTS, STUDENT, 60, 8, pad_to="max")
    assert ids.shape == mask.shape == (2, 64)
    short, short_mask = tokenize(TEXTS, STUDENT, 60, 8)
    width = short.shape[1]
    assert width < 64
    assert torch.equal(ids[:, :width], short)
    assert torch.equal(mask.sum(1), short_mask.sum(1))


def test_check_sequence_dim() -> None:
    data = BatchedDataDict({"input_ids": torch.zeros(2, 5), "wide": torch.zeros(2, 7), "flat": torch.zeros(2)})
    assert check_sequence_dim(data, skip_keys={"wide"}) == (1, 5)
    with pytest.raises(DataError):
        check_sequence_dim(data)


def test_arguments_have_second_names() -> None:
    for function in (xtoken.validate, xtoken.xtoken_off_policy_distillation_train):
        assert "teacher_policy" in inspect.signature(function).parameters
        with pytest.raises(ConfigError):
            function(teacher_policy=[], teacher_policies=[])  # type: ignore[call-arg]

    @also_named(second="first")
    def call(first: int, other: int = 0) -> tuple[int, int]:
        return first, other

    assert call(second=1, other=2) == call(1, 2) == (1, 2)  # type: ignore[call-arg]


@pytest.mark.train
def test_validate_by_newer_names() -> None:
    loss, student, teacher = tiny.loss_fn(), tiny.student(), LiveTeacher(tiny.teacher())
    batches: Any = StatefulDataLoader([tiny.batch([0, 1]), tiny.batch([2, 3])], batch_size=None)  # type: ignore[arg-type, list-item]
    config: Any = None
    new, _ = xtoken.validate(
        student,
        teacher_policies=[teacher],
        val_dataloader=batches,
        loss_fn=loss,
        master_config=config,
        skip_keys=frozenset({"x"}),
    )  # type: ignore[call-arg, arg-type]
    old, _ = xtoken.validate(student, [teacher], batches, loss, config)  # type: ignore[arg-type]
    assert new == old
    wide = BatchedDataDict({**tiny.batch([0, 1]), "x": torch.zeros(2, 3)})
    odd: Any = StatefulDataLoader([wide], batch_size=None)  # type: ignore[arg-type, list-item]
    xtoken.validate(student, [teacher], odd, loss, config, skip_keys={"x"})  # type: ignore[arg-type]
    with pytest.raises(DataError):
        xtoken.validate(student, [teacher], odd, loss, config)  # type: ignore[arg-type]


@pytest.mark.train
@pytest.mark.parametrize("mode", ["gold", "p_kl"])
def test_metrics_by_published_names(mode: str) -> None:
    loss = tiny.loss_fn(mode=mode, kl_loss_weight=0.5)
    result = tiny.student().train(tiny.batch(), loss, teachers=[LiveTeacher(tiny.teacher())])
    found = published_metrics(result, loss)
    total = found["kl_loss_scale"] * found["kl_loss"] + loss.cfg.ce_loss_scale * found["ce_loss"]
    assert found["loss"] == pytest.approx(total)
    assert found["num_valid_samples"] == found["global_valid_seqs"] == tiny.batch().size
    assert found["grad_norm"] == pytest.approx(result["grad_norm"])
    if mode == "gold":
        assert found["kl_common"] + found["l1_uncommon"] == pytest.approx(found["kl_loss"])
    else:
        assert "kl_common" not in found


def test_the_selected_teacher_is_the_one_with_the_weight() -> None:
    loss: Any = tiny.loss_fn(cross=False)
    loss.cfg.teacher_combination = "select_teacher"
    found = published_metrics({"teacher_0/weight": (1.0, 4.0), "teacher_1/weight": (3.0, 4.0)}, loss)
    assert (found["selected_teacher"], found["weight_t1"]) == (1.0, 0.75)
