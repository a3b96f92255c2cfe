"""Finding data files, unpacking compressed ones once, and indexing lines without holding text in memory."""

from __future__ import annotations

import bz2
import glob
import gzip
import hashlib
import json
import logging
import lzma
import mmap
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from limbeck.utils.errors import DataError
from limbeck.utils.files import cache_dir as cache_folder

log = logging.getLogger(__name__)

FORMATS = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather", ".ipc"),
    "text": (".txt", ".text", ".md", ".rst", ".py", ".tex", ".html", ".c", ".h", ".cpp", ".java", ".js", ".ts", ".go"),
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
HUB_PREFIX = "hf:"
_COPY_BLOCK = 1 << 20


def format_of(path: str, wanted: str = "auto") -> str:
    """``jsonl``, ``parquet``, ``arrow`` or ``text``, by the name without a compression suffix unless given."""
    if wanted != "auto":
        return wanted
    name = _plain_name(path)
    for kind, suffixes in FORMATS.items():
        if name.endswith(suffixes):
            return kind
    raise DataError(
        f"The format of {path} is not known by its name; rename it or set data.format to one of {', '.join(FORMATS)}."
    )


def _plain_name(path: str) -> str:
    name = path.lower()
    return name[: name.rindex(".")] if name.endswith(COMPRESSED) else name


def expand(specs: str | list[str]) -> list[str]:
    """Files (and hub ids) named by paths, globs and folders, in a fixed order, each once."""
    found: list[str] = []
    for spec in [specs] if isinstance(specs, str) else specs:
        found.extend(_expand_one(os.path.expanduser(spec)))
    unique = list(dict.fromkeys(found))
    if len(unique) < len(found):
        log.warning("%d data files are named more than once and are read once.", len(found) - len(unique))
    if not unique:
        raise DataError("No data file is given; set data.train to a file, a glob, a folder or hf:owner/name.")
    return unique


def _expand_one(spec: str) -> list[str]:
    if spec.startswith(HUB_PREFIX) or os.path.isfile(spec):
        return [spec]
    if os.path.isdir(spec):
        suffixes = tuple(suffix for group in FORMATS.values() for suffix in group)
        # A saved `datasets` folder keeps its own state beside the data.
        own = {"state.json", "dataset_info.json", "dataset_dict.json"}
        files = sorted(str(p) for p in Path(spec).rglob("*") if p.is_file() and p.name not in own)
        files = [path for path in files if _plain_name(path).endswith(suffixes)]
        if not files:
            raise DataError(f"The folder {spec} holds no data file ({', '.join(suffixes[:6])}, ...).")
        return files
    if glob.has_magic(spec):
        files = sorted(path for path in glob.glob(spec, recursive=True) if os.path.isfile(path))
        if not files:
            raise DataError(f"No file matches {spec!r} in {os.getcwd()}.")
        return files
    hint = f"; for a data set on the hub write hf:{spec}" if re.fullmatch(r"[\w.-]+/[\w.-]+", spec) else ""
    raise DataError(f"The data file {spec!r} does not exist in {os.getcwd()}{hint}.")


def default_cache_dir() -> Path:
    """Where unpacked data files are kept."""
    return cache_folder("data")


def cached_copy(path: str, what: str, cache_dir: str | None, fill: Callable[[str], None]) -> str:
    """A derived form of ``path``, made by ``fill(target)`` the first time and whenever the file has changed."""
    stat = os.stat(path)
    key = json.dumps([os.path.realpath(path), stat.st_size, stat.st_mtime_ns, what])
    folder = Path(cache_dir) if cache_dir else default_cache_dir()
    target = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.{what.split(':')[0]}"
    if target.exists():
        return str(target)
    folder.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=folder, suffix=".partial")
    os.close(handle)
    try:
        fill(partial)
        # Ranks may do this at the same time; the rename makes whoever comes last harmless.
        os.replace(partial, target)
    except OSError as error:
        raise DataError(
            f"{path} could not be unpacked into {folder}: {error}; free space or set data.cache_dir."
        ) from error
    finally:
        Path(partial).unlink(missing_ok=True)
    return str(target)


def unpacked(path: str, cache_dir: str | None) -> str:
    """The file itself, or its decompressed copy; random access needs one."""
    if not path.lower().endswith(COMPRESSED):
        return path

    def fill(target: str) -> None:
        try:
            with _open_compressed(path) as packed, open(target, "wb") as plain:
                while block := packed.read(_COPY_BLOCK):
                    plain.write(block)
        except (EOFError, zlib.error, lzma.LZMAError, ValueError, OSError) as error:
            # Decoders raise OSError without a number; one with a number is the disk's.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise DataError(f"{path} is not a whole compressed file: {error}; fetch it again.") from error

    return cached_copy(path, "plain", cache_dir, fill)


@contextmanager
def _open_compressed(path: str) -> Iterator[IO[bytes]]:
    suffix = path.lower()[path.rindex(".") :]
    if suffix == ".zst":
        import pyarrow as pa

        with pa.input_stream(path, compression="zstd") as stream:
            yield stream
        return
    opener: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}[suffix]
    with opener(path, "rb") as stream:
        yield stream


def index_lines(path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start offset, length in bytes (without the line end) and number (from 1) of every line that is not empty."""
    ends: list[np.ndarray] = []
    size = 0
    with open(path, "rb") as file:
        while block := file.read(_COPY_BLOCK * 4):
            ends.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == 10) + size)
            size += len(block)
    stops = np.concatenate([*ends, np.array([size])]) if size else np.zeros(0, dtype=np.int64)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), stops[:-1] + 1]) if size else stops
    lengths = stops - starts
    keep = lengths > 0
    single = np.flatnonzero(lengths == 1)
    if single.size:
        content = np.memmap(path, dtype=np.uint8, mode="r")
        keep[single] = content[starts[single]] != 13
    return starts[keep], lengths[keep], np.flatnonzero(keep) + 1


def split_spans(data: bytes | mmap.mmap, start: int, end: int, limit: int) -> list[tuple[int, int]]:
    """Cut ``data[start:end]`` into spans of at most ``limit`` bytes: at a line end, else before a space, else between
    two characters; never inside a UTF-8 sequence."""
    spans: list[tuple[int, int]] = []
    while end - start > limit:
        cut = start + limit
        window = cut - limit // 4
        if (at := data.rfind(b"\n", window, cut)) >= 0:
            cut = at + 1
        elif (at := data.rfind(b" ", window, cut)) > start:
            cut = at
        else:
            for _ in range(3):
                if data[cut] & 0xC0 != 0x80:
                    break
                cut -= 1
        spans.append((start, cut))
        start = cut
    spans.append((start, end))
    return spans


class RandomAccessFile:
    """Positioned reads that are safe in forked and spawned workers: no shared offset, nothing open when pickled."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor: int | None = None

    def read(self, start: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``start``; a file that has shrunk is an error."""
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        parts: list[bytes] = []
        while length > 0:
            part = os.pread(self._descriptor, min(length, 1 << 30), start)
            if not part:
                raise DataError(f"{self.path} has become shorter since it was indexed; leave data alone during a run.")
            parts.append(part)
            start += len(part)
            length -= len(part)
        return b"".join(parts)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_descriptor": None}

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            os.close(self._descriptor)  # type: ignore[arg-type]
