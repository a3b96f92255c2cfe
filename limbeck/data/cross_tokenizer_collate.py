"""The cross-tokenizer collator: tokenize twice, align once, one tensor batch.

It runs in data-loader workers. Records are dicts with ``text`` or ``messages`` (and ``tools``), ``idx``,
``loss_multiplier`` and, where known, ``source`` (file and line), which every error names.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypedDict

import numpy as np
import torch

from limbeck.align import AlignmentBatch, Chunks, TokenAligner
from limbeck.align.aligner import count_added_spaces
from limbeck.align.boundaries import last_fitting
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.layout import ChunkLayout
from limbeck.data.readers import BadRecord
from limbeck.data.sources import CONTEXT, TEACHER, as_record, flatten_documents
from limbeck.data.spans import fitting_spans
from limbeck.errors import ConfigError, DataError, LimbeckError, TokenizerError
from limbeck.tokens import ByteTokenizer, TokenizedText
from limbeck.tokens.chat import render_ahead, render_chat
from limbeck.tokens.chat.teacher_context import Context, ContextForm, InContext, add_context

Refine = Callable[[int, int, Chunks, Counter[str]], Chunks]
"""Chooses among the chunks of a row: (row, chunks, what is left out) -> chunks."""

_NOT_GIVEN = object()
CHARS_PER_TOKEN = 64
"""No real text comes near this many characters per token over a whole context."""
BEHIND_CONTEXT = "\n\n"
"""Stands between a teacher's context and a text."""


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
    teacher_context: Context
    continues: bool
    """The document goes on in another record, so that this one has no end token."""


CONTEXT_MOVED = "context_in_question"
"""Counts contexts that stand in the first question, for the template leaves out the instructions."""


@dataclass
class Side:
    """One model's view of the text: its tokenizer, how long a sequence may be, and how a conversation is rendered."""

    tokenizer: object
    ctx_length: int
    make_seq_div_by: int = 1
    template: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    name: str = "student"
    context_as: ContextForm = "system"

    def __post_init__(self) -> None:
        if self.ctx_length < 1:
            raise ConfigError(f"the {self.name}'s context length is {self.ctx_length}; it must be at least 1.")
        if self.make_seq_div_by < 1:
            raise ConfigError(f"make_seq_div_by of the {self.name} is {self.make_seq_div_by}; expected 1 or more.")
        self.encoder = ByteTokenizer.of(self.tokenizer)
        # Padding is found by lengths, never by ids, so any valid id will do.
        self.pad_id = next((i for i in (self.encoder.pad_id, self.encoder.eos_id) if i is not None), 0)

    def render_texts(
        self, texts: Sequence[str], eos: Sequence[bool], contexts: Sequence[Context | None] = ()
    ) -> list[TokenizedText]:
        """Each text with the end token where ``eos`` says so, behind its context where it has one."""
        rendered = {
            ended: iter(self.encoder.encode_batch(group, bos=self.encoder.adds_bos, eos=ended))
            for ended in set(eos)
            if (group := [text for text, eos_wanted in zip(texts, eos, strict=True) if eos_wanted == ended])
        }
        plain = [next(rendered[ended]) for ended in eos]
        pairs = zip(contexts or [None] * len(texts), plain, strict=True)
        return [self.behind(context, text) if context else text for context, text in pairs]

    def behind(self, context: Context, text: TokenizedText) -> TokenizedText:
        """A text behind its context, each in tokens of its own: those of the text are what they are without."""
        if not isinstance(context, str):
            raise DataError("a text has messages as its teacher_context; in front of a text only text can stand.")
        # BOS stays in front, and the context stands behind it
        begin = int(self.encoder.adds_bos)
        front = self.encoder.encode(context + BEHIND_CONTEXT)
        front = replace(front, loss_mask=np.zeros(len(front), dtype=bool))
        parts = [text.part(slice(0, begin)), front, text.part(slice(begin, None))]
        segments = tuple(s.shifted(len(front.source), len(front)) for s in text.segments)
        return replace(TokenizedText.joined(parts), segments=segments, skipped=text.skipped)

    def in_context(
        self, record: Mapping[str, Any], messages: Sequence[dict[str, Any]], *, hint: str = "", to_come: bool = False
    ) -> InContext:
        """A conversation with its record's context, if it has any, and a hint directly before its last answer."""
        encoder = self.encoder if self.template is None else self.encoder.with_template(self.template)
        out = InContext(list(messages), list(range(len(messages))))
        if context := record.get(CONTEXT):
            out = add_context(messages, context, self.context_as, encoder, to_come=to_come)
        return out.then(add_context(out.messages, hint, "hint", encoder, to_come=to_come)) if hint else out

    def render_messages(
        self, record: Mapping[str, Any], train_on: str = "all", *, context: bool = False, hint: str = "", **more: Any
    ) -> TokenizedText:
        """A record's conversation, with what its teachers alone read where ``context`` says so, and a ``hint``."""
        to_come, given = bool(more.get("add_generation_prompt")), record if context else {}
        conversation = self.in_context(given, record["messages"], hint=hint, to_come=to_come)
        rendering = render_chat(**self.as_given(record, conversation.messages), train_on=train_on, **more)
        if self._drops(given.get(CONTEXT), rendering):
            as_question = replace(self, context_as="user")
            conversation = as_question.in_context(given, record["messages"], hint=hint, to_come=to_come)
            rendering = render_chat(**self.as_given(record, conversation.messages), train_on=train_on, **more)
            rendering = replace(rendering, skipped={**rendering.skipped, CONTEXT_MOVED: 1})
        return conversation.renumbered(rendering)

    def _drops(self, context: Context | None, rendering: TokenizedText) -> bool:
        """Whether the template leaves a context out with the instructions that it stands in, as some do unless a
        question is last."""
        if self.context_as != "system" or not isinstance(context, str):
            return False
        return bool(rendering.skipped.get("unrendered_context")) and context.strip().encode() not in rendering.source

    def as_given(self, record: Mapping[str, Any], messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What a record's conversation is rendered with."""
        return {
            "tokenizer": self.tokenizer,
            "messages": messages,
            "tools": record.get("tools"),
            "template": self.template,
            "template_kwargs": {**self.template_kwargs, **(record.get("template_kwargs") or {})},
            "name": self.name,
        }

    def padded(self, rows: Sequence[TokenizedText], pad_to_max: bool) -> dict[str, torch.Tensor]:
        """Ids, lengths and target mask of a batch, right padded."""
        longest = self.ctx_length if pad_to_max else max((len(r) for r in rows), default=0)
        width = -(-max(longest, 1) // self.make_seq_div_by) * self.make_seq_div_by
        ids = np.full((len(rows), width), self.pad_id, dtype=np.int64)
        mask = np.zeros((len(rows), width), dtype=np.int64)
        for row, r in enumerate(rows):
            ids[row, : len(r)] = r.ids
            mask[row, : len(r)] = r.loss_mask
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
    student's ids, or is not asked."""

    record: DatumSpec
    number: int
    skipped: Counter[str]
    student: TokenizedText
    teachers: list[TokenizedText | None]


def _predicted_bytes(r: TokenizedText) -> int:
    """Bytes of the target tokens that have a predictor: the denominator of bits per byte."""
    if len(r) < 2:
        return 0
    lengths = np.diff(r.byte_ends, prepend=0)
    return int(lengths[1:][r.loss_mask[1:]].sum())


class CrossTokenizerCollator:
    """Turns records into one batch with student ids, each teacher's ids, and their alignments.

    The published arguments come first; all further ones are ours. With several teachers they may go by their plurals,
    as in newer releases of NeMo RL: ``teacher_tokenizers``, ``aligners``, ``ctx_length_teachers``,
    ``make_seq_div_by_teachers``; an entry None of ``aligners`` then stands for a teacher with the student's tokenizer.

    Args:
        student_tokenizer: tokenizer of the student.
        teacher_tokenizer: tokenizer of the only teacher, or a sequence with one per teacher; None stands for a teacher
            with the student's own tokenizer, which reads the student's ids.
        aligner: aligner of the teacher, or one per teacher; None builds it.
            An aligner of a class of your own that overrides ``align`` is asked by it, row by row.
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
            ``skipped``.
        train_on: in chat mode, ``all`` assistant turns or only the ``last``.
        student_template, teacher_template: chat templates that replace the tokenizers' own.
        template_kwargs, teacher_template_kwargs: arguments for the templates (the latter may be one per teacher).
        chunks_as: ``keys`` writes each alignment as the published ``alignment_*`` tensors, ``layout`` as the
            `ChunkLayout` that training makes of them (``chunks_{i}``), already here in the worker.
        teacher_names: of each teacher, by which a record chooses one (``teacher``); without any all read every record.

    Batch keys: ``input_ids, input_lengths, token_mask, target_bytes, sample_mask, idx, skipped``; per teacher *i*
    ``teacher_{i}_input_ids, ..._input_lengths, ..._token_mask, ..._target_bytes`` and ``alignment_{i}_*`` or
    ``chunks_{i}``; teacher 0's tensors also without the number. ``teacher_{i}_sample_mask``, where a record chooses one
    teacher: 1 for rows that teacher *i* is asked about. ``target_bytes`` is the bytes of supervised tokens that
    have a predictor.
    """

    def __init__(
        self,
        *,
        student_tokenizer: object,
        teacher_tokenizer: object = _NOT_GIVEN,
        aligner: TokenAligner | Sequence[TokenAligner | None] | None = None,
        ctx_length_student: int,
        ctx_length_teacher: int | Sequence[int] = 0,
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
        teacher_tokenizers: Sequence[object] | None = None,
        aligners: Sequence[TokenAligner | None] | None = None,
        ctx_length_teachers: Sequence[int] | None = None,
        make_seq_div_by_teachers: Sequence[int] | None = None,
        context_as: ContextForm = "system",
        teacher_names: Sequence[str | None] = (),
    ) -> None:
        if teacher_tokenizers is not None:
            if teacher_tokenizer is not _NOT_GIVEN:
                raise ConfigError("teacher_tokenizer and teacher_tokenizers are both given; give one of them")
            teacher_tokenizer = list(teacher_tokenizers)
            if aligners is not None:
                both = zip(teacher_tokenizer, _per_teacher(aligners, len(teacher_tokenizer), "aligners"), strict=True)
                teacher_tokenizer = [None if aligned is None else tokenizer for tokenizer, aligned in both]
        elif teacher_tokenizer is _NOT_GIVEN:
            raise ConfigError("the teacher's tokenizer is missing; give teacher_tokenizer or teacher_tokenizers")
        aligner = aligner if aligners is None else aligners
        ctx_length_teacher = ctx_length_teacher if ctx_length_teachers is None else ctx_length_teachers
        if make_seq_div_by_teachers is not None:
            make_seq_div_by_teacher = make_seq_div_by_teachers
        teachers = list(teacher_tokenizer) if isinstance(teacher_tokenizer, list | tuple) else [teacher_tokenizer]
        n = len(teachers)
        lengths = _per_teacher(ctx_length_teacher, n, "ctx_length_teacher")
        divisors = _per_teacher(make_seq_div_by_teacher, n, "make_seq_div_by_teacher")
        templates = _per_teacher(teacher_template, n, "teacher_template")
        arguments = _per_teacher(teacher_template_kwargs, n, "teacher_template_kwargs")
        self.student = Side(
            student_tokenizer, ctx_length_student, make_seq_div_by_student, student_template, template_kwargs or {}
        )

        def teacher(i: int, tokenizer: object, template: str | None, more: dict[str, Any] | None) -> Side:
            template_and_kwargs = templates[i] or template, arguments[i] or more or {}
            return Side(tokenizer, lengths[i], divisors[i], *template_and_kwargs, f"teacher {i}", context_as)

        self.teachers: list[Side | None] = [
            None if tokenizer is None else teacher(i, tokenizer, None, None) for i, tokenizer in enumerate(teachers)
        ]
        self.sharing = {
            i: teacher(i, student_tokenizer, student_template, template_kwargs)
            for i, tokenizer in enumerate(teachers)
            if tokenizer is None
        }
        """How teachers with the student's tokenizer read what they have to read by themselves."""
        aligners = _per_teacher(aligner, n, "aligner")
        self.aligners = [
            None if side is None else aligners[i] or TokenAligner(student_tokenizer, side.tokenizer)
            for i, side in enumerate(self.teachers)
        ]
        self.teacher_names = list(teacher_names)
        self.mode, self.append_eos, self.train_on = mode, append_eos, train_on
        self.long_documents = long_documents
        self.pad_to_max, self.skip_errors = pad_to == "max", on_error == "skip"
        self.as_layout = chunks_as == "layout"
        if mode == "chat":
            self._require_templates()

    def __call__(self, batch: list[DatumSpec]) -> BatchedDataDict[Any]:
        batch = flatten_documents(batch)  # type: ignore[arg-type, assignment]
        if any(record.get(CONTEXT) for record in batch):
            return self.apart._batch(batch)
        return self._batch(batch)

    @cached_property
    def apart(self) -> CrossTokenizerCollator:
        """The same with rows of its own for every teacher. One with the student's tokenizer reads the student's ids no
        longer, but can be shown more than the student."""
        if None not in self.teachers:
            return self
        shared, tokenizer = copy.copy(self), self.student.tokenizer
        shared.teachers = [side or self.sharing[i] for i, side in enumerate(self.teachers)]
        shared.aligners = [aligner or TokenAligner(tokenizer, tokenizer) for aligner in self.aligners]
        return shared

    def asked(self, record: Mapping[str, Any]) -> Sequence[int]:
        """Numbers of the teachers that a record is shown to: the one that it names, or all.

        Raises:
            DataError: no teacher has the name.
        """
        name = record.get(TEACHER)
        if name is None or not any(self.teacher_names):
            return range(len(self.teachers))
        if name not in self.teacher_names:
            known = ", ".join(repr(known_name) for known_name in self.teacher_names if known_name)
            raise DataError(
                f"record {_where(record)} names the teacher {str(name)[:80]!r}; expected {known}, or no name, by which "
                "all of them are asked"
            )
        return [self.teacher_names.index(name)]

    def _batch(self, batch: list[DatumSpec]) -> BatchedDataDict[Any]:
        rows = self._rows(batch)
        return self.assemble(
            [row.student for row in rows],
            [
                [] if side is None else [row.teachers[i] or side.encoder.encode("") for row in rows]
                for i, side in enumerate(self.teachers)
            ],
            idx=[int(row.record.get("idx", row.number)) for row in rows],
            weights=[float(row.record.get("loss_multiplier", 1.0)) for row in rows],
            skipped=[row.skipped for row in rows],
            asked=[self.asked(row.record) for row in rows],
        )

    def assemble(
        self,
        student: list[TokenizedText],
        teachers: Sequence[list[TokenizedText]],
        *,
        idx: list[int],
        weights: list[float],
        skipped: list[Counter[str]],
        refine: Refine | None = None,
        asked: Sequence[Sequence[int]] | None = None,
    ) -> BatchedDataDict[Any]:
        """The batch of rows that are rendered already: aligned, cut to the context lengths, padded.

        Args:
            student: one rendering per row.
            teachers: per teacher one rendering per row; empty for a teacher that reads the student's ids.
            idx, weights: record and ``loss_multiplier`` of each row.
            skipped: what rendering left out, by row; what is left out here is added.
            refine: chooses among the chunks of a row with a teacher, both given by number.
            asked: of each row the teachers that read it; default: all.
        """
        weights = list(weights)
        asked = asked or [range(len(self.teachers))] * len(student)
        chunks: list[list[Chunks]] = [[] for _ in self.teachers]
        for row, mine in enumerate(student):
            for i, side in enumerate(self.teachers):
                if side is not None and i not in asked[row]:
                    chunks[i].append(_NO_CHUNKS)
                elif side is not None:
                    aligned = self._align(i, mine, teachers[i][row], skipped[row])
                    chunks[i].append(aligned if refine is None else refine(row, i, aligned, skipped[row]))
        student, theirs, chunks = self._cut(student, [list(rows) for rows in teachers], chunks, skipped, asked)
        out: dict[str, Any] = dict(self.student.padded(student, self.pad_to_max))
        for row, r in enumerate(student):
            skipped[row].update(r.skipped)
            # a first token has no predictor
            if not r.loss_mask[1:].any():
                skipped[row]["no_target"] += 1
                weights[row] = 0.0
        for i, side in enumerate(self.teachers):
            if side is not None:
                tensors = side.padded(theirs[i], self.pad_to_max)
                ids = out["input_ids"], tensors["input_ids"]
                for number in ("", "0_") if i == 0 else (f"{i}_",):
                    out |= {f"teacher_{number}{key}": value for key, value in tensors.items()}
                out |= self._alignment(i, chunks[i], *ids)
        if any(len(numbers) < len(self.teachers) for numbers in asked):
            for i in range(len(self.teachers)):
                out[f"teacher_{i}_sample_mask"] = torch.tensor([float(i in numbers) for numbers in asked])
        out["sample_mask"] = torch.tensor(weights, dtype=torch.float32)
        out["idx"] = idx
        out["skipped"] = [{k: v for k, v in d.items() if v} for d in skipped]
        return BatchedDataDict(out)

    def _alignment(
        self, i: int, chunks: list[Chunks], student_ids_BT: torch.Tensor, teacher_ids_BT: torch.Tensor
    ) -> dict[str, Any]:
        if self.as_layout:
            return {f"chunks_{i}": ChunkLayout.of_chunks(chunks, student_ids_BT, teacher_ids_BT)}
        published = AlignmentBatch.from_chunks(chunks, student_ids_BT.shape[1], teacher_ids_BT.shape[1])
        return published.as_dict(f"alignment_{i}_") | (published.as_dict() if i == 0 else {})

    def _rows(self, records: list[DatumSpec]) -> list[_Row]:
        skipped: list[Counter[str]] = [Counter() for _ in records]
        records = [self.in_our_form(record, counts) for record, counts in zip(records, skipped, strict=True)]
        numbers = range(len(records))
        if self.mode == "chat":
            render_ahead(self._conversations(records))
            rows = [_Row(records[n], n, skipped[n], *self._render_chat(records[n], skipped[n])) for n in numbers]
        else:
            rows = self._text_rows(records, numbers, skipped)
        return [fitting for row in rows for fitting in self._fitting(row)]

    def _text_rows(self, records: list[DatumSpec], numbers: Sequence[int], skipped: list[Counter[str]]) -> list[_Row]:
        texts = [self._text(record, counts) for record, counts in zip(records, skipped, strict=True)]
        ends = [self.append_eos and not record.get("continues", False) for record in records]
        contexts = [record.get("teacher_context") for record in records]
        mine = self.student.render_texts(texts, ends)
        theirs: list[list[TokenizedText | None]] = [[None] * len(records) for _ in self.teachers]
        asked = [self.asked(record) for record in records]
        for i, side in enumerate(self.teachers):
            read = [n for n in range(len(records)) if i in asked[n]]
            if side is not None:
                of_these = [contexts[n] for n in read]
                renderings = side.render_texts([texts[n] for n in read], [ends[n] for n in read], of_these)
                for n, rendering in zip(read, renderings, strict=True):
                    theirs[i][n] = rendering
        return [
            _Row(record, numbers[n], skipped[n], mine[n], [rows[n] for rows in theirs])
            for n, record in enumerate(records)
        ]

    def _sides(self, row: _Row) -> list[tuple[Side, TokenizedText]]:
        """Who reads a row, and how."""
        others = zip(self.teachers, row.teachers, strict=True)
        return [(self.student, row.student), *((s, text) for s, text in others if s is not None and text is not None)]

    def _fitting(self, row: _Row) -> list[_Row]:
        """Rows that ``long_documents`` makes of one: itself where it fits, or is cut to fit later on."""
        over = next((side for side, rendering in self._sides(row) if len(rendering) > side.ctx_length), None)
        if (
            over is not None
            and row.record.get(CONTEXT)
            and self.long_documents != "error"
            and self._is_crowded_out(row)
        ):
            row.skipped["context_too_long"] += 1
            return [_Row(row.record, row.number, row.skipped, *self._empty())]
        if over is None or self.long_documents == "cut" or (self.long_documents == "split" and self.mode == "chat"):
            return [row]
        if self.long_documents == "split":
            return self._split(row)
        if self.long_documents == "error":
            raise DataError(
                f"record {_where(row.record)} is longer than the {over.name}'s context of {over.ctx_length} tokens; "
                "raise the context, or set data.long_documents to split, cut or skip."
            )
        row.skipped["too_long"] += 1
        return [_Row(row.record, row.number, row.skipped, *self._empty())]

    def _is_crowded_out(self, row: _Row) -> bool:
        """Whether a teacher's context leaves no room for the first target."""
        return any(
            rendering.loss_mask.any() and rendering.loss_mask.argmax() >= side.ctx_length
            for side, rendering in self._sides(row)
        )

    def _split(self, row: _Row) -> list[_Row]:
        """A text in pieces that fit; each is tokenized by itself, which may make one too long again."""
        sides, data = self._sides(row), row.student.source
        fronts = [_front(rendering) for _, rendering in sides]
        rooms = [
            side.ctx_length - int(rendering.special.sum()) - int((~rendering.special[:tokens]).sum())
            for (side, rendering), (tokens, _) in zip(sides, fronts, strict=True)
        ]
        ends = [
            rendering.byte_ends[tokens:] - size for (_, rendering), (tokens, size) in zip(sides, fronts, strict=True)
        ]
        spans = fitting_spans(data, ends, rooms) if min(rooms) > 0 else []
        # it cannot be parted: `_cut` shortens it
        if len(spans) < 2:
            return [row]
        pieces: list[DatumSpec] = [
            {**row.record, "text": data[start:end].decode("utf-8"), "continues": True} for start, end in spans
        ]
        pieces[-1]["continues"] = row.record.get("continues", False)
        counts = [row.skipped, *(Counter[str]() for _ in pieces[1:])]
        rows = self._text_rows(pieces, [row.number] * len(pieces), counts)
        return [fitting for piece in rows for fitting in self._fitting(piece)]

    def _empty(self) -> tuple[TokenizedText, list[TokenizedText | None]]:
        return self.student.encoder.encode(""), [None if s is None else s.encoder.encode("") for s in self.teachers]

    def _align(self, i: int, student: TokenizedText, teacher: TokenizedText, skipped: Counter[str]) -> Chunks:
        aligner = self.aligners[i]
        assert aligner is not None
        counts: Counter[str] = Counter()
        # renderings know their bytes; a class that overrides `align` is asked as published, by ids alone
        if type(aligner).align is TokenAligner.align:
            chunks = aligner.align_renderings(student, teacher, counts)
            count_added_spaces(chunks, counts)
        else:
            chunks = _asked(aligner, student, teacher)
        skipped.update({f"teacher_{i}_{k}" if i else k: v for k, v in counts.items()})
        return chunks

    def in_our_form(self, record: DatumSpec, skipped: Counter[str]) -> DatumSpec:
        """A record in our form, whether it came in it or in the published one."""
        try:
            return as_record(record)  # type: ignore[return-value]
        except BadRecord as error:
            self.refuse(record, error, skipped)
            return {**record, "text": "", "messages": [], "skip_reason": error.reason}

    def _text(self, record: DatumSpec, skipped: Counter[str]) -> str:
        try:
            text = self.text_of(record)
            return text if self.long_documents == "split" else self._prefix(text, skipped)
        except (DataError, UnicodeEncodeError) as error:
            self.refuse(record, error, skipped)
            return ""

    @staticmethod
    def text_of(record: DatumSpec) -> str:
        """A record's text, refused where there is none or no tokenizer could read it."""
        text = record.get("text")
        if not isinstance(text, str):
            raise DataError(f"record {_where(record)} has no text; its keys are {sorted(record)}.")
        # JSON can hold half a surrogate pair, which no tokenizer can read
        text.encode("utf-8")
        return text

    def _prefix(self, text: str, skipped: Counter[str]) -> str:
        """As much of a text as can matter: tokenizing megabytes to keep one context would be waste."""
        longest = max(side.ctx_length for side in (self.student, *self.teachers) if side is not None)
        budget = CHARS_PER_TOKEN * longest
        if len(text) <= budget:
            return text
        skipped["prefix_of_document"] += 1
        space = text.rfind(" ", budget // 2, budget)
        return text[: space if space > 0 else budget]

    def _conversations(self, records: Sequence[DatumSpec]) -> Iterator[dict[str, Any]]:
        """What :meth:`_render_chat` is going to render, but for what stands behind a context of its own."""
        for record in records:
            messages = record.get("messages")
            if not messages:
                continue
            yield self.student.as_given(record, messages)
            for i, side in enumerate(self.teachers):
                if side is not None and i not in self.sharing and not record.get(CONTEXT):
                    yield side.as_given(record, messages)

    def _render_chat(
        self, record: DatumSpec, skipped: Counter[str]
    ) -> tuple[TokenizedText, list[TokenizedText | None]]:
        try:
            if not record.get("messages") and not record.get("skip_reason"):
                raise DataError(f"record {_where(record)} has no messages; its keys are {sorted(record)}.")
            if record.get("messages"):
                mine = self.student.render_messages(record, self.train_on)
                # without context a teacher with the student's tokenizer reads the student's ids, here too
                shares = set() if record.get(CONTEXT) else set(self.sharing)
                theirs: list[TokenizedText | None] = []
                asked = self.asked(record)
                for i, side in enumerate(self.teachers):
                    if side is None or i not in asked:
                        theirs.append(None)
                    else:
                        read = mine if i in shares else side.render_messages(record, self.train_on, context=True)
                        skipped[CONTEXT_MOVED] += read.skipped.get(CONTEXT_MOVED, 0)
                        theirs.append(read)
                return mine, theirs
            skipped[str(record["skip_reason"])] += 1
        except LimbeckError as error:
            self.refuse(record, error, skipped)
        return self._empty()

    def refuse(self, record: DatumSpec, error: Exception, skipped: Counter[str]) -> None:
        """Stop at a record that cannot be used, or count it, as ``on_error`` says."""
        if not self.skip_errors:
            message = str(error) if isinstance(error, DataError) else f"record {_where(record)}: {error}"
            raise DataError(message) from error
        skipped["skipped_record"] += 1

    def _cut(
        self,
        student: list[TokenizedText],
        teachers: list[list[TokenizedText]],
        chunks: list[list[Chunks]],
        skipped: list[Counter[str]],
        asked: Sequence[Sequence[int]],
    ) -> tuple[list[TokenizedText], list[list[TokenizedText]], list[list[Chunks]]]:
        """Shorten rows that do not fit, every side at a boundary that it shares with the student."""
        for row, mine in enumerate(student):
            live = [i for i, side in enumerate(self.teachers) if side is not None and i in asked[row]]
            fits = len(mine) <= self.student.ctx_length
            if fits and all(len(teachers[i][row]) <= self.teachers[i].ctx_length for i in live):  # type: ignore[union-attr]
                continue
            # all limits before any cut: a teacher that ends the student's row early does so for the others, too
            limit = self.student.ctx_length
            for i in live:
                limit = _shared_limit(chunks[i][row], limit, self.teachers[i].ctx_length)  # type: ignore[union-attr]
            student[row] = mine.truncated(limit)
            skipped[row]["truncated"] += 1
            for i in live:
                kept = last_fitting(chunks[i][row], limit, self.teachers[i].ctx_length)  # type: ignore[union-attr]
                chunks[i][row] = chunks[i][row].select(slice(0, kept))
                end = int(chunks[i][row].teacher_end[-1]) if kept else 0
                teachers[i][row] = teachers[i][row].truncated(end)
        return student, teachers, chunks

    def _require_templates(self) -> None:
        for side in (self.student, *self.teachers):
            if side is not None and not (side.template or ByteTokenizer.of(side.tokenizer).templates):
                raise TokenizerError(
                    f"the {side.name}'s tokenizer has no chat template, which conversations need: give one as "
                    f"{'policy' if side is self.student else 'teacher'}.tokenizer.chat_template (a .jinja file or its "
                    "text), or read the data as text (data.mode: text)."
                )

    @staticmethod
    def _tokenize_batch(
        texts: list[str],
        tokenizer: object,
        ctx_length: int,
        make_seq_div_by: int,
        *,
        pad_to: Literal["longest", "max"] = "longest",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and attention mask of texts, cut at ``ctx_length`` and padded to a multiple of ``make_seq_div_by``; with
        ``pad_to="max"`` never narrower than ``ctx_length``, as published."""
        side = Side(tokenizer, ctx_length, make_seq_div_by)
        rows = [r.truncated(ctx_length) for r in side.render_texts(texts, [False] * len(texts))]
        tensors = side.padded(rows, pad_to == "max")
        width = tensors["input_ids"].shape[1]
        return tensors["input_ids"], (torch.arange(width)[None] < tensors["input_lengths"][:, None]).long()


_NOTHING, _NEVER = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool)
_NO_CHUNKS = Chunks(_NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, _NEVER, _NEVER, _NEVER)


def _asked(aligner: TokenAligner, student: TokenizedText, teacher: TokenizedText) -> Chunks:
    """A row's chunks by an ``align`` of the user's own, which knows ids alone."""
    sides = [torch.from_numpy(np.asarray(side.ids, dtype=np.int64))[None] for side in (student, teacher)]
    masks = [torch.ones_like(ids) for ids in sides]
    alignment = aligner.align(*sides, student_attention_mask=masks[0], teacher_attention_mask=masks[1])
    return alignment.chunks(0, student, teacher)


def _shared_limit(chunks: Chunks, student_length: int, teacher_length: int) -> int:
    """Student tokens up to the last shared boundary within both lengths."""
    kept = last_fitting(chunks, student_length, teacher_length)
    return int(chunks.student_end[kept - 1]) if kept else 0


def _front(rendering: TokenizedText) -> tuple[int, int]:
    """Tokens and bytes of the context in front of a text."""
    first = rendering.segments[0] if rendering.segments else None
    return (first.token_start, first.start) if first is not None and first.start else (0, 0)


def _where(record: Mapping[str, Any]) -> str:
    return str(record.get("source") or record.get("idx", "of unknown origin"))


def _per_teacher(value: Any, n: int, name: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value] * n
    if len(value) != n:
        raise ConfigError(f"{name} has {len(value)} entries for {n} teachers; give one for each, or a single value.")
    return list(value)
