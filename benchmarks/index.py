"""What it costs to find the records of a text file: seconds and bytes of memory per record, and random reads.

Short paragraphs of made-up words, so that there are many records per megabyte.

    python -m benchmarks.index [--mib 200]

Writes ``benchmarks/index.json``. ``again`` is a second start, which finds the stored index.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import parser, record

READS = 20_000


def write_paragraphs(path: Path, mib: int) -> None:
    """Paragraphs of 5 to 25 words."""
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(2000)]
    with path.open("w", encoding="utf-8") as out:
        while out.tell() < mib << 20:
            out.writelines(" ".join(rng.choices(words, k=rng.randint(5, 25))) + "\n\n" for _ in range(10_000))


def memory() -> int:
    """Bytes of this process that are not pages of a file."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))


def measure(path: str, cache: str) -> dict[str, Any]:
    """One start of a run, up to its first record, and reads after it."""
    from limbeck.data.loader import ShardSampler
    from limbeck.data.sources import ReadingConfig, RecordDataset

    before, start = memory(), time.perf_counter()
    data = RecordDataset(path, ReadingConfig(split_documents="blank_lines", cache_dir=cache)).prepare()
    fingerprint, index_s, index = data.fingerprint, time.perf_counter() - start, memory() - before
    order = iter(ShardSampler(len(data), fingerprint=fingerprint))
    assert data[next(order)]["text"]
    first_s, with_order = time.perf_counter() - start, memory() - before
    start = time.perf_counter()
    for _ in range(READS):
        data[next(order)]
    return {
        "records": len(data),
        "index_s": index_s,
        "first_record_s": first_s,
        "index_bytes_per_record": index / len(data),
        "with_order_bytes_per_record": with_order / len(data),
        "records_per_s": READS / (time.perf_counter() - start),
    }


def main() -> None:
    arguments = parser(__file__, __doc__)
    arguments.add_argument("--mib", type=int, default=200)
    arguments.add_argument("--measure", nargs=2, metavar=("FILE", "CACHE"), help="used by the script itself")
    args = arguments.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure)))
        return
    result: dict[str, Any] = {"mib": args.mib}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "paragraphs.txt"
        write_paragraphs(path, args.mib)
        for name in ("first", "again"):
            command = [sys.executable, "-m", "benchmarks.index", "--measure", str(path), str(Path(folder) / "cache")]
            # a process of its own, whose memory holds nothing else
            found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            result[name] = json.loads(found)
            print(name, result[name], flush=True)
    record(args.out, result)


if __name__ == "__main__":
    main()
