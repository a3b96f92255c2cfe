"""Data sets of texts and conversations: files in, records out, by index.

A data set is an index of (file, record, piece) over memory-light readers. Record i is the same whoever asks, so any
number of loader workers gives the same data, and a sampler's position is all there is to save.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache, partial
from typing import Any, Literal

import numpy as np
import torch
import torch.utils.data
from pydantic import BaseModel, ConfigDict, Field, model_validator

from limbeck.config import FREE, resolve
from limbeck.data.forms import chat_form, detect
from limbeck.data.readers import (
    HUB_PREFIX,
    BadRecord,
    Reader,
    expand,
    format_of,
    from_json,
    hub_source,
    keys_of,
    open_reader,
)
from limbeck.data.spans import split_spans
from limbeck.errors import ConfigError, DataError
from limbeck.tokens.chat.teacher_context import Context, ContextForm
from limbeck.utils.files import Stamp, short_names, stamp_files
from limbeck.utils.hub import data_commit

log = logging.getLogger(__name__)

Record = dict[str, Any]
PAD_INDEX = -1
"""Asked for by a sampler that fills up a last batch; gives a record that counts for nothing."""
_CHECK_AT_START_BYTES = 64 << 20
MOST_BYTES = 1 << 20
"""Longest record where nobody says how long the contexts are."""


class ReadingConfig(BaseModel):
    """How records are read, and what happens to those that cannot be used."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    mode: Literal["auto", "text", "chat"] = "auto"
    """``text`` reads ``text_key``; ``chat`` reads ``messages_key`` (and ``tools_key`` where a record has it), or prompt
    and completion, Alpaca, ShareGPT, question and answer. ``auto`` goes by the keys of the first record."""
    text_key: str = "text"
    """Key of the text in jsonl, parquet and arrow records."""
    messages_key: str = "messages"
    """Key of the conversation in chat records."""
    tools_key: str | None = "tools"
    """Key of a conversation's tools; null: they are not read."""
    teacher_context_key: str | None = "teacher_context"
    """Key of what teachers read in front of a record and the student does not: text, or messages; null: not read."""
    teacher_key: str | None = "teacher"
    """Key of the name of a record's only teacher, among ``teachers`` that have names; a record without it has all of
    them. null: not read."""
    format: Literal["auto", "jsonl", "parquet", "arrow", "text"] = "auto"
    """``auto`` goes by the file name."""
    split_documents: Literal["file", "blank_lines"] = "file"
    """In plain text, one document per file or per paragraph."""
    join_to_bytes: int | None = Field(default=None, ge=1)
    """Group neighbouring documents into records of up to this many bytes; they stay separate documents."""
    max_document_bytes: int | None = Field(default=None, ge=16)
    """Longest record in UTF-8 bytes; see ``long_documents``. Default: where a run splits texts, 8 bytes for each token
    of the shortest context; 1 MiB elsewhere."""
    long_documents: Literal["split", "cut", "skip", "error"] = "split"
    """Treatment of a longer document, and of one that is longer than a context. ``split``: nothing is lost, it
    becomes several records and rows, cut at a line end, else before a space. ``cut``: it is split into records, and
    what does not fit the context is left out. ``skip`` leaves all of it out, ``error`` stops. A conversation cannot be
    split: over ``max_document_bytes`` it is left out, over the context it is cut."""
    on_bad_record: Literal["error", "skip"] = "error"
    """Invalid UTF-8, malformed JSON, a missing key or a wrong type: stop with file and line, or skip and count."""
    check_records: Literal["auto", "at_start", "on_read"] = Field(default="auto", json_schema_extra=FREE)
    """Read every record once before the run (``auto``: up to 64 MiB of data), or find bad ones when they come up."""
    cache_dir: str | None = Field(default=None, json_schema_extra=FREE)
    """Where compressed and parquet files are unpacked; default ``$LIMBECK_CACHE`` or ``~/.cache/limbeck``."""
    hub_subset: str | None = None
    """``hf:`` data: the configuration of the data set."""
    hub_split: str = "train"
    """``hf:`` data: the split to train on."""

    @property
    def key(self) -> str:
        """The key every record must have."""
        return self.messages_key if self.mode == "chat" else self.text_key

    @property
    def most_bytes(self) -> int:
        """``max_document_bytes`` as a number."""
        return self.max_document_bytes or MOST_BYTES

    @property
    def splits(self) -> bool:
        """Whether longer documents become several records."""
        return self.mode != "chat" and self.long_documents in ("split", "cut")

    def identity(self) -> str:
        """Everything that changes records."""
        values = {name: getattr(self, name) for name in ReadingConfig.model_fields} | {"cache_dir": None}
        values["max_document_bytes"] = self.most_bytes
        if self.long_documents == "cut":
            # the records are the same
            values["long_documents"] = "split"
        return f"SourceOptions({', '.join(f'{name}={value!r}' for name, value in values.items())})"


class DataConfig(ReadingConfig):
    """The ``data`` section of a run file: what is read, in which order, and how long rows may be."""

    train: str | list[str]
    """Files, globs, folders, or ``hf:owner/name`` (``hf:owner/name@revision``) for a data set on the hub."""
    validation: str | list[str] | None = None
    """The same for validation; without it nothing is validated."""
    holdout: float = Field(default=0.0, ge=0, le=0.5)
    """Share of the documents of ``train`` that are validated on instead of learnt from; drawn once, the same in every
    run over the same files. 0: none."""
    hub_validation_split: str = "validation"
    """``hf:`` data: the split to validate on."""

    shuffle: bool = True
    """Draw a new order of records in every epoch."""
    num_workers: int | None = Field(default=None, ge=0, json_schema_extra=FREE)
    """Processes that read, tokenize and align ahead of the training step; default: 2 where there is an accelerator,
    which must not wait for text, and none elsewhere."""
    append_eos: bool = False
    """Close every document with the tokenizer's end token (text mode); of a document that is split, the last piece.
    Right where documents are whole: after excerpts and paragraphs it would teach the student to stop there."""
    max_input_seq_length: int | None = Field(default=None, ge=1)
    """Longest sequence in tokens; default, and never more: each model's ``max_total_sequence_length``."""
    max_teacher_seq_length: int | list[int] | None = None
    """The same for teachers alone, one number or one per teacher; default: ``max_input_seq_length``."""
    teacher_context_as: ContextForm = "system"
    """Place of a record's ``teacher_context`` in a conversation where it is text: part of the instructions, of the
    first ``user`` message (for templates without a system role), or a ``hint`` directly before the last answer."""

    def reading(self, split: Literal["train", "validation"]) -> ReadingConfig:
        """How the records of one part are read."""
        shared = {name: getattr(self, name) for name in ReadingConfig.model_fields}
        hub_split = self.hub_split if split == "train" else self.hub_validation_split
        return ReadingConfig.model_construct(**{**shared, "mode": self.detected_mode(), "hub_split": hub_split})

    @model_validator(mode="after")
    def _one_validation(self) -> DataConfig:
        if self.holdout and self.validation:
            raise ValueError(f"validation and holdout {self.holdout:g} are both given; use one of them")
        return self

    @property
    def validates(self) -> bool:
        """Whether there is anything to validate on."""
        return bool(self.validation) or self.holdout > 0

    def detected_mode(self) -> Literal["text", "chat"]:
        """``mode``; where it is ``auto``, by the first record of the training data."""
        return self.mode if self.mode != "auto" else detect_mode(expand(self.train)[0], self)


class RecordDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Records of one or several files, by index.

    A record is a dict: ``text`` (str or None), ``messages`` (list or None), ``tools``, ``idx``, ``loss_multiplier``,
    ``source`` (``file:line``), ``teacher_context`` where it has one, and ``continues`` where the document goes on in
    the next record. With ``join_to_bytes`` it has ``documents`` instead: a list of such records, which
    :func:`flatten_documents` turns into rows of their own, so that no attention crosses from one to the next.

    A record that is found bad when it is read (``on_bad_record="skip"`` with ``check_records="on_read"``) comes back
    with ``loss_multiplier`` 0 and a ``skip_reason``, which is counted in whichever process.

    Args:
        part: one of the two parts of the documents, and the share that is held out of the other.
        reference: keys of stored records that are kept under ``reference``, for whoever compares answers with them;
            None: all.

    Attributes:
        skipped: records left out, by reason, as far as this process has seen them.
    """

    def __init__(
        self,
        paths: str | list[str],
        options: ReadingConfig | Mapping[str, Any] | None = None,
        *,
        part: tuple[Literal["train", "validation"], float] | None = None,
        reference: Collection[str] | None = (),
    ) -> None:
        self._part, self._reference = part, reference
        reading = resolve(ReadingConfig, options or {})
        self.paths = expand(paths, tell=True)
        self.options = reading.model_copy(update={"mode": detect_mode(self.paths[0], reading)})
        self.skipped: Counter[str] = Counter()
        self._long: tuple[int, bytes, list[tuple[int, int]], Record] | None = None

    def __len__(self) -> int:
        return len(self._index.groups) if self._index.groups is not None else self._index.count

    def __getitem__(self, position: int) -> Record:
        if position == PAD_INDEX:
            return self._placeholder(PAD_INDEX, "padding", "padding")
        if not 0 <= position < len(self):
            raise IndexError(f"Record {position} is outside the data set of {len(self)} records.")
        groups = self._index.groups
        if groups is None:
            return self._read(position)
        end = groups[position + 1] if position + 1 < len(groups) else self._index.count
        documents = [self._read(unit) for unit in range(int(groups[position]), int(end))]
        return {
            "text": None,
            "messages": None,
            "documents": documents,
            "idx": position,
            "loss_multiplier": 1.0,
            "source": documents[0]["source"],
        }

    def __iter__(self) -> Iterator[Record]:
        return (self[position] for position in range(len(self)))

    @cached_property
    def fingerprint(self) -> str:
        """Changes when a file, its order or an option that changes records does; saved with a run's position."""
        digest = hashlib.sha256(self.options.identity().encode())
        if self._part is not None:
            digest.update(repr(self._part).encode())
        for path, reader in zip(self.paths, self._readers, strict=True):
            digest.update(json.dumps([path.rsplit("/", 1)[-1], len(reader)]).encode())
            for sizes in reader.sizes():
                digest.update(np.ascontiguousarray(sizes, dtype=np.int64).tobytes())
            if not path.startswith(HUB_PREFIX):
                with open(path, "rb") as file:
                    digest.update(file.read(1 << 16))
        return digest.hexdigest()

    def parts(self) -> dict[str, int]:
        """How many positions each file has, in order, by short names that tell the files apart.

        A record that joins documents of several files counts for the first of them.
        """
        first = self._index.groups if self._index.groups is not None else np.arange(self._index.count)
        file = np.searchsorted(self._first, self._index.records(first), side="right") - 1
        sizes = np.bincount(file, minlength=len(self.paths))
        names = short_names(self.paths)
        return {names[path]: int(size) for path, size in zip(self.paths, sizes, strict=True) if size}

    def stamps(self) -> list[Stamp]:
        """Stamp that tells the files from others of their names; see ``stamp_files``. Of a data set on the hub its
        commit."""
        hub = [hub_source(path) for path in self.paths if path.startswith(HUB_PREFIX)]
        here = stamp_files([path for path in self.paths if not path.startswith(HUB_PREFIX)])
        return [*here, *(Stamp(f"{HUB_PREFIX}{source}", 0, 0, data_commit(source)[0]) for source in hub)]

    def prepare(self) -> RecordDataset:
        """Index (and check) now instead of at the first access; call it before workers are forked."""
        _ = self._index
        return self

    @cached_property
    def _readers(self) -> list[Reader]:
        o = self.options
        readers = []
        for path in self.paths:
            if o.mode == "chat" and not path.startswith(HUB_PREFIX) and format_of(path, o.format) == "text":
                raise ConfigError(f"{path} is read as plain text, which holds no conversations; use data.mode=text.")
            readers.append(
                open_reader(
                    path,
                    format=o.format,
                    columns=partial(_columns, o, path, self._reference),
                    text_key=o.text_key,
                    cache_dir=o.cache_dir,
                    paragraphs=o.split_documents == "blank_lines",
                    text_limit=o.most_bytes if o.splits else None,
                    hub_subset=o.hub_subset,
                    hub_split=o.hub_split,
                )
            )
        return readers

    @cached_property
    def _first(self) -> np.ndarray:
        """Number of the first record of each file, and the total."""
        return np.cumsum([0, *(len(reader) for reader in self._readers)])

    @cached_property
    def _index(self) -> _Index:
        count = total = 0
        long: list[int] = []
        for sizes in self._sizes():
            long += (np.flatnonzero(sizes > self.options.most_bytes) + count).tolist()
            count, total = count + len(sizes), total + int(sizes.sum())
        index = _Index(count, None, None, None)
        if long and self.options.mode == "text":
            index = self._index_long(count, long)
        if self._checks_at_start(total):
            usable = np.array([self._usable(index, unit) for unit in range(index.count)], dtype=bool)
            if not usable.all():
                index = index.select(np.flatnonzero(usable))
        if self.skipped:
            log.warning("Skipped records in %s: %s.", _shorten(self.paths), dict(self.skipped))
        if index.count == 0:
            why = f" (skipped: {dict(self.skipped)})" if self.skipped else ""
            raise DataError(f"There is no usable record in {_shorten(self.paths)}{why}.")
        if self._part is not None:
            index = self._select_part(index, *self._part)
        if self.options.join_to_bytes is not None:
            every = np.concatenate(list(self._sizes()))
            index.groups = _group(index.unit_sizes(every, self.options.most_bytes), self.options.join_to_bytes)
        return index

    def _select_part(self, index: _Index, name: str, share: float) -> _Index:
        """The held-out documents, or the others; all pieces of a document are in one part."""
        documents = index.records(np.arange(index.count))
        known = np.unique(documents)
        if len(known) < 2:
            raise DataError(
                f"data.holdout is {share:g}, but {_shorten(self.paths)} holds one document; give data.validation, or "
                "data.split_documents: blank_lines where its paragraphs are documents"
            )
        number = min(max(round(share * len(known)), 1), len(known) - 1)
        held = np.random.default_rng(0).choice(known, number, replace=False)
        return index.select(np.flatnonzero(np.isin(documents, held, invert=name == "train")))

    def _sizes(self) -> Iterator[np.ndarray]:
        """Bytes of all records, some at a time."""
        return (sizes for reader in self._readers for sizes in reader.sizes())

    def _checks_at_start(self, total_bytes: int) -> bool:
        choice = self.options.check_records
        return choice == "at_start" or (choice == "auto" and total_bytes <= _CHECK_AT_START_BYTES)

    def _index_long(self, count: int, long: list[int]) -> _Index:
        """Cut documents over the limit into pieces, or leave them out, or stop, as the options say."""
        pieces = np.ones(count, dtype=np.int64)
        for record in long:
            try:
                data = self._document(record)["text"].encode("utf-8")
            except BadRecord:
                continue  # Handled like any other bad record when its turn comes.
            # sizes by the index also count escapes and other keys: only now is it certain
            if len(data) <= self.options.most_bytes:
                continue
            if self.options.splits:
                pieces[record] = len(split_spans(data, 0, len(data), self.options.most_bytes))
                continue
            self._refuse(
                record,
                BadRecord("too_long", f"the document has {len(data)} bytes, more than max_document_bytes"),
                stop=self.options.long_documents == "error",
            )
            pieces[record] = 0
        return _Index.of_pieces(pieces)

    def _usable(self, index: _Index, unit: int) -> bool:
        record, piece = index.locate(unit)
        # its document was tried with the first piece
        if piece > 0:
            return True
        try:
            self._document(record)
        except BadRecord as error:
            self._refuse(record, error)
            return False
        return True

    def _read(self, unit: int) -> Record:
        number, piece = self._index.locate(unit)
        try:
            record = self._document(number) if not self._index.is_split(unit) else self._piece(number, piece)
        except BadRecord as error:
            self._refuse(number, error)
            return self._placeholder(unit, error.reason, self._location(number))
        return {**record, "idx": unit, "loss_multiplier": 1.0, "source": self._location(number)}

    def _piece(self, number: int, piece: int) -> Record:
        """One piece of a long document; the last such document is kept, because its pieces are often asked in a row."""
        if self._long is None or self._long[0] != number:
            document = self._document(number)
            data = document["text"].encode("utf-8")
            context = {key: document[key] for key in (CONTEXT, TEACHER, REFERENCE) if key in document}
            self._long = (number, data, split_spans(data, 0, len(data), self.options.most_bytes), context)
        start, end = self._long[2][piece]
        text = self._long[1][start:end].decode("utf-8")
        fields = {**self._long[3], "text": text, "messages": None, "tools": None}
        return {**fields, "continues": piece + 1 < len(self._long[2])}

    def _document(self, number: int) -> Record:
        file = int(np.searchsorted(self._first, number, side="right")) - 1
        o = self.options
        stored = self._readers[file].row(number - int(self._first[file]))
        row = as_record(stored, o.text_key, o.messages_key)
        if o.key not in row or row[o.key] is None:
            raise BadRecord(
                "missing_key", f"the record has no {o.key!r}, only {', '.join(sorted(stored)) or 'no keys'}"
            )
        context = checked_context(row, o.teacher_context_key, o.mode)
        if o.teacher_key and row.get(o.teacher_key) is not None:
            context[TEACHER] = row[o.teacher_key]
        if o.mode == "text":
            context |= self._kept(row)
            document = {"text": checked_text(row[o.key], o.key), "messages": None, "tools": None, **context}
            reader, line = self._readers[file], number - int(self._first[file])
            return {**document, "continues": True} if reader.continues(line) else document
        messages = checked_messages(row[o.key], o.key)
        size = len(json.dumps(messages, ensure_ascii=False).encode("utf-8"))
        if size > o.most_bytes:
            raise BadRecord("too_long", f"the conversation has {size} bytes, more than max_document_bytes")
        tools = row.get(o.tools_key) if o.tools_key else None
        context |= self._kept({**row, "messages": messages})
        return {"text": None, "messages": messages, "tools": _checked_tools(tools, str(o.tools_key)), **context}

    def _kept(self, row: Mapping[str, Any]) -> Record:
        if self._reference is None:
            return {REFERENCE: dict(row)}
        kept = {key: row[key] for key in self._reference if row.get(key) is not None}
        return {REFERENCE: kept} if kept else {}

    def _location(self, number: int) -> str:
        file = int(np.searchsorted(self._first, number, side="right")) - 1
        return self._readers[file].location(number - int(self._first[file]))

    def _refuse(self, number: int, error: BadRecord, stop: bool | None = None) -> None:
        """Stop with file and line, or count the record; an empty one holds nothing to lose and never stops a run."""
        if stop is None:
            harmless = error.reason == "empty" or (
                error.reason == "too_long" and self.options.long_documents != "error"
            )
            stop = self.options.on_bad_record == "error" and not harmless
        if stop:
            remedy = "raise data.max_document_bytes" if error.reason == "too_long" else "correct it"
            option = "long_documents" if error.reason == "too_long" else "on_bad_record"
            raise DataError(f"{self._location(number)}: {error}; {remedy}, or set data.{option}=skip to leave it out.")
        if not self.skipped[error.reason]:
            log.warning(
                "Skipping %s: %s (further records of this kind are only counted).", self._location(number), error
            )
        self.skipped[error.reason] += 1

    def _placeholder(self, position: int, reason: str, source: str) -> Record:
        chat = self.options.mode == "chat"
        return {
            "text": None if chat else "",
            "messages": [] if chat else None,
            "tools": None,
            "idx": position,
            "loss_multiplier": 0.0,
            "source": source,
            "skip_reason": reason,
        }

    def __getstate__(self) -> dict[str, Any]:
        # a copy of one document in pieces, which workers make themselves
        return {**self.__dict__, "_long": None}


class _Index:
    """Units (whole records or pieces of long ones) in order; without pieces or gaps it needs no memory."""

    def __init__(
        self, count: int, record: np.ndarray | None, piece: np.ndarray | None, split: np.ndarray | None
    ) -> None:
        self.count = count
        self._record = record
        self._piece = piece
        self._split = split
        self.groups: np.ndarray | None = None

    @classmethod
    def of_pieces(cls, pieces: np.ndarray) -> _Index:
        record = np.repeat(np.arange(len(pieces)), pieces)
        piece = np.arange(len(record)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        return cls(len(record), record, piece.astype(np.int32), np.repeat(pieces > 1, pieces))

    def select(self, units: np.ndarray) -> _Index:
        if self._record is None or self._piece is None or self._split is None:
            return _Index(len(units), units, np.zeros(len(units), dtype=np.int32), np.zeros(len(units), dtype=bool))
        return _Index(len(units), self._record[units], self._piece[units], self._split[units])

    def locate(self, unit: int) -> tuple[int, int]:
        if self._record is None or self._piece is None:
            return unit, 0
        return int(self._record[unit]), int(self._piece[unit])

    def records(self, units: np.ndarray) -> np.ndarray:
        """Numbers of the records that units belong to."""
        return units if self._record is None else self._record[units]

    def is_split(self, unit: int) -> bool:
        return self._split is not None and bool(self._split[unit])

    def unit_sizes(self, sizes: np.ndarray, limit: int) -> np.ndarray:
        unit_sizes: np.ndarray = np.minimum(sizes if self._record is None else sizes[self._record], limit)
        return unit_sizes


def detect_mode(path: str, options: ReadingConfig) -> Literal["text", "chat"]:
    """Form of a file's records: as ``options`` say, or by the keys of its first record, which is then said in one
    line."""
    if options.mode != "auto":
        return options.mode
    # for the cache's key: a file that has changed is looked at again
    changed = 0 if path.startswith(HUB_PREFIX) else os.stat(path).st_mtime_ns
    where = options.format, options.cache_dir, options.hub_subset, options.hub_split
    return _detect(path, changed, where, options.text_key, options.messages_key)


@lru_cache(maxsize=64)
def _detect(
    path: str, changed: int, where: tuple[str, str | None, str | None, str], text_key: str, messages_key: str
) -> Literal["text", "chat"]:
    """See :func:`detect_mode`; cached, so that a file is looked at and spoken of once."""
    mode, form = detect(keys_of(path, *where), text_key, messages_key, path)
    if mode == "text":
        return "text"
    what = messages_key if form is None else f"{form.name}: {form.keys}"
    log.warning("%s is read as conversations (%s); data.mode: text would read %r instead.", path, what, text_key)
    return "chat"


def _columns(options: ReadingConfig, path: str, reference: Collection[str] | None, names: Collection[str]) -> list[str]:
    """Which of a columnar file's columns are read, the one whose bytes count first."""
    if options.key in names:
        keys = [options.key]
    elif options.mode == "chat" and (form := chat_form(names, path)) is not None:
        keys = [*form.needed, *(name for name in form.optional if name in names)]
    else:
        raise DataError(f"{path} has no column {options.key!r}; it has {', '.join(names) or 'none'}.")
    more = [options.teacher_context_key, options.teacher_key, options.tools_key if options.mode == "chat" else None]
    more += names if reference is None else reference
    return [*keys, *dict.fromkeys(key for key in more if key and key in names and key not in keys)]


def _group(sizes: np.ndarray, limit: int) -> np.ndarray:
    """First unit of each group of neighbours whose sizes add up to at most ``limit`` (or of a single larger one)."""
    ends = np.cumsum(sizes)
    starts = [0]
    while True:
        done = ends[starts[-1] - 1] if starts[-1] else 0
        after = max(int(np.searchsorted(ends, done + limit, side="right")), starts[-1] + 1)
        if after >= len(sizes):
            return np.array(starts, dtype=np.int64)
        starts.append(after)


PUBLISHED_KEY = "message_log"
"""Where a published record keeps its text or conversation: a list of messages with ``role`` and ``content``."""
CONTEXT = "teacher_context"
"""Where a record has what its teachers alone read, if it has any."""
TEACHER = "teacher"
"""Where a record names the only teacher that it is shown to."""
REFERENCE = "reference"
"""Where a record has what answers are compared with, where a run compares them."""


def as_record(row: Mapping[str, Any], text_key: str = "text", messages_key: str = "messages") -> Mapping[str, Any]:
    """A row in the published form with our keys besides: the messages, and their contents end to end as the text; and
    one in another form of chat data with its messages.

    Keys that a row has already are left as they are. Raises BadRecord.
    """
    if any(row.get(key) is not None for key in (text_key, messages_key)):
        return row
    if PUBLISHED_KEY not in row:
        form = chat_form(row, "the record")
        return row if form is None else {**row, messages_key: form.convert(row)}
    log = from_json(row[PUBLISHED_KEY], PUBLISHED_KEY)
    if isinstance(log, list):
        # tensors are ids and masks of one tokenizer, which other models do not share
        log = [_without_tensors(message) if isinstance(message, Mapping) else message for message in log]
    messages = checked_messages(log, PUBLISHED_KEY)
    record: dict[str, Any] = {**row, messages_key: messages}
    contents = [message.get("content", "") for message in messages]
    if all(isinstance(content, str) for content in contents):
        record[text_key] = "".join(contents)
    return record


def _without_tensors(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in message.items() if not isinstance(part, torch.Tensor)}


def checked_text(value: Any, key: str) -> str:
    """``value`` if it is text that can be encoded; raises BadRecord."""
    if not isinstance(value, str):
        raise BadRecord("wrong_type", f"{key!r} is a {type(value).__name__}, not a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRecord("invalid_unicode", f"{key!r} has half a surrogate pair at character {error.start}") from None
    if not value.strip():
        raise BadRecord("empty", f"{key!r} is empty")
    return value


def checked_messages(value: Any, key: str) -> list[dict[str, Any]]:
    """A conversation: a list (or its JSON) of objects with a role; raises BadRecord."""
    messages = from_json(value, key)
    if not isinstance(messages, list):
        raise BadRecord("wrong_type", f"{key!r} is a {type(messages).__name__}, not a list of messages")
    if not messages:
        raise BadRecord("empty", f"{key!r} has no message")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadRecord("bad_message", f"message {number} of {key!r} has no role")
    try:
        # contents and arguments may nest: JSON reaches every text in them
        json.dumps(messages, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecord("invalid_unicode", f"{key!r} has half a surrogate pair") from None
    except (TypeError, ValueError) as error:
        raise BadRecord("wrong_type", f"{key!r} holds a value that JSON cannot hold ({error})") from None
    # Columnar files give every message the keys of all of them, with null where it has none.
    return [{name: part for name, part in message.items() if part is not None} for message in messages]


def checked_context(row: Mapping[str, Any], key: str | None, mode: str) -> dict[str, Context]:
    """A record's context for teachers under its own key; nothing where it is empty. Raises BadRecord."""
    value = row.get(key) if key else None
    if not value or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, str):
        return {CONTEXT: checked_text(value, str(key))}
    if mode == "text":
        raise BadRecord("wrong_type", f"{key!r} is a {type(value).__name__}; in front of a text only text can stand")
    return {CONTEXT: checked_messages(value, str(key))}


def _checked_tools(value: Any, key: str) -> list[Any] | None:
    tools = from_json(value, key)
    if tools is not None and not isinstance(tools, list):
        raise BadRecord("wrong_type", f"{key!r} is a {type(tools).__name__}, not a list of tools")
    return tools or None


def flatten_documents(records: Iterable[Record]) -> list[Record]:
    """Rows for a collator: each document of a joined record by itself, other records as they are."""
    return [row for record in records for row in record.get("documents") or [record]]


def _shorten(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def build_dataset(
    cfg: DataConfig | Mapping[str, Any],
    split: Literal["train", "validation"] = "train",
    reference: Collection[str] | None = (),
) -> RecordDataset:
    """The data set of a ``data`` section; ``reference``: see :class:`RecordDataset`."""
    config = resolve(DataConfig, cfg)
    if config.holdout:
        part = (split, config.holdout)
        return RecordDataset(config.train, config.reading("train"), part=part, reference=reference)
    paths = config.train if split == "train" else config.validation
    if not paths:
        raise ConfigError(f"data.{split} is not set; give a file, a glob, a folder or {HUB_PREFIX}owner/name.")
    return RecordDataset(paths, config.reading(split), reference=reference)
