"""``limbeck doctor``: findings about the machine and about models."""

from __future__ import annotations

import importlib.metadata
import json
import sys

import pytest

from limbeck.doctor import examine
from tests.cli.command import run
from tests.zoo import tokenizer_dir


@pytest.mark.train
def test_doctor_checks_the_machine_and_a_model(capsys, tmp_path) -> None:
    code, out, _ = run(capsys, "doctor", tokenizer_dir("qwen3"), "--json")
    assert code == 0
    found = {f["what"].rsplit(": ", 1)[-1]: f for f in json.loads(out)["findings"]}
    assert found["torch"]["level"] == "ok"
    assert found["chat template"]["level"] == "ok"
    assert found["bytes"]["level"] in ("ok", "note")
    assert all(f["remedy"] for f in found.values() if f["level"] == "bad")
    code, out, _ = run(capsys, "doctor", tmp_path / "nothing", "--json")
    assert code == 1
    assert json.loads(out)["findings"][-1]["remedy"] == "give a folder with a tokenizer.json"
    assert "bad" in run(capsys, "doctor", tmp_path / "nothing")[1]


def test_doctor_tells_a_head_that_does_not_fit(capsys, tmp_path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tokenizer_dir("gpt2") / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50304}))
    out = json.loads(run(capsys, "doctor", tmp_path, "--json")[1])
    head = next(f for f in out["findings"] if f["what"].endswith("head"))
    assert "47 rows are no token" in head["found"]


def test_a_core_without_the_training_parts_is_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("torch", "safetensors"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {f["what"]: f for f in examine([])}
    assert (found["torch"]["level"], found["safetensors"]["level"]) == ("note", "bad")
    assert "limbeck[train]" in found["torch"]["remedy"]


def test_doctor_does_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = {f["what"]: f for f in examine([])}
    assert found["cpu"]["level"] == "ok"
    assert "disk" in found
    assert "gpu" not in found
