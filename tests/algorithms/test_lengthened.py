"""A run that is made longer under a schedule goes on, with the schedule made anew over the new length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from limbeck.algorithms.xtoken_off_policy_distillation import run
from limbeck.short_forms import schedule_word, write_out_schedule
from tests.helpers import runs
from tests.helpers.runs import limbeck, refused, settings


@pytest.mark.parametrize("word", ["constant", "cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_the_word_of_a_schedule_is_found_again(word: str, warmup: int) -> None:
    written = write_out_schedule({"policy": {"scheduler": word, "warmup_steps": warmup}}, 20)["policy"]["scheduler"]
    assert schedule_word(written, 20) == (word, warmup)
    assert word == "constant" or schedule_word(written, 21) is None


@pytest.mark.parametrize("warmup", [1, 0.4])
def test_a_finished_run_is_made_longer(tmp_path: Path, warmup: float) -> None:
    """A warm-up that is a share of the steps, as `limbeck init` writes it, is one of the new length."""
    runs.write_tokenizers(tmp_path)
    runs.write_data(tmp_path)
    values = settings(tmp_path, tmp_path / "run")
    values["policy"] |= {"scheduler": "cosine", "warmup_steps": warmup}
    values["distillation"] |= {"max_num_steps": 3, "val_at_start": False, "val_at_end": False, "val_period": 0}
    run_file = tmp_path / "run.yaml"
    run_file.write_text(json.dumps(values), encoding="utf-8")
    assert limbeck("train", run_file)[0] == 0
    versions = json.loads((tmp_path / "run" / "versions.json").read_text())
    (tmp_path / "run" / "versions.json").write_text(json.dumps({**versions, "started": "2001-02-03T04:05:06+00:00"}))
    code, _, said = limbeck("train", run_file)
    assert "complete with 3 steps" in said
    code, _, said = limbeck("train", run_file, "distillation.max_num_steps=6")
    assert code == 0, said
    assert "the schedule is made anew for the new length: step 4 has learning rate" in said
    assert json.loads((tmp_path / "run" / "versions.json").read_text())["started"] == "2001-02-03T04:05:06+00:00"
    rates = [row["train/lr"] for row in runs.rows(tmp_path / "run")]
    values["logger"]["log_dir"] = str(tmp_path / "whole")
    whole = tmp_path / "whole.yaml"
    whole.write_text(json.dumps(values), encoding="utf-8")
    assert limbeck("train", whole, "-q", "distillation.max_num_steps=6")[0] == 0
    expected = [row["train/lr"] for row in runs.rows(tmp_path / "whole")]
    assert rates[3:] == pytest.approx(expected[3:])
    assert rates[1:3] != pytest.approx(expected[1:3])
    # another schedule is another configuration, and so is another warm-up
    assert "another configuration" in refused("train", run_file, "-q", "policy.warmup_steps=3", "max_num_steps=6")
    assert "another configuration" in refused("train", run_file, "-q", "policy.scheduler=linear", "max_num_steps=9")


BATCHES: list[dict[str, Any]] = [
    {"train_micro_batch_size": 1},
    {"train_micro_batch_size": None, "dynamic_batching": {"enabled": True, "train_mb_tokens": 96}},
    {"train_micro_batch_size": None, "sequence_packing": {"enabled": True, "train_mb_tokens": 128}},
    {"train_micro_batch_size": None, "logprob_batch_size": 3},
]


@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_a_run_goes_on_with_another_budget(tmp_path: Path, batches: dict[str, Any]) -> None:
    """What fits the memory of one machine need not fit another's: the losses stay the same but for rounding."""
    runs.write_tokenizers(tmp_path)
    runs.write_data(tmp_path)

    def losses(folder: str, steps: int, own: dict[str, Any]) -> list[float]:
        values = settings(tmp_path, tmp_path / folder)
        values["policy"] = {**values["policy"], "scheduler": None, **own}
        values["distillation"] |= {"max_num_steps": steps, "val_at_start": False, "val_at_end": False, "val_period": 0}
        run(runs.resolved(values))
        return [row["train/loss"] for row in runs.rows(tmp_path / folder)]

    losses("run", 2, {})
    # float32 sums of other groups of rows
    assert losses("run", 4, batches) == pytest.approx(losses("whole", 4, {}), rel=1e-5)
