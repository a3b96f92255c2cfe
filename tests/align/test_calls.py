"""Tool calls in different syntax: only the same bytes of the same field may ever be compared."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from limbeck.align import align_renderings
from limbeck.tokens import TokenizedText, render_chat
from tests.helpers.tokenizers import byte_level

Label = tuple[Any, ...] | None
Written = list[tuple[str, Label]]
"""Text with the field that each stretch of it belongs to; None for the template's own."""

HEAD = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
TAIL = "{% endfor %}<|end|>{% endfor %}"


# -- an independent writer for every style -----------------------------------------------------------------------------


def dumped(value: Any, path: tuple[Any, ...], *, ascii_only: bool = False, twice: bool = False) -> Written:
    """A value in JSON; ``twice``: inside a JSON string once more."""

    def escape(text: str) -> str:
        once = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
        return json.dumps(once, ensure_ascii=ascii_only)[1:-1] if twice else once

    quote = '\\"' if twice else '"'

    def walk(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[str, Label]]:
        if isinstance(value, dict):
            yield "{", None
            for i, (key, item) in enumerate(value.items()):
                yield (", " if i else "") + quote, None
                yield escape(key), (*path, key, "key")
                yield quote + ": ", None
                yield from walk(item, (*path, key))
            yield "}", None
        elif isinstance(value, list):
            yield "[", None
            for i, item in enumerate(value):
                yield ", " if i else "", None
                yield from walk(item, (*path, i))
            yield "]", None
        elif isinstance(value, str):
            yield from ((quote, None), (escape(value), path), (quote, None))
        else:
            yield json.dumps(value), path

    return list(walk(value, path))


def hermes(name: str, arguments: dict[str, Any]) -> Written:
    body = dumped(arguments, ("arguments",))
    return [('\n<call>\n{"name": "', None), (name, ("name",)), ('", "arguments": ', None), *body, ("}\n</call>", None)]


def llama(name: str, arguments: dict[str, Any]) -> Written:
    return [('{"name": "', None), (name, ("name",)), ('", "parameters": ', None), *dumped(arguments, ("arguments",)),
            ("}", None)]  # fmt: skip


def sorted_keys(name: str, arguments: dict[str, Any]) -> Written:
    def order(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: order(value[key]) for key in sorted(value)}
        return [order(item) for item in value] if isinstance(value, list) else value

    return [("!", None), (name, ("name",)), (" ", None), *dumped(order(arguments), ("arguments",))]


def ascii_json(name: str, arguments: dict[str, Any]) -> Written:
    return [("call ", None), (name, ("name",)), ("(", None), *dumped(arguments, ("arguments",), ascii_only=True),
            (")", None)]  # fmt: skip


def twice(name: str, arguments: dict[str, Any]) -> Written:
    body = dumped(arguments, ("arguments",), twice=True)
    return [('{"arguments": "', None), *body, ('", "name": "', None), (name, ("name",)), ('"}', None)]


def xml(name: str, arguments: dict[str, Any]) -> Written:
    parts: Written = [("<function=", None), (name, ("name",)), (">", None)]
    for key, value in arguments.items():
        parts += [("\n<parameter=", None), (key, ("arguments", key, "key")), (">\n", None)]
        own = ("arguments", key)
        parts += [(value, own)] if isinstance(value, str) else dumped(value, own)
        parts.append(("\n</parameter>", None))
    return [*parts, ("\n</function>", None)]


STYLES: dict[str, tuple[Callable[[str, dict[str, Any]], Written], str]] = {
    "hermes": (
        hermes,
        '{{ "\\n" }}<call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
        "\n</call>",
    ),
    "llama": (llama, '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'),
    "sorted": (sorted_keys, "!{{ c.function.name }} {{ c.function.arguments | tojson(sort_keys=true) }}"),
    "ascii": (ascii_json, "call {{ c.function.name }}({{ c.function.arguments | tojson(ensure_ascii=true) }})"),
    "twice": (
        twice,
        '{"arguments": {{ c.function.arguments | tojson | tojson }}, "name": "{{ c.function.name }}"}',
    ),
    "xml": (
        xml,
        "<function={{ c.function.name }}>{% for k, v in c.function.arguments.items() %}{{ '\\n' }}<parameter={{ k }}>\n"
        "{{ v if v is string else v | tojson }}\n</parameter>{% endfor %}{{ '\\n' }}</function>",
    ),
}


@cache
def tokenizer(style: str, side: int) -> Any:
    """Two vocabularies that cut the same text differently, syntax and values together."""
    words = (["name", '", "', '": ', '{"', "ab", "12", "\\n", "call"], ["na", '": {"', '"}', "abc", "1", '\\"', "\n<"])
    template = HEAD + STYLES[style][1] + TAIL
    return byte_level(words[side], specials=["<|start|>", "<|end|>"], split_words=False, template=template)


def rendered(style: str, side: int, messages: list[dict[str, Any]]) -> TokenizedText:
    return render_chat(tokenizer(style, side), messages)


def labels(style: str, messages: list[dict[str, Any]], rendering: TokenizedText) -> list[Label]:
    """The field of every byte of the source, from the independent writer; it must spell what the template wrote."""
    found: list[Label] = []
    text = b""
    for message in messages:
        parts: Written = [(f"{message['role']}\n", None), (message.get("content") or "", None)]
        for number, made in enumerate(message.get("tool_calls") or []):
            function = made["function"]
            for written, label in STYLES[style][0](function["name"], function["arguments"]):
                parts.append((written, None if label is None else (number, *label)))
        for written, label in parts:
            text += written.encode()
            found += [label] * len(written.encode())
    assert text == rendering.source
    return found


# -- conversations -----------------------------------------------------------------------------------------------------

WORDS = st.text(st.sampled_from("abc12 \n\"'\\{}:,é中🙂"), max_size=8)
KEYS = st.text(st.sampled_from("abcé_1"), min_size=1, max_size=3)
SCALARS = st.one_of(
    st.integers(-12, 1212), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False, width=16)
)
VALUES = st.recursive(
    st.one_of(WORDS, SCALARS),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(KEYS, inner, max_size=2)),
    max_leaves=4,
)
CALLS = st.lists(st.tuples(KEYS, st.dictionaries(KEYS, VALUES, max_size=4)), min_size=1, max_size=2)


def conversation(calls: list[tuple[str, dict[str, Any]]], content: str = "") -> list[dict[str, Any]]:
    made = [{"id": f"call0000{i}", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)]
    return [{"role": "user", "content": "go"}, {"role": "assistant", "content": content, "tool_calls": made}]


def begins(rendering: TokenizedText) -> Any:
    return np.concatenate([[0], rendering.byte_ends[:-1]])


def check_chunks(pair: tuple[str, str], messages: list[dict[str, Any]]) -> tuple[int, int]:
    """No chunk compares different fields; returns compared and all bytes of the student's fields."""
    student, teacher = rendered(pair[0], 0, messages), rendered(pair[1], 1, messages)
    mine, theirs = labels(pair[0], messages, student), labels(pair[1], messages, teacher)
    chunks = align_renderings(student, teacher, Counter())
    compared = 0
    last = 0
    for i in range(len(chunks)):
        if chunks.role[i]:
            continue
        a, b = (int(x[i]) for x in (chunks.student_start, chunks.student_end))
        c, d = (int(x[i]) for x in (chunks.teacher_start, chunks.teacher_end))
        assert c >= last, "chunks are in order on both sides"
        last = d
        assert student.loss_mask[a:b].all()
        assert teacher.loss_mask[c:d].all()
        span_s = slice(int(begins(student)[a]), int(student.byte_ends[b - 1]))
        span_t = slice(int(begins(teacher)[c]), int(teacher.byte_ends[d - 1]))
        if not chunks.exact[i]:
            continue
        assert student.source[span_s] == teacher.source[span_t]
        assert mine[span_s] == theirs[span_t]
        compared += sum(label is not None for label in mine[span_s])
    return compared, sum(label is not None for label in mine)


PAIRS = [(a, b) for a in STYLES for b in STYLES if a != b]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls=CALLS, content=st.sampled_from(["", "ab"]))
def test_no_chunk_compares_two_fields(pair: tuple[str, str], calls: Any, content: str) -> None:
    check_chunks(pair, conversation(calls, content))


ARGUMENTS = {"command": "ls -l abc", "timeout": 12, "cwd": "/tmp/中", "deep": {"on": True, "list": ["a", None, 2.5]}}
USUAL = [("run", ARGUMENTS)]


@pytest.mark.parametrize("pair", [p for p in PAIRS if set(p) <= {"hermes", "llama", "xml"}], ids="-".join)
def test_name_keys_and_values_are_compared_whatever_stands_between(pair: tuple[str, str]) -> None:
    compared, written = check_chunks(pair, conversation(USUAL))
    assert compared > 0.9 * written


def test_keys_in_another_order_are_compared_as_far_as_the_order_is_the_same() -> None:
    swapped = [("run", {"b": "one two three", "a": "four five six"})]
    compared, written = check_chunks(("hermes", "sorted"), conversation(swapped))
    assert 0 < compared < written
    in_order = [("run", {"a": "one two three", "b": "four five six"})]
    assert check_chunks(("hermes", "sorted"), conversation(in_order)) == (written, written)


def test_escapes_are_other_bytes() -> None:
    plain, escaped = [("run", {"a": "abc"})], [("run", {"a": "中文"})]
    assert check_chunks(("hermes", "ascii"), conversation(plain))[0] == len("runaabc")
    assert check_chunks(("hermes", "ascii"), conversation(escaped))[0] == len("runa")
    assert check_chunks(("hermes", "xml"), conversation([("run", {"a": 'x"y'})]))[0] == len("runa")


def test_equal_values_of_other_keys_are_not_exchanged() -> None:
    """Both orders hold the same texts at other places: a comparison by text alone would mix them up."""
    calls = [("run", {"b": "same", "a": "same", "c": 1, "d": 1})]
    compared, _ = check_chunks(("hermes", "sorted"), conversation(calls))
    assert compared > 0


def test_what_announces_a_call_is_not_compared() -> None:
    """One side has opened the call when the other has yet to decide on it."""
    messages = conversation([("run", {"a": "b"})])
    student, teacher = rendered("hermes", 0, messages), rendered("llama", 1, messages)
    chunks = align_renderings(student, teacher, Counter())
    assert student.source[: int(chunks.byte_start[0])].endswith(b'{"name": "')
