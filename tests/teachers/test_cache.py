import errno
import json
import multiprocessing
import os
import pickle
import struct
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limbeck.errors import CacheError
from limbeck.teachers.cache import CacheReader, CacheSpec, CacheWriter, document_key, estimate_bytes
from limbeck.teachers.cache.format import RecordLayout, sha256_of
from tests.patience import WAIT_SECONDS

SPEC = CacheSpec("topk", vocab_size=70_000, teacher_fingerprint="f" * 64, model_identity={"weights": "w"}, k=4)


def document(seed, n=None):
    rng = np.random.default_rng(seed)
    n = n or int(rng.integers(2, 60))
    rows = n - 1
    return {
        "ids": rng.integers(0, 70_000, n),
        "topk_ids": rng.integers(0, 70_000, (rows, 4)),
        "topk_logprobs": -rng.random((rows, 4)).astype(np.float32) * 9,
        "next_logprob": -rng.random(rows).astype(np.float32),
        "logsumexp": rng.random(rows).astype(np.float32),
    }


def write(folder, seeds, *, complete=True, **more):
    writer = CacheWriter(folder, SPEC, **more)
    for seed in seeds:
        writer.add(**document(seed))
    writer.close(complete=complete)
    return writer


def check(reader, seeds):
    for seed in seeds:
        doc = document(seed)
        got = reader.get(doc["ids"])
        assert np.array_equal(got.ids, doc["ids"])
        assert np.array_equal(got.topk_ids, doc["topk_ids"])
        assert np.array_equal(got.topk_logprobs, doc["topk_logprobs"].astype(np.float16))
        assert np.array_equal(got.next_logprob, doc["next_logprob"])
        assert np.array_equal(got.logsumexp, doc["logsumexp"])


@pytest.mark.parametrize("shard_bytes", [1 << 30, 3000, 1])
def test_documents_come_back_in_any_order(tmp_path, shard_bytes):
    write(tmp_path, range(20), shard_bytes=shard_bytes)
    reader = CacheReader(tmp_path)
    check(reader, reversed(range(20)))
    assert len(reader) == reader.verify() == 20
    shards = len(list(tmp_path.glob("*.lbk")))
    assert shards == 20 if shard_bytes == 1 else 3 < shards < 20 if shard_bytes == 3000 else shards == 1


def test_a_prefix_of_a_longer_document_is_served(tmp_path):
    doc = document(1, n=300)
    with CacheWriter(tmp_path, SPEC) as writer:
        writer.add(**doc)
        writer.add(**document(2, n=300))
    reader = CacheReader(tmp_path)
    for n in (16, 17, 64, 200, 299):
        got = reader.get(doc["ids"][:n])
        assert np.array_equal(got.topk_ids, doc["topk_ids"][: n - 1])
        assert len(got.next_logprob) == n - 1
    changed = doc["ids"][:200].copy()
    changed[150] += 1
    with pytest.raises(CacheError, match="no document of 200 tokens"):
        reader.get(changed)
    assert changed not in reader
    assert doc["ids"] in reader


def test_duplicates_and_empty_documents_are_not_stored(tmp_path):
    with CacheWriter(tmp_path, SPEC) as writer:
        assert writer.add(**document(1))
        assert writer.has(document(1)["ids"])
        assert not writer.add(**document(1))
        one = {k: v[: 1 if k == "ids" else 0] for k, v in document(3).items()}
        assert not writer.add(**one)
    assert len(CacheReader(tmp_path)) == 1


@pytest.mark.parametrize("shard_bytes", [1 << 30, 3000])
def test_resume_after_a_cut_at_any_byte(tmp_path, shard_bytes):
    """Kill = both files of the open shard end anywhere; the journal never ends before what it promised was synced."""
    reference = tmp_path / "whole"
    write(reference, range(12), shard_bytes=shard_bytes)
    for trial in range(12):
        folder = tmp_path / str(trial)
        write(folder, range(7), complete=False, commit_documents=1, shard_bytes=shard_bytes)
        rng = np.random.default_rng(trial)
        journal = max(folder.glob("*.journal"))
        data = journal.with_suffix(".lbk")
        lines = journal.read_bytes()
        keep = int(rng.integers(0, len(lines) + 1))
        journal.write_bytes(lines[:keep])
        if keep < len(lines):
            whole = lines[:keep].count(b"\n")
            first = json.loads(lines.split(b"\n")[whole])["offset"]
            raw = data.read_bytes()
            data.write_bytes(raw[: int(rng.integers(first, len(raw) + 1))])
        write(folder, range(12), shard_bytes=shard_bytes)
        check(CacheReader(folder), range(12))
        for path in reference.glob("*.lbk"):
            assert path.read_bytes() == (folder / path.name).read_bytes()


def test_resume_after_a_kill_inside_the_header(tmp_path):
    write(tmp_path, range(3), complete=False)
    (path,) = tmp_path.glob("*.lbk")
    (journal,) = tmp_path.glob("*.journal")
    journal.write_bytes(b"")
    path.write_bytes(path.read_bytes()[:20])
    write(tmp_path, range(3))
    check(CacheReader(tmp_path), range(3))


def test_an_incomplete_cache_is_refused_unless_asked_for(tmp_path):
    write(tmp_path, range(3), complete=False)
    with pytest.raises(CacheError, match=r"not complete \(3 documents so far\)"):
        CacheReader(tmp_path)
    check(CacheReader(tmp_path, allow_incomplete=True), range(3))


def test_a_complete_cache_can_be_extended(tmp_path):
    write(tmp_path, range(3))
    writer = write(tmp_path, range(5))
    assert writer.documents == 5
    check(CacheReader(tmp_path), range(5))


def test_every_flipped_byte_of_a_shard_is_found(tmp_path):
    write(tmp_path, range(2))
    path = min(tmp_path.glob("*.lbk"))
    raw = path.read_bytes()
    rng = np.random.default_rng(0)
    places = [0, 8, 20, *rng.integers(16, len(raw), 60).tolist()]
    for place in places:
        bad = bytearray(raw)
        bad[place] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(bad)
        with pytest.raises(CacheError):
            CacheReader(tmp_path).verify()
    path.write_bytes(raw)
    assert CacheReader(tmp_path).verify() == 2


def test_a_damaged_document_is_found_when_it_is_read(tmp_path):
    write(tmp_path, range(3))
    path = min(tmp_path.glob("*.lbk"))
    raw = bytearray(path.read_bytes())
    raw[-9] ^= 1
    path.write_bytes(raw)
    reader = CacheReader(tmp_path)
    check(reader, range(2))
    with pytest.raises(CacheError, match=f"{path.name}.*checksum"):
        reader.get(document(2)["ids"])


@pytest.mark.parametrize("damage", ["journal", "cut", "gone", "index", "name", "empty"])
def test_other_damage(tmp_path, damage):
    write(tmp_path, range(3))
    path = min(tmp_path.glob("*.lbk"))
    index = tmp_path / "index_000.json"
    if damage == "journal":
        journal = path.with_suffix(".journal")
        journal.write_bytes(journal.read_bytes().replace(b'"n":', b'"n": 1'))
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-8])
    elif damage == "gone":
        path.unlink()
    elif damage == "index":
        index.write_text("{}")
    elif damage == "name":
        index.write_text(index.read_text().replace(path.name, "../../etc/passwd"))
    else:
        index.unlink()
    with pytest.raises(CacheError):
        CacheReader(tmp_path)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=64), st.integers(0, 2**64 - 1), st.booleans())
def test_hostile_headers_are_refused(tmp_path_factory, junk, length, with_magic):
    folder = tmp_path_factory.mktemp("hostile")
    write(folder, range(1), complete=False)
    (path,) = folder.glob("*.lbk")
    path.write_bytes((b"LIMBECK\1" if with_magic else b"") + struct.pack("<Q", length) + junk)
    with pytest.raises(CacheError):
        CacheReader(folder, allow_incomplete=True)


def test_a_changed_teacher_is_refused(tmp_path):
    write(tmp_path, range(2))
    CacheReader(tmp_path, teacher_fingerprint="f" * 64, model_identity={"weights": "w"})
    with pytest.raises(CacheError, match=r"f{16}.*e{16}"):
        CacheReader(tmp_path, teacher_fingerprint="e" * 64)
    with pytest.raises(CacheError, match=r"'w'.*'x'"):
        CacheReader(tmp_path, model_identity={"weights": "x"})
    for change in ({"k": 5}, {"teacher_fingerprint": "e"}, {"model_identity": {}}, {"vocab_size": 7}):
        with pytest.raises(CacheError, match=f"was made with {next(iter(change))} ="):
            CacheWriter(tmp_path, CacheSpec(**{**SPEC.to_dict(), **change}))


def test_a_cache_of_a_version_with_a_longer_name_is_continued(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("limbeck.teachers.cache.shards.__version__", "0.1.0.dev20260101+a.longer.name")
        write(tmp_path, range(2), complete=False)
    write(tmp_path, range(4))
    check(CacheReader(tmp_path), range(4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "full"}, "unknown"),
        ({"k": 0}, "k = 0"),
        ({"k": 70_001}, "1 <= k <= 70000"),
        ({"kind": "hidden"}, "hidden states of size 0"),
        ({"vocab_size": 0}, "vocabulary of 0"),
    ],
)
def test_bad_specs(change, message):
    with pytest.raises(CacheError, match=message):
        CacheSpec(**{**SPEC.to_dict(), **change})


def test_bad_values_are_refused(tmp_path):
    writer = CacheWriter(tmp_path, SPEC)
    with pytest.raises(CacheError, match=r"next_logprob.*not finite"):
        writer.add(**{**document(1), "next_logprob": np.full(len(document(1)["ids"]) - 1, np.nan, np.float32)})
    with pytest.raises(CacheError, match="topk_ids has shape"):
        writer.add(**{**document(1), "topk_ids": np.zeros((1, 4), int)})
    ids = -document(1)["ids"] - 1
    with pytest.raises(CacheError, match=rf"{ids.min()}\.\.{ids.max()}"):
        writer.add(**{**document(1), "ids": ids})
    writer.close()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("topk_ids", 70_001, "70001.* 70000"),
        ("topk_ids", -7, "topk_ids.* -7"),
        ("topk_ids", None, "twice in a row"),
        ("topk_logprobs", np.nan, "topk_logprobs.*not finite"),
        ("next_logprob", np.inf, "next_logprob.*not finite"),
    ],
)
def test_stored_values_that_no_teacher_gave_are_refused(tmp_path, name, value, said):
    """A cache whose checksums are right all the same: written by a faulty program, or made by hand."""
    doc = document(1, 5)
    write_as_given(tmp_path, doc, name, value)
    with pytest.raises(CacheError, match=said):
        CacheReader(tmp_path).get(doc["ids"])
    with pytest.raises(CacheError, match=f"{name} (holds|that)"):
        CacheWriter(tmp_path / "new", SPEC).add(**spoiled(doc, name, value))


def spoiled(doc, name, value):
    """``doc`` with another first number of an array; None: its second."""
    changed = doc[name].copy()
    changed.flat[0] = changed.flat[1] if value is None else value
    return {**doc, name: changed}


def write_as_given(folder, doc, name, value):
    """A cache of one document without the writer's look at its values."""
    with CacheWriter(folder, SPEC) as writer:
        writer.add(**doc)
    (journal,), (shard,) = folder.glob("*.journal"), folder.glob("*.lbk")
    row = json.loads(journal.read_text())
    record = RecordLayout(SPEC, row["n"]).pack(spoiled(doc, name, value))
    raw = shard.read_bytes()
    shard.write_bytes(raw[: row["offset"]] + record + raw[row["offset"] + len(record) :])
    journal.write_text(json.dumps({**row, "crc": zlib.crc32(record)}) + "\n")
    index = json.loads((folder / "index_000.json").read_text())
    index["shards"][0]["journal_sha256"] = sha256_of(journal)
    (folder / "index_000.json").write_text(json.dumps(index))


def test_hidden_states_that_are_not_finite_are_refused(tmp_path):
    for dtype, bits in (("bfloat16", 0x7F80), ("float16", 0xFC01)):
        spec = CacheSpec("hidden", vocab_size=10, teacher_fingerprint="f", hidden_size=2, hidden_dtype=dtype)
        arrays = {"next_logprob": np.zeros(1, np.float32), "logsumexp": np.zeros(1, np.float32)}
        with pytest.raises(CacheError, match=r"hidden.*not finite"):
            CacheWriter(tmp_path / dtype, spec).add([1, 2], hidden=np.array([[0, bits]], np.uint16), **arrays)


def test_a_journal_that_is_gone_or_too_deep(tmp_path):
    write(tmp_path, [1, 2])
    (journal,) = tmp_path.glob("*.journal")
    journal.write_text("[" * 100_000 + "\n")
    with pytest.raises(CacheError, match=f"{journal.name}:1 "):
        CacheReader(tmp_path)
    journal.unlink()
    with pytest.raises(CacheError, match=f"{journal.stem}.*sealed"):
        CacheReader(tmp_path)
    with pytest.raises(CacheError, match=f"{journal.name}.*gone"):
        CacheWriter(tmp_path, SPEC)
    journal.mkdir()
    with pytest.raises(CacheError, match=f"{journal.name}.*{os.strerror(errno.EISDIR)}"):
        CacheReader(tmp_path)


@pytest.mark.parametrize("n", [1 << 40, 1 << 62, 10**30])
def test_a_journal_that_promises_more_than_memory_holds(tmp_path, n):
    write(tmp_path, [1, 2], complete=False)
    (journal,) = tmp_path.glob("*.journal")
    lines = [{**json.loads(line), "n": n} for line in journal.read_text().splitlines()]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(CacheError, match=f"{journal.stem}.*beyond"):
        CacheReader(tmp_path, allow_incomplete=True)
    with pytest.raises(CacheError, match=f"byte {lines[0]['offset']}:"):
        CacheWriter(tmp_path, SPEC)


@pytest.mark.parametrize(
    "change", [{"spec": None}, {"spec": []}, {"shards": {}}, {"shards": [[]]}, {"world_size": "2"}]
)
def test_an_index_of_other_types(tmp_path, change):
    write(tmp_path, [1, 2])
    index = tmp_path / "index_000.json"
    values = {**json.loads(index.read_text()), **change}
    index.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    for use in (CacheReader, lambda folder: CacheWriter(folder, SPEC)):
        with pytest.raises(CacheError):
            use(tmp_path)


def test_one_writer_at_a_time(tmp_path):
    writer = CacheWriter(tmp_path, SPEC)
    with pytest.raises(CacheError, match=f"another process.*{tmp_path.name}"):
        CacheWriter(tmp_path, SPEC)
    writer.close()
    CacheWriter(tmp_path, SPEC).close()


def test_two_ranks_write_one_cache(tmp_path):
    write(tmp_path, range(0, 10, 2), rank=0, world_size=2)
    with pytest.raises(CacheError, match=r"not complete \(5 documents"):
        CacheReader(tmp_path)
    write(tmp_path, range(1, 10, 2), rank=1, world_size=2)
    reader = CacheReader(tmp_path)
    check(reader, range(10))
    with pytest.raises(CacheError, match=r"2 processes.* 1;"):
        CacheWriter(tmp_path, SPEC)


def test_full_disk_keeps_what_is_committed(tmp_path):
    writer = CacheWriter(tmp_path, SPEC, commit_documents=1)
    writer.add(**document(0))
    real = writer._data
    writer._data = open("/dev/full", "r+b")  # noqa: SIM115
    with pytest.raises(CacheError, match=os.strerror(errno.ENOSPC)):
        writer.add(**document(1))
    writer._data.raw.close()
    real.close()
    writer._journal.close()
    writer._lock.close()
    write(tmp_path, range(3))
    check(CacheReader(tmp_path), range(3))


def _read_all(folder, queue):
    reader = CacheReader(folder)
    check(reader, range(20))
    queue.put(len(reader))


def test_several_processes_read_at_once_and_readers_travel(tmp_path):
    write(tmp_path, range(20), shard_bytes=3000)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_read_all, args=(tmp_path, queue)) for _ in range(3)]
    for worker in workers:
        worker.start()
    assert [queue.get(timeout=WAIT_SECONDS) for _ in workers] == [20, 20, 20]
    for worker in workers:
        worker.join()
    check(pickle.loads(pickle.dumps(CacheReader(tmp_path))), range(20))


def test_threads_look_up_beginnings_at_once(tmp_path):
    docs = [document(number, n=300) for number in range(8)]
    with CacheWriter(tmp_path, SPEC) as writer:
        for doc in docs:
            writer.add(**doc)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            reader = CacheReader(tmp_path)
            with ThreadPoolExecutor(8) as pool:
                found = list(pool.map(lambda doc, reader=reader: reader.get(doc["ids"][:200]), docs))
            for got, doc in zip(found, docs, strict=True):
                assert np.array_equal(got.topk_ids, doc["topk_ids"][:199])
    finally:
        sys.setswitchinterval(interval)


def test_hidden_states_are_kept_bit_for_bit(tmp_path):
    spec = CacheSpec("hidden", vocab_size=10, teacher_fingerprint="f", hidden_size=6)
    bits = np.random.default_rng(0).integers(0, 1 << 16, (4, 6)).astype(np.uint16)
    with CacheWriter(tmp_path, spec) as writer:
        writer.add(np.arange(5), hidden=bits, next_logprob=np.zeros(4, np.float32), logsumexp=np.ones(4, np.float32))
    assert np.array_equal(CacheReader(tmp_path).get(np.arange(5)).hidden, bits)


def test_small_vocabularies_take_two_bytes_per_id(tmp_path):
    spec = CacheSpec("topk", vocab_size=1 << 16, teacher_fingerprint="f", k=2)
    top = np.array([[65535, 0], [1, 2]])
    with CacheWriter(tmp_path, spec) as writer:
        zeros = np.zeros(2, np.float32)
        writer.add([1, 2, 3], topk_ids=top, topk_logprobs=top * 0.0, next_logprob=zeros, logsumexp=zeros)
    assert np.array_equal(CacheReader(tmp_path).get([1, 2, 3]).topk_ids, top)


@given(st.integers(2, 5000), st.integers(1, 512), st.sampled_from([1000, 200_000]))
def test_the_estimate_is_what_a_record_takes(n, k, vocab):
    size = RecordLayout(CacheSpec("topk", vocab_size=vocab, teacher_fingerprint="f", k=min(k, vocab)), n).size
    estimate = estimate_bytes(n, min(k, vocab), vocab_size=vocab)
    assert size <= estimate <= size + 12 + 6 * k


def test_the_estimate_by_hand():
    assert estimate_bytes(700_000_000, 64) == 700_000_000 * (12 + 64 * 6)
    assert estimate_bytes(1, hidden_size=2560) == 12 + 5120
    with pytest.raises(CacheError, match="either k or hidden_size"):
        estimate_bytes(1)


def test_keys_do_not_depend_on_the_integer_type():
    assert document_key([1, 2]) == document_key(np.array([1, 2], np.int32)) != document_key([1, 2, 0])
