"""Data and weights that changed under the same name since a run began are noticed when it goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from limbeck.algorithms.origins import check_origins
from limbeck.errors import DataError
from limbeck.utils.files import Stamp, stamp_files
from tests.helpers import runs, tiny

SIZE = 40 << 20


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "big.bin"
    with path.open("wb") as stream:
        stream.truncate(SIZE)
    return path


def change(path: Path, place: int) -> None:
    """Another byte at a place, at the same time as before."""
    before = path.stat()
    with path.open("r+b") as stream:
        stream.seek(place)
        stream.write(b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("place", [0, SIZE // 3 // 65536 * 65536 + 40_000, SIZE // 2, SIZE - 1])
def test_samples_reach_over_the_whole_file(big: Path, place: int) -> None:
    """64 blocks of 64 KiB of 640: what is changed here lies in one of them."""
    starts = [(SIZE - 65536) * n // 63 for n in range(64)]
    place = next(start for start in reversed(starts) if start <= place)
    (before,) = stamp_files([big])
    change(big, place)
    (after,) = stamp_files([big])
    assert before[:3] == after[:3]
    assert before.sample != after.sample


@pytest.mark.parametrize("place", [70_000, 131_071, 199_999])
def test_a_small_file_is_read_as_a_whole(tmp_path: Path, place: int) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(200_000))
    before = stamp_files([path])
    change(path, place)
    assert stamp_files([path]) != before


def origin(tmp_path: Path, stamp: Stamp, *, goes_on: bool, facts: Any = None) -> None:
    check_origins(tmp_path, {"teacher_0": [stamp]}, facts, has_checkpoint=goes_on)


def test_what_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = Stamp("model.safetensors", 10, 1, "aa")
    facts = {"teacher_1.cache": {"k": 4}}
    origin(tmp_path, first, goes_on=False, facts=facts)
    origin(tmp_path, first, goes_on=True, facts=facts)
    for changed, line in (
        (first._replace(size=11), "teacher_0: 'model.safetensors' has 11 bytes and had 10"),
        (first._replace(sample="bb"), "teacher_0: 'model.safetensors' holds something else"),
        (first._replace(name="other"), "teacher_0: 'other' was not there"),
    ):
        with pytest.raises(DataError, match=line):
            origin(tmp_path, changed, goes_on=True)
    with pytest.raises(DataError, match=r"teacher_1\.cache is no longer the one"):
        origin(tmp_path, first, goes_on=True, facts={"teacher_1.cache": {"k": 5}})
    assert capsys.readouterr().err == ""
    origin(tmp_path, first._replace(written=2), goes_on=True)
    assert "was written again since this run began" in capsys.readouterr().err
    # a run that starts anew takes what there is, and one of an earlier version stored nothing
    origin(tmp_path, first._replace(size=11), goes_on=False)
    (tmp_path / "origins.json").unlink()
    origin(tmp_path, first, goes_on=True)


@pytest.mark.parametrize("text", ["", "[]", '{"files": {"a": [1]}, "facts": {}}', '{"files": 1}'])
def test_a_damaged_record_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "origins.json").write_text(text)
    with pytest.raises(DataError, match=r"origins\.json' is damaged"):
        origin(tmp_path, Stamp("a", 1, 1, "a"), goes_on=True)


@pytest.mark.parametrize("what", ["data", "teacher"])
def test_a_run_does_not_go_on_with_other_things_of_the_same_name(tmp_path: Path, what: str) -> None:
    weights = tmp_path / "weights"
    tiny.teacher().save_checkpoint(weights)
    runs.write_tokenizers(tmp_path)
    runs.write_data(tmp_path, train=1800)
    data = tmp_path / "train.jsonl"
    assert data.stat().st_size > 90_000
    values = runs.settings(tmp_path, tmp_path / "run", distillation={"max_num_steps": 1, "val_period": 0})
    values["teacher"] = {"model_name": str(weights), "logprob_batch_size": 3}
    values["distillation"] |= {"val_at_start": False, "val_at_end": False}
    run_file = runs.write_run_file(tmp_path / "run.yaml", values)
    assert runs.limbeck("train", run_file, "-q")[0] == 0
    if what == "data":
        lines = data.read_text(encoding="utf-8").splitlines()
        words = json.loads(lines[-1])["text"].split()
        lines[-1] = json.dumps({"text": " ".join(words[::-1])}, ensure_ascii=False)
        data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        tensors = load_file(weights / "model.safetensors")
        tensors["model.norm.weight"][3] += 1
        save_file(tensors, weights / "model.safetensors", {"format": "pt"})
    name = "data.train: 'train.jsonl'" if what == "data" else "teacher_0: 'model.safetensors'"
    line = runs.refused("train", run_file, "-q", "distillation.max_num_steps=2")
    assert f"{name} holds something else than when this run began" in line
