"""Writing a teacher cache: append-only, committed by journal lines, resumable after a kill."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from limbeck.models.cache_format import (
    FORMAT,
    CacheSpec,
    RecordLayout,
    document_key,
    pack_header,
    prefix_keys,
    read_header,
)
from limbeck.models.cache_index import Entry, parse_journal, read_index, sha256_of, version
from limbeck.utils.errors import CacheError
from limbeck.utils.files import fsync_path, write_atomic


class CacheWriter:
    """Appends documents to a cache; several processes write to one folder, each under its own ``rank``.

    Example::

        writer = CacheWriter("cache", CacheSpec("topk", vocab_size=49152, teacher_fingerprint=fingerprint, k=64))
        if not writer.has(ids):
            writer.add(ids, topk_ids=..., topk_logprobs=..., next_logprob=..., logsumexp=...)
        writer.close(complete=True)
    """

    def __init__(
        self,
        folder: str | Path,
        spec: CacheSpec,
        *,
        rank: int = 0,
        world_size: int = 1,
        shard_bytes: int = 1 << 30,
        commit_documents: int = 64,
        commit_bytes: int = 16 << 20,
    ) -> None:
        self.folder, self.spec, self.rank, self.world_size = Path(folder), spec, rank, world_size
        self._limits = (shard_bytes, commit_documents, commit_bytes)
        self._pending: list[tuple[str, Entry, bytes]] = []
        self._data: Any = None
        self._journal: Any = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / f".lock_{rank:03d}", "w")  # noqa: SIM115
        except OSError as e:
            raise CacheError(f"cache folder {str(self.folder)!r} cannot be written: {e}") from e
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            self._lock.close()
            raise CacheError(f"another process writes the cache {str(self.folder)!r}; wait for it or stop it") from e
        try:
            self._resume()
        except BaseException:
            self._lock.close()
            raise

    # -- resume -----------------------------------------------------------------------------------------------------

    def _index_path(self) -> Path:
        return self.folder / f"index_{self.rank:03d}.json"

    def _shard_path(self, number: int) -> Path:
        return self.folder / f"shard_{self.rank:03d}_{number:05d}.lbk"

    def _resume(self) -> None:
        self._sealed: list[dict[str, Any]] = []
        self._known: dict[str, int] = {}
        self.tokens = 0
        if self._index_path().exists():
            index = read_index(self._index_path())
            if index["world_size"] != self.world_size:
                raise CacheError(
                    f"cache {str(self.folder)!r} was begun by {index['world_size']} processes, this run has "
                    f"{self.world_size}; resume it with as many, or make a new one"
                )
            where = f"cache {str(self.folder)!r}"
            CacheSpec.from_dict(index["spec"], where).check_same(self.spec, where)
            self._sealed = index["shards"]
        else:
            self._write_index(complete=False)
        for shard in self._sealed:
            entries, _ = parse_journal((self.folder / shard["file"]).with_suffix(".journal"), 0)
            self._learn(entries)
        self._number = len(self._sealed)
        self._open_shard()

    def _learn(self, entries: Mapping[str, Entry]) -> None:
        for key, entry in entries.items():
            self._known[key] = entry.n
            self.tokens += entry.n

    def _open_shard(self) -> None:
        """Open the shard under work; keep its whole documents, cut off the rest."""
        path = self._shard_path(self._number)
        header = pack_header(self.spec, version())
        entries, journal_end = parse_journal(path.with_suffix(".journal"), self._number)
        if not path.exists() or path.stat().st_size < len(header):
            if entries:
                raise CacheError(f"{str(path)!r} is shorter than its journal says; the cache is damaged, make it again")
            path.write_bytes(header)
        self._data = open(path, "r+b")  # noqa: SIM115
        found, end = read_header(self._data.read(len(header)), str(path))
        found.check_same(self.spec, str(path))
        for entry in entries.values():
            end = self._check_record(path, entry, end)
        self._data.truncate(end)
        self._digest = hashlib.sha256()
        self._data.seek(0)
        while block := self._data.read(1 << 20):
            self._digest.update(block)
        self._end = end
        self._journal = open(path.with_suffix(".journal"), "a+b")  # noqa: SIM115
        self._journal.truncate(journal_end)
        self._learn(entries)
        self._shard_documents = len(entries)
        fsync_path(self.folder)

    def _check_record(self, path: Path, entry: Entry, expected: int) -> int:
        size = RecordLayout(self.spec, entry.n).size
        self._data.seek(entry.offset)
        record = self._data.read(size)
        if entry.offset != expected or len(record) != size or zlib.crc32(record) != entry.crc:
            raise CacheError(
                f"{str(path)!r} is damaged at byte {entry.offset}: its journal promises a document that is not there; "
                "remove this shard and its journal and run the caching again"
            )
        return entry.offset + size

    # -- write ------------------------------------------------------------------------------------------------------

    def has(self, ids: npt.ArrayLike) -> bool:
        """Whether this rank has stored the document already (also one not yet committed)."""
        return document_key(ids) in self._known

    def add(self, ids: npt.ArrayLike, **arrays: npt.NDArray[Any]) -> bool:
        """Store one document; False where it is there already or has no row (fewer than two tokens).

        ``ids`` [n]; ``next_logprob``, ``logsumexp`` [n - 1]; ``topk_ids``, ``topk_logprobs`` [n - 1, k], or ``hidden``
        [n - 1, h] as uint16 bit patterns.
        """
        tokens = np.asarray(ids)
        key = document_key(tokens)
        if len(tokens) < 2 or key in self._known:
            return False
        if int(tokens.min()) < 0 or int(tokens.max()) >= 1 << 31:
            raise CacheError(f"token ids {int(tokens.min())}..{int(tokens.max())} cannot be stored; they are no ids")
        for name, value in arrays.items():
            if np.issubdtype(value.dtype, np.floating) and not np.isfinite(value).all():
                raise CacheError(f"the teacher gave {name} that is not finite for document {key}; check its weights")
        record = RecordLayout(self.spec, len(tokens)).pack({"ids": tokens, **arrays})
        if self._end + self._pending_bytes() + len(record) > self._limits[0] and self._shard_documents + len(
            self._pending
        ):
            self.commit()
            self._seal()
        offset = self._end + self._pending_bytes()
        entry = Entry(self._number, offset, len(tokens), zlib.crc32(record), tuple(prefix_keys(tokens)))
        self._pending.append((key, entry, record))
        self._learn({key: entry})
        if len(self._pending) >= self._limits[1] or self._pending_bytes() >= self._limits[2]:
            self.commit()
        return True

    def _pending_bytes(self) -> int:
        return sum(len(record) for _, _, record in self._pending)

    def commit(self) -> None:
        """Put all added documents on the disk: records first, then their journal lines."""
        if not self._pending:
            return
        lines = []
        try:
            self._data.seek(self._end)
            for key, entry, record in self._pending:
                self._data.write(record)
                row = {"key": key, "offset": entry.offset, "n": entry.n, "crc": entry.crc, "prefixes": entry.prefixes}
                lines.append(json.dumps(row, separators=(",", ":")) + "\n")
            self._data.flush()
            os.fsync(self._data.fileno())
            self._journal.write("".join(lines).encode())
            self._journal.flush()
            os.fsync(self._journal.fileno())
        except OSError as e:
            raise CacheError(
                f"cache {str(self.folder)!r} cannot be written ({e.strerror}); free some space and run it again, "
                "it goes on after the last whole document"
            ) from e
        for _, _, record in self._pending:
            self._digest.update(record)
            self._end += len(record)
        self._shard_documents += len(self._pending)
        self._pending = []

    def _seal(self) -> None:
        path = self._shard_path(self._number)
        self._data.close()
        self._journal.close()
        self._sealed.append(
            {
                "file": path.name,
                "bytes": self._end,
                "sha256": self._digest.hexdigest(),
                "journal_sha256": sha256_of(path.with_suffix(".journal")),
                "documents": self._shard_documents,
            }
        )
        self._write_index(complete=False)
        self._number += 1
        self._open_shard()

    def _write_index(self, complete: bool) -> None:
        index = {
            "format": FORMAT,
            "limbeck": version(),
            "complete": complete,
            "world_size": self.world_size,
            "spec": self.spec.to_dict(),
            "documents": len(self._known),
            "tokens": self.tokens,
            "shards": self._sealed,
        }
        write_atomic(self._index_path(), json.dumps(index, indent=1))

    @property
    def documents(self) -> int:
        """Documents stored by this rank so far."""
        return len(self._known)

    def close(self, *, complete: bool = False) -> None:
        """Commit; with ``complete=True`` also seal the last shard and mark this rank's part as whole."""
        if self._data is None or self._data.closed:
            return
        self.commit()
        if complete:
            if self._shard_documents:
                self._seal()
            self._write_index(complete=True)
        self._data.close()
        self._journal.close()
        if complete:
            # sealing opened the next shard, which nobody will need
            self._shard_path(self._number).unlink()
            self._shard_path(self._number).with_suffix(".journal").unlink()
        self._lock.close()

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.close(complete=kind is None)
