"""Files of several formats as rows by number: found, unpacked once where compressed, never held in memory as text."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from limbeck.data.spans import LINE_BLOCK, Lines, Paragraphs, Scanner, Whole, find_spans
from limbeck.errors import ConfigError, DataError, one_line
from limbeck.utils.files import cache_dir as cache_folder
from limbeck.utils.files import package_file
from limbeck.utils.hub import HubId, data_commit, parse_id
from limbeck.utils.jsonl import COMPRESSED, check_expansion, open_bytes

OPEN_FILES = 128
"""Data files that a process keeps open at most."""
INDEX_ON_DISK = 32 << 20
"""Bytes of a text file from which its index is kept in the cache folder."""
_SIZES_AT_ONCE = 1 << 16
_RECORDS_TRIED = 16


class BadRecord(Exception):
    """One record is not usable: the reason to count it under, and what to tell the user."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


Columns = Callable[[list[str]], list[str]]
"""Which columns of a columnar file are read, of those that it has; the first is the one whose bytes count."""


class Reader(Protocol):
    """Random access to the records of one file."""

    def __len__(self) -> int: ...

    def sizes(self) -> Iterator[np.ndarray]:
        """Bytes of each record, or more than that (escapes, other keys); some at a time, int64, in order."""
        ...

    def row(self, number: int) -> dict[str, Any]:
        """Record ``number`` by key; raises BadRecord."""
        ...

    def continues(self, number: int) -> bool:
        """Whether record ``number`` is a piece of a document that goes on in the next one."""
        ...

    def location(self, number: int) -> str:
        """``file:line`` of record ``number`` for messages."""
        ...


def from_json(value: Any, key: str) -> Any:
    """A value, or what its JSON text stands for, as columnar files often keep nested values; raises BadRecord."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise BadRecord("malformed_json", f"{key!r} is text but not valid JSON ({error})") from None


class SpanIndex:
    """Byte spans of the records of a text file, and the lines they begin at.

    Large files have theirs in ``cache_dir``, 16 bytes per record, where any number of processes read it; it is made
    again when the file changes. Where nothing can be written there it is kept in memory.
    """

    def __init__(
        self, path: str, scanner: Callable[[], Scanner], cache_dir: str | None, limit: int | None = None
    ) -> None:
        self._scanner, self._limit = scanner, limit
        self._file = RandomAccessFile(path)
        size = os.path.getsize(path)
        blocks = -(-size // LINE_BLOCK)
        # spans as (start, length), then the newlines before each block
        self._stored: RandomAccessFile | None = None
        self._last = -1, (0, 0)  # asked for twice in a row: once for the record, once for its line
        self._words = np.zeros(0, dtype=np.int64)
        if size >= INDEX_ON_DISK and (target := self._on_disk(path, cache_dir)) is not None:
            self._stored = RandomAccessFile(target)
            words = os.path.getsize(target) // 8
        else:
            self._words = np.concatenate([self._words, *self._find()])
            words = len(self._words)
        self._count = (words - blocks) // 2

    def _on_disk(self, path: str, cache_dir: str | None) -> str | None:
        def fill(target: str) -> None:
            with open(target, "wb") as out:
                for words in self._find():
                    out.write(words.astype("<i8").tobytes())

        try:
            return cached_copy(path, f"spans:{self._scanner().name}:{self._limit}:1", cache_dir, fill)
        except DataError as error:
            log.warning("The index of %s is kept in memory: %s", path, error)
            return None

    def _find(self) -> Iterator[np.ndarray]:
        """The words of the index, some at a time."""
        per_block = np.zeros(-(-os.path.getsize(self._file.path) // LINE_BLOCK), dtype=np.int64)
        for (starts, ends), newlines in find_spans(self._file.path, self._scanner(), self._limit):
            if len(newlines):
                first = int(newlines[0]) // LINE_BLOCK
                counts = np.bincount(newlines // LINE_BLOCK - first)
                per_block[first : first + len(counts)] += counts
            yield np.stack([starts, ends - starts], axis=1).reshape(-1)
        yield np.cumsum(per_block) - per_block

    def _read(self, start: int, stop: int) -> np.ndarray:
        if self._stored is None:
            return self._words[start:stop]
        return np.frombuffer(self._stored.read(8 * start, 8 * (stop - start)), dtype="<i8")

    def __len__(self) -> int:
        return self._count

    def sizes(self) -> Iterator[np.ndarray]:
        """Bytes of the records, some at a time."""
        for start in range(0, self._count, _SIZES_AT_ONCE):
            yield self._read(2 * start, 2 * min(start + _SIZES_AT_ONCE, self._count))[1::2]

    def span(self, number: int) -> tuple[int, int]:
        """Offset and length of a record."""
        last, span = self._last
        if last != number:
            start, length = self._read(2 * number, 2 * number + 2).tolist()
            span = start, length
            self._last = number, span
        return span

    def line(self, number: int) -> int:
        """Line, from 1, at which a record begins."""
        start, _ = self.span(number)
        block = start // LINE_BLOCK
        word = 2 * self._count + block
        lines_before = self._file.read(block * LINE_BLOCK, start - block * LINE_BLOCK).count(b"\n")
        return int(self._read(word, word + 1)[0]) + lines_before + 1


class _Spans:
    """Records that are stretches of bytes of one file."""

    path: str
    _file: RandomAccessFile
    _index: SpanIndex

    def __len__(self) -> int:
        return len(self._index)

    def sizes(self) -> Iterator[np.ndarray]:
        return self._index.sizes()

    def continues(self, number: int) -> bool:
        return False

    def location(self, number: int) -> str:
        return f"{self.path}:{self._index.line(number)}"

    def _bytes(self, number: int) -> bytes:
        return self._file.read(*self._index.span(number))


class JsonlReader(_Spans):
    """One JSON object per line; empty lines are no records."""

    def __init__(self, path: str, cache_dir: str | None) -> None:
        self.path = path
        self._plain = _lines_of(unpacked(path, cache_dir), path, cache_dir)
        self._file = RandomAccessFile(self._plain)
        self._index = SpanIndex(self._plain, Lines, cache_dir)

    def row(self, number: int) -> dict[str, Any]:
        raw = self._bytes(number)
        try:
            # only at the beginning of a file is U+FEFF a mark; elsewhere it is text
            line = raw.decode("utf-8-sig" if self._index.span(number)[0] == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise BadRecord("invalid_utf8", f"byte {error.start} of the line is not valid UTF-8") from None
        if not line.strip():
            raise BadRecord("empty", "the line is blank")
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadRecord("malformed_json", f"the line is not valid JSON ({error})") from None
        if not isinstance(value, dict):
            raise BadRecord("not_an_object", f"the line is a JSON {type(value).__name__}, not an object with keys")
        return value


def _lines_of(plain: str, path: str, cache_dir: str | None) -> str:
    """A file that is one JSON array is rewritten once as lines; others are lines already."""
    with open(plain, "rb") as file:
        head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not head.startswith(b"["):
        return plain

    def fill(target: str) -> None:
        try:
            with open(plain, encoding="utf-8-sig") as file:
                values = json.load(file)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} starts as a JSON array but cannot be read as one: {error}.") from error
        with open(target, "w", encoding="utf-8") as out:
            # escaped: half a surrogate pair is no UTF-8, and costs its own record alone when that is read
            out.writelines(json.dumps(value) + "\n" for value in values)

    return cached_copy(plain, "lines", cache_dir, fill)


class TextReader(_Spans):
    """Plain text: a document per file or per paragraph; long ones are cut into pieces of ``limit`` bytes."""

    def __init__(self, path: str, key: str, cache_dir: str | None, *, paragraphs: bool, limit: int | None) -> None:
        self.path = path
        self._key = key
        self._plain = unpacked(path, cache_dir)
        self._file = RandomAccessFile(self._plain)
        self._index = SpanIndex(self._plain, Paragraphs if paragraphs else Whole, cache_dir, limit)

    def continues(self, number: int) -> bool:
        # between two documents there is a blank line at least
        start, length = self._index.span(number)
        return number + 1 < len(self) and self._index.span(number + 1)[0] == start + length

    def row(self, number: int) -> dict[str, Any]:
        raw = self._bytes(number)
        try:
            return {self._key: raw.decode("utf-8")}
        except UnicodeDecodeError as error:
            line = self._index.line(number) + raw.count(b"\n", 0, error.start)
            raise BadRecord("invalid_utf8", f"line {line} is not valid UTF-8") from None


class ArrowReader:
    """Rows of an Arrow file (file or stream format), memory-mapped."""

    def __init__(self, path: str, plain: str, columns: Columns) -> None:
        self.path = path
        self._plain = plain
        self._columns = columns
        self._table: Any = None
        self._check(self._open())
        self._rows = int(self._open().num_rows)

    def _check(self, table: Any) -> None:
        """All offsets and lengths must lie inside their buffers: Arrow itself trusts them, and would end the process.
        Whether text is UTF-8 is asked row by row."""
        import pyarrow as pa

        text = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
        try:
            for column in table.columns:
                column.cast(text.get(column.type, column.type)).validate(full=True)
        except (pa.ArrowException, MemoryError) as error:
            raise DataError(f"{self.path} is a damaged Arrow file: {one_line(error)}.") from error

    def _open(self) -> Any:
        if self._table is not None:
            return self._table
        import pyarrow as pa

        source = pa.memory_map(self._plain) if os.path.getsize(self._plain) else None
        try:
            if source is None:
                raise pa.ArrowInvalid("the file is empty")
            try:
                # both formats go by the same names
                table = pa.ipc.open_file(source).read_all()
            except pa.ArrowInvalid:
                source.seek(0)
                table = pa.ipc.open_stream(source).read_all()
            names = table.column_names
        except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
            raise DataError(f"{self.path} is not a readable Arrow file: {one_line(error)}.") from error
        self._table = table.select(_of_one_each(self._columns(names), names, self.path))
        return self._table

    def __len__(self) -> int:
        return self._rows

    def sizes(self) -> Iterator[np.ndarray]:
        yield column_sizes(self._open().column(0))

    def continues(self, number: int) -> bool:
        return False

    def location(self, number: int) -> str:
        return f"{self.path}:{number + 1}"

    def row(self, number: int) -> dict[str, Any]:
        table = self._open()
        try:
            return {name: table.column(name)[number].as_py() for name in table.column_names}
        except UnicodeDecodeError as error:
            raise BadRecord("invalid_utf8", f"byte {error.start} of the value is not valid UTF-8") from None

    def __getstate__(self) -> dict[str, Any]:
        # every process maps the file for itself: pickled, the table would be copied
        return {**self.__dict__, "_table": None}


def _of_one_each(wanted: list[str], names: Sequence[str], path: str) -> list[str]:
    """The wanted columns; ``DataError`` where a table has two of a name, of which nobody knows which is meant."""
    twice = sorted({name for name in wanted if list(names).count(name) > 1})
    if twice:
        raise DataError(f"{path} has more than one column {twice[0]!r}; rename all but one of them.")
    return wanted


def parquet_as_arrow(path: str, columns: Columns, cache_dir: str | None) -> str:
    """The needed columns of a parquet file as an Arrow file, unpacked once: parquet has no random access to rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        there = pq.read_schema(path).names
        names = _of_one_each(columns(there), there, path)
    except (pa.ArrowException, MemoryError) as error:
        raise DataError(f"{path} is not a readable parquet file: {one_line(error)}.") from error

    def fill(target: str) -> None:
        try:
            with pq.ParquetFile(path) as source:
                facts, wanted = source.metadata, {column.split(".")[0] for column in names}
                groups = [facts.row_group(group) for group in range(facts.num_row_groups)]
                parts = (group.column(column) for group in groups for column in range(group.num_columns))
                # what the file says of itself, before any of it is unpacked; and below, what it came to
                check_expansion(
                    path, sum(c.total_uncompressed_size for c in parts if c.path_in_schema.split(".")[0] in wanted)
                )
                schema = pa.schema([source.schema_arrow.field(name) for name in names])
                with pa.OSFile(target, "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                    for batch in source.iter_batches(batch_size=1024, columns=names):
                        writer.write_batch(batch.select(names))
                        check_expansion(path, sink.tell())
        except (pa.ArrowException, MemoryError) as error:
            raise DataError(f"{path} is not a readable parquet file: {one_line(error)}.") from error

    return cached_copy(path, f"arrow:{','.join(names)}", cache_dir, fill)


def hub_source(spec: str) -> HubId:
    """The data set that ``hf:owner/name`` or ``hf:owner/name@revision`` names."""
    hub_id = parse_id(spec.removeprefix(HUB_PREFIX), "dataset")
    if hub_id is None:
        raise DataError(
            f"{spec!r} names no data set of the hub; give {HUB_PREFIX}owner/name or a revision of it (@NAME)"
        )
    return hub_id


def _hub_data(spec: str, subset: str | None, split: str) -> Any:
    source = hub_source(spec)
    try:
        import datasets
    except ImportError:
        raise DataError(f"Reading {spec} needs the datasets package; install it with pip install datasets.") from None
    try:
        commit, reached = data_commit(source)
    except ConfigError as error:
        raise DataError(str(error)) from error
    with ExitStack() as stack:
        if not reached:
            # without this the package would ask the hub again, for half a minute
            stack.callback(setattr, datasets.config, "HF_HUB_OFFLINE", datasets.config.HF_HUB_OFFLINE)
            datasets.config.HF_HUB_OFFLINE = True
        try:
            # the address, since a folder here may have the name
            data = datasets.load_dataset(f"hf://datasets/{source.repo}", subset, split=split, revision=commit)
        except Exception as error:  # the package's own, the client's, and those of whatever reads a file
            first = one_line(error).partition("\n")[0].rstrip(".")
            raise DataError(
                f"The data set {spec!r} (split {split!r}) cannot be loaded from the hub: {first}; "
                "check subset, split and the network, or give local files."
            ) from error
    # the package's cache knows no revisions: it gives the newest that it has
    if not reached and not all(commit in file["filename"] for file in data.cache_files):
        raise DataError(
            f"{spec!r}: of this revision no split {split!r} was fetched before, and the hub is not reached."
        )
    return data


def data_size(path: str, hub_subset: str | None, hub_split: str) -> int:
    """Bytes of a file, or of a data set of the hub as it is kept here."""
    in_cache = path.startswith(HUB_PREFIX)
    return int(_hub_data(path, hub_subset, hub_split).data.nbytes if in_cache else os.stat(path).st_size)


class HubReader:
    """A split of a data set on the hub, which the ``datasets`` package keeps memory-mapped in its cache."""

    def __init__(self, spec: str, columns: Columns, subset: str | None, split: str) -> None:
        self.path = spec
        data = _hub_data(spec, subset, split)
        self._data = data.select_columns(columns(data.column_names))

    def __len__(self) -> int:
        return len(self._data)

    def sizes(self) -> Iterator[np.ndarray]:
        # A selection of rows is kept beside the table, so the column alone would tell other rows' sizes.
        selected = self._data._indices is not None
        yield (
            np.zeros(len(self._data), dtype=np.int64)
            if selected
            else column_sizes(self._data.data.column(self._data.column_names[0]))
        )

    def continues(self, number: int) -> bool:
        return False

    def location(self, number: int) -> str:
        return f"{self.path}:{number + 1}"

    def row(self, number: int) -> dict[str, Any]:
        return dict(self._data[number])


def column_sizes(column: Any) -> np.ndarray:
    """Bytes per value of a string column, read from its offsets alone; 0 for null and for other types."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return np.zeros(len(column), dtype=np.int64)
    sizes: np.ndarray = pc.fill_null(pc.binary_length(column), 0).to_numpy()
    return sizes.astype(np.int64)


def keys_of(path: str, format: str, cache_dir: str | None, hub_subset: str | None, hub_split: str) -> list[str]:
    """The keys of a file's first usable record; none for plain text, and where no record can be read."""
    if path.startswith(HUB_PREFIX):
        return list(_hub_data(path, hub_subset, hub_split).column_names)
    kind = format_of(path, format)
    if kind == "text":
        return []
    if kind == "jsonl":
        reader = JsonlReader(path, cache_dir)
        for number in range(min(len(reader), _RECORDS_TRIED)):
            with suppress(BadRecord):
                return list(reader.row(number))
        return []
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind == "arrow":
        return list(ArrowReader(path, unpacked(path, cache_dir), list)._open().column_names)
    try:
        return list(pq.read_schema(unpacked(path, cache_dir)).names)
    except (pa.ArrowException, MemoryError) as error:
        raise DataError(f"{path} is not a readable parquet file: {one_line(error)}.") from error


def open_reader(
    path: str,
    *,
    format: str,
    columns: Columns,
    text_key: str,
    cache_dir: str | None,
    paragraphs: bool = False,
    text_limit: int | None = None,
    hub_subset: str | None = None,
    hub_split: str = "train",
) -> Reader:
    """The reader for one file or hub id; ``text_key``: the key under which plain text is handed out."""
    if path.startswith(HUB_PREFIX):
        return HubReader(path, columns, hub_subset, hub_split)
    kind = format_of(path, format)
    if kind == "jsonl":
        return JsonlReader(path, cache_dir)
    if kind == "text":
        return TextReader(path, text_key, cache_dir, paragraphs=paragraphs, limit=text_limit)
    plain = unpacked(path, cache_dir)
    if kind == "parquet":
        plain = parquet_as_arrow(plain, columns, cache_dir)
    return ArrowReader(path, plain, columns)


# -- files -------------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

FORMATS = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather", ".ipc"),
    "text": (".txt", ".text", ".md", ".rst", ".py", ".tex", ".html", ".c", ".h", ".cpp", ".java", ".js", ".ts", ".go"),
}
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


def is_plain_text(path: str, wanted: str = "auto") -> bool:
    """Whether a file is read as text, of which a document is the whole or a paragraph."""
    return not path.startswith(HUB_PREFIX) and format_of(path, wanted) == "text"


def _plain_name(path: str) -> str:
    name = path.lower()
    return name[: name.rindex(".")] if name.endswith(COMPRESSED) else name


def expand(specs: str | list[str], *, tell: bool = False) -> list[str]:
    """Files (and hub ids) named by paths, globs and folders, in a fixed order, each once; ``tell``: warn of others."""
    files: list[str] = []
    for spec in [specs] if isinstance(specs, str) else specs:
        files.extend(_expand_one(os.path.expanduser(package_file(spec))))
    unique = list(dict.fromkeys(files))
    if tell and len(unique) < len(files):
        twice = ", ".join(name for name, times in Counter(files).items() if times > 1)
        log.warning("data files that are named more than once are read once: %s", twice)
    if not unique:
        raise DataError("No data file is given; set data.train to a file, a glob, a folder or hf:owner/name.")
    return unique


def _expand_one(spec: str) -> list[str]:
    if spec.startswith(HUB_PREFIX) or os.path.isfile(spec):
        return [spec]
    if os.path.isdir(spec):
        suffixes = tuple(suffix for group in FORMATS.values() for suffix in group)
        # A saved `datasets` folder keeps its own state beside the data.
        bookkeeping = {"state.json", "dataset_info.json", "dataset_dict.json"}
        files = sorted(str(p) for p in Path(spec).rglob("*") if p.is_file() and p.name not in bookkeeping)
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


def cached_copy(path: str, what: str, cache_dir: str | None, fill: Callable[[str], None]) -> str:
    """A derived form of ``path``, made by ``fill(target)`` the first time and whenever the file has changed."""
    stat = os.stat(path)
    key = json.dumps([os.path.realpath(path), stat.st_size, stat.st_mtime_ns, what])
    folder = Path(cache_dir).expanduser() if cache_dir else cache_folder("data")
    target = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.{what.split(':')[0]}"
    if target.exists():
        return str(target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=folder, suffix=".partial")
        os.close(handle)
        try:
            fill(partial)
            # Ranks may do this at the same time; the rename makes whoever comes last harmless.
            os.replace(partial, target)
        finally:
            Path(partial).unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"{path} could not be unpacked into {folder}: {error}; free space or set data.cache_dir."
        ) from error
    return str(target)


def unpacked(path: str, cache_dir: str | None) -> str:
    """The file itself, or its decompressed copy; random access needs one."""
    if not path.lower().endswith(COMPRESSED):
        return path

    def fill(target: str) -> None:
        with open(target, "wb") as plain:
            # blocks out of a generator: an error of writing is none of reading
            for block in _blocks(path):
                plain.write(block)

    return cached_copy(path, "plain", cache_dir, fill)


def _blocks(path: str) -> Iterator[bytes]:
    with open_bytes(path) as packed:
        while block := packed.read(_COPY_BLOCK):
            yield block


class RandomAccessFile:
    """Positioned reads that are safe in forked and spawned workers: no shared offset, nothing open when pickled.

    Only the files read last stay open, however many there are.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def read(self, start: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``start``; a file that has shrunk is an error."""
        file = _descriptor(self)
        parts: list[bytes] = []
        while length > 0:
            # Linux reads less than 2 GiB at a time
            part = os.pread(file.number, min(length, 1 << 30), start)
            if not part:
                raise DataError(f"{self.path} has become shorter since it was indexed; leave data alone during a run.")
            parts.append(part)
            start += len(part)
            length -= len(part)
        return b"".join(parts)


class _Descriptor:
    """An open file, closed with the last reference to it: a thread that still reads keeps it from being closed."""

    number: int = -1

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.number >= 0:  # it could be opened
            os.close(self.number)


@lru_cache(maxsize=OPEN_FILES)
def _descriptor(file: RandomAccessFile) -> _Descriptor:
    return _Descriptor(file.path)
