"""The recipe of CI: all three channels on the shipped traces, through the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from limbeck.utils.logger import read_metrics
from tests.helpers.runs import limbeck

# They change only where the arithmetic, the traces or the recipe does.
LOSSES = [0.74855, 0.69212, 0.05759, 0.10781, 0.49597, 0.60795, 0.51947, 0.33919, 0.17224]


@pytest.mark.slow
def test_the_trace_recipe_gives_the_stored_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = limbeck("train", "traces_cpu", "-q", f"logger.log_dir={tmp_path / 'run'}")
    assert code == 0, err
    start, *_, end = rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    # Other numbers of threads add in another order, and nine steps carry that on.
    assert [row["train/loss"] for row in rows[1:]] == pytest.approx(LOSSES, rel=2e-2, abs=5e-3)
    assert end["val/erroneous_logprob"] < start["val/erroneous_logprob"]
    assert end["val/rejected_logprob"] < start["val/rejected_logprob"]
    assert end["val/chosen_logprob"] > start["val/chosen_logprob"]
    assert {p.name for p in (tmp_path / "run" / "checkpoints").iterdir()} == {"step_0", "step_9"}
    assert (tmp_path / "run" / "report.html").is_file()
