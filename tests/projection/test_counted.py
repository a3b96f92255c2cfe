from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import limbeck.projection.counted as counted_module
from limbeck.errors import DataError, ProjectionError
from limbeck.projection import Projection, build_counted, build_rules, count_pairs
from limbeck.projection.counted import iter_texts
from limbeck.tokens import ByteVocab
from tests.helpers.tokenizers import byte_level
from tests.projection.rows import dense, row

STUDENT = byte_level(["ab", "cd", "zz"])
TEACHER = byte_level(["abc", "b"], order_from=9)
# "abcd": the student cuts ab|cd, the teacher abc|d, one chunk of two tokens each.  "ab": ab on both sides.
TEXTS = ["abcd", "ab", "abcd", "b", "cd"]


def ids(tokenizer: Any, *tokens: bytes) -> list[int]:
    return [ByteVocab.from_tokenizer(tokenizer).ids_by_bytes[t] for t in tokens]


def test_pairs_are_counted_at_shared_boundaries() -> None:
    counter = count_pairs(STUDENT, TEACHER, TEXTS)
    found = {(int(s), int(t)): int(n) for s, t, n in zip(*counter.pairs(), strict=True)}
    ab, cd, b = ids(STUDENT, b"ab", b"cd", b"b")
    abc, ab_t, b_t, c_t = ids(TEACHER, b"abc", b"ab", b"b", b"c")
    assert found == {(ab, abc): 2, (ab, ab_t): 1, (b, b_t): 1, (cd, c_t): 1}
    assert counter.boundaries == 5
    assert counter.student_tokens[[ab, cd, b]].tolist() == [3, 3, 1]
    assert (counter.texts, counter.bytes) == (5, 13)


def test_counts_are_smoothed_towards_rules() -> None:
    rules = build_rules(STUDENT, TEACHER)
    projection = build_counted(count_pairs(STUDENT, TEACHER, TEXTS), rules, smoothing=2.0)
    ab, cd, zz = ids(STUDENT, b"ab", b"cd", b"zz")
    abc, ab_t, c_t, d_t = ids(TEACHER, b"abc", b"ab", b"c", b"d")
    assert row(projection, ab) == pytest.approx({abc: 2 / 5, ab_t: (1 + 2) / 5})
    assert row(projection, cd) == pytest.approx({c_t: (1 + 2 * 0.9 / 0.99) / 3, d_t: 2 * 0.09 / 0.99 / 3})
    assert row(projection, zz) == pytest.approx(row(rules, zz))
    assert projection.rule == "counted"
    assert projection.details["boundaries"] == "5"
    np.testing.assert_array_equal(projection.exact, rules.exact)


def test_little_smoothing_gives_frequencies_and_much_gives_rules() -> None:
    rules, counter = build_rules(STUDENT, TEACHER), count_pairs(STUDENT, TEACHER, TEXTS)
    (ab,), (abc, ab_t) = ids(STUDENT, b"ab"), ids(TEACHER, b"abc", b"ab")
    assert row(build_counted(counter, rules, smoothing=1e-9), ab) == pytest.approx({abc: 2 / 3, ab_t: 1 / 3})
    np.testing.assert_allclose(dense(build_counted(counter, rules, smoothing=1e12)), dense(rules), atol=1e-6)


def test_the_result_does_not_depend_on_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["ab cd zz abc", "", "水 ab", "\n\n"] * 20
    whole = count_pairs(STUDENT, TEACHER, texts).pairs()
    monkeypatch.setattr(counted_module, "_BATCH_TEXTS", 3)
    monkeypatch.setattr(counted_module, "_MERGE_KEYS", 7)
    for one, other in zip(whole, count_pairs(STUDENT, TEACHER, iter(texts)).pairs(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_chunks_that_a_normaliser_changed_are_left_out_and_counted() -> None:
    counter = count_pairs(STUDENT, byte_level(["é"], nfc=True), ["e\u0301"])
    assert (counter.boundaries, counter.inexact) == (0, 1)


def test_unusable_counts_are_errors() -> None:
    rules, counter = build_rules(STUDENT, TEACHER), count_pairs(STUDENT, TEACHER, TEXTS)
    with pytest.raises(ProjectionError, match="holds no shared boundary"):
        build_counted(count_pairs(STUDENT, TEACHER, [""]), rules)
    for smoothing in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ProjectionError, match="smoothing="):
            build_counted(counter, rules, smoothing=smoothing)
    with pytest.raises(ProjectionError, match="do not fit rules"):
        build_counted(counter, build_rules(TEACHER, byte_level(["abcdef"])))
    swapped = Projection(
        **{**rules.__dict__, "student_fingerprint": rules.teacher_fingerprint}  # same sizes, another tokenizer
    )
    with pytest.raises(ProjectionError, match="another student tokenizer"):
        build_counted(counter, swapped)


def test_corpus_files_give_their_text_in_blocks(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_bytes("one\r\ntwo\nwater 水\n".encode() + b"x" * 50)
    lines.write_text('{"text": "t1"}\n\n{"messages": [{"content": "m1"}, {"content": null}, {"content": "m2"}]}\n')
    texts = list(iter_texts([plain, lines], block_chars=10))
    assert "".join(texts[:-3]) == plain.read_bytes().decode()
    assert all(len(text) < 20 for text in texts)
    assert texts[-3:] == ["t1", "m1", "m2"]
    packed = [path.with_name(f"{path.name}.gz") for path in (plain, lines)]
    for path, other in zip(packed, (plain, lines), strict=True):
        path.write_bytes(gzip.compress(other.read_bytes()))
    assert list(iter_texts(packed, block_chars=10)) == texts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("b.jsonl", b'{"text": "ok"}\n{"text"', r"b\.jsonl:2 is not JSON"),
        ("c.jsonl", b"[" * 100_000, r"c\.jsonl:1 is not JSON"),
        ("d.jsonl", b'{"body": "x"}', r"d\.jsonl:1 has neither"),
        ("e.jsonl", b"\xff", r"e\.jsonl:1 is not JSON"),
    ],
)
def test_bad_corpus_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(iter_texts([tmp_path / name]))


def test_a_missing_corpus_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no corpus file"):
        list(iter_texts([tmp_path / "absent.txt"]))
