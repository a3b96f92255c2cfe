"""The cross-tokenizer collator: tokenize twice, align once, one tensor batch.

It runs in data-loader workers. Records are dicts with ``text`` or ``messages`` (and ``tools``), ``idx``,
``loss_multiplier`` and, where known, ``source`` (file and line), which every error names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import numpy as np
import torch

from limbeck.align import AlignmentBatch, Chunks, TokenAligner
from limbeck.align.boundaries import last_fitting
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.layout import ChunkLayout
from limbeck.data.readers import BadRecord
from limbeck.data.sources import as_record, flatten_documents
from limbeck.data.spans import fitting_spans
from limbeck.errors import ConfigError, DataError, LimbeckError, TokenizerError
from limbeck.projection.events import Conditions, Facts, Runs
from limbeck.tokens import Rendering, TextEncoder
from limbeck.tokens.chat import render_chat

Refine = Callable[[int, int, Chunks, Counter[str]], Chunks]
"""Chooses among the chunks of a row: (row, chunks, what is left out) -> chunks."""

CHARS_PER_TOKEN = 64
"""No real text comes near this many characters per token over a whole context."""


class DatumSpec(TypedDict, total=False):
    """One record of a data set. ``message_log``: text or conversation in the published form."""

    text: str
    message_log: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    idx: int
    loss_multiplier: float
    source: str
    skip_reason: str
    template_kwargs: dict[str, Any]
    continues: bool
    """The document goes on in another record, so that this one has no end token."""


@dataclass
class Side:
    """One model's view of the text: its tokenizer, how long a sequence may be, and how a conversation is rendered."""

    tokenizer: object
    ctx_length: int
    make_seq_div_by: int = 1
    template: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    name: str = "student"

    def __post_init__(self) -> None:
        if self.ctx_length < 1:
            raise ConfigError(f"the {self.name}'s context length is {self.ctx_length}; it must be at least 1.")
        if self.make_seq_div_by < 1:
            raise ConfigError(f"make_seq_div_by of the {self.name} is {self.make_seq_div_by}; expected 1 or more.")
        self.encoder = TextEncoder.for_tokenizer(self.tokenizer)
        # Padding is told by lengths, never by ids, so any valid id will do.
        self.pad_id = next((i for i in (self.encoder.pad_id, self.encoder.eos_id) if i is not None), 0)

    def render_texts(self, texts: Sequence[str], eos: Sequence[bool]) -> list[Rendering]:
        """Each text with the end token where ``eos`` says so."""
        made = {
            ended: iter(self.encoder.encode_batch(own, bos=self.encoder.adds_bos, eos=ended))
            for ended in set(eos)
            if (own := [text for text, its_own in zip(texts, eos, strict=True) if its_own == ended])
        }
        return [next(made[ended]) for ended in eos]

    def render_messages(self, record: Mapping[str, Any], train_on: str) -> Rendering:
        return render_chat(
            self.tokenizer,
            record["messages"],
            tools=record.get("tools"),
            template=self.template,
            template_kwargs={**self.template_kwargs, **(record.get("template_kwargs") or {})},
            name=self.name,
            train_on=train_on,
        )

    def padded(self, rows: Sequence[Rendering], pad_to_max: bool) -> dict[str, torch.Tensor]:
        """Ids, lengths and target mask of a batch, right padded."""
        longest = self.ctx_length if pad_to_max else max((len(r) for r in rows), default=0)
        width = -(-max(longest, 1) // self.make_seq_div_by) * self.make_seq_div_by
        ids = np.full((len(rows), width), self.pad_id, dtype=np.int64)
        mask = np.zeros((len(rows), width), dtype=np.int64)
        for row, r in enumerate(rows):
            ids[row, : len(r)] = r.ids
            mask[row, : len(r)] = r.target
        lengths = torch.tensor([len(r) for r in rows], dtype=torch.int64)
        target_bytes = torch.tensor([_predicted_bytes(r) for r in rows], dtype=torch.int64)
        return {
            "input_ids": torch.from_numpy(ids),
            "input_lengths": lengths,
            "token_mask": torch.from_numpy(mask),
            "target_bytes": target_bytes,
        }


@dataclass
class _Row:
    """Record ``number`` of a batch, or a piece of it, as every side reads it; ``teachers``: None for one that reads the
    student's ids."""

    record: DatumSpec
    number: int
    dropped: Counter[str]
    student: Rendering
    teachers: list[Rendering | None]


def _predicted_bytes(r: Rendering) -> int:
    """Bytes of the target tokens that have a predictor: the denominator of bits per byte."""
    if len(r) < 2:
        return 0
    lengths = np.diff(r.ends, prepend=0)
    return int(lengths[1:][r.target[1:]].sum())


class CrossTokenizerCollator:
    """Turns records into one batch with student ids, each teacher's ids, and their alignments.

    The published arguments come first; all further ones are ours.

    Args:
        student_tokenizer: tokenizer of the student.
        teacher_tokenizer: tokenizer of the only teacher, or a sequence with one per teacher; None stands for a teacher
            with the student's own tokenizer, which reads the student's ids.
        aligner: aligner of the teacher, or one per teacher; None builds it.
        ctx_length_student, ctx_length_teacher: longest sequence of each side (the latter may be a sequence).
        make_seq_div_by_student, make_seq_div_by_teacher: widths are rounded up to a multiple of these.
        mode: ``text`` reads each record's ``text``; ``chat`` renders its ``messages`` with each side's own template.
        append_eos: in text mode, close every document with the tokenizer's end token; of a document in several pieces
            the last.
        long_documents: what happens to a record that is longer than a side's context. ``cut``: all sides end at the
            last boundary they share that fits, and the tokens behind it are counted. ``split``: a text becomes as
            many rows as it needs, cut at a line end, else before a space, each tokenized by itself; a conversation is
            cut. ``skip``: an empty row that takes no part, counted. ``error``: stop.
        pad_to: ``longest`` pads to the batch's longest row, ``max`` to the context length (static shapes).
        on_error: ``raise`` stops at a bad record; ``skip`` keeps an empty row that takes no part, counted in
            ``dropped``.
        train_on: in chat mode, ``all`` assistant turns or only the ``last``.
        student_template, teacher_template: chat templates that replace the tokenizers' own.
        template_kwargs, teacher_template_kwargs: arguments for the templates (the latter may be one per teacher).
        chunks_as: ``keys`` writes each alignment as the published ``alignment_*`` tensors, ``layout`` as the
            `ChunkLayout` that training makes of them (``chunks_{i}``), already here in the worker.
        conditions: with ``layout``, the loss's conditions of each teacher (or None); what a batch needs of them is
            found here and travels with it (``conditions_{i}``, an entry per sample).

    Batch keys: ``input_ids, input_lengths, token_mask, target_bytes, sample_mask, idx, dropped``; per teacher *i*
    ``teacher_{i}_input_ids, ..._input_lengths, ..._token_mask, ..._target_bytes`` and ``alignment_{i}_*`` or
    ``chunks_{i}``; teacher 0's tensors also without the number. ``target_bytes`` is the bytes of supervised tokens that
    have a predictor.
    """

    def __init__(
        self,
        *,
        student_tokenizer: object,
        teacher_tokenizer: object,
        aligner: TokenAligner | Sequence[TokenAligner | None] | None = None,
        ctx_length_student: int,
        ctx_length_teacher: int | Sequence[int],
        make_seq_div_by_student: int = 1,
        make_seq_div_by_teacher: int | Sequence[int] = 1,
        mode: Literal["text", "chat"] = "text",
        append_eos: bool = False,
        long_documents: Literal["split", "cut", "skip", "error"] = "cut",
        pad_to: Literal["longest", "max"] = "longest",
        on_error: Literal["raise", "skip"] = "raise",
        train_on: Literal["all", "last"] = "all",
        student_template: str | None = None,
        teacher_template: str | Sequence[str | None] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        teacher_template_kwargs: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        chunks_as: Literal["keys", "layout"] = "keys",
        conditions: Sequence[Conditions | None] | None = None,
    ) -> None:
        teachers = _as_list(teacher_tokenizer)
        n = len(teachers)
        lengths = _per_teacher(ctx_length_teacher, n, "ctx_length_teacher")
        divisors = _per_teacher(make_seq_div_by_teacher, n, "make_seq_div_by_teacher")
        templates = _per_teacher(teacher_template, n, "teacher_template")
        arguments = _per_teacher(teacher_template_kwargs, n, "teacher_template_kwargs")
        self.student = Side(
            student_tokenizer, ctx_length_student, make_seq_div_by_student, student_template, template_kwargs or {}
        )
        self.teachers: list[Side | None] = [
            None
            if tokenizer is None
            else Side(tokenizer, lengths[i], divisors[i], templates[i], arguments[i] or {}, f"teacher {i}")
            for i, tokenizer in enumerate(teachers)
        ]
        given = _per_teacher(aligner, n, "aligner")
        self.aligners = [
            None if side is None else given[i] or TokenAligner(student_tokenizer, side.tokenizer)
            for i, side in enumerate(self.teachers)
        ]
        self.mode, self.append_eos, self.train_on = mode, append_eos, train_on
        self.long_documents = long_documents
        self.pad_to_max, self.skip_errors = pad_to == "max", on_error == "skip"
        self.as_layout = chunks_as == "layout"
        self.conditions = _per_teacher(conditions, n, "conditions")
        if mode == "chat":
            self._require_templates()

    def __call__(self, batch: list[DatumSpec]) -> BatchedDataDict[Any]:
        batch = flatten_documents(batch)  # type: ignore[arg-type, assignment]
        rows = self._rows(batch)
        return self.assemble(
            [row.student for row in rows],
            [[] if side is None else [row.teachers[i] for row in rows] for i, side in enumerate(self.teachers)],  # type: ignore[misc]
            idx=[int(row.record.get("idx", row.number)) for row in rows],
            weights=[float(row.record.get("loss_multiplier", 1.0)) for row in rows],
            dropped=[row.dropped for row in rows],
        )

    def assemble(
        self,
        student: list[Rendering],
        teachers: Sequence[list[Rendering]],
        *,
        idx: list[int],
        weights: list[float],
        dropped: list[Counter[str]],
        refine: Refine | None = None,
    ) -> BatchedDataDict[Any]:
        """The batch of rows that are rendered already: aligned, cut to the context lengths, padded.

        Args:
            student: one rendering per row.
            teachers: per teacher one rendering per row; empty for a teacher that reads the student's ids.
            idx, weights: record and ``loss_multiplier`` of each row.
            dropped: what rendering left out, by row; what is left out here is added.
            refine: chooses among the chunks of a row with a teacher, both given by number.
        """
        weights = list(weights)
        chunks: list[list[Chunks]] = [[] for _ in self.teachers]
        for row, mine in enumerate(student):
            for i, side in enumerate(self.teachers):
                if side is not None:
                    found = self._align(i, mine, teachers[i][row], dropped[row])
                    chunks[i].append(found if refine is None else refine(row, i, found, dropped[row]))
        student, theirs, chunks = self._cut(student, [list(own) for own in teachers], chunks, dropped)
        out: dict[str, Any] = dict(self.student.padded(student, self.pad_to_max))
        for row, r in enumerate(student):
            dropped[row].update(r.dropped)
            if not r.target[1:].any():
                dropped[row]["no_target"] += 1
                weights[row] = 0.0
        for i, side in enumerate(self.teachers):
            if side is not None:
                tensors = side.padded(theirs[i], self.pad_to_max)
                ids = out["input_ids"], tensors["input_ids"]
                for number in ("", "0_") if i == 0 else (f"{i}_",):
                    out |= {f"teacher_{number}{key}": value for key, value in tensors.items()}
                out |= self._alignment(i, chunks[i], *ids)
        out["sample_mask"] = torch.tensor(weights, dtype=torch.float32)
        out["idx"] = idx
        out["dropped"] = [{k: v for k, v in d.items() if v} for d in dropped]
        return BatchedDataDict(out)

    def _alignment(
        self, i: int, chunks: list[Chunks], student_ids_BT: torch.Tensor, teacher_ids_BT: torch.Tensor
    ) -> dict[str, Any]:
        if self.as_layout:
            layout = ChunkLayout.of_chunks(chunks, student_ids_BT, teacher_ids_BT)
            if self.conditions[i] is None:
                return {f"chunks_{i}": layout}
            return {f"chunks_{i}": layout, f"conditions_{i}": _facts(self.conditions[i], layout)}
        published = AlignmentBatch.from_chunks(chunks, student_ids_BT.shape[1], teacher_ids_BT.shape[1])
        return published.as_dict(f"alignment_{i}_") | (published.as_dict() if i == 0 else {})

    def _rows(self, records: list[DatumSpec]) -> list[_Row]:
        dropped: list[Counter[str]] = [Counter() for _ in records]
        records = [self.in_our_form(record, counts) for record, counts in zip(records, dropped, strict=True)]
        numbers = range(len(records))
        if self.mode == "chat":
            rows = [_Row(records[n], n, dropped[n], *self._render_chat(records[n], dropped[n])) for n in numbers]
        else:
            rows = self._text_rows(records, numbers, dropped)
        return [fitting for row in rows for fitting in self._fitting(row)]

    def _text_rows(self, records: list[DatumSpec], numbers: Sequence[int], dropped: list[Counter[str]]) -> list[_Row]:
        texts = [self._text(record, counts) for record, counts in zip(records, dropped, strict=True)]
        ends = [self.append_eos and not record.get("continues", False) for record in records]
        mine = self.student.render_texts(texts, ends)
        theirs = [None if side is None else side.render_texts(texts, ends) for side in self.teachers]
        return [
            _Row(record, numbers[n], dropped[n], mine[n], [None if own is None else own[n] for own in theirs])
            for n, record in enumerate(records)
        ]

    def _sides(self, row: _Row) -> list[tuple[Side, Rendering]]:
        """Who reads a row, and how."""
        others = zip(self.teachers, row.teachers, strict=True)
        return [(self.student, row.student), *((s, own) for s, own in others if s is not None and own is not None)]

    def _fitting(self, row: _Row) -> list[_Row]:
        """What ``long_documents`` makes of a row: itself where it fits, or is cut to fit later on."""
        over = next((side for side, own in self._sides(row) if len(own) > side.ctx_length), None)
        if over is None or self.long_documents == "cut" or (self.long_documents == "split" and self.mode == "chat"):
            return [row]
        if self.long_documents == "split":
            return self._split(row)
        if self.long_documents == "error":
            raise DataError(
                f"record {_where(row.record)} is longer than the {over.name}'s context of {over.ctx_length} tokens; "
                "raise the context, or set data.long_documents to split, cut or skip."
            )
        row.dropped["too_long"] += 1
        return [_Row(row.record, row.number, row.dropped, *self._empty())]

    def _split(self, row: _Row) -> list[_Row]:
        """A text in pieces that fit; each is tokenized by itself, which may make one too long again."""
        sides, data = self._sides(row), row.student.source
        rooms = [side.ctx_length - int(own.special.sum()) for side, own in sides]
        spans = fitting_spans(data, [own.ends for _, own in sides], rooms) if min(rooms) > 0 else []
        if len(spans) < 2:
            return [row]
        pieces: list[DatumSpec] = [
            {**row.record, "text": data[start:end].decode("utf-8"), "continues": True} for start, end in spans
        ]
        pieces[-1]["continues"] = row.record.get("continues", False)
        counts = [row.dropped, *(Counter[str]() for _ in pieces[1:])]
        rows = self._text_rows(pieces, [row.number] * len(pieces), counts)
        return [fitting for piece in rows for fitting in self._fitting(piece)]

    def _empty(self) -> tuple[Rendering, list[Rendering | None]]:
        return self.student.encoder.encode(""), [None if s is None else s.encoder.encode("") for s in self.teachers]

    def _align(self, i: int, student: Rendering, teacher: Rendering, dropped: Counter[str]) -> Chunks:
        aligner = self.aligners[i]
        assert aligner is not None
        counts: Counter[str] = Counter()
        chunks = aligner.align_renderings(student, teacher, counts)
        dropped.update({f"teacher_{i}_{k}" if i else k: v for k, v in counts.items()})
        return chunks

    def in_our_form(self, record: DatumSpec, dropped: Counter[str]) -> DatumSpec:
        """A record in our form, whether it came in it or in the published one."""
        try:
            return as_record(record)  # type: ignore[return-value]
        except BadRecord as error:
            self.refuse(record, error, dropped)
            return {**record, "text": "", "messages": [], "skip_reason": error.reason}

    def _text(self, record: DatumSpec, dropped: Counter[str]) -> str:
        try:
            text = self.text_of(record)
            return text if self.long_documents == "split" else self._prefix(text, dropped)
        except (DataError, UnicodeEncodeError) as error:
            self.refuse(record, error, dropped)
            return ""

    @staticmethod
    def text_of(record: DatumSpec) -> str:
        """A record's text, refused where there is none or no tokenizer could read it."""
        text = record.get("text")
        if not isinstance(text, str):
            raise DataError(f"record {_where(record)} has no text; its keys are {sorted(record)}.")
        text.encode("utf-8")
        return text

    def _prefix(self, text: str, dropped: Counter[str]) -> str:
        """As much of a text as can matter: tokenizing megabytes to keep one context would be waste."""
        longest = max(side.ctx_length for side in (self.student, *self.teachers) if side is not None)
        budget = CHARS_PER_TOKEN * longest
        if len(text) <= budget:
            return text
        dropped["prefix_of_document"] += 1
        space = text.rfind(" ", budget // 2, budget)
        return text[: space if space > 0 else budget]

    def _render_chat(self, record: DatumSpec, dropped: Counter[str]) -> tuple[Rendering, list[Rendering | None]]:
        try:
            if not record.get("messages") and not record.get("skip_reason"):
                raise DataError(f"record {_where(record)} has no messages; its keys are {sorted(record)}.")
            if record.get("messages"):
                mine = self.student.render_messages(record, self.train_on)
                return mine, [None if s is None else s.render_messages(record, self.train_on) for s in self.teachers]
            dropped[str(record["skip_reason"])] += 1
        except LimbeckError as error:
            self.refuse(record, error, dropped)
        return self._empty()

    def refuse(self, record: DatumSpec, error: Exception, dropped: Counter[str]) -> None:
        """Stop at a record that cannot be used, or count it, as ``on_error`` says."""
        if not self.skip_errors:
            message = str(error) if isinstance(error, DataError) else f"record {_where(record)}: {error}"
            raise DataError(message) from error
        dropped["skipped_record"] += 1

    def _cut(
        self,
        student: list[Rendering],
        teachers: list[list[Rendering]],
        chunks: list[list[Chunks]],
        dropped: list[Counter[str]],
    ) -> tuple[list[Rendering], list[list[Rendering]], list[list[Chunks]]]:
        """Shorten rows that do not fit, every side at a boundary that it shares with the student."""
        for row, mine in enumerate(student):
            live = [i for i, side in enumerate(self.teachers) if side is not None]
            fits = len(mine) <= self.student.ctx_length
            if fits and all(len(teachers[i][row]) <= self.teachers[i].ctx_length for i in live):  # type: ignore[union-attr]
                continue
            limit = self.student.ctx_length
            for i in live:
                limit = _shared_limit(chunks[i][row], limit, self.teachers[i].ctx_length)  # type: ignore[union-attr]
            student[row] = mine.truncated(limit)
            dropped[row]["truncated"] += 1
            for i in live:
                kept = last_fitting(chunks[i][row], limit, self.teachers[i].ctx_length)  # type: ignore[union-attr]
                chunks[i][row] = chunks[i][row].select(slice(0, kept))
                end = int(chunks[i][row].teacher_end[-1]) if kept else 0
                teachers[i][row] = teachers[i][row].truncated(end)
        return student, teachers, chunks

    def _require_templates(self) -> None:
        for side in (self.student, *self.teachers):
            if side is not None and not (side.template or TextEncoder.for_tokenizer(side.tokenizer).templates):
                raise TokenizerError(
                    f"the {side.name}'s tokenizer has no chat template, which conversations need: give one as "
                    f"{'policy' if side is self.student else 'teacher'}.tokenizer.chat_template (a .jinja file or its "
                    "text), or read the data as text (data.mode: text)."
                )

    @staticmethod
    def _tokenize_batch(
        texts: list[str], tokenizer: object, ctx_length: int, make_seq_div_by: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and attention mask of texts, cut at ``ctx_length`` and padded to a multiple of ``make_seq_div_by``."""
        side = Side(tokenizer, ctx_length, make_seq_div_by)
        rows = [r.truncated(ctx_length) for r in side.render_texts(texts, [False] * len(texts))]
        tensors = side.padded(rows, pad_to_max=False)
        width = tensors["input_ids"].shape[1]
        return tensors["input_ids"], (torch.arange(width)[None] < tensors["input_lengths"][:, None]).long()


def _facts(conditions: Conditions, layout: ChunkLayout) -> list[Facts]:
    """What a batch needs of conditions and was not sent before, with its first sample."""
    student = layout.student_ids_M, layout.student_first_C, layout.student_count_C, layout.student_last_C
    teacher = layout.teacher_ids_Q, layout.teacher_first_C, layout.teacher_count_C, layout.teacher_last_C
    sides = (Runs(*(tensor.numpy() for tensor in side)) for side in (student, teacher))
    return [conditions.news(*sides), *({} for _ in range(len(layout) - 1))][: len(layout)]


def _shared_limit(chunks: Chunks, student_length: int, teacher_length: int) -> int:
    """Student tokens up to the last shared boundary within both lengths."""
    kept = last_fitting(chunks, student_length, teacher_length)
    return int(chunks.student_end[kept - 1]) if kept else 0


def _where(record: Mapping[str, Any]) -> str:
    return str(record.get("source") or record.get("idx", "of unknown origin"))


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _per_teacher(value: Any, n: int, name: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value] * n
    if len(value) != n:
        raise ConfigError(f"{name} has {len(value)} entries for {n} teachers; give one for each, or a single value.")
    return list(value)
