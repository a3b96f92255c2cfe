"""Data and weights that changed under the same name since a run began are noticed when it goes on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from limbeck.algorithms.origins import check_origins
from limbeck.errors import DataError
from limbeck.tokens.tokenizer import ByteTokenizer
from limbeck.utils.files import Stamp, stamp_files
from tests.helpers import runs, tiny
from tests.helpers import tokenizers as made

SIZE = 40 << 20
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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


def test_files_of_one_name_in_several_folders(tmp_path: Path) -> None:
    parts = [tmp_path / folder / "part.jsonl" for folder in "ab"]
    for number, part in enumerate(parts):
        part.parent.mkdir()
        part.write_text("x" * (100 + number))
    check_origins(tmp_path, {"data.train": stamp_files(parts)}, has_checkpoint=False)
    for order in (parts, parts[::-1]):
        check_origins(tmp_path, {"data.train": stamp_files(order)}, has_checkpoint=True, store=False)
    for changed in parts:
        kept = changed.read_text()
        changed.write_text(kept[:-1] + "y")
        with pytest.raises(DataError):
            check_origins(tmp_path, {"data.train": stamp_files(parts)}, has_checkpoint=True, store=False)
        changed.write_text(kept)
    with pytest.raises(DataError):
        check_origins(tmp_path, {"data.train": stamp_files([parts[0]] * 2)}, has_checkpoint=True, store=False)


def test_what_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = Stamp("model.safetensors", 10, 1, "aa")
    facts = {"teacher_1": {"k": 4}}
    origin(tmp_path, first, goes_on=False, facts=facts)
    origin(tmp_path, first, goes_on=True, facts=facts)
    for changed, line in (
        (first._replace(size=11), "teacher_0: 'model.safetensors' .*11 .* 10 "),
        (first._replace(sample="bb"), "teacher_0: 'model.safetensors' holds"),
        (first._replace(name="other"), "teacher_0: 'other'"),
    ):
        with pytest.raises(DataError, match=line):
            origin(tmp_path, changed, goes_on=True)
    with pytest.raises(DataError, match="teacher_1 is"):
        origin(tmp_path, first, goes_on=True, facts={"teacher_1": {"k": 5}})
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


def _edit(path: Path, change: Any) -> None:
    spec = json.loads(path.read_text(encoding="utf-8"))
    change(spec)
    path.write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")


def _swap_ids(spec: Any) -> None:
    vocab = spec["model"]["vocab"]
    one, other = list(vocab)[70:72]
    vocab[one], vocab[other] = vocab[other], vocab[one]


def _swap_merges(spec: Any) -> None:
    merges = spec["model"]["merges"]
    merges[3], merges[4] = merges[4], merges[3]


def _normalize(spec: Any) -> None:
    spec["normalizer"] = {"type": "NFKC"}


def _name_another(config: Any) -> None:
    config["pad_token"] = config["eos_token"]


TOKENIZER_CHANGES = {
    "ids of the student": ("student", "tokenizer.json", _swap_ids, "policy.tokenizer: other tokens and rules"),
    "ids of the teacher": ("teacher", "tokenizer.json", _swap_ids, "teacher_0.tokenizer: other tokens and rules"),
    "merges": ("student", "tokenizer.json", _swap_merges, "policy.tokenizer: other tokens and rules"),
    "normalizer": ("teacher", "tokenizer.json", _normalize, "teacher_0.tokenizer: other tokens and rules"),
    "padding": ("teacher", "tokenizer_config.json", _name_another, "teacher_0.tokenizer: other special tokens"),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, of conversations, with a template of its own on the teacher's side."""
    folder = tmp_path_factory.mktemp("begun")
    runs.write_tokenizers(folder)
    (folder / "teacher.jinja").write_text(CHATML, encoding="utf-8")
    (folder / "student" / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    lines = [
        json.dumps({"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}, yes"}]})
        for i in range(12)
    ]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    values = runs.settings(folder, folder / "run", distillation={"max_num_steps": 1, "val_period": 0})
    values["data"] |= {"validation": None, "max_input_seq_length": 128, "max_teacher_seq_length": 128}
    values["teacher"]["tokenizer"]["chat_template"] = str(folder / "teacher.jinja")
    values["distillation"] |= {"val_at_start": False, "val_at_end": False}
    values["checkpointing"] = {"save_period": 1}
    run_file = runs.write_run_file(folder / "run.yaml", values)
    assert runs.limbeck("train", run_file, "-q")[0] == 0
    return run_file


@pytest.mark.parametrize("case", TOKENIZER_CHANGES)
@pytest.mark.parametrize("flags", [("-q",), ("--dry-run",)], ids=["run", "dry run"])
def test_a_run_does_not_go_on_with_another_tokenizer(begun: Path, case: str, flags: tuple[str, ...]) -> None:
    side, name, change, message = TOKENIZER_CHANGES[case]
    path = begun.parent / side / name
    before = path.read_bytes()
    _edit(path, change)
    try:
        code, _, line = runs.limbeck("train", begun, *flags, "distillation.max_num_steps=2")
    finally:
        path.write_bytes(before)
    assert code in (1, 2)  # of a dry run: 2
    assert message in line
    assert str(path) in line


@pytest.mark.parametrize("name", ["teacher.jinja", "student/chat_template.jinja"])
def test_a_run_does_not_go_on_with_another_chat_template(begun: Path, name: str) -> None:
    path = begun.parent / name
    path.write_text(CHATML.replace("<|im_end|>", "<|end|>"), encoding="utf-8")
    try:
        line = runs.refused("train", begun, "-q", "distillation.max_num_steps=2")
    finally:
        path.write_text(CHATML, encoding="utf-8")
    side = "teacher_0" if name == "teacher.jinja" else "policy"
    assert f"{side}.tokenizer: other chat template" in line
    assert str(path) in line


def test_a_tokenizer_that_is_written_in_another_way_is_the_same(begun: Path, tmp_path: Path) -> None:
    """Spaces and the order of keys of its files count for nothing."""
    shutil.copytree(begun.parent, tmp_path / "copy")
    tokenizer = begun.parent / "student" / "tokenizer.json"
    before = tokenizer.read_bytes()
    tokenizer.write_text(json.dumps(json.loads(before), indent=3), encoding="utf-8")
    try:
        assert runs.limbeck("train", begun, "-q", "distillation.max_num_steps=2")[0] == 0
    finally:
        tokenizer.write_bytes(before)
        shutil.rmtree(begun.parent / "run")
        shutil.copytree(tmp_path / "copy" / "run", begun.parent / "run")


def test_identity_of_a_tokenizer() -> None:
    """It does not depend on the copy, on the twin's names, or on what was asked before."""
    one, other = (ByteTokenizer.of(made.tiny(300)) for _ in range(2))
    other.encode("some text")
    assert one.identity() == other.identity() == one.identity()
    assert one.with_template(CHATML).identity()["chat template"] != one.identity()["chat template"]
    assert ByteTokenizer.of(made.tiny(310)).identity() != one.identity()
