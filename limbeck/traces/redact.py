"""Taking secrets out of traces before anything is written, sent or trained on.

Logs of real sessions contain keys and passwords. Redaction is on by default and works on every string of a trace:
contents, reasoning, call arguments, ids and names, tool schemas, error facts and preference pairs. It replaces a
secret by ``[REDACTED:kind]``, counts it, and leaves everything else as it is; a second pass changes nothing.

What counts as a secret is data: ``secrets.yaml`` beside this file, and files of the same form that a user gives.

Example:
    >>> Redactor().text("docker run -e DB_PASSWORD=tr0ub4dor img")
    'docker run -e DB_PASSWORD=[REDACTED:assigned_secret] img'
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from limbeck.traces.inner_texts import encoded, unescaped
from limbeck.traces.named_secrets import NamedSecrets
from limbeck.traces.schema import Message, PreferencePair, Trace
from limbeck.traces.secret_rules import Rule, RuleSet, kept_rules
from limbeck.traces.secret_values import MASK, Judge

_T = TypeVar("_T")
_Id = TypeVar("_Id", str, "str | None")

_ASSIGNED = "assigned_secret"
_MARK = re.compile(r"\[REDACTED:\w+\]")
_DEPTH = 8
"""How many texts inside texts are read."""


@dataclass(frozen=True)
class Hit:
    """One secret that was found: the rule's name, and the secret with all but its beginning hidden."""

    kind: str
    preview: str

    @classmethod
    def of(cls, kind: str, secret: str) -> Hit:
        """Of a secret itself, which is not kept: at most a fifth of it can be seen."""
        seen = " ".join(secret[: min(6, len(secret) // 5)].split())
        return cls(kind, f"{seen}… ({len(secret)} characters)")


Found = tuple[int, int, str]
"""Where a secret stands, and its rule."""

Note = Callable[[str, str], None]
"""Told of every secret: the rule's name and the secret."""


class Redactor:
    """Takes secrets out of texts, JSON values, messages and traces.

    Args:
        pii: Also e-mail addresses, user names in home paths, phone and card numbers.
        rules: Rules besides the kept ones, as ``read_rules`` gives them.
    """

    def __init__(self, *, pii: bool = False, rules: Sequence[RuleSet] = ()) -> None:
        rule_set = kept_rules()
        for further in rules:
            rule_set = rule_set + further
        self._rules = [rule for rule in rule_set.rules if pii or not rule.pii]
        self._literals = [(literal, i) for i, rule in enumerate(self._rules) for literal in rule.literals or [""]]
        self._judge = Judge(rule_set)
        self._named = NamedSecrets(rule_set.assigned, self._judge)
        self._ids: dict[str, str] = {}
        self._alike: Counter[str] = Counter()

    def text(self, text: str, counts: Counter[str] | None = None) -> str:
        """``text`` without the secrets that it contains; ``counts`` gets one per secret, by kind."""
        return self._text(text, _counting(counts))

    def value(self, value: _T, counts: Counter[str] | None = None) -> _T:
        """The same JSON value with every string in it redacted, keys included."""
        return self._json(value, _counting(counts))

    def id(self, name: str) -> str:
        """A trace's id as ``trace`` writes it."""
        return self._id(name, _counting(None))

    def message(self, message: Message, counts: Counter[str] | None = None) -> Message:
        """A message without secrets; the same one where it has none."""
        return self._message(message, _counting(counts))

    def trace(self, trace: Trace) -> tuple[Trace, Counter[str]]:
        """A copy of the trace without secrets, and how many were found, by kind."""
        counts: Counter[str] = Counter()
        clean = self._trace(trace, _counting(counts))
        return (clean if counts else trace), counts

    def hits(self, trace: Trace) -> list[tuple[int | None, Hit]]:
        """Hits that redaction would take out: the index of the message (None elsewhere in the trace) and the hit."""
        hits: list[tuple[int | None, Hit]] = []

        def noting(message_index: int | None) -> Note:
            return lambda kind, secret: hits.append((message_index, Hit.of(kind, secret)))

        for index, message in enumerate(trace.messages):
            self._message(message, noting(index))
        self._trace(trace.model_copy(update={"messages": []}), noting(None))
        return hits

    # -- texts ---------------------------------------------------------------------------------------------------------

    def _text(self, text: str, note: Note) -> str:
        # what is left may read differently without its neighbour, and a second pass must change nothing
        for _ in range(4):
            secrets = sorted(self._find(_MARK.sub(lambda mark: MASK * len(mark[0]), text), 0))
            if not secrets:
                break
            parts, done = list[str](), 0
            for start, end, kind in secrets:
                note(kind, text[start:end])
                parts += [text[done:start], f"[REDACTED:{kind}]"]
                done = end
            text = "".join([*parts, text[done:]])
        return text

    def _find(self, text: str, depth: int) -> list[Found]:
        """Secrets of a text and of the texts inside it, apart from one another."""
        lowered = text.lower()
        secrets = list[Found]()
        # in the order of the rule file, whatever literal was found first: earlier rules go before later ones
        for index in sorted({index for literal, index in self._literals if literal in lowered}):
            rule = self._rules[index]
            text = _masked(text, ((*span, rule.id) for span in self._matches(rule, text)), secrets)
        text = _masked(text, ((*span, _ASSIGNED) for span in self._named.spans(text)), secrets)
        if depth < _DEPTH:
            if (inner := unescaped(text)) is not None:
                deeper = self._find(inner.text, depth + 1)
                text = _masked(text, sorted((inner.place(a), inner.place(b), kind) for a, b, kind in deeper), secrets)
            for start, end, spelt in encoded(text):
                if deeper := self._find(spelt, depth + 1):
                    secrets.append((start, end, deeper[0][2]))
        return secrets

    def _matches(self, rule: Rule, text: str) -> Iterator[tuple[int, int]]:
        group: int | str = "secret" if "secret" in rule.pattern.groupindex else 0
        for match in rule.pattern.finditer(text):
            if match[group] and self._judge.holds(rule, match[group]):
                yield match.span(group)

    # -- values, messages, traces --------------------------------------------------------------------------------------

    def _json(self, value: Any, note: Note) -> Any:
        if isinstance(value, str):
            return self._text(value, note)
        if isinstance(value, list):
            return [self._json(item, note) for item in value]
        if isinstance(value, dict):
            named = value.get("name", value.get("key"))
            return {
                self._text(str(key), note): self._field(named if key == "value" else str(key), item, note)
                for key, item in value.items()
            }
        return value

    def _field(self, name: Any, item: Any, note: Note) -> Any:
        """A field's name can give its value away, as an assignment does in text."""
        if isinstance(item, list) and all(isinstance(part, str) for part in item):
            return [self._field(name, part, note) for part in item]
        if isinstance(item, dict) and isinstance(item.get("value"), str) and "name" not in item and "key" not in item:
            return self._json({**item, "value": self._field(name, item["value"], note)}, note)
        if not isinstance(item, str):
            return self._json(item, note)
        clean = self._text(item, note)
        strength = self._named.strength(name) if isinstance(name, str) and len(name) <= 64 else None
        if clean != item or strength is None or not self._judge.is_secret(strength, item, True):
            return clean
        note(_ASSIGNED, item)
        return f"[REDACTED:{_ASSIGNED}]"

    def _message(self, message: Message, note: Note) -> Message:
        calls = [
            call.model_copy(
                update={
                    "id": self._id(call.id, note),
                    "name": self._text(call.name, note),
                    "arguments": self._json(call.arguments, note),
                }
            )
            for call in message.tool_calls
        ]
        update: dict[str, Any] = {
            "content": self._text(message.content, note),
            "reasoning": self._optional(message.reasoning, note),
            "tool_calls": calls,
            "tool_call_id": self._id(message.tool_call_id, note),
            "name": self._optional(message.name, note),
            "error_meta": self._json(message.error_meta, note),
        }
        if all(getattr(message, name) == clean for name, clean in update.items()):
            return message
        # The sampled ids still spell the secret.
        return message.model_copy(update={**update, "sampled_ids": None, "logprobs": None})

    def _optional(self, text: str | None, note: Note) -> str | None:
        return None if text is None else self._text(text, note)

    def _id(self, name: _Id, note: Note) -> _Id:
        """An id without secrets: equal ids stay equal and different ones different, by a number in order of appearance.

        A hash would do the same for a pair of files, but lets anyone test a guess of a short secret.
        """
        if name is None:
            return name
        clean = self._text(name, note)
        if clean == name:
            return name
        if name not in self._ids:
            self._alike[clean] += 1
            number = self._alike[clean]
            self._ids[name] = clean if number == 1 else f"{clean}#{number}"
        return self._ids[name]

    def _trace(self, trace: Trace, note: Note) -> Trace:
        def clean_pair(pair: PreferencePair) -> PreferencePair:
            return pair.model_copy(
                update={
                    "chosen": self._message(pair.chosen, note),
                    "rejected": self._message(pair.rejected, note),
                    "prompt": None if pair.prompt is None else [self._message(m, note) for m in pair.prompt],
                    "tools": self._json(pair.tools, note),
                    "trace_id": self._id(pair.trace_id, note),
                    "provenance": self._json(pair.provenance, note),
                }
            )

        origin = trace.origin
        update = {
            "id": self._id(trace.id, note),
            "group_id": self._id(trace.group_id, note),
            "origin": origin and origin.model_copy(update={"file": self._text(origin.file, note)}),
            "messages": [self._message(message, note) for message in trace.messages],
            "tools": self._json(trace.tools, note),
            "meta": self._json(trace.meta, note),
            "preference_pairs": [clean_pair(pair) for pair in trace.preference_pairs],
        }
        return trace.model_copy(update=update)


def _masked(text: str, spans: Iterable[Found], secrets: list[Found]) -> str:
    """The text without what the spans hold, as long as before; ``secrets`` gets those that are new."""
    parts, done = list[str](), 0
    for start, end, kind in spans:
        if start >= done:
            secrets.append((start, end, kind))
            parts += [text[done:start], MASK * (end - start)]
            done = end
    return "".join([*parts, text[done:]]) if parts else text


def _counting(counts: Counter[str] | None) -> Note:
    counter: Counter[str] = counts if counts is not None else Counter()

    def note(kind: str, secret: str) -> None:
        counter[kind] += 1

    return note


@cache
def default_redactor() -> Redactor:
    """The kept rules alone, without personal data."""
    return Redactor()


def redact_text(text: str, counts: Counter[str] | None = None) -> str:
    """``Redactor.text`` with the kept rules."""
    return default_redactor().text(text, counts)


def redact_trace(trace: Trace) -> tuple[Trace, Counter[str]]:
    """``Redactor.trace`` with the kept rules."""
    return default_redactor().trace(trace)
