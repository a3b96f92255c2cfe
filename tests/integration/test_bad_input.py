"""Everything that a user can get wrong ends with one clear line and exit code 1."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from limbeck.config import merge
from limbeck.projection import load_or_build
from limbeck.utils.manifest import write_manifest
from tests.gates import Gate
from tests.helpers.runs import (
    checkpoint,
    leftovers,
    limbeck,
    refused,
    rows,
    settings,
    start,
    weight_bytes,
    write_run_file,
)
from tests.helpers.tiny import tokenizer
from tests.patience import WAIT_SECONDS


@pytest.fixture
def run_file(stuff: Path, tmp_path: Path) -> Path:
    return write_run_file(tmp_path / "run.yaml", settings(stuff, tmp_path / "run"))


def test_a_run_file_that_is_not_there(tmp_path):
    assert "nowhere.yaml" in refused("train", tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.train=nowhere/*.jsonl", "nowhere/*.jsonl"),
        ("data.validation=/nowhere.jsonl", "/nowhere.jsonl"),
        ("policy.tokenizer.name=/nowhere", "/nowhere"),
        ("policy.tokenizer.chat_template=/nowhere.jinja", "/nowhere.jinja"),
        ("teacher.cache=/nowhere", "/nowhere"),
        ("policy.optimzer.name=x", "did you mean 'optimizer'?"),
        ("distillation.max_num_step=3", "did you mean 'max_num_steps'?"),
        ("los_fn.mode=p_kl", "did you mean 'loss_fn'?"),
        ("distillation.max_num_steps=0", "'distillation.max_num_steps' is 0"),
        ("distillation.seed=-5", "'distillation.seed' is -5"),
        ("loss_fn.mode=p_lk", "'loss_fn.mode' is 'p_lk'"),
        ("distillation.num_prompts_per_step=6", "smaller than one global batch"),
        ("policy.train_global_batch_size=3", "no multiple"),
        ("policy.optimizer.name=os.system", "'os.system' is not allowed"),
        ("data.mode=chat", "messages"),
        ("algorithm=[trace_distillation]", "'algorithm' is ['trace_distillation'], which is unknown"),
        ("loss_fn.mode=[p_kl]", "'loss_fn.mode' is ['p_kl']"),
        ("policy=[3]", "'policy' is [3]"),
        ("=3", "not of the form"),
    ],
)
def test_a_wrong_value(run_file, override, said):
    more = ["data.train=" + str(run_file.with_name("five.jsonl"))] if "num_prompts" in override else []
    run_file.with_name("five.jsonl").write_text('{"text": "a b c d"}\n' * 5)
    assert said in refused("train", run_file, "-q", override, *more)
    assert not (run_file.parent / "run" / "metrics.jsonl").exists()


def test_a_model_that_is_not_there(stuff, tmp_path):
    values = settings(stuff, tmp_path / "run")
    values["policy"] = {"model_name": "/nowhere/model", "tokenizer": {"name": str(stuff / "student")}}
    assert "'/nowhere/model'" in refused("train", write_run_file(tmp_path / "run.yaml", values), "-q")


def test_a_teacher_with_another_vocabulary_than_its_model(run_file):
    line = refused("train", run_file, "-q", "teacher.model_overrides.vocab_size=300")
    assert "300" in line
    assert "340" in line


def test_a_projection_for_another_teacher(run_file, tmp_path):
    path = tmp_path / "other.safetensors"
    load_or_build(tokenizer(300), tokenizer(320), None).save(path)
    assert "teacher" in refused("train", run_file, "-q", f"loss_fn.projection_matrix_path={path}")


def test_a_cache_of_another_teacher(stuff, run_file, tmp_path):
    cache = f"teacher.cache={tmp_path / 'cache'}"
    same = ["teacher.tokenizer.name=" + str(stuff / "student"), "teacher.model_overrides.vocab_size=300"]
    assert limbeck("cache", run_file, cache, *same)[0] == 0
    assert "tokenizer" in refused("train", run_file, "-q", cache)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no usable record"),
        ('{"text": ""}\n{"text": ""}\n', "no usable record"),
        ('{"body": "x"}\n', "no 'text'"),
        ('{"text": "x"\n', ":1"),
        ('{"text": 3}\n', "not a string"),
        # one token each: nothing that could be predicted
        ('{"text": "a"}\n' * 8, "nothing to learn from"),
    ],
    ids=["nothing", "empty", "wrong_key", "no_json", "wrong_type", "too_short"],
)
def test_data_without_a_usable_row(run_file, tmp_path, text, said):
    data = tmp_path / "bad.jsonl"
    data.write_text(text, encoding="utf-8")
    assert said in refused("train", run_file, "-q", f"data.train={data}")


def _bind(folder: Path) -> None:
    """A manifest of the files as they are now."""
    (folder / "manifest.json").unlink()
    write_manifest(folder, int(folder.name.removeprefix("step_")))


def test_a_loss_that_is_not_finite(run_file, tmp_path):
    """The run stops, keeps its last good checkpoint, names the records and stores the batch."""
    run_dir = tmp_path / "run"
    base = ("train", run_file, "-q", "checkpointing.save_period=1", "distillation.val_period=0")
    assert limbeck(*base, "distillation.max_num_steps=2", "distillation.val_at_end=false")[0] == 0
    good = weight_bytes(run_dir, 2)
    # from the third step on the optimizer throws the weights far away: the fourth step sees the damage
    state = next((run_dir / "checkpoints" / "step_2").rglob("optimizer/state.json"))
    state.write_text(state.read_text().replace('"lr": 0.00975', '"lr": 1e+30, "old": 0.00975'))
    assert "1e+30" in state.read_text()
    _bind(checkpoint(run_dir, 2))
    line = refused(*base)
    assert "step 4: " in line
    assert "step_3" in line
    folder = run_dir / "failed_batch_step_4"
    assert str(folder) in line
    records = json.loads((folder / "records.json").read_text())["idx"]
    assert str(records) in line or any(str(i) in line for i in records)
    assert set(load_file(folder / "batch.safetensors")) >= {"input_ids", "teacher_input_ids", "sample_mask"}
    assert [r["step"] for r in rows(run_dir)][-1] == 3
    assert weight_bytes(run_dir, 2) == good
    assert leftovers(run_dir) == []


def test_a_full_disk_while_saving(run_file, tmp_path, monkeypatch):
    import limbeck.utils.checkpoint as module

    run_dir = tmp_path / "run"
    flush, calls = module.fsync_tree, []

    def full(path: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(path)

    monkeypatch.setattr(module, "fsync_tree", full)
    line = refused("train", run_file, "-q")
    assert "no space left to save step 6" in line
    assert "step_3 is intact" in line
    assert leftovers(run_dir) == []
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["step_3"]
    monkeypatch.undo()
    assert limbeck("train", run_file, "-q")[0] == 0
    assert [r["step"] for r in rows(run_dir)] == list(range(9))


def test_a_full_disk_while_logging(run_file, tmp_path, monkeypatch):
    import limbeck.utils.logger as module

    write, calls = os.write, []

    def short(fd: int, data: bytes) -> int:
        if data.startswith(b'{"step"'):
            calls.append(data)
            if len(calls) in (5, 6):
                return write(fd, data[:20])
        return write(fd, data)

    monkeypatch.setattr(module.os, "write", short)
    line = refused("train", run_file, "-q")
    assert "no space left" in line
    assert str(tmp_path / "run") in line
    monkeypatch.undo()
    # half a row must not stand in the way of the resumed run
    assert limbeck("train", run_file, "-q")[0] == 0
    assert [r["step"] for r in rows(tmp_path / "run")] == list(range(9))


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of one mebibyte, where the system lets us mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True)
    if not done or done.returncode != 0:
        pytest.skip("needs the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(stuff, tmp_path, small_disk):
    values = merge(settings(stuff, small_disk / "run"), {"logger": {"tensorboard_enabled": True}})
    run_file = write_run_file(tmp_path / "run.yaml", values)
    line = refused("train", run_file, "-q", "checkpointing.keep_top_k=null", "checkpointing.save_period=1")
    assert "no space left" in line
    assert leftovers(small_disk / "run") == []
    kept = sorted((small_disk / "run" / "checkpoints").iterdir())
    assert kept, "at least one checkpoint fits"
    assert f"{kept[-1].name} is intact" in line


def test_a_second_run_in_the_same_folder_says_who_holds_it(run_file, tmp_path):
    gate = Gate(tmp_path / "gate")
    first = start("train", run_file, "-q", hold=(gate, "row written", 3))
    line = refused("train", run_file, "-q", "distillation.seed=6")
    assert f"process {first.pid} on" in line
    elsewhere = refused(
        "train",
        run_file,
        "-q",
        f"logger.log_dir={tmp_path / 'other'}",
        f"checkpointing.checkpoint_dir={tmp_path / 'run'}",
    )
    assert f"process {first.pid} on" in elsewhere
    gate.open()
    first.join(WAIT_SECONDS)
    assert first.exitcode == 0
    assert rows(tmp_path / "run")[-1]["step"] == 8
    assert limbeck("train", run_file, "-q")[0] == 0


def _flip(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


WEIGHTS = Path("policy", "weights", "model.safetensors")
DAMAGES: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "flipped bit": (lambda new, old: _flip(new / WEIGHTS), "its checksum differs"),
    "weights of another step": (lambda new, old: shutil.copy(old / WEIGHTS, new / WEIGHTS), "its checksum differs"),
    "cut off": (lambda new, old: os.truncate(new / WEIGHTS, 100), "has 100 bytes instead of"),
    "gone": (lambda new, old: (new / WEIGHTS).unlink(), "is missing"),
    "no counters": (lambda new, old: (new / "training_info.json").unlink(), "'training_info.json' .* is missing"),
    "manifest": (lambda new, old: (new / "manifest.json").write_text("[" * 100_000), "manifest.json' is damaged"),
    "no manifest": (lambda new, old: (new / "manifest.json").unlink(), "manifest.json' is damaged"),
}


@pytest.fixture(scope="module")
def four_steps(stuff: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with two checkpoints."""
    folder = tmp_path_factory.mktemp("four")
    more = {"checkpointing": {"save_period": 2}, "distillation": {"max_num_steps": 4, "val_period": 0}}
    run_file = write_run_file(folder / "run.yaml", settings(stuff, folder / "run", **more))
    assert limbeck("train", run_file, "-q")[0] == 0
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_the_run_goes_on_from_the_older(four_steps, tmp_path, damage):
    run_dir = shutil.copytree(four_steps / "run", tmp_path / "run")
    newer, older = checkpoint(run_dir, 4), checkpoint(run_dir, 2)
    spoil, why = DAMAGES[damage]
    spoil(newer, older)
    code, out, _ = limbeck("doctor", run_dir, "--json")
    findings = {f["what"].rpartition(" ")[2]: f for f in json.loads(out)["findings"]}
    assert (code, findings["step_2"]["level"], findings["step_4"]["level"]) == (1, "ok", "bad")
    assert re.search(why, findings["step_4"]["found"])

    here = f"logger.log_dir={run_dir}"
    code, _, said = limbeck("train", four_steps / "run.yaml", "-q", here)
    assert code == 0, said
    (line,) = [line for line in said.splitlines() if "damaged_step_4" in line]
    assert re.search(f"{why}.*; it is set aside as damaged_step_4, and the run goes on from step_2$", line)
    assert weight_bytes(run_dir, 4) == weight_bytes(four_steps / "run", 4)
    assert rows(run_dir) == rows(four_steps / "run")
    assert limbeck("doctor", run_dir, "--json")[0] == 0

    shutil.rmtree(older)
    spoil(newer, checkpoint(four_steps / "run", 2))
    line = refused("train", four_steps / "run.yaml", "-q", here)
    assert re.search(f"{why}.*, and there is no older checkpoint; put back what was saved", line)


def test_a_checkpoint_under_the_name_of_another_step(four_steps, tmp_path):
    run_dir = shutil.copytree(four_steps / "run", tmp_path / "run")
    command = ("train", four_steps / "run.yaml", "-q", f"logger.log_dir={run_dir}")
    shutil.copytree(checkpoint(run_dir, 2), checkpoint(run_dir, 99))
    code, _, said = limbeck(*command)
    assert code == 0
    assert "was saved as step 2; it is set aside as damaged_step_99" in said
    assert "the run goes on from step_4" in said


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("training_info.json", '"current_epoch": 0', '"current_epoch": "x"'),
        ("training_info.json", '"total_steps": 4', '"total_steps": [4]'),
        ("training_info.json", '"compilation": {', '"compilation": 3, "x": {'),
        ("train_state/rank_0/state.json", '"position"', '"psition"'),
        ("train_state/rank_0/state.json", '"consumed": ', '"consumed": {}, "x": '),
        ("train_state/rank_0/state.json", '"python": ', '"python": 3, "x": '),
        ("train_state/rank_0/state.json", '{"$tensor": "rng/torch"}', '{"$tensor": ["rng/torch"]}'),
        ("policy/optimizer/state.json", '"param_groups"', '"groups"'),
        ("policy/optimizer/state.json", '"steps": 4', '"steps": "four"'),
        ("policy/optimizer/state.json", '"optimizer": {', '"optimizer": 3, "x": {'),
    ],
)
def test_stored_values_of_other_types_are_one_line(four_steps, tmp_path, name, old, new):
    run_dir = shutil.copytree(four_steps / "run", tmp_path / "run")
    path = checkpoint(run_dir, 4) / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    # as whole as what was saved: the values are wrong, not the bytes
    _bind(checkpoint(run_dir, 4))
    line = refused("train", four_steps / "run.yaml", "-q", f"logger.log_dir={run_dir}", "distillation.max_num_steps=6")
    assert "take another checkpoint" in line
