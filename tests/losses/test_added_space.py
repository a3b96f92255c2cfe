"""The chunk at a space that one tokenizer writes by itself: its probability is compared, its first tokens are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.data.layout import teacher_chunks
from limbeck.losses import CrossTokenizerDistillationLossFn, Head, TeacherLogits
from limbeck.losses.chunk_policy import ChunkPolicyConfig, ChunkPolicyLossFn
from limbeck.projection import Projection, load_or_build
from limbeck.tokens import ByteTokenizer
from tests.losses import reference
from tests.losses.cases import microbatch, starts
from tests.zoo import tokenizer

PAIRS = [("llama2", "internlm2"), ("internlm2", "llama2")]
RECORDS = [{"text": text, "idx": i} for i, text in enumerate(["Distil this.", "x", "蒸馏 is old"])]


def collated(student: str, teacher: str, chunks_as: Any) -> dict[str, Any]:
    collate = CrossTokenizerCollator(
        student_tokenizer=tokenizer(student),
        teacher_tokenizer=tokenizer(teacher),
        ctx_length_student=64,
        ctx_length_teacher=64,
        chunks_as=chunks_as,
    )
    return dict(collate(RECORDS))  # type: ignore[arg-type]


def rules(student: str, teacher: str, folder: Any) -> Projection:
    return load_or_build(tokenizer(student), tokenizer(teacher), cache_dir=folder)


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_alm_is_that_of_float64_brute_force_and_others_leave_the_chunk_out(
    student: str, teacher: str, tmp_path: Any
) -> None:
    batch = collated(student, teacher, "keys")
    assert sum(counts.get("added_space_chunks", 0) for counts in batch["skipped"]) == 3
    assert not any(counts.get("inexact_chunks") for counts in batch["skipped"])
    sizes = [ByteTokenizer.of(tokenizer(name)).vocab.size for name in (student, teacher)]
    gen = torch.Generator().manual_seed(0)
    logits, theirs = (
        4 * torch.randn(*batch[key].shape, size, generator=gen, dtype=torch.float64)
        for key, size in zip(("input_ids", "teacher_0_input_ids"), sizes, strict=True)
    )
    projection = rules(student, teacher, tmp_path)
    by_text = {**batch, "alignment_0_pair_is_correct": batch["alignment_0_pair_same_text"]}
    numbers = {}
    for mode, meant in (("alm", by_text), ("uld", batch)):
        loss_fn = CrossTokenizerDistillationLossFn({"mode": mode, "ce_loss_scale": 0.0}, projections=[projection])
        rows = logits.flatten(0, 1)
        head = Head.identity(sizes[0])
        signal = TeacherLogits(theirs.flatten(0, 1), batch["teacher_0_input_ids"].reshape(-1))
        inputs = loss_fn.build_layout(microbatch(batch), [starts(batch["teacher_0_input_ids"])])
        loss, _ = loss_fn.compute_loss(rows, head, [signal], inputs, loss_fn.denominators(batch))
        want, numbers[mode] = reference.kd(mode, meant, logits, theirs, torch.zeros(1, 1))
        assert loss.item() == pytest.approx((want / numbers[mode]).item(), rel=1e-9)
    assert numbers["alm"] == numbers["uld"] + 3


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_keys_and_layout_give_the_same_chunks(student: str, teacher: str) -> None:
    batches = [collated(student, teacher, form) for form in ("keys", "layout")]
    for by_text in (False, True):
        found = [
            teacher_chunks(batch, 0, same_vocabulary=False, allow_inexact=False, by_text=by_text) for batch in batches
        ]
        for name in ("student_rows_M", "student_ids_M", "teacher_rows_Q", "teacher_ids_Q", "sample_C"):
            assert torch.equal(getattr(found[0], name), getattr(found[1], name))
        # the first chunk stands behind BOS, so its first token is predicted by row 0
        first = {int(row) for row in found[0].student_rows_M[found[0].student_first_C]}
        assert (0 in first) == by_text


def test_the_policy_gradient_has_the_chunk() -> None:
    batch = collated(*PAIRS[0], "layout")
    whole = teacher_chunks(batch, 0, same_vocabulary=False, allow_inexact=False, by_text=True)
    assert ChunkPolicyLossFn(ChunkPolicyConfig()).select_chunks(batch)[0].num_chunks == whole.num_chunks
