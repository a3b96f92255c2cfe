from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save as to_safetensors

from limbeck.errors import ProjectionError
from limbeck.projection import Projection
from limbeck.projection.matrix import from_triples
from tests.projection.rows import dense


def make(indices: Any, weights: Any, exact: Any = None, teacher_size: int = 6, **extra: Any) -> Projection:
    rows = len(indices)
    return Projection(
        indices=np.array(indices, dtype=np.int32),
        weights=np.array(weights, dtype=np.float32),
        exact=np.array([-1] * rows if exact is None else exact, dtype=np.int32),
        teacher_size=teacher_size,
        **{"student_fingerprint": "s" * 64, "teacher_fingerprint": "t" * 64, "rule": "rules", **extra},
    )


def vocab(fingerprint: str, size: int) -> Any:
    token_bytes = [bytes([number]) for number in range(size)]
    return SimpleNamespace(fingerprint=fingerprint, size=size, token_bytes=token_bytes)


@st.composite
def triples(draw: st.DrawFn) -> tuple[list[tuple[int, int, float]], int, int, int]:
    rows, columns = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    entry = st.tuples(
        st.integers(0, rows - 1), st.integers(0, columns - 1), st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0])
    )
    return draw(st.lists(entry, max_size=30)), rows, columns, draw(st.integers(1, 5))


def random_projection(data: tuple[list[tuple[int, int, float]], int, int, int]) -> Projection:
    entries, rows, columns, k = data
    r, c, w = zip(*entries, strict=True) if entries else ((), (), ())
    indices, weights = from_triples(r, c, w, shape=(rows, columns), k=k)
    return make(indices, weights, teacher_size=columns)


@given(triples())
def test_from_triples_keeps_the_largest_sums_and_normalises(data: Any) -> None:
    entries, rows, columns, k = data
    projection = random_projection(data)
    full = np.zeros((rows, columns))
    for r, c, w in entries:
        full[r, c] += w
    for r in range(rows):
        best = sorted((c for c in range(columns) if full[r, c] > 0), key=lambda c: (-full[r, c], c))[:k]
        assert projection.indices[r].tolist() == best + [-1] * (k - len(best))
        expected = full[r, best] / full[r, best].sum() if best else []
        np.testing.assert_allclose(projection.weights[r, : len(best)], expected, rtol=1e-6)
    assert projection.mapped.tolist() == (full.sum(axis=1) > 0).tolist()


@given(triples(), st.data())
def test_teacher_view_and_columns_equal_the_dense_matrix(data: Any, draw: st.DataObject) -> None:
    projection = random_projection(data)
    full = dense(projection)
    view = projection.by_teacher()
    for t in range(projection.teacher_size):
        part = slice(view.offsets[t], view.offsets[t + 1])
        assert view.student_ids[part].tolist() == np.flatnonzero(full[:, t]).tolist()
        np.testing.assert_array_equal(view.weights[part], full[view.student_ids[part], t].astype(np.float32))
    wanted = draw.draw(st.lists(st.integers(0, projection.teacher_size - 1), max_size=6))
    probabilities = np.random.default_rng(0).random(projection.student_size)
    entries = projection.columns(wanted)
    mass = np.zeros(len(wanted))
    np.add.at(mass, entries.column, probabilities[entries.student_ids] * entries.weights)
    np.testing.assert_allclose(mass, (probabilities @ full)[wanted], rtol=1e-6)


@pytest.mark.parametrize("bad", [[-1], [6], [0, 99]])
def test_columns_refuse_ids_outside_the_teacher(bad: list[int]) -> None:
    with pytest.raises(ProjectionError, match=f"id {bad[-1]} .* 6 ids"):
        make([[0]], [[1.0]]).columns(bad)


@given(triples())
@settings(max_examples=25)
def test_a_stored_projection_comes_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    projection = random_projection(data)
    path = tmp_path_factory.mktemp("w") / "deep" / "w.safetensors"
    projection.save(path)
    again = Projection.load(path)
    for name in ("indices", "weights", "exact"):
        np.testing.assert_array_equal(getattr(again, name), getattr(projection, name))
    for name in ("teacher_size", "student_fingerprint", "teacher_fingerprint", "rule", "details", "k"):
        assert getattr(again, name) == getattr(projection, name)
    assert os.listdir(path.parent) == ["w.safetensors"]


def test_exact_pairs_and_immutability() -> None:
    projection = make([[0], [-1], [4]], [[1.0], [0.0], [1.0]], exact=[0, -1, 4])
    assert [a.tolist() for a in projection.exact_pairs()] == [[0, 2], [0, 4]]
    with pytest.raises(ValueError, match="read-only"):
        projection.weights[0, 0] = 0.5


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: make([[0]], [[float("nan")]]), "row 0 .*NaN"),
        (lambda: make([[0], [1]], [[1.0], [float("inf")]]), "row 1 .*NaN"),
        (lambda: make([[0, 1]], [[1.5, -0.5]]), "outside 0..1"),
        (lambda: make([[6]], [[1.0]]), "teacher id outside -1..5"),
        (lambda: make([[-2]], [[1.0]]), "teacher id outside -1..5"),
        (lambda: make([[-1]], [[1.0]]), "weight without a teacher id"),
        (lambda: make([[0, 1]], [[1.0, 0.0]]), "teacher id without a weight"),
        (lambda: make([[0, 1]], [[0.4, 0.6]]), "row 0 .*sorted"),
        (lambda: make([[2, 2]], [[0.5, 0.5]]), "row 0 .*twice"),
        (lambda: make([[0, 1]], [[0.5, 0.4]]), "row 0 sums"),
        (lambda: make([[0]], [[1.0]], exact=[6]), "exact teacher id outside"),
        (lambda: make([[0], [0]], [[1.0], [1.0]], exact=[0, 0]), "teacher id 0 .*exact partner"),
        (lambda: make([[0]], [[1.0]], exact=[0, 1]), "shapes do not fit"),
        (lambda: make([0], [1.0]), "shapes do not fit"),
        (lambda: make(np.zeros((1, 0)), np.zeros((1, 0))), "k=0 entries"),
        (lambda: make([[0]], [[1.0]], teacher_size=0), "vocabulary sizes 1 and 0"),
        (lambda: from_triples([0], [0], [1.0], shape=(1, 1), k=0), "k=0 is not usable"),
    ],
)
def test_malformed_matrices_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ProjectionError, match=message):
        build()


def test_loading_checks_whose_tokenizers_it_belongs_to(tmp_path: Path) -> None:
    path = make([[0], [1]], [[1.0], [1.0]]).save(tmp_path / "w.safetensors")
    loaded = Projection.load(path, vocab("s" * 64, 2), vocab("t" * 64, 6))
    assert loaded.token_bytes == ([b"\0", b"\1"], [bytes([number]) for number in range(6)])
    with pytest.raises(ProjectionError, match=r"this student: x{12}, 2 ids"):
        Projection.load(path, vocab("x" * 64, 2), None)
    with pytest.raises(ProjectionError, match=r"this teacher: y{12}, 6 ids"):
        Projection.load(path, None, vocab("y" * 64, 6))
    with pytest.raises(ProjectionError, match=r"this teacher: t{12}, 7 ids"):
        Projection.load(path, None, vocab("t" * 64, 7))


GOOD_HEADER = {
    "format": "limbeck.projection",
    "version": "1",
    "rule": "rules",
    "k": "1",
    "student_size": "2",
    "teacher_size": "6",
    "student_fingerprint": "s",
    "teacher_fingerprint": "t",
    "details": "{}",
}
GOOD_TENSORS = {
    "indices": np.array([[0], [1]], dtype=np.int32),
    "weights": np.array([[1], [1]], dtype=np.float32),
    "exact": np.array([0, -1], dtype=np.int32),
}


def stored(tmp_path: Path, header: dict[str, str | None] | None = None, tensors: dict[str, Any] | None = None) -> Path:
    """A file that differs from a good one in the given header fields and arrays (None removes)."""
    fields = {name: value for name, value in (GOOD_HEADER | (header or {})).items() if value is not None}
    arrays = {name: value for name, value in (GOOD_TENSORS | (tensors or {})).items() if value is not None}
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(to_safetensors(arrays, metadata=fields))
    return path


def test_the_unchanged_file_of_the_hostile_cases_loads(tmp_path: Path) -> None:
    assert Projection.load(stored(tmp_path)).exact.tolist() == [0, -1]


@pytest.mark.parametrize(
    ("header", "tensors", "message"),
    [
        ({"format": None}, {}, "format is None"),
        ({"format": "other"}, {}, "format is 'other'"),
        ({"version": "2"}, {}, "version '2'"),
        ({"rule": None, "k": None}, {}, "lacks rule, k"),
        ({"k": "2"}, {}, "k=2, .*1"),
        ({"student_size": "3"}, {}, "student_size=3, .*2"),
        ({"teacher_size": "1"}, {}, "teacher id outside -1..0"),
        ({"teacher_size": "9" * 5000}, {}, "teacher_size is '9{40}'"),
        ({"teacher_size": "-6"}, {}, "teacher_size is '-6'"),
        ({"teacher_size": "六"}, {}, "teacher_size is '六'"),
        ({"details": "[" * 100_000}, {}, "details .*JSON"),
        ({"details": '{"a": 1}'}, {}, "details .*JSON"),
        ({}, {"exact": None}, r"\['indices', 'weights'\]"),
        ({}, {"more": np.zeros(1)}, "'more'"),
        ({}, {"weights": np.ones((2, 1))}, "`weights` has dtype F64, expected F32"),
        ({}, {"indices": np.array([[0], [1]])}, "`indices` has dtype I64, expected I32"),
        ({}, {"weights": np.array([[1], [np.nan]], dtype=np.float32)}, "row 1 .*NaN"),
        ({}, {"weights": np.ones((3, 1), dtype=np.float32)}, "shapes do not fit"),
        ({}, {"indices": np.array([[0], [-7]], dtype=np.int32)}, "teacher id outside"),
    ],
)
def test_hostile_files_are_refused_with_their_name(
    tmp_path: Path, header: dict[str, str | None], tensors: dict[str, Any], message: str
) -> None:
    path = stored(tmp_path, header, tensors)
    with pytest.raises(ProjectionError, match=message) as caught:
        Projection.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_safetensors_are_refused(tmp_path: Path) -> None:
    whole = stored(tmp_path).read_bytes()
    path = tmp_path / "bad.safetensors"
    contents = [whole[:n] for n in (0, 4, 8, 20, len(whole) - 1)]
    contents += [b"\x80\x04K\x01.", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 2) + b"[]", whole + b"x"]
    big = json.dumps({"weights": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    contents.append(struct.pack("<Q", len(big)) + big)
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(ProjectionError, match=r"bad\.safetensors .*readable"):
            Projection.load(path)
    with pytest.raises(ProjectionError, match=r"absent\.safetensors;"):
        Projection.load(tmp_path / "absent.safetensors")
    with pytest.raises(ProjectionError, match=f"{tmp_path.name};"):
        Projection.load(tmp_path)


@given(st.integers(0, 10_000), st.integers(0, 255))
@settings(max_examples=150)
def test_a_changed_byte_is_refused_or_still_a_valid_projection(
    tmp_path_factory: pytest.TempPathFactory, place: int, value: int
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    content = bytearray(stored(folder).read_bytes())
    content[place % len(content)] = value
    (folder / "w").write_bytes(content)
    try:
        projection = Projection.load(folder / "w")
    except ProjectionError:
        return
    np.testing.assert_allclose(projection.weights.sum(axis=1), 1, atol=1e-4)


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make([[0]], [[1.0]]).save(tmp_path / "w.safetensors")
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        make([[1]], [[1.0]]).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_every_flipped_bit_of_a_stored_projection_is_refused_or_means_nothing(tmp_path: Path) -> None:
    saved = make([[0, 1], [2, -1], [3, 4]], [[0.75, 0.25], [1, 0], [0.5, 0.5]], [0, -1, 3])
    whole = saved.save(tmp_path / "w.safetensors").read_bytes()
    refused = 0
    for bit in range(8 * len(whole)):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        (tmp_path / "flipped").write_bytes(content)
        try:
            loaded = Projection.load(tmp_path / "flipped")
        except ProjectionError:
            refused += 1
            continue
        for name in ("indices", "weights", "exact"):
            assert np.array_equal(getattr(loaded, name), getattr(saved, name))
        assert (loaded.rule, loaded.details, loaded.teacher_size) == (saved.rule, saved.details, saved.teacher_size)
    assert refused > 7.5 * len(whole)
