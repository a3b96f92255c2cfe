"""A cache is read for the weights that filled it: others of the same name, shape and tokenizer are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from limbeck.errors import CacheError
from limbeck.teachers.cache.origin import NAME, check_origin, store_origin
from tests.helpers import runs, tiny


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file whose cache was filled by the model in ``weights``."""
    folder = tmp_path_factory.mktemp("filled")
    runs.write_tokenizers(folder)
    runs.write_data(folder)
    weights = folder / "weights"
    tiny.teacher().model.save_pretrained(weights)
    for path in (folder / "teacher").iterdir():
        shutil.copy(path, weights)
    values = runs.settings(folder, folder / "run", distillation={"max_num_steps": 1})
    values["teacher"] = {"model_name": str(weights), "cache": str(folder / "cache"), "cache_k": 16}
    path = runs.write_run_file(folder / "run.yaml", values)
    code, _, err = runs.limbeck("cache", path)
    assert code == 0, err
    return path


def _change(filled: Path, how: str) -> None:
    """Other weights under the same name: drawn anew, or of one value more than nothing."""
    weights = filled.parent / "weights"
    if how == "drawn anew":
        tiny.teacher(seed=2).model.save_pretrained(weights)
        return
    path = weights / "model.safetensors"
    values = load_file(path)
    name = sorted(values)[0]
    values[name].view(-1)[0] += 1
    save_file(values, path, {"format": "pt"})


@pytest.mark.parametrize("how", ["drawn anew", "one value"])
@pytest.mark.parametrize("flags", [("-q",), ("--dry-run",)], ids=["run", "dry run"])
def test_a_cache_of_other_weights_is_refused(filled: Path, how: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    shutil.copytree(filled.parent / "weights", tmp_path / "kept")
    try:
        _change(filled, how)
        code, _, line = runs.limbeck("train", filled, *flags, f"logger.log_dir={tmp_path / 'run'}")
    finally:
        shutil.rmtree(filled.parent / "weights")
        shutil.copytree(tmp_path / "kept", filled.parent / "weights")
    assert code in (1, 2)
    assert "other weights" in line
    assert str(filled.parent / "weights") in line


def test_the_same_weights_are_accepted_elsewhere_and_in_other_files(filled: Path, tmp_path: Path) -> None:
    """Moved, with another configuration file; written in two parts, once these have filled it, too; and not here."""
    weights, moved = filled.parent / "weights", tmp_path / "moved"
    shutil.copytree(weights, moved)
    (moved / "config.json").write_text((moved / "config.json").read_text() + "\n")

    def told(name: Path) -> tuple[int, str]:
        options = (f"teacher.model_name={name}", f"logger.log_dir={tmp_path / 'run'}")
        code, out, err = runs.limbeck("train", filled, "--dry-run", *options)
        return code, out + err

    code, text = told(moved)
    assert code == 0, text
    assert "is not known here" not in text
    parts = tmp_path / "parts"
    shutil.copytree(weights, parts)
    (parts / "model.safetensors").unlink()
    tiny.teacher().model.save_pretrained(parts, max_shard_size="50KB")
    assert len(list(parts.glob("*.safetensors"))) > 1
    assert told(parts)[0] != 0
    assert runs.limbeck("cache", filled, f"teacher.model_name={parts}")[0] == 0
    assert [told(name)[0] for name in (parts, weights)] == [0, 0]
    for path in parts.glob("*.safetensors*"):
        path.unlink()
    code, text = told(parts)
    assert code == 0, text
    assert "is not known here" in text


@pytest.mark.parametrize("text", ["", "{", "[[1]]", "[[[1, 2, 3]]]", "7", "[" * 100_000])
def test_a_damaged_list_of_weights_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(CacheError):
        check_origin(tmp_path, [], "m")


def test_order_and_names_of_files_do_not_count(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.safetensors", "b.safetensors", "config.json")]
    for number, path in enumerate(files):
        save_file({"x": torch.full((4,), number)}, path)
    store_origin(tmp_path, files[:2])
    for path in files[:2]:
        path.rename(path.with_name(f"other_{path.name}"))
    assert check_origin(tmp_path, [tmp_path / "other_b.safetensors", tmp_path / "other_a.safetensors", files[2]], "m")
    assert not check_origin(tmp_path, [], "m")
    assert not check_origin(tmp_path / "elsewhere", files[2:], "m")
    with pytest.raises(CacheError):
        check_origin(tmp_path, [tmp_path / "other_b.safetensors"], "m")
