"""The teacher cache's own container against safetensors shards with an Arrow index: size, speed, what a kill loses.

    python -m benchmarks.cache_container       # writes benchmarks/cache_container.json

Both hold the same arrays of the same documents, checked alike when they are written and read (checksum, finite numbers,
ids of the vocabulary, none twice in a row), flushed to the disk alike, and read in one random order.
"""

from __future__ import annotations

import functools
import hashlib
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from safetensors import safe_open
from safetensors.numpy import save_file

from benchmarks.cache_size import CASES, LENGTH, arrays
from benchmarks.common import parser, record
from limbeck.teachers.cache import CacheReader, CacheSpec, CacheWriter
from limbeck.teachers.cache.format import RecordLayout
from limbeck.utils.files import fsync_path

DOCUMENTS, PER_SHARD = 48, 16
ROUNDS = 5


def checked(spec: CacheSpec, values: Mapping[str, np.ndarray]) -> int:
    """The checksum of a document whose values are good."""
    wrong = RecordLayout(spec, len(values["ids"])).check_values(values)
    assert wrong is None, wrong
    crc = 0
    for value in values.values():
        crc = zlib.crc32(value.data, crc)
    return crc


def stored(spec: CacheSpec, document: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A document's arrays in the types that both containers keep."""
    parts = RecordLayout(spec, LENGTH).parts
    return {name: np.ascontiguousarray(document[name].astype(dtype)) for name, dtype, _ in parts}


def write_tensors(folder: Path, spec: CacheSpec, documents: list[dict[str, Any]]) -> None:
    """One safetensors file per shard, whose header comes first: a shard is written when it is whole."""
    index: dict[str, list[Any]] = {"key": [], "shard": [], "place": [], "crc": []}
    for shard in range(0, len(documents), PER_SHARD):
        tensors = {}
        for place, document in enumerate(documents[shard : shard + PER_SHARD]):
            values = stored(spec, document)
            index["crc"].append(checked(spec, values))
            tensors |= {f"{place}/{name}": value for name, value in values.items()}
            index["key"].append(hashlib.sha256(tensors[f"{place}/ids"].tobytes()).digest())
            index["shard"].append(shard // PER_SHARD)
            index["place"].append(place)
        save_file(tensors, folder / f"{shard // PER_SHARD}.safetensors")
        fsync_path(folder / f"{shard // PER_SHARD}.safetensors")
    table = pa.table(index)
    with pa.OSFile(str(folder / "index.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    fsync_path(folder / "index.arrow")


class TensorReader:
    def __init__(self, spec: CacheSpec, folder: Path) -> None:
        self.spec = spec
        table = pa.ipc.open_file(pa.memory_map(str(folder / "index.arrow"))).read_all().to_pydict()
        entries = zip(table["shard"], table["place"], table["crc"], strict=True)
        self.places = dict(zip(table["key"], entries, strict=True))
        shards = sorted(set(table["shard"]))
        self.files = [safe_open(folder / f"{shard}.safetensors", framework="numpy") for shard in shards]
        self.names = [part[0] for part in RecordLayout(spec, LENGTH).parts]

    def get(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        shard, place, crc = self.places[hashlib.sha256(ids.astype(np.int32).tobytes()).digest()]
        found = {name: self.files[shard].get_tensor(f"{place}/{name}") for name in self.names}
        assert np.array_equal(found["ids"], ids)
        assert checked(self.spec, found) == crc
        return found


def measure(case: dict[str, Any]) -> dict[str, Any]:
    spec = CacheSpec(teacher_fingerprint="f" * 64, **{k: v for k, v in case.items() if k != "teacher"})
    rng = np.random.default_rng(0)
    documents = [arrays(spec, rng) for _ in range(DOCUMENTS)]
    order = rng.permutation(DOCUMENTS)

    def write_own(folder: Path) -> None:
        with CacheWriter(folder, spec) as writer:
            for document in documents:
                writer.add(**document)

    def write_other(folder: Path) -> None:
        write_tensors(folder, spec, documents)

    def read_all(get: Callable[[np.ndarray], Any]) -> None:
        for number in order:
            get(documents[number]["ids"])

    out: dict[str, Any] = dict(case)
    ways: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
        "own": (write_own, CacheReader),
        "safetensors": (write_other, functools.partial(TensorReader, spec)),
    }
    for name, (write, reader) in ways.items():
        writing, reading = [], []
        for _ in range(ROUNDS):
            with tempfile.TemporaryDirectory() as folder:
                start = time.perf_counter()
                write(Path(folder))
                writing.append(time.perf_counter() - start)
                size = sum(p.stat().st_size for p in Path(folder).iterdir())
                start = time.perf_counter()
                read_all(reader(Path(folder)).get)
                reading.append(time.perf_counter() - start)
        tokens = DOCUMENTS * LENGTH
        out[name] = {
            "bytes_per_token": round(size / tokens, 2),
            "write_tokens_per_s": round(tokens / min(writing)),
            "read_tokens_per_s": round(tokens / min(reading)),
        }
    return out


def main() -> None:
    args = parser(__file__, __doc__).parse_args()
    result: dict[str, Any] = {
        "documents": DOCUMENTS,
        "tokens_per_document": LENGTH,
        "documents_per_shard": PER_SHARD,
        "best_of": ROUNDS,
        "rows": [measure(case) for case in CASES if case["k" if case["kind"] == "topk" else "hidden_size"] != 512],
    }
    record(args.out, result)
    for row in result["rows"]:
        what = f"k={row['k']}" if row["kind"] == "topk" else f"hidden {row['hidden_size']}"
        print(f"{row['teacher']:>9} {what:>12}", *(f"{name} {row[name]}" for name in ("own", "safetensors")))


if __name__ == "__main__":
    main()
