"""Rows of what a student wrote: its ids as they were sampled, and the same bytes as each teacher reads them.

A prompt is the beginning of a text, or a conversation up to an answer; each side renders it for itself, with its own
template. The student's ids are never tokenised again: a teacher gets the bytes that they spell, in its own tokens, and
chunks are found by bytes as for stored text. An answer with tool calls that the student's template would write in these
very bytes, and with these special tokens, is read by each teacher as its own template writes it, and compared by the
names, keys and values of the calls. What cannot be compared is counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from limbeck.align import Chunks
from limbeck.align.aligner import rendering_of_ids
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.cross_tokenizer_collate import CHARS_PER_TOKEN, CrossTokenizerCollator, DatumSpec, Side
from limbeck.data.sources import CONTEXT, REFERENCE, TEACHER, flatten_documents
from limbeck.errors import DataError, LimbeckError, TemplateError
from limbeck.tokens import TokenizedText
from limbeck.tokens.chat.calls import WrittenCall, written_calls
from limbeck.tokens.chat.ends import end_of_turn
from limbeck.tokens.chat.markup import CallMarkup
from limbeck.tokens.tokenized_text import BoolArray, CallField, IntArray, Segment

_BLANKS = b" \t"
_ABOUT = ("tools", "template_kwargs", CONTEXT, TEACHER, REFERENCE)
_THOUGHT = re.compile(r"<think>\n(.*?)\n</think>\n*", re.DOTALL)


@dataclass(frozen=True, eq=False)
class Prompt:
    """Text that is continued.

    Attributes:
        idx: number of its record.
        student: its rendering; of a conversation with the header of the answer to come.
        teachers: the same for each teacher, behind the context of its record; None for a text, which is rendered
            together with what follows it, and for teachers that read the student's ids.
        messages: of the conversation; empty for a text.
        weight: what its rows count.
        record: what else its record says about the conversation: tools, template_kwargs, teacher_context, and what its
            answers are compared with.
        turn: its number among the prompts of its record.
        hint: what the teachers alone read directly before the answer.
        compared: whether teachers read the answer at all.
    """

    idx: int
    student: TokenizedText
    teachers: tuple[TokenizedText | None, ...] = ()
    messages: Sequence[dict[str, Any]] = ()
    weight: float = 1.0
    record: Mapping[str, Any] = field(default_factory=dict)
    turn: int = 0
    hint: str = ""
    compared: bool = True

    @property
    def data(self) -> bytes:
        """The bytes that its tokens stand for."""
        return self.student.source[: int(self.student.byte_ends[-1])]

    def as_json(self) -> dict[str, Any]:
        """For another process; see `from_json`."""
        teachers = [None if theirs is None else _packed(theirs) for theirs in self.teachers]
        # answers are judged before they go to another process
        record = {name: value for name, value in self.record.items() if name != REFERENCE}
        plain = {"idx": self.idx, "weight": self.weight, "messages": list(self.messages), "record": record}
        more = {"turn": self.turn, "hint": self.hint, "compared": self.compared}
        return {**plain, "student": _packed(self.student), "teachers": teachers, **more}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Prompt:
        """Prompt from what `as_json` gave; nothing in a prompt is a target, so that targets and segments stay
        behind."""
        teachers = tuple(None if theirs is None else _unpacked(theirs) for theirs in value["teachers"])
        rest = (value[name] for name in ("messages", "weight", "record", "turn", "hint", "compared"))
        return cls(value["idx"], _unpacked(value["student"]), teachers, *rest)


@dataclass(frozen=True, eq=False)
class Continuation:
    """Answer behind a prompt: ids ``[n]``, the token that ended it included; ``ended`` is False where the
    length limit cut it off."""

    prompt: Prompt
    ids: IntArray
    ended: bool


@dataclass(frozen=True)
class ReadAnswer:
    """An answer as a message, its calls for an environment, and how many of them could not be read."""

    message: dict[str, Any]
    calls: list[dict[str, Any]]
    malformed: int


@dataclass(frozen=True)
class _Calling:
    """An answer with tool calls: the message that it is, and its parts and their fields, by bytes of the answer."""

    message: dict[str, Any]
    segments: tuple[Segment, ...]
    fields: tuple[CallField, ...]

    def placed(self, row: TokenizedText, start: int, first: int) -> tuple[list[Segment], tuple[CallField, ...]]:
        """The parts in a row whose answer begins at byte ``start`` and with token ``first``."""
        ends = row.byte_ends
        begins = np.concatenate([[start], ends[first:-1]]) if len(ends) > first else ends[first:]
        segments = []
        for s in self.segments:
            a, b = start + s.start, start + s.end
            low = first + int(np.searchsorted(begins, a, side="left"))
            high = max(low, first + int(np.searchsorted(ends[first:], b, side="right")))
            segments += _parted(replace(s, start=a, end=b, token_start=low, token_end=high), row)
        return segments, tuple(replace(f, start=start + f.start, end=start + f.end) for f in self.fields)


class ContinuationCollator:
    """Records to prompts, and continuations of prompts to batches.

    Args:
        collator: of the run; its sides, templates and lengths are used.
        prompt_tokens: student tokens of a text that are its prompt; a shorter text is one as a whole.
        max_new_tokens: room that a prompt must leave.
        compare_stops: whether the token that ends an answer is compared with the teacher's own, by its role.
        mask_blanks: leave chunks out that are nothing but spaces and tabs, where tokenizers differ most and mean least;
            a teacher with the student's tokenizer is asked about these, too.
        turns: of a conversation its last answer is written, or each of them behind what was said before it.
    """

    def __init__(
        self,
        collator: CrossTokenizerCollator,
        *,
        prompt_tokens: int,
        max_new_tokens: int,
        compare_stops: bool = True,
        mask_blanks: bool = True,
        turns: Literal["last", "all"] = "last",
    ) -> None:
        self.collator, self.compare_stops, self.mask_blanks = collator, compare_stops, mask_blanks
        self.turns = turns
        self.room = collator.student.ctx_length - max_new_tokens
        self.prompt_tokens = min(prompt_tokens, self.room)
        self.vocab = collator.student.encoder.vocab
        self.end_ids = self.vocab.end_ids()
        # a text is rendered as a whole: whoever is to read the student's ids there has no side of its own
        self.same_ids = [
            side is not None
            and (i in collator.sharing or (collator.mode == "chat" and side.encoder.vocab.same_tokens(self.vocab)))
            for i, side in enumerate(collator.teachers)
        ]
        self.reads_bytes = any(
            s is not None and not same for s, same in zip(collator.teachers, self.same_ids, strict=True)
        )
        """Whether a teacher has another tokenizer than the student."""
        self.teacher_ends = [None if side is None else _end_id(side, collator.mode) for side in collator.teachers]

    @cached_property
    def apart(self) -> ContinuationCollator:
        """The same with rows of its own for every teacher, which can be shown more than the student."""
        if self.collator.apart is self.collator:
            return self
        return ContinuationCollator(
            self.collator.apart,
            prompt_tokens=self.prompt_tokens,
            max_new_tokens=self.collator.student.ctx_length - self.room,
            compare_stops=self.compare_stops,
            mask_blanks=self.mask_blanks,
            turns=self.turns,
        )

    # ---- prompts ----

    def prompts(self, records: Sequence[DatumSpec]) -> tuple[list[Prompt], Counter[str]]:
        """The prompts of records, and what was left out, by reason."""
        records = flatten_documents(list(records))  # type: ignore[arg-type, assignment]
        if any(record.get(CONTEXT) for record in records) and self.apart is not self:
            return self.apart.prompts(records)
        skipped: Counter[str] = Counter()
        prompts = []
        for number, record in enumerate(records):
            ours = self.collator.in_our_form(record, skipped)
            prompts += self._prompts(ours, number, skipped)
        return prompts, skipped

    def _prompts(self, record: DatumSpec, number: int, skipped: Counter[str]) -> list[Prompt]:
        idx = int(record.get("idx", number))
        try:
            if self.collator.mode == "text":
                return [self._of_text(record, idx)]
            asked = _asked(record)
            every = [asked] if self.turns == "last" else [*_earlier(asked), asked]
            prompts = [self._prompt(record, idx, turn, messages, skipped) for turn, messages in enumerate(every)]
            return [prompt for prompt in prompts if prompt is not None]
        except LimbeckError as error:
            self.collator.refuse(record, error, skipped)
            return []

    def _prompt(
        self, record: DatumSpec, idx: int, turn: int, asked: list[dict[str, Any]], skipped: Counter[str]
    ) -> Prompt | None:
        fitting = self._fitting(record, asked)
        if fitting is None:
            skipped["prompt_too_long"] += 1
            return None
        messages, student = fitting
        if len(messages) < len(asked):
            skipped["cut_messages"] += len(asked) - len(messages)
        teachers = self._headers(record, messages)
        about: Mapping[str, Any] = record
        more = {name: about[name] for name in _ABOUT if about.get(name)}
        if CONTEXT in more and self._full(teachers):
            skipped["context_too_long"] += 1
            return None
        return Prompt(idx, student, teachers, messages, float(record.get("loss_multiplier", 1.0)), more, turn)

    def _headers(
        self, record: Mapping[str, Any], messages: list[dict[str, Any]], hint: str = ""
    ) -> tuple[TokenizedText | None, ...]:
        """What each teacher with rows of its own reads in front of an answer, if it is asked."""
        readers = self.collator.asked(record)
        return tuple(
            None if side is None or i not in readers else _header(side, record, messages, context=True, hint=hint)
            for i, side in enumerate(self.collator.teachers)
        )

    def hinted(self, prompt: Prompt, hint: str) -> Prompt | None:
        """The prompt of a conversation with a hint that its teachers alone read directly before the answer; None where
        one of them has no room left for an answer.

        Raises:
            LimbeckError: a teacher's template has no place for it.
        """
        teachers = self.apart._headers(prompt.record, list(prompt.messages), hint)
        return None if self.apart._full(teachers) else replace(prompt, teachers=teachers, hint=hint)

    def _fitting(
        self, record: Mapping[str, Any], messages: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], TokenizedText] | None:
        """A conversation that leaves room for an answer, as the student reads it: without as many of its earliest
        messages as need be, instructions excepted. It begins with no tool's answer, whose call would be gone."""
        side = self.collator.student
        whole = _header(side, record, messages)
        if len(whole) <= self.room:
            return messages, whole
        kept = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
        sizes = np.array([len(str(message)) for message in messages])
        # what is twice too long by its share of the characters needs no look at its tokens
        likely = 2 * self.room * int(sizes.sum()) / len(whole)
        for start in range(kept + 1, len(messages)):
            if messages[start]["role"] == "tool" or sizes[start:].sum() > likely:
                continue
            shorter = messages[:kept] + messages[start:]
            try:
                rendering = _header(side, record, shorter)
            except TemplateError:  # one that wants a user first
                continue
            if len(rendering) <= self.room:
                return shorter, rendering
        return None

    def _full(self, headers: Sequence[TokenizedText | None]) -> bool:
        """Whether a teacher has no room for an answer."""
        sides = zip(self.collator.teachers, headers, strict=True)
        return any(s is not None and rendering is not None and len(rendering) >= s.ctx_length for s, rendering in sides)

    def _of_text(self, record: DatumSpec, idx: int) -> Prompt:
        student = self._beginning(record)
        about: Mapping[str, Any] = record
        more = {name: about[name] for name in (CONTEXT, TEACHER, REFERENCE) if about.get(name)}
        context = record.get("teacher_context")
        if not context:
            return Prompt(idx, student, record=more)
        teachers = tuple(
            s.behind(context, student) if s is not None and same else None
            for s, same in zip(self.collator.teachers, self.same_ids, strict=True)
        )
        return Prompt(idx, student, teachers, record=more)

    def _beginning(self, record: DatumSpec) -> TokenizedText:
        encoder = self.collator.student.encoder
        text = self.collator.text_of(record)[: CHARS_PER_TOKEN * self.prompt_tokens]
        whole = encoder.encode(text, bos=encoder.adds_bos)
        start = whole.truncated(self.prompt_tokens)
        if not int(start.byte_ends[-1] if len(start) else 0):
            raise DataError(f"record {record.get('source') or record.get('idx')} is empty; a prompt needs some text.")
        return start

    # ---- answers of an episode ----

    @cached_property
    def markup(self) -> CallMarkup | None:
        """How the student's template opens a tool call; None where it writes none."""
        side = self.collator.student
        return CallMarkup.of_template(side.tokenizer, side.template, side.template_kwargs)

    def prompt_of(
        self, record: DatumSpec, messages: Sequence[dict[str, Any]], *, turn: int, with_context: bool
    ) -> Prompt | None:
        """The prompt of a conversation that goes on, all of it; None where it leaves no room for an answer.

        ``with_context``: whether any record of the step has context that its teachers alone read.
        """
        if with_context and self.apart is not self:
            return self.apart.prompt_of(record, messages, turn=turn, with_context=with_context)
        skipped: Counter[str] = Counter()
        prompt = self._prompt(record, int(record.get("idx", 0)), turn, list(messages), skipped)
        return None if prompt is None or skipped["cut_messages"] else prompt

    def read_answer(self, one: Continuation, first_call: int) -> ReadAnswer:
        """An answer as the message that it is, its calls read as the student's template writes them.

        ``first_call``: number of calls that the episode has had; ids follow from it.
        """
        ids = np.asarray(one.ids, dtype=np.int64)
        if one.ended and len(ids) and int(ids[-1]) in self.end_ids:
            ids = ids[:-1]
        front, calls_found = ("", []) if self.markup is None else self.markup.read(ids, self.vocab)
        read = [(first_call + number, call) for number, call in enumerate(calls_found)]
        calls = [_call_of(call, number) for number, call in read if not isinstance(call, str)]
        written = [
            {"id": call["id"], "name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            for call in calls
        ]
        malformed = [
            {"id": _call_id(number), "name": None, "arguments": call, "error": "the tool call could not be read"}
            for number, call in read
            if isinstance(call, str)
        ]
        if not calls:
            return ReadAnswer({"role": "assistant", "content": self._text_of(ids)}, malformed, len(malformed))
        exact = None if malformed else self._exact(one.prompt, ids, calls)
        if exact is not None:
            return ReadAnswer(exact[0], written, 0)
        message: dict[str, Any] = {"role": "assistant", "content": front.strip(), "tool_calls": calls}
        if (thought := _THOUGHT.match(front)) is not None:
            message |= {"reasoning_content": thought[1].strip("\n"), "content": front[thought.end() :].strip()}
        return ReadAnswer(message, [*written, *malformed], len(malformed))

    def said(self, one: Continuation) -> str:
        """Answer as text; bytes that are none are replaced."""
        return self.vocab.join(one.ids.tolist()).decode("utf-8", "replace")

    # ---- rows ----

    def batch(self, written: Sequence[Continuation]) -> BatchedDataDict[Any]:
        """Rows of continuations: prompt and answer, the answer's tokens as targets; keys as those of the collator."""
        hinted = any(one.prompt.hint or one.prompt.record.get(CONTEXT) for one in written)
        if hinted and self.apart is not self:
            return self.apart.batch(written)
        skipped: list[Counter[str]] = [Counter() for _ in written]
        student: list[TokenizedText] = []
        teachers: list[list[TokenizedText]] = [[] for _ in self.collator.teachers]
        for one, counts in zip(written, skipped, strict=True):
            mine, theirs = self._row(one, counts)
            student.append(mine)
            for side, teacher_rows, rendering in zip(self.collator.teachers, teachers, theirs, strict=True):
                if side is not None:
                    teacher_rows.append(rendering or side.encoder.encode(""))

        def refine(row: int, teacher: int, chunks: Chunks, counts: Counter[str]) -> Chunks:
            blanks = self.mask_blanks and not self.same_ids[teacher]
            return self._comparable(student[row], chunks, written[row].ended, counts, mask_blanks=blanks)

        return self.collator.assemble(
            list(student),
            teachers,
            idx=[one.prompt.idx for one in written],
            weights=[one.prompt.weight for one in written],
            skipped=skipped,
            refine=refine,
            asked=[self._readers(one.prompt) for one in written],
        )

    def _readers(self, prompt: Prompt) -> Sequence[int]:
        """Numbers of the teachers that read an answer."""
        return self.collator.asked(prompt.record) if prompt.compared else ()

    def _row(self, one: Continuation, counts: Counter[str]) -> tuple[TokenizedText, list[TokenizedText | None]]:
        """The student's rendering and each teacher's, with the stretches that they can compare as their segments."""
        prompt, ids = one.prompt, np.asarray(one.ids, dtype=np.int64)
        special = np.flatnonzero(self.vocab.special[ids])
        stops = bool(one.ended and len(special) and special[-1] == len(ids) - 1)
        size = inner = len(ids) - stops
        whole = stops and prompt.messages and prompt.compared
        calling = self._calling(prompt, ids[:inner], counts) if whole else None
        sides, body, reach = self._read(prompt, ids[:inner], size)
        if len(special) > stops and (calling is None or reach < len(body)):
            # the student's special token has no bytes that another tokenizer could read
            size = int(special[0])
            sides, body, reach = self._read(prompt, ids[:inner], size)
            counts["special_in_answer"] += self.reads_bytes
        if reach < len(body):
            counts["unspelled_bytes"] += len(body) - reach
            calling = None
        stops &= self.compare_stops and reach == len(body)
        mine = self._student(prompt, ids, inner)
        segments, fields = self._segments(prompt, mine, size, inner, reach, calling)
        theirs: list[TokenizedText | None] = []
        for i, (side, end_id) in enumerate(zip(sides, self.teacher_ends, strict=True)):
            if side is None:
                theirs.append(None)
                continue
            rendering, start = side
            if self.same_ids[i]:
                header = self._header_of(prompt, i)
                by_bytes, by_tokens = start - len(prompt.data), len(header) - len(prompt.student)
                shifted = [s.shifted(by_bytes, by_tokens) for s in segments]
                called = tuple(replace(f, start=f.start + by_bytes, end=f.end + by_bytes) for f in fields)
                theirs.append(_with_segments(rendering, shifted, called, int(ids[inner]) if stops else None))
                continue
            rewritten = None if calling is None else self._rewritten(i, prompt, calling, counts)
            if rewritten is not None:
                theirs.append(rewritten)
                continue
            compared = stops and size == inner
            if compared and end_id is None:
                counts["stop_without_partner"] += 1
            end = end_id if compared else None
            if calling is None:
                text = segments[0]
                theirs.append(_with_segments(rendering, [_text(rendering, start, text.end - text.start)], (), end))
            else:
                their_header = prompt.teachers[i]
                assert their_header is not None
                theirs.append(_with_segments(rendering, *calling.placed(rendering, start, len(their_header)), end))
        if stops and (size == inner or any(self.same_ids)):
            token, byte = len(prompt.student) + inner, len(prompt.data) + len(self.vocab.join(ids[:inner].tolist()))
            segments.append(Segment(0, "eot", byte, byte, token, token + 1))
        return replace(mine, segments=tuple(segments), fields=fields), theirs

    def _segments(
        self, prompt: Prompt, row: TokenizedText, size: int, inner: int, reach: int, calling: _Calling | None
    ) -> tuple[list[Segment], tuple[CallField, ...]]:
        """Part of the student's row that can be compared, the end excepted.

        Teachers of other tokenizers read the first ``size`` tokens of an answer, or ``reach`` bytes where that is less;
        those of the student's tokenizer all ``inner`` ones, special tokens among them.
        """
        first, start = len(prompt.student), len(prompt.data)
        if calling is not None:
            segments, fields = calling.placed(row, start, first)
        else:
            ends = row.byte_ends[first : first + size]
            inside = int(np.searchsorted(ends, start + reach, side="right"))
            end = int(ends[inside - 1]) if inside else start
            segments, fields = [Segment(0, "text", start, end, first, first + inside)], ()
        if any(self.same_ids):
            special = first + np.flatnonzero(row.special[first : first + inner])
            if size < inner:
                rest = int(row.byte_ends[first + size]), int(row.byte_ends[first + inner - 1])
                segments += _parted(Segment(0, "text", *rest, first + size, first + inner), row)
            bytes_at = row.byte_ends[special].tolist()
            segments += [Segment(0, "special", b, b, i, i + 1) for i, b in zip(special.tolist(), bytes_at, strict=True)]
            segments.sort(key=lambda s: (s.token_start, s.token_end))
        return segments, fields

    def _calling(self, prompt: Prompt, ids: IntArray, counts: Counter[str]) -> _Calling | None:
        """The message that an answer with tool calls is, where the student's template writes it in these very bytes and
        special tokens; of other calls a teacher reads the bytes that the student wrote."""
        if not self.reads_bytes:
            return None
        first = _unused_number(prompt.messages)
        calls = [_call_of(call, first + number) for number, call in enumerate(written_calls(self._text_of(ids)))]
        if not calls:
            return None
        rendered = self._exact(prompt, ids, calls)
        if rendered is None:
            counts["calls_in_student_markup"] += 1
            return None
        message, whole = rendered
        size, number = len(prompt.data), len(prompt.messages)
        answer_segments = [s for s in whole.segments if s.message == number and s.kind != "eot" and s.start >= size]
        shifted = tuple(replace(s, message=0, start=s.start - size, end=s.end - size) for s in answer_segments)
        fields = (replace(f, message=0, start=f.start - size, end=f.end - size) for f in whole.fields)
        return _Calling(message, shifted, tuple(fields))

    def _exact(
        self, prompt: Prompt, ids: IntArray, calls: list[dict[str, Any]]
    ) -> tuple[dict[str, Any], TokenizedText] | None:
        """The message with these calls that the student's template writes as exactly these ids' bytes and special
        tokens, and the conversation with it."""
        body = self.vocab.join(ids.tolist())
        size, before = len(prompt.data), int(prompt.student.special.sum())
        markers = _specials(self.vocab.special[ids], ids, np.cumsum(self.vocab.byte_len[ids]))
        for message in self._readings(prompt, self._text_of(ids), calls):
            whole = _answered(self.collator.student, prompt.record, prompt.messages, message)
            if whole is None:
                continue
            ends = [s for s in whole.segments if s.kind == "eot"]
            if not ends or whole.source[: ends[-1].start] != prompt.data + body:
                continue
            said = slice(0, ends[-1].token_start)
            if _specials(whole.special[said], whole.ids[said], whole.byte_ends[said] - size)[before:] == markers:
                return message, whole
        return None

    def _text_of(self, ids: IntArray) -> str:
        return self.vocab.join(ids.tolist()).decode("utf-8", "replace")

    def _readings(self, prompt: Prompt, text: str, calls: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Messages that an answer may be: these calls, with what stands in front of them as content and reasoning."""
        thought = _THOUGHT.match(text)
        for more in ({"reasoning_content": thought[1].strip("\n")}, {}) if thought else ({},):
            bare = {"role": "assistant", "content": "", **more, "tool_calls": calls}
            yield bare
            rest = text[thought.end() :] if thought and more else text
            alone = _answered(self.collator.student, prompt.record, prompt.messages, bare)
            markup = [] if alone is None else [s for s in alone.segments if s.kind == "tool_call"]
            if alone is None or not markup:
                continue
            written = alone.source[markup[0].start : markup[-1].end].decode("utf-8", "replace").lstrip()
            markup_start = rest.rfind(written)
            if markup_start > 0:
                contents = dict.fromkeys((rest[:markup_start].rstrip("\n"), rest[:markup_start].rstrip()))
                yield from ({**bare, "content": content} for content in contents)

    def _rewritten(self, number: int, prompt: Prompt, calling: _Calling, counts: Counter[str]) -> TokenizedText | None:
        """The conversation with the answer as a teacher's own template writes it; None where it cannot."""
        side = self.collator.teachers[number]
        assert side is not None
        whole = _answered(side, prompt.record, prompt.messages, calling.message, context=True, hint=prompt.hint)
        if whole is None or not any(s.kind == "tool_call" for s in whole.segments):
            counts["calls_in_student_markup"] += 1
            return None
        segments = tuple(replace(s, message=0) for s in whole.segments)
        fields = tuple(replace(f, message=0) for f in whole.fields)
        ends = [s for s in segments if s.kind == "eot"]
        if self.compare_stops and not ends:
            counts["stop_without_partner"] += 1
        target = whole.loss_mask.copy()
        if not self.compare_stops:
            for s in ends:
                target[s.token_start : s.token_end] = False
            segments = tuple(s for s in segments if s.kind != "eot")
        return replace(whole, segments=segments, fields=fields, loss_mask=target, skipped={})

    def _read(
        self, prompt: Prompt, ids: IntArray, size: int
    ) -> tuple[list[tuple[TokenizedText, int] | None], bytes, int]:
        """Each teacher's rendering of prompt and answer, and the byte of its source at which the answer begins; the
        bytes of the answer's first ``size`` ids, which teachers of other tokenizers read, and how many all can spell.

        A teacher with the student's tokenizer reads all of the answer's very ids behind its own prompt.
        """
        body = self.vocab.join(ids[:size].tolist())
        renderings: list[tuple[TokenizedText, int] | None] = []
        reach, asked = len(body), self._readers(prompt)
        for i, side in enumerate(self.collator.teachers):
            if side is None or i not in asked:
                renderings.append(None)
                continue
            encoder = side.encoder
            if not prompt.messages and not self.same_ids[i]:
                context, data = prompt.record.get(CONTEXT), prompt.data
                # prompt and answer at once: a token of the teacher's may reach from one into the other
                alone = encoder.encode_bytes(data + body, bos=encoder.adds_bos)
                whole = side.behind(context, alone) if context else alone
                rendering = whole, len(whole.source) - len(alone.source) + len(data)
            else:
                header = self._header_of(prompt, i)
                answer = rendering_of_ids(self.vocab, ids) if self.same_ids[i] else encoder.encode_bytes(body)
                rendering = TokenizedText.joined([header, answer]), len(header.source)
            if not self.same_ids[i]:
                reach = min(reach, len(rendering[0].source) - rendering[1])
            renderings.append(rendering)
        return renderings, body, reach

    @staticmethod
    def _header_of(prompt: Prompt, teacher: int) -> TokenizedText:
        """Prompt that a teacher reads in front of an answer: the student's prompt where it reads the student's ids."""
        teacher_prompt = prompt.teachers[teacher] if prompt.teachers else None
        return prompt.student if teacher_prompt is None else teacher_prompt

    def _student(self, prompt: Prompt, ids: IntArray, inner: int) -> TokenizedText:
        """The student's row; its segments are yet to be found."""
        target = np.ones(len(ids), dtype=bool)
        if not self.compare_stops:
            target[inner:] = False
        return TokenizedText(
            np.concatenate([prompt.student.ids, ids]),
            np.concatenate([prompt.student.byte_ends, len(prompt.data) + np.cumsum(self.vocab.byte_len[ids])]),
            prompt.data + self.vocab.join(ids.tolist()),
            np.concatenate([prompt.student.byte_exact, np.ones(len(ids), dtype=bool)]),
            np.concatenate([prompt.student.special, self.vocab.special[ids]]),
            np.concatenate([np.zeros(len(prompt.student), dtype=bool), target]),
        )

    @staticmethod
    def _comparable(
        student: TokenizedText, chunks: Chunks, ended: bool, counts: Counter[str], *, mask_blanks: bool
    ) -> Chunks:
        """The chunks that count: not those of blanks, nor the last one of an answer that was cut off, which a teacher
        would have tokenised with what was to follow."""
        keep = np.ones(len(chunks), dtype=bool)
        if mask_blanks:
            spans = zip(chunks.byte_start.tolist(), chunks.byte_end.tolist(), strict=True)
            # chunks without bytes are of special tokens, which are no blanks
            keep = np.array([a == b or bool(student.source[a:b].strip(_BLANKS)) for a, b in spans], dtype=bool)
            counts["blank_chunks"] += int(np.count_nonzero(~keep))
        if not ended and len(chunks) and int(chunks.student_end[-1]) == len(student):
            counts["cut_chunks"] += int(keep[-1])
            keep[-1] = False
        return chunks.select(keep)


def _call_id(number: int) -> str:
    # some templates want nine letters and digits
    return f"call{number:05}"


def _unused_number(messages: Sequence[Mapping[str, Any]]) -> int:
    """The first number whose id no call of a conversation has, as long as ids are counted up."""
    used = {call.get("id") for message in messages for call in message.get("tool_calls") or []}
    # one number more than there are ids, so that one is free
    return next(number for number in range(len(used) + 1) if _call_id(number) not in used)


def _call_of(call: WrittenCall, number: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id or _call_id(number), "type": "function", "function": function}


def _packed(rendering: TokenizedText) -> dict[str, Any]:
    lists = {name: getattr(rendering, name).tolist() for name in ("ids", "byte_ends", "byte_exact", "special")}
    # JSON holds no bytes; latin-1 has a character for each, and prompts may end inside one of UTF-8
    return {**lists, "source": rendering.source.decode("latin-1")}


def _unpacked(value: Mapping[str, Any]) -> TokenizedText:
    ids, ends = (np.array(value[name], dtype=np.int64) for name in ("ids", "byte_ends"))
    exact, special = (np.array(value[name], dtype=bool) for name in ("byte_exact", "special"))
    return TokenizedText(ids, ends, value["source"].encode("latin-1"), exact, special, np.zeros(len(ids), dtype=bool))


def _asked(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A conversation up to its last answer."""
    messages = list(record.get("messages") or [])
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        where = record.get("source") or record.get("idx")
        raise DataError(f"record {where} has no message before an answer; a prompt needs one, such as a user's.")
    return messages


def _earlier(messages: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Messages before each answer inside a conversation; of answers in a row, before the first."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return [list(messages[:i]) for i in answers if i and messages[i - 1]["role"] != "assistant"]


def _header(
    side: Side, record: Mapping[str, Any], messages: list[dict[str, Any]], *, context: bool = False, hint: str = ""
) -> TokenizedText:
    """A conversation with the header of the answer to come; nothing in it is a target."""
    whole = {**record, "messages": messages}
    rendering = side.render_messages(whole, context=context, hint=hint, add_generation_prompt=True)
    return replace(rendering, loss_mask=np.zeros(len(rendering), dtype=bool), segments=(), fields=(), skipped={})


def _end_id(side: Side, mode: str) -> int | None:
    """The token with which a side ends an answer: its template's, or the end of a document."""
    if mode == "text":
        return side.encoder.eos_id
    end = end_of_turn(side.tokenizer, side.template, side.template_kwargs, side.name)
    return side.encoder.eos_id if end is None else end


def _answered(
    side: Side,
    record: Mapping[str, Any],
    messages: Sequence[dict[str, Any]],
    answer: dict[str, Any],
    *,
    context: bool = False,
    hint: str = "",
) -> TokenizedText | None:
    """A conversation with its last answer as a side writes it, whose parts are the segments; None where it cannot."""
    whole = {**record, "messages": [*messages, answer]}
    try:
        return side.render_messages(whole, "last", context=context, hint=hint)
    except LimbeckError:
        return None


def _specials(special: BoolArray, ids: IntArray, ends: IntArray) -> list[tuple[int, int]]:
    """Special tokens and the bytes at which they stand."""
    return list(zip(ids[special].tolist(), ends[special].tolist(), strict=True))


def _parted(segment: Segment, row: TokenizedText) -> list[Segment]:
    """A segment without its special tokens: the stretches between them that have bytes."""
    cuts = segment.token_start + np.flatnonzero(row.special[segment.token_start : segment.token_end])
    parts, start, first = [], segment.start, segment.token_start
    for cut in cuts.tolist():
        byte = int(row.byte_ends[cut])
        parts.append(replace(segment, start=start, end=byte, token_start=first, token_end=cut))
        start, first = byte, cut + 1
    parts.append(replace(segment, start=start, token_start=min(first, segment.token_end)))
    return [s for s in parts if s.end > s.start] or [segment]


def _text(rendering: TokenizedText, start: int, size: int) -> Segment:
    """``size`` bytes from byte ``start`` on."""
    begins = np.concatenate([[0], rendering.byte_ends[:-1]]) if len(rendering) else rendering.byte_ends
    first = int(np.searchsorted(begins, start, side="left"))
    last = max(first, int(np.searchsorted(rendering.byte_ends, start + size, side="right")))
    return Segment(0, "text", start, start + size, first, last)


def _with_segments(
    rendering: TokenizedText, segments: Sequence[Segment], fields: tuple[CallField, ...], end_id: int | None
) -> TokenizedText:
    """A rendering whose targets are these segments, and an end token where one is given."""
    target = np.zeros(len(rendering), dtype=bool)
    for s in segments:
        target[s.token_start : s.token_end] = True
    if end_id is None:
        return replace(rendering, loss_mask=target, segments=tuple(segments), fields=fields, skipped={})
    token, byte = len(rendering), segments[-1].end
    end = Segment(0, "eot", byte, byte, token, token + 1)
    true = np.ones(1, dtype=bool)
    return replace(
        rendering,
        ids=np.append(rendering.ids, end_id),
        byte_ends=np.append(rendering.byte_ends, len(rendering.source)),
        byte_exact=np.concatenate([rendering.byte_exact, true]),
        special=np.concatenate([rendering.special, true]),
        loss_mask=np.concatenate([target, true]),
        segments=(*segments, end),
        fields=fields,
        skipped={},
    )
