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
from limbeck.errors import ConfigError, DataError, LimbeckError, TokenizerError
from limbeck.projection.events import Conditions, Facts, Runs
from limbeck.tokens import Rendering, TextEncoder
from limbeck.tokens.chat import render_chat

Refine = Callable[[int, Chunks, Counter[str]], Chunks]
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

    def render_texts(self, texts: Sequence[str], *, append_eos: bool) -> list[Rendering]:
        return self.encoder.encode_batch(texts, bos=self.encoder.adds_bos, eos=append_eos)

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
        ctx_length_student, ctx_length_teacher: longest sequence of each side (the latter may be a sequence). Where a
            text is longer on either side, both are cut at the last boundary they share that fits.
        make_seq_div_by_student, make_seq_div_by_teacher: widths are rounded up to a multiple of these.
        mode: ``text`` reads each record's ``text``; ``chat`` renders its ``messages`` with each side's own template.
        append_eos: in text mode, close every document with the tokenizer's end token.
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
        self.pad_to_max, self.skip_errors = pad_to == "max", on_error == "skip"
        self.as_layout = chunks_as == "layout"
        self.conditions = _per_teacher(conditions, n, "conditions")
        if mode == "chat":
            self._require_templates()

    def __call__(self, batch: list[DatumSpec]) -> BatchedDataDict[Any]:
        batch = flatten_documents(batch)  # type: ignore[arg-type, assignment]
        dropped: list[Counter[str]] = [Counter() for _ in batch]
        batch = [self.in_our_form(r, d) for r, d in zip(batch, dropped, strict=True)]
        student, teachers = self._render(batch, dropped)
        idx = [int(r.get("idx", row)) for row, r in enumerate(batch)]
        weights = [float(r.get("loss_multiplier", 1.0)) for r in batch]
        return self.assemble(student, teachers, idx=idx, weights=weights, dropped=dropped)

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
            refine: chooses among the chunks of a row.
        """
        weights = list(weights)
        chunks: list[list[Chunks]] = [[] for _ in self.teachers]
        for row, mine in enumerate(student):
            for i, side in enumerate(self.teachers):
                if side is not None:
                    found = self._align(i, mine, teachers[i][row], dropped[row])
                    chunks[i].append(found if refine is None else refine(row, found, dropped[row]))
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

    def _render(
        self, batch: list[DatumSpec], dropped: list[Counter[str]]
    ) -> tuple[list[Rendering], list[list[Rendering]]]:
        """Renderings of every side, record by record where one may fail."""
        student: list[Rendering] = []
        teachers: list[list[Rendering]] = [[] for _ in self.teachers]
        if self.mode == "text":
            known = self._render_texts([self._text(r, d) for r, d in zip(batch, dropped, strict=True)])
        for row, record in enumerate(batch):
            mine, theirs = known[row] if self.mode == "text" else self._render_chat(record, dropped[row])
            student.append(mine)
            for i, side in enumerate(self.teachers):
                if side is not None:
                    teachers[i].append(theirs[i])
        return student, teachers

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
            return self._prefix(self.text_of(record), dropped)
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

    def _render_texts(self, texts: list[str]) -> list[tuple[Rendering, list[Any]]]:
        mine = self.student.render_texts(texts, append_eos=self.append_eos)
        theirs = [
            [None] * len(texts) if side is None else side.render_texts(texts, append_eos=self.append_eos)
            for side in self.teachers
        ]
        return [(r, [rows[row] for rows in theirs]) for row, r in enumerate(mine)]

    def _render_chat(self, record: DatumSpec, dropped: Counter[str]) -> tuple[Rendering, list[Any]]:
        try:
            if not record.get("messages") and not record.get("skip_reason"):
                raise DataError(f"record {_where(record)} has no messages; its keys are {sorted(record)}.")
            if record.get("messages"):
                mine = self.student.render_messages(record, self.train_on)
                theirs = [None if s is None else s.render_messages(record, self.train_on) for s in self.teachers]
                return mine, theirs
            dropped[str(record["skip_reason"])] += 1
        except LimbeckError as error:
            self.refuse(record, error, dropped)
        empty = [None if s is None else s.encoder.encode("") for s in self.teachers]
        return self.student.encoder.encode(""), empty

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
        rows = [r.truncated(ctx_length) for r in side.render_texts(texts, append_eos=False)]
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
