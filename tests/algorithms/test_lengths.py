"""How long the rows of each model may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from limbeck.algorithms.build import make_collator, student_length, teacher_lengths
from limbeck.errors import ConfigError
from limbeck.models.loading import check_length
from tests.helpers import runs
from tests.helpers.tiny import LLAMA
from tests.helpers.tokenizers import tiny


def lengths(folder: Path, data: dict[str, Any], student: int | None = None, teacher: int | None = None) -> list[int]:
    values = runs.settings(folder, folder / "run")
    values["data"] = {"train": "train.jsonl", "validation": "held_out.jsonl", **data}
    for name, own in (("policy", student), ("teacher", teacher)):
        if own is not None:
            values[name]["max_total_sequence_length"] = own
    config = runs.resolved(values)
    return [student_length(config), *teacher_lengths(config)]


def test_each_side_has_its_own_limit(tmp_path: Path) -> None:
    assert lengths(tmp_path, {}) == [2048, 2048]
    assert lengths(tmp_path, {}, student=4096) == [4096, 2048]
    assert lengths(tmp_path, {}, teacher=32) == [2048, 32]
    assert lengths(tmp_path, {"max_input_seq_length": 100}, teacher=32) == [100, 32]
    assert lengths(tmp_path, {"max_input_seq_length": 100, "max_teacher_seq_length": 120}) == [100, 120]
    assert lengths(tmp_path, {"max_teacher_seq_length": [64]}, teacher=48) == [2048, 48]
    with pytest.raises(ConfigError, match="2 entries for 1 teachers"):
        lengths(tmp_path, {"max_teacher_seq_length": [64, 64]})


def test_a_teachers_limit_cuts_its_rows(tmp_path: Path) -> None:
    runs.write_data(tmp_path)
    config = runs.resolved(runs.settings(tmp_path, tmp_path / "run", teacher={"max_total_sequence_length": 5}))
    batch = make_collator(config, tiny(300), [tiny(340)])(
        [{"text": "in one pass: " * 4, "idx": 0, "loss_multiplier": 1.0}]
    )
    assert int(batch["teacher_input_lengths"].max()) == 5
    assert int(batch["input_lengths"].max()) > 5


@pytest.mark.parametrize(
    ("override", "who"), [("max_input_seq_length", "student"), ("max_teacher_seq_length", "teacher_0")]
)
def test_more_than_a_models_positions_is_refused(tmp_path: Path, override: str, who: str) -> None:
    runs.write_tokenizers(tmp_path)
    runs.write_data(tmp_path)
    run_file = runs.write_run_file(tmp_path / "run.yaml", runs.settings(tmp_path, tmp_path / "run"))
    line = runs.refused("train", run_file, "-q", f"data.{override}=257")
    assert f"{who} has 256 positions, but its sequences may have 257 tokens" in line


def test_a_teacher_that_is_cached_has_its_positions_too(tmp_path: Path) -> None:
    run_file = runs.write_run(tmp_path, teacher={"cache": str(tmp_path / "cache")})
    line = runs.refused("cache", run_file, "data.max_teacher_seq_length=257")
    assert "teacher_0 has 256 positions, but its sequences may have 257 tokens" in line


def test_a_stretched_rope_reaches_further() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    stretched = {"init": "random", "model_overrides": {**LLAMA, "rope_scaling": rope}}
    check_length(stretched, 1024, name="student")
    with pytest.raises(ConfigError, match="has 1024 positions"):
        check_length(stretched, 1025, name="student")
