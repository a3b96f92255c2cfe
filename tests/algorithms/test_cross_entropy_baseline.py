"""A run and, behind it, the same student by cross-entropy alone: what the teacher was worth."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from limbeck.algorithms.config import OnPolicyMasterConfig
from limbeck.algorithms.xtoken_off_policy_distillation import baseline_of
from limbeck.config import resolve
from limbeck.errors import ConfigError
from limbeck.export import model_card
from limbeck.report.run_data import RunData, read_run
from limbeck.report.run_page import write_comparison, write_report
from limbeck.utils.logger import read_metrics
from tests.gates import Gate
from tests.helpers.runs import limbeck, resolved, rows, settings, start, weight_bytes, write_run_file


def bits(folder: Path) -> dict[int, float]:
    return {row["step"]: row["val/bpb"] for row in read_metrics(folder / "metrics.jsonl") if "val/bpb" in row}


@pytest.mark.slow
def test_the_baseline_is_the_run_without_its_teacher(stuff: Path, tmp_path: Path) -> None:
    run, plain, alone = (tmp_path / name for name in ("run", "plain", "alone"))
    code, _, said = limbeck("train", write_run_file(tmp_path / "run.yaml", settings(stuff, run)), "--baseline")
    assert code == 0, said
    for folder, more in ((plain, {}), (alone, {"teacher": None, "loss_fn": {}})):
        values = settings(stuff, folder) | more
        code, _, said = limbeck("train", write_run_file(tmp_path / f"{folder.name}.yaml", values))
        assert code == 0, said
    assert bits(run) == bits(plain)
    assert bits(run / "baseline") == bits(alone)
    assert bits(run)[0] == bits(alone)[0]
    assert bits(run)[8] != bits(alone)[8]
    assert weight_bytes(run / "baseline", 8) == weight_bytes(alone, 8)

    data = read_run(run)
    gain = bits(alone)[8] - bits(run)[8]
    assert data.gain == (8, pytest.approx(gain))
    assert f"{-gain:+.4f}" in write_report(run).read_text(encoding="utf-8")
    assert f"{-gain:+.4f}" in write_comparison([run, plain], tmp_path / "both.html").read_text(encoding="utf-8")
    card = model_card(data, step=8, license=None, adapter=False)
    assert f"| cross-entropy alone on the same records | {bits(alone)[8]:.3f} |" in card

    # the error is that of the records, whose bits are those of the validations
    for folder in (run, run / "baseline"):
        found = read_metrics(folder / "records.jsonl")
        assert [row["step"] for row in found] == [0, 4, 8]
        for row in found:
            assert row["records"] == list(range(7))
            assert sum(row["bits"]) / sum(row["bytes"]) == pytest.approx(bits(folder)[row["step"]], rel=1e-5)
    assert not (plain / "records.jsonl").exists()
    taught, untaught = (np.array(read_metrics(f / "records.jsonl")[-1]["bits"]) for f in (run, run / "baseline"))
    size = np.array(read_metrics(run / "records.jsonl")[-1]["bytes"])
    left = (taught - untaught) - (taught - untaught).sum() / size.sum() * size
    error = math.sqrt(7 / 6 * (left**2).sum()) / size.sum()
    assert data.gain_error(8) == pytest.approx(error)
    shown = f"{-gain:+.4f} ± {error:.4f}"
    assert data.shown_gain(8) == shown
    assert f"| {shown} |" in card
    assert shown in write_report(run).read_text(encoding="utf-8")
    assert shown in write_comparison([run, plain], tmp_path / "both.html").read_text(encoding="utf-8")
    without = read_run(plain)
    assert (without.baseline, without.gain) == (None, None)
    for text in (model_card(without, step=8, license=None, adapter=False), write_report(plain).read_text("utf-8")):
        assert "cross-entropy alone" not in text
        assert shown not in text

    code, _, said = limbeck("train", tmp_path / "run.yaml", "--baseline")
    assert (code, said.count("nothing is left to do")) == (0, 2), said
    # a run that is complete can have its baseline later
    code, _, said = limbeck("train", tmp_path / "plain.yaml", "--baseline")
    assert code == 0, said
    assert bits(plain / "baseline") == bits(alone)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 5])
def test_a_baseline_that_is_killed_goes_on_to_the_same_bits(stuff: Path, tmp_path: Path, step: int) -> None:
    whole, broken = (tmp_path / name for name in ("whole", "broken"))
    file = write_run_file(tmp_path / "run.yaml", settings(stuff, whole))
    assert limbeck("train", file, "--baseline")[0] == 0
    # its own run is complete, so that the first process that waits is in the baseline
    again = (file, "-q", f"logger.log_dir={broken}", "distillation.record_bits.enabled=true")
    assert limbeck("train", *again)[0] == 0
    gate = Gate(tmp_path / "gate")
    process = start("train", *again, "--baseline", hold=(gate, "row written", step))
    process.kill()
    process.join()
    assert bits(broken / "baseline").keys() < bits(whole / "baseline").keys()
    code, _, said = limbeck("train", *again, "--baseline")
    assert code == 0, said
    assert weight_bytes(broken / "baseline", 8) == weight_bytes(whole / "baseline", 8)
    for name in ("", "baseline"):
        assert rows(broken / name) == rows(whole / name)
        records = [(folder / name / "records.jsonl").read_bytes() for folder in (broken, whole)]
        assert records[0] == records[1]
    assert read_run(broken).shown_gain(8) == read_run(whole).shown_gain(8)


def test_records_that_nobody_can_read_have_no_error(tmp_path: Path) -> None:
    run, alone = RunData(tmp_path), RunData(tmp_path / "baseline")
    assert run.gain_error(8) is None
    run.baseline = alone
    good = {"step": 8, "records": [0, 1], "bits": [3.0, 4.0], "bytes": [2.0, 2.0]}
    run.records = alone.records = [good]
    assert run.gain_error(8) == 0.0
    for damaged in ({**good, "bits": None}, {**good, "bits": ["3", None]}, {"step": 8}, {**good, "records": [[], {}]}):
        run.records = [damaged]
        assert run.gain_error(8) is None


def test_its_run_file_is_whole(stuff: Path, tmp_path: Path) -> None:
    values = settings(stuff, tmp_path / "run", checkpointing={"metric_name": "val/kl_loss"})
    values["distillation"] |= {"baseline": True}
    alone = baseline_of(resolved(values))
    assert resolved(alone.model_dump(mode="json")) == alone
    assert (alone.all_teachers, alone.logger.log_dir) == ([], str(tmp_path / "run" / "baseline"))
    assert (alone.distillation.baseline, alone.checkpointing.metric_name) == (False, None)
    assert alone.distillation.seed == 5
    assert alone.policy == resolved(values).policy


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"teacher": None}, "cross-entropy alone already"),
        ({"loss_fn": {"kl_loss_weight": 0}}, "cross-entropy alone already"),
        ({"data": {"validation": None}, "checkpointing": {"metric_name": None}}, "give data.validation"),
    ],
)
def test_where_it_would_compare_nothing_it_is_refused(
    stuff: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    values = settings(stuff, tmp_path)
    values["distillation"] |= {"baseline": True}
    for section, keys in changes.items():
        values[section] = None if keys is None else {**values[section], **keys}
    with pytest.raises(ConfigError, match=re.escape(reason)):
        resolved(values)


def test_a_student_that_writes_its_own_text_has_none(stuff: Path, tmp_path: Path) -> None:
    values = settings(stuff, tmp_path)
    values["distillation"] |= {"baseline": True}
    del values["distillation"]["samples"]
    with pytest.raises(ConfigError, match="baseline"):
        resolve(OnPolicyMasterConfig, {**values, "algorithm": "on_policy_distillation"})
