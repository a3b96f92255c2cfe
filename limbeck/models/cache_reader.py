"""Reading a teacher cache: mapped files, documents found by their token ids, every checksum checked."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from limbeck.models.cache_format import PREFIXES, CacheSpec, RecordLayout, document_key, read_header
from limbeck.models.cache_index import INDEX, Entry, parse_journal, read_index, sha256_of
from limbeck.utils.errors import CacheError


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

    Each document's checksum is checked when it is first read. ``teacher_fingerprint`` and ``model_identity``, where
    given, must be those of the teacher that made the cache.
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
        return _reopen, (str(self.folder), self._args)

    def _open(self, allow_incomplete: bool) -> CacheSpec:
        indexes = sorted(p for p in self.folder.glob("index_*.json") if INDEX.fullmatch(p.name))
        if not indexes:
            raise CacheError(f"{str(self.folder)!r} holds no teacher cache; make one with 'limbeck cache run.yaml'")
        spec: CacheSpec | None = None
        complete = True
        for path in indexes:
            index = read_index(path)
            found = CacheSpec.from_dict(index["spec"], str(path))
            if spec is not None:
                spec.check_same(found, f"the other part of cache {str(self.folder)!r}")
            spec = found
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
            if sha256_of(path.with_suffix(".journal")) != sealed["journal_sha256"]:
                raise CacheError(f"the journal of shard {str(path)!r} is not the one it was sealed with; it is damaged")
        with open(path, "rb") as f:
            found, start = read_header(f.read(min(size, 16 + (1 << 20))), str(path))
        found.check_same(spec, str(path))
        for entry in entries.values():
            if entry.offset < start or entry.offset + RecordLayout(spec, entry.n).size > size:
                raise CacheError(f"{str(path)!r}: the journal names a document beyond the file's end; it is damaged")
        self._paths.append(path)
        for key, entry in entries.items():
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
        """Keys of all documents."""
        return iter(self._entries)

    def _find(self, ids: npt.NDArray[Any]) -> str | None:
        key = document_key(ids)
        if key in self._entries:
            return key
        fits = [n for n in PREFIXES if n <= len(ids)]
        if not fits:
            return None
        if self._prefixes is None:
            self._prefixes = {}
            for known, entry in self._entries.items():
                for short in entry.prefixes:
                    self._prefixes.setdefault(short, []).append(known)
        for candidate in self._prefixes.get(document_key(ids[: fits[-1]])[:16], []):
            entry = self._entries[candidate]
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
        if not np.array_equal(arrays["ids"][:n], wanted):
            raise CacheError(f"document {key} of cache {str(self.folder)!r} holds other token ids than asked for")
        return CachedDocument(**{k: v[: n if k == "ids" else n - 1] for k, v in arrays.items()})

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
