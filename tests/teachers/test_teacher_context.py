"""What a loss makes of rows in which the teacher reads more than the student."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.teachers.cache.fill import spec_for, write_cache
from limbeck.teachers.cached import CachedTeacher
from limbeck.teachers.live import LiveTeacher
from limbeck.teachers.self_teacher import make_self_teacher
from tests.helpers.tiny import loss_fn, student, teacher, tokenizer
from tests.helpers.tokenizers import TEXTS
from tests.models.test_policy import LAYOUTS


def rows(contexts: list[str | None], *, cross: bool = True) -> BatchedDataDict[Any]:
    lengths = {"ctx_length_student": 128, "ctx_length_teacher": 128}
    own = CrossTokenizerCollator(
        student_tokenizer=tokenizer(300),
        teacher_tokenizer=tokenizer(340) if cross else None,
        append_eos=True,
        **lengths,
    )
    texts = zip(TEXTS, contexts, strict=False)
    return own([{"text": text, "teacher_context": context or "", "idx": i} for i, (text, context) in enumerate(texts)])  # type: ignore[typeddict-item]


TOLD = ["The dog", None, "2011 and so on", "a"]


def kl(result: dict[str, Any]) -> float:
    total, count = result["metrics"]["kl_loss"]
    return float(total) / float(count)


@pytest.mark.parametrize("cross", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_loss(layout: str, cross: bool) -> None:
    source = LiveTeacher(teacher() if cross else student(seed=3))
    want = student().train(rows(TOLD, cross=cross), loss_fn(cross), teachers=[source])
    found = student(**LAYOUTS[layout]).train(rows(TOLD, cross=cross), loss_fn(cross), teachers=[source])
    assert found["loss"] == pytest.approx(want["loss"], rel=1e-6)
    without = student().train(rows([None] * 4, cross=cross), loss_fn(cross), teachers=[source])
    assert kl(without) != pytest.approx(kl(want), rel=1e-3)
    assert without["counts"] == want["counts"]


@pytest.mark.parametrize("cross", [True, False])
def test_a_cache_holds_the_context_of_its_rows(tmp_path: Path, cross: bool) -> None:
    policy = teacher() if cross else student(seed=3)
    spec = spec_for(policy, k=policy.vocab_size)
    for contexts in (TOLD, [None] * 4):
        write_cache(policy, [rows(contexts, cross=cross)], tmp_path, spec)
    live, stored = LiveTeacher(policy), CachedTeacher(tmp_path)
    assert len(stored.reader) == 4 + 3, "a row with and without context is two"
    for contexts in (TOLD, [None] * 4):
        both = [student().train(rows(contexts, cross=cross), loss_fn(cross), teachers=[own]) for own in (live, stored)]
        # float16 keeps log p to 2^-11 of its size
        assert kl(both[1]) == pytest.approx(kl(both[0]), abs=5e-4)


@pytest.mark.parametrize("weights", ["frozen", "ema"])
def test_the_student_teaches_itself_nothing_but_what_its_context_says(weights: Any) -> None:
    own = student(max_grad_norm=None)
    source = make_self_teacher(own, weights, own.cfg, seed=0)
    loss = {"ce_loss_scale": 0.0}
    nothing = own.train(rows([None] * 4, cross=False), loss_fn(False, **loss), teachers=[source], eval_mode=True)
    assert kl(nothing) == pytest.approx(0, abs=1e-7)
    # rows of its own, but none with more to read than the student, in all rows but one
    one = own.train(rows([None, None, None, "a"], cross=False), loss_fn(False, **loss), teachers=[source])
    assert kl(one) > 1e-6


def test_adapters_that_are_off_read_the_context() -> None:
    own = student(lora={"r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]})
    with torch.no_grad():
        for name, value in own.model.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.5)
    source = make_self_teacher(own, "base", own.cfg, seed=0)
    plain, told = (
        kl(own.train(rows(c, cross=False), loss_fn(False), teachers=[source], eval_mode=True))
        for c in ([None] * 4, TOLD)
    )
    assert plain > 0
    assert told != pytest.approx(plain, rel=1e-3)
