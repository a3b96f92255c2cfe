"""``samples.jsonl``: nothing twice, nothing behind the checkpoint that a run resumes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from limbeck.errors import DataError
from limbeck.utils.logger import EPISODES_NAME, Logger, read_metrics


def test_the_log_drops_what_lies_behind_a_checkpoint_and_what_it_has(tmp_path: Path) -> None:
    def rows(step: int) -> list[dict[str, Any]]:
        one = {"writer": "student", "number": 0, "prompt": "a", "text": f"at {step}"}
        return [one, {**one, "writer": "teacher", "step": 0, "text": "constant"}]

    settings = {"log_dir": str(tmp_path), "tensorboard_enabled": False, "progress": False}
    with Logger(settings, resume_step=-1, rank=0) as logger:
        for step in (0, 2, 4):
            logger.log_samples(rows(step), step)
    with Logger(settings, resume_step=2, rank=0) as logger:
        logger.log_samples(rows(4), 4)
    with Logger(settings, resume_step=4, rank=1) as logger:
        logger.log_samples(rows(6), 6)
    found = [(row["step"], row["writer"], row["text"]) for row in read_metrics(tmp_path / "samples.jsonl")]
    assert found == [(0, "student", "at 0"), (0, "teacher", "constant"), (2, "student", "at 2"), (4, "student", "at 4")]


def test_traces_behind_a_checkpoint_are_cut_off_with_half_a_line(tmp_path: Path) -> None:
    settings, path = (
        {"log_dir": str(tmp_path), "tensorboard_enabled": False, "progress": False},
        tmp_path / EPISODES_NAME,
    )
    with Logger(settings, resume_step=-1, rank=0) as logger:
        for step in (1, 2, 2, 3):
            logger.log_episodes([{"id": f"{step}", "meta": {"step": step}}])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(path.read_bytes() + lines[-1][:9])
    Logger(settings, resume_step=3, rank=0).close()
    assert path.read_bytes() == b"".join(lines)
    Logger(settings, resume_step=0, rank=1).close()
    Logger(settings, resume_step=2, rank=0).close()
    assert path.read_bytes() == b"".join(lines[:3])
    path.write_text('{"meta": {}}\n')
    with pytest.raises(DataError):
        Logger(settings, resume_step=1, rank=0)
