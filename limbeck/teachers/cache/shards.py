"""Shards of a teacher cache: written one document at a time, resumable at each, mapped by any number of readers."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from limbeck import __version__
from limbeck.errors import CacheError
from limbeck.teachers.cache.format import (
    FORMAT,
    HEADER_BYTES,
    INDEX,
    PREFIXES,
    CacheSpec,
    Entry,
    RecordLayout,
    document_key,
    pack_header,
    parse_journal,
    prefix_keys,
    read_header,
    read_index,
    sha256_of,
)
from limbeck.utils.files import fsync_path, lock_file, write_atomic


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
            # one for each rank: ranks of one filling share the folder
            self._lock = lock_file(self.folder / f".lock_{rank:03d}")
        except BlockingIOError as e:
            raise CacheError(
                f"another process writes the cache {str(self.folder)!r} ({e}); wait for it or stop it"
            ) from e
        except OSError as e:
            raise CacheError(f"cache folder {str(self.folder)!r} cannot be written: {e}") from e
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
            journal = (self.folder / shard["file"]).with_suffix(".journal")
            if not journal.is_file():
                raise CacheError(f"the journal {str(journal)!r} of the cache is gone; put it back, or make a new cache")
            self._learn(parse_journal(journal, 0)[0])
        self._number = len(self._sealed)
        self._open_shard()

    def _learn(self, entries: Mapping[str, Entry]) -> None:
        for key, entry in entries.items():
            self._known[key] = entry.n
            self.tokens += entry.n

    def _open_shard(self) -> None:
        """Open the shard under work; keep its whole documents, cut off the rest."""
        path = self._shard_path(self._number)
        header = pack_header(self.spec, __version__)
        entries, journal_end = parse_journal(path.with_suffix(".journal"), self._number)
        if not path.exists() or path.stat().st_size < len(header):
            if entries:
                raise CacheError(f"{str(path)!r} is shorter than its journal says; the cache is damaged, make it again")
            path.write_bytes(header)
        self._data = open(path, "r+b")  # noqa: SIM115
        # one that another version of the program wrote may be longer than this one's
        stored_spec, end = read_header(self._data.read(HEADER_BYTES), str(path))
        stored_spec.check_same(self.spec, str(path))
        for entry in entries.values():
            end = self._check_record(path, entry, end)
        # a kill in the middle of a record leaves bytes behind the last one that the journal knows
        self._data.truncate(end)
        # anew from the file: a running hash cannot be stored, and this reads every byte of the shard once more
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
        there = entry.offset == expected and expected + size <= os.fstat(self._data.fileno()).st_size
        self._data.seek(expected)
        if not there or zlib.crc32(self._data.read(size)) != entry.crc:
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
        layout = RecordLayout(self.spec, len(tokens))
        record = layout.pack({"ids": tokens, **arrays})
        if wrong := layout.check_values(layout.views(np.frombuffer(record, np.uint8))):
            raise CacheError(f"the signals of document {key} cannot be stored: {wrong}; check the teacher")
        # a document that is larger than a shard has one to itself, and no empty one is sealed in front of it
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
            # before the journal says so: a line whose record never reached the disk would be damage, a record without
            # its line is merely cut off
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
        # before the next shard is begun: a resumed writer numbers its shards by this list
        self._write_index(complete=False)
        self._number += 1
        self._open_shard()

    def _write_index(self, complete: bool) -> None:
        index = {
            "format": FORMAT,
            "limbeck": __version__,
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


@dataclass(frozen=True)
class CachedDocument:
    """Views of one document: ``ids`` [n] and, for its n - 1 rows, the arrays of the cache's kind."""

    ids: npt.NDArray[Any]
    next_logprob: npt.NDArray[Any]
    logsumexp: npt.NDArray[Any]
    topk_ids: npt.NDArray[Any] | None = None
    topk_logprobs: npt.NDArray[Any] | None = None
    hidden: npt.NDArray[Any] | None = None


class CacheReader:
    """Maps a cache and finds documents by their token ids. Safe to use from many processes at once, and to pickle.

    Each document's checksum and values are checked when it is first read. ``teacher_fingerprint`` and
    ``model_identity``, where given, must be those of the teacher that made the cache.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        teacher_fingerprint: str | None = None,
        model_identity: Mapping[str, str] | None = None,
        allow_incomplete: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self._args = {
            "teacher_fingerprint": teacher_fingerprint,
            "model_identity": model_identity,
            "allow_incomplete": allow_incomplete,
        }
        self._paths: list[Path] = []
        self._entries: dict[str, Entry] = {}
        self._prefixes: dict[str, list[str]] | None = None
        self._maps: dict[int, npt.NDArray[np.uint8]] = {}
        self._checked: set[str] = set()
        self.spec = self._open(allow_incomplete)
        where = f"cache {str(self.folder)!r}"
        if teacher_fingerprint is not None and teacher_fingerprint != self.spec.teacher_fingerprint:
            raise CacheError(
                f"{where} was made with a teacher tokenizer of fingerprint {self.spec.teacher_fingerprint[:16]}..., "
                f"this run's has {teacher_fingerprint[:16]}...; make the cache again or name the teacher it came from"
            )
        if model_identity is not None and dict(model_identity) != self.spec.model_identity:
            raise CacheError(
                f"{where} was made with the teacher {self.spec.model_identity}, this run's is {dict(model_identity)}; "
                "its weights or configuration changed, so make the cache again"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # opened again: a memory map would be pickled with all that it maps
        return _reopen, (str(self.folder), self._args)

    def _open(self, allow_incomplete: bool) -> CacheSpec:
        indexes = sorted(p for p in self.folder.glob("index_*.json") if INDEX.fullmatch(p.name))
        if not indexes:
            raise CacheError(f"{str(self.folder)!r} holds no teacher cache; make one with 'limbeck cache run.yaml'")
        spec: CacheSpec | None = None
        complete = True
        for path in indexes:
            index = read_index(path)
            stored_spec = CacheSpec.from_dict(index["spec"], str(path))
            if spec is not None:
                spec.check_same(stored_spec, f"the other part of cache {str(self.folder)!r}")
            spec = stored_spec
            complete = complete and index["complete"] and index["world_size"] == len(indexes)
            for shard in index["shards"]:
                self._add_shard(self.folder / shard["file"], shard, spec)
            if not index["complete"]:
                rank = INDEX.fullmatch(path.name)[1]  # type: ignore[index]
                self._add_shard(self.folder / f"shard_{rank}_{len(index['shards']):05d}.lbk", None, spec)
        if not complete and not allow_incomplete:
            raise CacheError(
                f"cache {str(self.folder)!r} is not complete ({len(self._entries)} documents so far); "
                "run 'limbeck cache' again to finish it"
            )
        assert spec is not None
        return spec

    def _add_shard(self, path: Path, sealed: Mapping[str, Any] | None, spec: CacheSpec) -> None:
        if sealed is None and not path.exists():
            return
        number = len(self._paths)
        # the journal before the size: a living writer may add documents in between, never take any away
        entries, _ = parse_journal(path.with_suffix(".journal"), number)
        try:
            size = path.stat().st_size
        except OSError as e:
            raise CacheError(f"shard {str(path)!r} of the cache cannot be read ({e}); make the cache again") from e
        if sealed is not None:
            if size != sealed["bytes"]:
                raise CacheError(
                    f"shard {str(path)!r} has {size} bytes, its index says {sealed['bytes']}; it is damaged"
                )
            journal = path.with_suffix(".journal")
            if not journal.is_file() or sha256_of(journal) != sealed["journal_sha256"]:
                raise CacheError(f"the journal of shard {str(path)!r} is not the one it was sealed with; it is damaged")
        with open(path, "rb") as f:
            stored_spec, start = read_header(f.read(HEADER_BYTES), str(path))
        stored_spec.check_same(spec, str(path))
        for entry in entries.values():
            if entry.offset < start or entry.offset + RecordLayout(spec, entry.n).size > size:
                raise CacheError(f"{str(path)!r}: the journal names a document beyond the file's end; it is damaged")
        self._paths.append(path)
        for key, entry in entries.items():
            # ranks may have stored the same text; any of them serves
            self._entries.setdefault(key, entry)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def tokens(self) -> int:
        """Tokens of all documents together."""
        return sum(entry.n for entry in self._entries.values())

    def __contains__(self, ids: npt.ArrayLike) -> bool:
        return self._find(np.asarray(ids)) is not None

    def keys(self) -> Iterator[str]:
        return iter(self._entries)

    def _find(self, ids: npt.NDArray[Any]) -> str | None:
        key = document_key(ids)
        if key in self._entries:
            return key
        fits = [n for n in PREFIXES if n <= len(ids)]
        if not fits:
            return None
        if self._prefixes is None:
            prefixes: dict[str, list[str]] = {}
            for known, entry in self._entries.items():
                for short in entry.prefixes:
                    prefixes.setdefault(short, []).append(known)
            self._prefixes = prefixes  # whole: other threads may be looking
        for candidate in self._prefixes.get(document_key(ids[: fits[-1]])[:16], []):
            entry = self._entries[candidate]
            # the hash covers the beginning alone; behind it candidates differ
            if entry.n > len(ids) and np.array_equal(self._read(candidate)["ids"][: len(ids)], ids):
                return candidate
        return None

    def get(self, ids: npt.ArrayLike) -> CachedDocument:
        """Signals for these token ids: of the same document, or of a longer one that begins with them.

        A causal teacher says the same at a position whatever follows, so the rows of a longer document serve. The
        stored ids are compared with ``ids``; no match is a ``CacheError``.
        """
        wanted = np.asarray(ids)
        key = self._find(wanted)
        if key is None:
            raise CacheError(
                f"cache {str(self.folder)!r} ({len(self)} documents) has no document of {len(wanted)} tokens that "
                f"starts with ids {wanted[:6].tolist()}; cache this data, or check that context lengths and "
                "template are the same as when it was made"
            )
        arrays = self._read(key)
        n = len(wanted)
        # signals of other ids give a finite loss and no other sign
        if not np.array_equal(arrays["ids"][:n], wanted):
            raise CacheError(f"document {key} of cache {str(self.folder)!r} holds other token ids than asked for")
        return CachedDocument(**{k: v[: n if k == "ids" else n - 1] for k, v in arrays.items()})

    def document(self, key: str) -> CachedDocument:
        return CachedDocument(**self._read(key))

    def _read(self, key: str) -> dict[str, npt.NDArray[Any]]:
        entry = self._entries[key]
        layout = RecordLayout(self.spec, entry.n)
        if entry.shard not in self._maps:
            self._maps[entry.shard] = np.memmap(self._paths[entry.shard], dtype=np.uint8, mode="r")
        record = self._maps[entry.shard][entry.offset : entry.offset + layout.size]
        if key not in self._checked:
            if zlib.crc32(record.data) != entry.crc:
                raise CacheError(
                    f"document {key} in {str(self._paths[entry.shard])!r} (byte {entry.offset}) does not match its "
                    "checksum; the file is damaged, make the cache again"
                )
            if wrong := layout.check_values(layout.views(record)):
                raise CacheError(
                    f"document {key} in {str(self._paths[entry.shard])!r} (byte {entry.offset}) is not usable: "
                    f"{wrong}; make the cache again"
                )
            self._checked.add(key)
        return layout.views(record)

    def verify(self) -> int:
        """Check the sha256 of every sealed shard and the checksum of every document; returns the documents checked."""
        for path in sorted(self.folder.glob("index_*.json")):
            for shard in read_index(path)["shards"]:
                if sha256_of(self.folder / shard["file"]) != shard["sha256"]:
                    raise CacheError(f"shard {shard['file']!r} of {str(self.folder)!r} does not match its sha256")
        for key in self._entries:
            self._read(key)
        return len(self._entries)


def _reopen(folder: str, args: dict[str, Any]) -> CacheReader:
    return CacheReader(folder, **args)
