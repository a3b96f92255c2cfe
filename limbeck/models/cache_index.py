"""Tables of a teacher cache: the journal of a shard (one line per document) and the index of sealed shards."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from limbeck.models.cache_format import ALIGN, FORMAT
from limbeck.utils.errors import CacheError

SHARD = re.compile(r"shard_(\d{3})_(\d{5})\.lbk")
INDEX = re.compile(r"index_(\d{3})\.json")


@dataclass(frozen=True)
class Entry:
    """One line of a journal."""

    shard: int
    offset: int
    n: int
    crc: int
    prefixes: tuple[str, ...]


def parse_journal(path: Path, shard: int) -> tuple[dict[str, Entry], int]:
    """Complete documents of a journal by key, and the bytes that its whole lines take."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return {}, 0
    whole = raw[: raw.rfind(b"\n") + 1]
    found: dict[str, Entry] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line)
            key, prefixes = row["key"], tuple(row["prefixes"])
            entry = Entry(shard, row["offset"], row["n"], row["crc"], prefixes)
            texts, numbers = (key, *prefixes), (entry.offset, entry.n, entry.crc)
            good = all(isinstance(t, str) for t in texts) and all(type(v) is int and v >= 0 for v in numbers)
        except (ValueError, KeyError, TypeError):
            good = False
        if not good or entry.n < 2 or entry.offset % ALIGN:
            raise CacheError(f"{path}:{number} is no journal line; the cache is damaged, make it again")
        found[key] = entry
    return found, len(whole)


def read_index(path: Path) -> dict[str, Any]:
    try:
        index = json.loads(path.read_text())
        good = index["format"] == FORMAT and isinstance(index["complete"], bool) and type(index["world_size"]) is int
        for shard in index["shards"]:
            good = good and bool(SHARD.fullmatch(shard["file"])) and type(shard["bytes"]) is int
            good = good and isinstance(shard["sha256"], str) and isinstance(shard["journal_sha256"], str)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CacheError(f"cache index {str(path)!r} cannot be read ({e}); it is damaged, make the cache again") from e
    if not good:
        raise CacheError(f"cache index {str(path)!r} is damaged or of another version; make the cache again")
    return dict(index)


def sha256_of(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256_slow(f)


def _sha256_slow(f: Any) -> str:
    digest = hashlib.sha256()
    while block := f.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def version() -> str:
    from limbeck import __version__

    return str(__version__)
