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
from typing import Any, Literal

import numpy as np

from limbeck.align import Chunks
from limbeck.align.aligner import rendering_of_ids
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.cross_tokenizer_collate import CHARS_PER_TOKEN, CrossTokenizerCollator, DatumSpec, Side
from limbeck.data.sources import flatten_documents
from limbeck.errors import DataError, LimbeckError, TemplateError
from limbeck.tokens import Rendering
from limbeck.tokens.chat import render_chat
from limbeck.tokens.chat.calls import written_calls
from limbeck.tokens.chat.placement import insert_hint, probe_placement
from limbeck.tokens.rendering import BoolArray, CallField, IntArray, Segment
from limbeck.tokens.vocab import is_end

_BLANKS = b" \t"
_ABOUT = ("tools", "template_kwargs", "hint")
_THOUGHT = re.compile(r"<think>\n(.*?)\n</think>\n*", re.DOTALL)


@dataclass(frozen=True, eq=False)
class Prompt:
    """What is continued.

    Attributes:
        idx: number of its record.
        student: its rendering; of a conversation with the header of the answer to come.
        teachers: the same for each teacher; None for a text, which is rendered together with what follows it, and for
            teachers that read the student's ids.
        messages: of the conversation; empty for a text.
        weight: what its rows count.
        record: what else its record says about the conversation: tools, template_kwargs, hint.
        turn: its number among the prompts of its record.
    """

    idx: int
    student: Rendering
    teachers: tuple[Rendering | None, ...] = ()
    messages: Sequence[dict[str, Any]] = ()
    weight: float = 1.0
    record: Mapping[str, Any] = field(default_factory=dict)
    turn: int = 0

    @property
    def data(self) -> bytes:
        """The bytes that its tokens stand for."""
        return self.student.source[: int(self.student.ends[-1])]

    def as_json(self) -> dict[str, Any]:
        """For another process; see `from_json`."""
        teachers = [None if theirs is None else _packed(theirs) for theirs in self.teachers]
        own = {"idx": self.idx, "weight": self.weight, "messages": list(self.messages), "record": dict(self.record)}
        return {**own, "student": _packed(self.student), "teachers": teachers, "turn": self.turn}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Prompt:
        """What `as_json` gave; nothing in a prompt is a target, so that targets and segments stay behind."""
        teachers = tuple(None if theirs is None else _unpacked(theirs) for theirs in value["teachers"])
        own = value["messages"], value["weight"], value["record"], value["turn"]
        return cls(value["idx"], _unpacked(value["student"]), teachers, *own)


@dataclass(frozen=True, eq=False)
class Continuation:
    """What was written after a prompt: ids ``[n]``, the token that ended it included; ``ended`` is False where the
    length limit cut it off."""

    prompt: Prompt
    ids: IntArray
    ended: bool


@dataclass(frozen=True)
class _Calling:
    """An answer with tool calls: the message that it is, and its parts and their fields, by bytes of the answer."""

    message: dict[str, Any]
    segments: tuple[Segment, ...]
    fields: tuple[CallField, ...]

    def placed(self, row: Rendering, start: int, first: int) -> tuple[list[Segment], tuple[CallField, ...]]:
        """The parts in a row whose answer begins at byte ``start`` and with token ``first``."""
        ends = row.ends
        begins = np.concatenate([[start], ends[first:-1]]) if len(ends) > first else ends[first:]
        found = []
        for s in self.segments:
            a, b = start + s.start, start + s.end
            low = first + int(np.searchsorted(begins, a, side="left"))
            high = max(low, first + int(np.searchsorted(ends[first:], b, side="right")))
            found += _parted(replace(s, start=a, end=b, token_start=low, token_end=high), row)
        return found, tuple(replace(f, start=start + f.start, end=start + f.end) for f in self.fields)


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
        self.end_ids = [i for i, role in self.vocab.roles.items() if is_end(role)]
        # a text is rendered as a whole: whoever is to read the student's ids there has no side of its own
        self.same_ids = [
            side is not None and collator.mode == "chat" and side.encoder.vocab.same_tokens(self.vocab)
            for side in collator.teachers
        ]
        self.reads_bytes = any(
            s is not None and not same for s, same in zip(collator.teachers, self.same_ids, strict=True)
        )
        """Whether a teacher has another tokenizer than the student."""
        self.teacher_ends = [None if side is None else _end_id(side, collator.mode) for side in collator.teachers]

    # ---- prompts ----

    def prompts(self, records: Sequence[DatumSpec]) -> tuple[list[Prompt], Counter[str]]:
        """The prompts of records, and what was left out, by reason."""
        dropped: Counter[str] = Counter()
        found = []
        for number, record in enumerate(flatten_documents(list(records))):  # type: ignore[arg-type]
            ours = self.collator.in_our_form(record, dropped)  # type: ignore[arg-type]
            found += self._prompts(ours, number, dropped)
        return found, dropped

    def _prompts(self, record: DatumSpec, number: int, dropped: Counter[str]) -> list[Prompt]:
        idx = int(record.get("idx", number))
        try:
            if self.collator.mode == "text":
                return [Prompt(idx, self._beginning(record))]
            asked = _asked(record)
            every = [asked] if self.turns == "last" else [*_earlier(asked), asked]
            found = [self._prompt(record, idx, turn, messages, dropped) for turn, messages in enumerate(every)]
            return [prompt for prompt in found if prompt is not None]
        except LimbeckError as error:
            self.collator.refuse(record, error, dropped)
            return []

    def _prompt(
        self, record: DatumSpec, idx: int, turn: int, asked: list[dict[str, Any]], dropped: Counter[str]
    ) -> Prompt | None:
        fitting = self._fitting(record, asked)
        if fitting is None:
            dropped["prompt_too_long"] += 1
            return None
        messages, student = fitting
        if len(messages) < len(asked):
            dropped["cut_messages"] += len(asked) - len(messages)
        sides = self.collator.teachers
        teachers = tuple(None if s is None else _header(s, record, self._told(s, record, messages)) for s in sides)
        about: Mapping[str, Any] = record
        more = {name: about[name] for name in _ABOUT if about.get(name)}
        return Prompt(idx, student, teachers, messages, float(record.get("loss_multiplier", 1.0)), more, turn)

    def _fitting(
        self, record: Mapping[str, Any], messages: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], Rendering] | None:
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

    @staticmethod
    def _told(side: Side, record: Mapping[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation as a teacher reads it: with the record's hint, where it has one, before the answer."""
        hint = record.get("hint")
        if not hint:
            return messages
        own = side.encoder if side.template is None else side.encoder.with_template(side.template)
        answered = [*messages, {"role": "assistant", "content": ""}]
        return insert_hint(answered, len(messages), str(hint), probe_placement(own))[:-1]

    def _beginning(self, record: DatumSpec) -> Rendering:
        encoder = self.collator.student.encoder
        text = self.collator.text_of(record)[: CHARS_PER_TOKEN * self.prompt_tokens]
        whole = encoder.encode(text, bos=encoder.adds_bos)
        start = whole.truncated(self.prompt_tokens)
        if not int(start.ends[-1] if len(start) else 0):
            raise DataError(f"record {record.get('source') or record.get('idx')} is empty; a prompt needs some text.")
        return start

    # ---- rows ----

    def said(self, one: Continuation) -> str:
        """What was written, as text; bytes that are none are replaced."""
        return self.vocab.join(one.ids.tolist()).decode("utf-8", "replace")

    def batch(self, written: Sequence[Continuation]) -> BatchedDataDict[Any]:
        """Rows of continuations: prompt and answer, the answer's tokens as targets; keys as those of the collator."""
        dropped: list[Counter[str]] = [Counter() for _ in written]
        student: list[Rendering] = []
        teachers: list[list[Rendering]] = [[] for _ in self.collator.teachers]
        for one, counts in zip(written, dropped, strict=True):
            mine, theirs = self._row(one, counts)
            student.append(mine)
            for own, rendering in zip(teachers, theirs, strict=True):
                if rendering is not None:
                    own.append(rendering)

        def refine(row: int, teacher: int, chunks: Chunks, counts: Counter[str]) -> Chunks:
            blanks = self.mask_blanks and not self.same_ids[teacher]
            return self._comparable(student[row], chunks, written[row].ended, counts, mask_blanks=blanks)

        return self.collator.assemble(
            list(student),
            teachers,
            idx=[one.prompt.idx for one in written],
            weights=[one.prompt.weight for one in written],
            dropped=dropped,
            refine=refine,
        )

    def _row(self, one: Continuation, counts: Counter[str]) -> tuple[Rendering, list[Rendering | None]]:
        """The student's rendering and each teacher's, with the stretches that they can compare as their segments."""
        prompt, ids = one.prompt, np.asarray(one.ids, dtype=np.int64)
        special = np.flatnonzero(self.vocab.special[ids])
        stops = bool(one.ended and len(special) and special[-1] == len(ids) - 1)
        size = inner = len(ids) - stops
        calling = self._calling(prompt, ids[:inner], counts) if stops and prompt.messages else None
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
        theirs: list[Rendering | None] = []
        for i, (side, end_id) in enumerate(zip(sides, self.teacher_ends, strict=True)):
            if side is None:
                theirs.append(None)
                continue
            rendering, start = side
            if self.same_ids[i]:
                header = prompt.teachers[i]
                assert header is not None
                by_bytes, by_tokens = start - len(prompt.data), len(header) - len(prompt.student)
                own = [_shifted(s, by_bytes, by_tokens) for s in segments]
                called = tuple(replace(f, start=f.start + by_bytes, end=f.end + by_bytes) for f in fields)
                theirs.append(_with_segments(rendering, own, called, int(ids[inner]) if stops else None))
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
                header = prompt.teachers[i]
                assert header is not None
                theirs.append(_with_segments(rendering, *calling.placed(rendering, start, len(header)), end))
        if stops and (size == inner or any(self.same_ids)):
            at, byte = len(prompt.student) + inner, len(prompt.data) + len(self.vocab.join(ids[:inner].tolist()))
            segments.append(Segment(0, "eot", byte, byte, at, at + 1))
        return replace(mine, segments=tuple(segments), fields=fields), theirs

    def _segments(
        self, prompt: Prompt, row: Rendering, size: int, inner: int, reach: int, calling: _Calling | None
    ) -> tuple[list[Segment], tuple[CallField, ...]]:
        """What of the student's row can be compared, the end excepted.

        Teachers of other tokenizers read the first ``size`` tokens of an answer, or ``reach`` bytes where that is less;
        those of the student's tokenizer all ``inner`` ones, special tokens among them.
        """
        first, start = len(prompt.student), len(prompt.data)
        if calling is not None:
            segments, fields = calling.placed(row, start, first)
        else:
            ends = row.ends[first : first + size]
            inside = int(np.searchsorted(ends, start + reach, side="right"))
            end = int(ends[inside - 1]) if inside else start
            segments, fields = [Segment(0, "text", start, end, first, first + inside)], ()
        if any(self.same_ids):
            special = first + np.flatnonzero(row.special[first : first + inner])
            if size < inner:
                rest = int(row.ends[first + size]), int(row.ends[first + inner - 1])
                segments += _parted(Segment(0, "text", *rest, first + size, first + inner), row)
            bytes_at = row.ends[special].tolist()
            segments += [Segment(0, "special", b, b, i, i + 1) for i, b in zip(special.tolist(), bytes_at, strict=True)]
            segments.sort(key=lambda s: (s.token_start, s.token_end))
        return segments, fields

    def _calling(self, prompt: Prompt, ids: IntArray, counts: Counter[str]) -> _Calling | None:
        """The message that an answer with tool calls is, where the student's template writes it in these very bytes and
        special tokens; of other calls a teacher reads the bytes that the student wrote."""
        if not self.reads_bytes:
            return None
        body = self.vocab.join(ids.tolist())
        text = body.decode("utf-8", "replace")
        calls = [
            {
                # some templates want nine letters and digits
                "id": call.id or f"call{number:05}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(written_calls(text))
        ]
        if not calls:
            return None
        size, number, before = len(prompt.data), len(prompt.messages), int(prompt.student.special.sum())
        markers = _specials(self.vocab.special[ids], ids, np.cumsum(self.vocab.byte_len[ids]))
        for message in self._readings(prompt, text, calls):
            whole = _answered(self.collator.student, prompt.record, prompt.messages, message)
            if whole is None:
                continue
            ends = [s for s in whole.segments if s.kind == "eot"]
            if not ends or whole.source[: ends[-1].start] != prompt.data + body:
                continue
            said = slice(0, ends[-1].token_start)
            if _specials(whole.special[said], whole.ids[said], whole.ends[said] - size)[before:] != markers:
                continue
            own = [s for s in whole.segments if s.message == number and s.kind != "eot" and s.start >= size]
            shifted = tuple(replace(s, message=0, start=s.start - size, end=s.end - size) for s in own)
            fields = (replace(f, message=0, start=f.start - size, end=f.end - size) for f in whole.fields)
            return _Calling(message, shifted, tuple(fields))
        counts["calls_in_student_markup"] += 1
        return None

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
            at = rest.rfind(written)
            if at > 0:
                contents = dict.fromkeys((rest[:at].rstrip("\n"), rest[:at].rstrip()))
                yield from ({**bare, "content": content} for content in contents)

    def _rewritten(self, number: int, prompt: Prompt, calling: _Calling, counts: Counter[str]) -> Rendering | None:
        """The conversation with the answer as a teacher's own template writes it; None where it cannot."""
        side = self.collator.teachers[number]
        assert side is not None
        told = self._told(side, prompt.record, list(prompt.messages))
        whole = _answered(side, prompt.record, told, calling.message)
        if whole is None or not any(s.kind == "tool_call" for s in whole.segments):
            counts["calls_in_student_markup"] += 1
            return None
        segments = tuple(replace(s, message=0) for s in whole.segments)
        fields = tuple(replace(f, message=0) for f in whole.fields)
        ends = [s for s in segments if s.kind == "eot"]
        if self.compare_stops and not ends:
            counts["stop_without_partner"] += 1
        target = whole.target.copy()
        if not self.compare_stops:
            for s in ends:
                target[s.token_start : s.token_end] = False
            segments = tuple(s for s in segments if s.kind != "eot")
        return replace(whole, segments=segments, fields=fields, target=target, dropped={})

    def _read(self, prompt: Prompt, ids: IntArray, size: int) -> tuple[list[tuple[Rendering, int] | None], bytes, int]:
        """Each teacher's rendering of prompt and answer, and the byte of its source at which the answer begins; the
        bytes of the answer's first ``size`` ids, which teachers of other tokenizers read, and how many all can spell.

        A teacher with the student's tokenizer reads all of the answer's very ids behind its own prompt.
        """
        body = self.vocab.join(ids[:size].tolist())
        found: list[tuple[Rendering, int] | None] = []
        reach = len(body)
        for i, side in enumerate(self.collator.teachers):
            if side is None:
                found.append(None)
                continue
            encoder = side.encoder
            if not prompt.teachers:
                data = prompt.data
                own = encoder.encode_bytes(data + body, bos=encoder.adds_bos), len(data)
            else:
                header = prompt.teachers[i]
                assert header is not None
                answer = rendering_of_ids(self.vocab, ids) if self.same_ids[i] else encoder.encode_bytes(body)
                own = Rendering.joined([header, answer]), len(header.source)
            if not self.same_ids[i]:
                reach = min(reach, len(own[0].source) - own[1])
            found.append(own)
        return found, body, reach

    def _student(self, prompt: Prompt, ids: IntArray, inner: int) -> Rendering:
        """The student's row; its segments are yet to be found."""
        target = np.ones(len(ids), dtype=bool)
        if not self.compare_stops:
            target[inner:] = False
        return Rendering(
            np.concatenate([prompt.student.ids, ids]),
            np.concatenate([prompt.student.ends, len(prompt.data) + np.cumsum(self.vocab.byte_len[ids])]),
            prompt.data + self.vocab.join(ids.tolist()),
            np.concatenate([prompt.student.exact, np.ones(len(ids), dtype=bool)]),
            np.concatenate([prompt.student.special, self.vocab.special[ids]]),
            np.concatenate([np.zeros(len(prompt.student), dtype=bool), target]),
        )

    @staticmethod
    def _comparable(
        student: Rendering, chunks: Chunks, ended: bool, counts: Counter[str], *, mask_blanks: bool
    ) -> Chunks:
        """The chunks that count: not those of blanks, nor the last one of an answer that was cut off, which a teacher
        would have tokenised with what was to follow."""
        keep = np.ones(len(chunks), dtype=bool)
        if mask_blanks:
            spans = zip(chunks.byte_start.tolist(), chunks.byte_end.tolist(), strict=True)
            keep = np.array([a == b or bool(student.source[a:b].strip(_BLANKS)) for a, b in spans], dtype=bool)
            counts["blank_chunks"] += int(np.count_nonzero(~keep))
        if not ended and len(chunks) and int(chunks.student_end[-1]) == len(student):
            counts["cut_chunks"] += int(keep[-1])
            keep[-1] = False
        return chunks.select(keep)


def _packed(rendering: Rendering) -> dict[str, Any]:
    lists = {name: getattr(rendering, name).tolist() for name in ("ids", "ends", "exact", "special")}
    return {**lists, "source": rendering.source.decode("latin-1")}


def _unpacked(value: Mapping[str, Any]) -> Rendering:
    ids, ends = (np.array(value[name], dtype=np.int64) for name in ("ids", "ends"))
    exact, special = (np.array(value[name], dtype=bool) for name in ("exact", "special"))
    return Rendering(ids, ends, value["source"].encode("latin-1"), exact, special, np.zeros(len(ids), dtype=bool))


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
    """What was said before each answer inside a conversation; of answers in a row, before the first."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return [list(messages[:i]) for i in answers if i and messages[i - 1]["role"] != "assistant"]


def _header(side: Side, record: Mapping[str, Any], messages: list[dict[str, Any]]) -> Rendering:
    """A conversation with the header of the answer to come; nothing in it is a target."""
    rendering = render_chat(
        side.tokenizer,
        messages,
        tools=record.get("tools"),
        template=side.template,
        template_kwargs={**side.template_kwargs, **(record.get("template_kwargs") or {})},
        name=side.name,
        add_generation_prompt=True,
    )
    return replace(rendering, target=np.zeros(len(rendering), dtype=bool), segments=(), fields=(), dropped={})


def _end_id(side: Side, mode: str) -> int | None:
    """The token with which a side ends an answer: its template's, or the end of a document."""
    if mode == "text":
        return side.encoder.eos_id
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rendering = render_chat(
        side.tokenizer, talk, template=side.template, template_kwargs=side.template_kwargs, name=side.name
    )
    ends = [int(rendering.ids[s.token_start]) for s in rendering.segments if s.kind == "eot"]
    return ends[-1] if ends else side.encoder.eos_id


def _answered(
    side: Side, record: Mapping[str, Any], messages: Sequence[dict[str, Any]], answer: dict[str, Any]
) -> Rendering | None:
    """A conversation with its last answer as a side writes it, whose parts are the segments; None where it cannot."""
    try:
        return render_chat(
            side.tokenizer,
            [*messages, answer],
            tools=record.get("tools"),
            template=side.template,
            template_kwargs={**side.template_kwargs, **(record.get("template_kwargs") or {})},
            name=side.name,
            train_on="last",
        )
    except LimbeckError:
        return None


def _specials(special: BoolArray, ids: IntArray, ends: IntArray) -> list[tuple[int, int]]:
    """Special tokens and the bytes at which they stand."""
    return list(zip(ids[special].tolist(), ends[special].tolist(), strict=True))


def _parted(segment: Segment, row: Rendering) -> list[Segment]:
    """A segment without its special tokens: the stretches between them that have bytes."""
    cuts = segment.token_start + np.flatnonzero(row.special[segment.token_start : segment.token_end])
    found, start, first = [], segment.start, segment.token_start
    for cut in cuts.tolist():
        byte = int(row.ends[cut])
        found.append(replace(segment, start=start, end=byte, token_start=first, token_end=cut))
        start, first = byte, cut + 1
    found.append(replace(segment, start=start, token_start=min(first, segment.token_end)))
    return [s for s in found if s.end > s.start] or [segment]


def _shifted(segment: Segment, by_bytes: int, by_tokens: int) -> Segment:
    return replace(
        segment,
        start=segment.start + by_bytes,
        end=segment.end + by_bytes,
        token_start=segment.token_start + by_tokens,
        token_end=segment.token_end + by_tokens,
    )


def _text(rendering: Rendering, start: int, size: int) -> Segment:
    """``size`` bytes from byte ``start`` on."""
    begins = np.concatenate([[0], rendering.ends[:-1]]) if len(rendering) else rendering.ends
    first = int(np.searchsorted(begins, start, side="left"))
    last = max(first, int(np.searchsorted(rendering.ends, start + size, side="right")))
    return Segment(0, "text", start, start + size, first, last)


def _with_segments(
    rendering: Rendering, segments: Sequence[Segment], fields: tuple[CallField, ...], end_id: int | None
) -> Rendering:
    """A rendering whose targets are these segments, and an end token where one is given."""
    target = np.zeros(len(rendering), dtype=bool)
    for s in segments:
        target[s.token_start : s.token_end] = True
    if end_id is None:
        return replace(rendering, target=target, segments=tuple(segments), fields=fields, dropped={})
    at, byte = len(rendering), segments[-1].end
    end = Segment(0, "eot", byte, byte, at, at + 1)
    true = np.ones(1, dtype=bool)
    return replace(
        rendering,
        ids=np.append(rendering.ids, end_id),
        ends=np.append(rendering.ends, len(rendering.source)),
        exact=np.concatenate([rendering.exact, true]),
        special=np.concatenate([rendering.special, true]),
        target=np.concatenate([target, true]),
        segments=(*segments, end),
        fields=fields,
        dropped={},
    )
