"""How long the rows of a training on traces may be, and for which models that is too long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from limbeck.algorithms.trace_distillation import run
from limbeck.errors import ConfigError
from limbeck.traces.dataset import load_traces, make_collator, row_lengths
from tests.helpers.tokenizers import workshop
from tests.helpers.trace_runs import MODEL, config, settings, tokenizer_folder


def teacher(where: Path, size: int = 330, **more: Any) -> dict[str, Any]:
    section = {**settings(where)["policy"], "tokenizer": {"name": tokenizer_folder(where, size)}, **more}
    del section["optimizer"], section["train_micro_batch_size"]
    return section


def lengths(where: Path, **more: Any) -> list[int]:
    made = config(where, **more)
    found = row_lengths(made.traces, made.policy, made.teacher)
    return [found.student, found.pair, found.teacher]


def test_each_model_has_its_own_limit(tmp_path: Path) -> None:
    assert lengths(tmp_path) == [2048, 2048, 2048]
    assert lengths(tmp_path, policy={"max_total_sequence_length": 500}) == [500, 500, 500]
    own = {"max_seq_length": 300, "max_pair_seq_length": 200}
    assert lengths(tmp_path, traces=own) == [300, 200, 300]
    assert lengths(tmp_path, traces={**own, "max_teacher_seq_length": 400}) == [300, 200, 400]
    assert lengths(tmp_path, traces=own, teacher=teacher(tmp_path, max_total_sequence_length=100)) == [300, 200, 100]


@pytest.mark.parametrize("size", [400, 330])
def test_a_limit_of_the_hinted_model_cuts_its_rows(tmp_path: Path, size: int) -> None:
    """Whether its tokenizer is the student's (400) or not."""
    foreign = None if size == 400 else workshop(size)

    def widths(limit: int) -> tuple[int, int]:
        made = config(tmp_path, teacher=teacher(tmp_path, size, max_total_sequence_length=limit))
        collate = make_collator(
            made.traces, made.policy, made.teacher, workshop(400), foreign, hint=True, preference=False
        )
        batch = collate(load_traces(made.traces).traces)
        return batch["sdpo_student_input_ids"].shape[1], batch["ctx_teacher_input_ids"].shape[1]

    whole = widths(2048)
    cut = widths(whole[1] - 1)
    assert cut[1] < whole[1]
    assert cut[0] <= whole[0]


@pytest.mark.parametrize("channel", ["student", "teacher"])
def test_more_than_a_models_positions_is_refused(tmp_path: Path, channel: str) -> None:
    short = {"model_overrides": {**MODEL, "max_position_embeddings": 256}}
    sections = {"policy": short} if channel == "student" else {"teacher": teacher(tmp_path, **short)}
    with pytest.raises(ConfigError, match=f"{channel} has 256 positions, .* 2048 tokens"):
        run(config(tmp_path, **sections))


def test_hinted_rows_count_where_the_student_reads_them(tmp_path: Path) -> None:
    short = {"model_overrides": {**MODEL, "max_position_embeddings": 256}}
    limits = {"max_seq_length": 256, "max_pair_seq_length": 256, "max_teacher_seq_length": 300}
    with pytest.raises(ConfigError, match=r"student has 256 positions, .* 300 tokens"):
        run(config(tmp_path, policy=short, traces=limits))
