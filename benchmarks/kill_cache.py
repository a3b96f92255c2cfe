"""Kill the caching of a teacher again and again, let it go on, and compare the caches with one that was left alone.

    python -m benchmarks.kill_cache --kills 100

Every attempt is a ``limbeck cache`` in a process of its own that ends by SIGKILL: while it starts, at a random moment
of its writing, or between a document's record and its journal line. After each kill the cache must open as it is; one
that is whole is compared, and the next one begun, until there were enough kills. What must be equal in the end: the
documents, their ids, and their log-probabilities up to rounding (a batch that lacks stored documents is padded to
another width). Writes ``kill_cache.json`` beside this file.
"""

from __future__ import annotations

import importlib
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import parser, record
from benchmarks.kill_resume import PRELOAD, Attempt, prepare
from limbeck.teachers.cache import CacheReader

WAYS = ("writing", "commit", "commit", "start")


def caching(run_file: Path, folder: Path, *, fresh: bool = False) -> Attempt:
    """A caching that has begun."""
    arguments = ["cache", str(run_file), f"teacher.cache={folder}", "teacher.cache_k=8"]
    return Attempt(arguments, folder.with_suffix(".log"), fresh=fresh)


def stored_bytes(folder: Path, kind: str) -> int:
    """Bytes of all shards or journals."""
    return sum(path.stat().st_size for path in folder.glob(f"*.{kind}"))


def is_complete(folder: Path) -> bool:
    """Whether the index says so."""
    index = folder / "index_000.json"
    return index.is_file() and bool(json.loads(index.read_text())["complete"])


def kill_once(run_file: Path, folder: Path, way: str, rng: random.Random, *, fresh: bool) -> dict[str, Any]:
    """Start the caching, kill it in the given way, and say what it left."""
    begin, before = time.monotonic(), stored_bytes(folder, "lbk")
    attempt = caching(run_file, folder, fresh=fresh)
    if way == "start":
        limit = begin + rng.uniform(0.0, 1.2)
        while attempt.code is None and time.monotonic() < limit:
            time.sleep(0.001)
    else:
        while attempt.code is None and stored_bytes(folder, "lbk") <= max(before, 4096):
            time.sleep(0.0002)
        time.sleep(rng.uniform(0.0, 0.25) if way == "writing" else rng.uniform(0.0, 0.006))
    ended = attempt.code is not None
    attempt.kill()
    attempt.check()
    documents = len(CacheReader(folder, allow_incomplete=True)) if (folder / "index_000.json").is_file() else 0
    promised = sum(len(path.read_bytes().splitlines()) for path in folder.glob("*.journal"))
    return {
        "way": way,
        "process": "new" if fresh else "fork",
        "seconds": round(time.monotonic() - begin, 3),
        "killed": not ended,
        "documents": documents,
        "torn_line": promised != documents,
    }


def compare(whole: CacheReader, broken: CacheReader) -> dict[str, Any]:
    """What two caches have in common."""
    same_keys = set(whole.keys()) == set(broken.keys())
    farthest, equal = 0.0, 0
    for key in whole.keys() if same_keys else ():
        a, b = whole.document(key), broken.document(key)
        assert np.array_equal(a.ids, b.ids)
        assert a.topk_logprobs is not None
        assert b.topk_logprobs is not None
        pairs = ((a.next_logprob, b.next_logprob), (a.topk_logprobs, b.topk_logprobs))
        farthest = max(farthest, *(float(np.abs(x.astype(np.float64) - y).max()) for x, y in pairs))
        equal += all(np.array_equal(x, y) for x, y in pairs)
    return {
        "same_documents": same_keys,
        "checksums_verified": broken.verify(),
        "bit_identical": equal,
        "farthest_logprob": farthest,
    }


def main() -> None:
    """Cache, kill, compare, write the result; exit code 1 if anything differs."""
    arguments = parser(__file__, __doc__)
    arguments.add_argument("--kills", type=int, default=100)
    arguments.add_argument("--documents", type=int, default=1200)
    arguments.add_argument("--seed", type=int, default=0)
    args = arguments.parse_args()
    rng = random.Random(args.seed)
    for name in PRELOAD:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run_file = prepare(folder, 1, args.documents)
        attempt = caching(run_file, folder / "whole")
        attempt.wait()
        attempt.check()
        whole = CacheReader(folder / "whole")
        kills: list[dict[str, Any]] = []
        caches: list[dict[str, Any]] = []
        while sum(k["killed"] for k in kills) < args.kills:
            broken, number = folder / f"broken_{len(caches)}", len(kills)
            kills.append(kill_once(run_file, broken, WAYS[number % 4], rng, fresh=number % 20 == 19))
            print(json.dumps(kills[-1]), flush=True)
            if is_complete(broken):
                caches.append(compare(whole, CacheReader(broken)))
        last = folder / f"broken_{len(caches)}"
        attempt = caching(run_file, last)
        attempt.wait()
        attempt.check()
        caches.append(compare(whole, CacheReader(last)))
        result = {
            "documents": len(whole),
            "kills": sum(k["killed"] for k in kills),
            "kills_by_way": {way: sum(k["killed"] and k["way"] == way for k in kills) for way in dict.fromkeys(WAYS)},
            "caches": caches,
            "attempts": kills,
        }
    record(args.out, result)
    print(json.dumps({k: v for k, v in result.items() if k != "attempts"}))
    if not all(c["same_documents"] and c["farthest_logprob"] < 1e-3 for c in caches):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
