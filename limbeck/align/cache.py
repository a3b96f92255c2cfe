"""Alignments kept on disk, keyed by text and tokenizers.

One SQLite file holds, for each text, the ids and byte ends of both sides and their chunks, so that a second epoch or a
second run tokenizes nothing. Several processes may read and write it at once. Entries of other tokenizers, of another
layout or of another text are never returned, because all of that is in the key.
"""

from __future__ import annotations

import hashlib
import sqlite3
import zlib
from dataclasses import fields
from pathlib import Path

import numpy as np

from limbeck.align.boundaries import Chunks
from limbeck.tokens import Rendering, Segment
from limbeck.utils.errors import AlignmentError

_LAYOUT = b"limbeck-alignment-1"
_CHUNK_FIELDS = [f.name for f in fields(Chunks)]  # six spans, then two flags


class AlignmentCache:
    """A store of (student rendering, teacher rendering, chunks) by text.

    Args:
        path: the SQLite file; made with its folder when missing.
        student, teacher: fingerprints of the two tokenizers.
        options: whatever else decides the renderings, such as begin and end tokens.
    """

    def __init__(self, path: str | Path, student: str, teacher: str, options: str = "") -> None:
        self.path = Path(path)
        self._prefix = b"\0".join([_LAYOUT, student.encode(), teacher.encode(), options.encode()])
        self._connection: sqlite3.Connection | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_connection": None}

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                connection = sqlite3.connect(self.path, timeout=60, isolation_level=None)
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=NORMAL")
                connection.execute("CREATE TABLE IF NOT EXISTS alignment (key BLOB PRIMARY KEY, value BLOB)")
            except sqlite3.Error as error:
                raise AlignmentError(f"the alignment cache {self.path} cannot be used: {error}; delete it.") from error
            self._connection = connection
        return self._connection

    def _key(self, text: str) -> bytes:
        return hashlib.sha256(self._prefix + b"\0" + text.encode("utf-8")).digest()

    def get(self, text: str) -> tuple[Rendering, Rendering, Chunks] | None:
        """The stored entry of a text, or None; a damaged entry counts as missing."""
        row = self._open().execute("SELECT value FROM alignment WHERE key = ?", (self._key(text),)).fetchone()
        return _unpack(row[0], text) if row else None

    def put(self, text: str, student: Rendering, teacher: Rendering, chunks: Chunks) -> None:
        """Store an entry; an existing one is replaced."""
        value = _pack([*_arrays(student), *_arrays(teacher), *(getattr(chunks, n) for n in _CHUNK_FIELDS)])
        self._open().execute("INSERT OR REPLACE INTO alignment VALUES (?, ?)", (self._key(text), value))

    def __len__(self) -> int:
        return int(self._open().execute("SELECT COUNT(*) FROM alignment").fetchone()[0])


def _arrays(r: Rendering) -> list[np.ndarray]:
    segments = [(("text", "eot").index(s.kind), s.start, s.end, s.token_start, s.token_end) for s in r.segments]
    return [r.ids, r.ends, r.exact, r.special, r.target, np.array(segments, dtype=np.int64).reshape(-1, 5)]


def _rendering(arrays: list[np.ndarray], source: bytes) -> Rendering:
    ids, ends, exact, special, target, rows = arrays
    segments = tuple(Segment(0, ("text", "eot")[k], a, b, c, d) for k, a, b, c, d in rows.reshape(-1, 5).tolist())
    return Rendering(ids, ends, source, exact.astype(bool), special.astype(bool), target.astype(bool), segments)


def _pack(arrays: list[np.ndarray]) -> bytes:
    packed = [zlib.compress(np.ascontiguousarray(a, dtype=np.int32).tobytes(), 1) for a in arrays]
    header = np.array([len(packed), *map(len, packed)], dtype=np.int64).tobytes()
    payload = header + b"".join(packed)
    return zlib.crc32(payload).to_bytes(4, "little") + payload


def _unpack(value: bytes, text: str) -> tuple[Rendering, Rendering, Chunks] | None:
    if zlib.crc32(value[4:]).to_bytes(4, "little") != value[:4]:
        return None
    count = int(np.frombuffer(value, np.int64, 1, 4)[0])
    lengths = np.frombuffer(value, np.int64, count, 12)
    at, arrays = 12 + 8 * count, []
    for length in lengths.tolist():
        arrays.append(np.frombuffer(zlib.decompress(value[at : at + length]), np.int32).astype(np.int64))
        at += length
    source = text.encode("utf-8")
    a, b, c, d, start, end, exact, role = arrays[12:]
    chunks = Chunks(a, b, c, d, start, end, exact.astype(bool), role.astype(bool))
    return _rendering(arrays[:6], source), _rendering(arrays[6:12], source), chunks
