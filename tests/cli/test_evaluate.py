"""``limbeck eval`` end to end: tables, JSON, one clear line on bad input."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from limbeck.cli import application
from limbeck.cli.evaluate import split_arguments
from limbeck.cli.evaluation_tables import notes, print_evaluation
from limbeck.errors import ConfigError
from tests.helpers import tiny

app = application()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    tiny.student().save_checkpoint(root / "one")
    tiny.teacher().save_checkpoint(root / "two")
    return [str(root / "one"), str(root / "two")]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name, text in (("a.txt", tiny.TEXTS[0]), ("b.txt", tiny.TEXTS[3])):
        (tmp_path / name).write_text(text, encoding="utf-8")
    return [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]


def test_models_side_by_side_as_json(models: list[str], files: list[str]) -> None:
    result = CliRunner().invoke(app, ["eval", *models, "--data", *files, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["models"]
    assert list(found) == models
    for model in models:
        assert list(found[model]) == files
        for row in found[model].values():
            assert set(row) >= {"bpb", "bytes", "documents", "tokens"}
            assert 2 < row["bpb"] < 9


def test_models_side_by_side_as_a_table(models: list[str], files: list[str]) -> None:
    result = CliRunner().invoke(app, ["eval", *models, "--data", files[0], "--data", files[1]])
    assert result.exit_code == 0, result.output
    for expected in ("one", "two", "a.txt", "b.txt", "all bytes", "bits per byte"):
        assert expected in result.stdout


def test_data_files_behind_the_option_are_no_models(files: list[str], tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_text("")
    assert split_arguments(["m", str(gguf), files[1], "x/*.txt", "hf:a/b"], [files[0]]) == (
        ["m", str(gguf)],
        [files[0], files[1], "x/*.txt", "hf:a/b"],
    )
    with pytest.raises(ConfigError, match=re.escape(f"({files[1]})")):
        split_arguments([files[1]], [files[0]])


def test_nothing_to_evaluate_on_is_refused(models: list[str]) -> None:
    result = CliRunner().invoke(app, ["eval", models[0]])
    assert isinstance(result.exception, ConfigError)
    assert "--data FILE" in str(result.exception)


def test_a_model_without_some_of_its_weights_needs_a_flag(models: list[str], files: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "lacking"
    shutil.copytree(models[0], folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    arguments = ["eval", str(folder), "--data", files[0], "--json"]
    refused = CliRunner().invoke(app, arguments)
    assert isinstance(refused.exception, ConfigError)
    assert "mlp.up_proj.weight" in str(refused.exception)
    assert "--allow-missing" in str(refused.exception)
    allowed = CliRunner().invoke(app, [*arguments, "--allow-missing"])
    assert allowed.exit_code == 0, allowed.output
    assert json.loads(allowed.stdout)["settings"]["allow_missing"] is True


def test_a_missing_harness_is_one_sentence(models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    result = CliRunner().invoke(app, ["eval", models[0], "--lm-eval", "arc_easy"])
    assert isinstance(result.exception, ConfigError)
    assert "pip install 'limbeck[eval]'" in str(result.exception)


def test_the_lowest_of_each_row_is_marked_and_notes_say_what_differs() -> None:
    rows = {"m/a": {"bpb": 1.2, "bytes": 100, "documents": 2, "tokens": 30, "acc": 0.5}}
    rows["m/b"] = {"bpb": 1.1, "bytes": 90, "documents": 2, "tokens": 20, "acc": 0.7, "skipped": {"inexact_tokens": 3}}
    result = {"models": {spec: {"f.txt": row} for spec, row in rows.items()}, "files": {"f.txt": "text"}}
    console = Console(record=True, width=120, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_evaluation(result, console)
    marked = console.export_text(styles=True)
    assert "\x1b[1;32m1.1000" in marked
    assert "\x1b[1;32m1.2000" not in marked
    assert "\x1b[1;32m0.700" in marked
    first, second = notes(result["models"], {"m/a": "a", "m/b": "b"}, {"f.txt": "f.txt"})
    assert "a 100, b 90" in first
    assert "3 inexact_tokens" in second
