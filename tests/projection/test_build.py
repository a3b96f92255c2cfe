from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import limbeck.projection.rules as rules_module
from limbeck.errors import ProjectionError
from limbeck.projection import load_or_build
from tests.helpers.tokenizers import byte_level
from tests.patience import WAIT_SECONDS

STUDENT = byte_level(["201", "the"])
TEACHER = byte_level(["the"])
OTHER = byte_level(["cat"])


@pytest.fixture
def no_building(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a stored projection was built again")

    monkeypatch.setattr(rules_module, "build_rules", fail)


def test_a_missing_matrix_is_built_once(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    first = load_or_build(STUDENT, TEACHER, cache_dir=tmp_path)
    request.getfixturevalue("no_building")
    second = load_or_build(STUDENT, TEACHER, cache_dir=tmp_path)
    np.testing.assert_array_equal(first.indices, second.indices)
    np.testing.assert_array_equal(first.weights, second.weights)


def test_everything_that_decides_the_content_is_in_the_name(tmp_path: Path) -> None:
    load_or_build(STUDENT, TEACHER, cache_dir=tmp_path)
    load_or_build(TEACHER, STUDENT, cache_dir=tmp_path)
    load_or_build(STUDENT, OTHER, cache_dir=tmp_path)
    assert len(os.listdir(tmp_path)) == 3


def test_a_damaged_cache_file_is_replaced_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_or_build(STUDENT, TEACHER, cache_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    with caplog.at_level(logging.WARNING):
        load_or_build(STUDENT, TEACHER, cache_dir=tmp_path)
    assert "built anew" in caplog.text
    assert len(path.read_bytes()) == len(whole)


def test_a_given_path_is_written_once_and_checked_afterwards(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = tmp_path / "new" / "w.safetensors"
    load_or_build(STUDENT, TEACHER, path)
    request.getfixturevalue("no_building")
    load_or_build(STUDENT, TEACHER, path)
    with pytest.raises(ProjectionError, match=r"w\.safetensors: .*this teacher"):
        load_or_build(STUDENT, OTHER, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ProjectionError, match=r"w\.safetensors .*truncated"):
        load_or_build(STUDENT, TEACHER, path)


def test_a_cache_that_cannot_be_written_is_a_warning_and_a_path_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        assert load_or_build(STUDENT, TEACHER, cache_dir=blocked).rule == "rules"
    assert "cannot be cached" in caplog.text
    with pytest.raises(ProjectionError, match=r"file/w\.safetensors"):
        load_or_build(STUDENT, TEACHER, blocked / "w.safetensors")


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMBECK_CACHE", str(tmp_path))
    load_or_build(STUDENT, TEACHER)
    assert len(list((tmp_path / "projections").iterdir())) == 1


@pytest.mark.train
def test_two_processes_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    for name, tokenizer in (("s", STUDENT), ("t", TEACHER)):
        tokenizer.save_pretrained(tmp_path / name)
    program = (
        "import sys; from limbeck.tokens import load_tokenizer; from limbeck.projection import load_or_build\n"
        "s, t = (load_tokenizer(p) for p in sys.argv[1:3])\n"
        "for i in range(20):\n"
        "    load_or_build(s, t, cache_dir=sys.argv[3])\n"
        "    for f in __import__('pathlib').Path(sys.argv[3]).glob('*.safetensors'): f.unlink(missing_ok=True)\n"
        "load_or_build(s, t, cache_dir=sys.argv[3])\n"
    )
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", program, str(tmp_path / "s"), str(tmp_path / "t"), str(cache)]
    runs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for run in runs:
        _, errors = run.communicate(timeout=WAIT_SECONDS)
        assert run.returncode == 0, errors
    load_or_build(STUDENT, TEACHER, cache_dir=cache)
    assert not list(cache.glob(".*"))


@pytest.mark.train
def test_trees_are_built_when_asked_for_and_stored_with_the_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    assert load_or_build(STUDENT, TEACHER, cache_dir=tmp_path).trees is None
    request.getfixturevalue("no_building")
    built = load_or_build(STUDENT, TEACHER, cache_dir=tmp_path, trees=True).trees
    monkeypatch.setattr(rules_module, "build_trees", None)
    loaded = load_or_build(STUDENT, TEACHER, cache_dir=tmp_path, trees=True).trees
    assert built is not None
    assert loaded is not None
    for name, array in built.tensors().items():
        np.testing.assert_array_equal(array, loaded.tensors()[name])
    assert loaded.num_cells == TEACHER.vocab_size
    two, numeral = (STUDENT.convert_tokens_to_ids(token) for token in ("2", "201"))
    assert loaded.student_cell[two] == loaded.student_cell[numeral]
    digits = [TEACHER.convert_tokens_to_ids(digit) for digit in "201"]
    assert loaded.teacher_tree.members(loaded.teacher_tree.find(digits)).tolist() == [numeral]


def test_a_given_file_without_trees_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    load_or_build(STUDENT, TEACHER, path)
    before = path.read_bytes()
    assert load_or_build(STUDENT, TEACHER, path, trees=True).trees is not None
    assert path.read_bytes() == before


@pytest.mark.train
def test_special_tokens_share_a_cell_by_role() -> None:
    ends = [byte_level(["the"], specials=["<|endoftext|>", "<|im_end|>", "<|pad|>"]) for _ in range(2)]
    ends[1].add_special_tokens({"additional_special_tokens": ["<|other|>"]})
    trees = rules_module.build_trees(*ends)
    for name in ("<|endoftext|>", "<|im_end|>"):
        mine, theirs = (tokenizer.convert_tokens_to_ids(name) for tokenizer in ends)
        assert trees.student_cell[mine] == trees.teacher_cell[theirs] >= 0
