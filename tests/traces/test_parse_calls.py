"""Calls in what a model wrote: every family's syntax, and what is none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limbeck.traces.calls import parse_calls

CALL = {"name": "run", "arguments": {"command": 'echo "{x}" | tee a', "n": 2}}
BODY = json.dumps(CALL["arguments"])
XML = (
    '<function=run>\n<parameter=command>\necho "{x}" | tee a\n</parameter>\n<parameter=n>\n2\n</parameter>\n</function>'
)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(CALL),
        f"I look.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>",
        f'{{"name": "run", "parameters": {BODY}}}',
        f"[{json.dumps({**CALL, 'id': 'abcdefghi'})}]",
        f"\nfunction\nrun\n```json\n{BODY}\n```\n",
        json.dumps({"name": "run", "arguments": BODY}),
        f"Say {{ what }} then {json.dumps(CALL)}",
        XML,
    ],
)
def test_a_call_is_found_in_every_syntax(text: str) -> None:
    (call,) = parse_calls(text)
    assert (call.name, call.arguments) == (CALL["name"], CALL["arguments"])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no call",
        "{",
        '{"name": "run", "argum',
        '{"name": 3, "arguments": {}}',
        '{"name": "x", "arguments": "ls"}',
        "[[[",
        BODY,
    ],
)
def test_what_is_no_call_is_none(text: str) -> None:
    assert parse_calls(text) == []


def test_several_calls_keep_their_order() -> None:
    two = {"name": "b", "arguments": {}}
    assert [call.name for call in parse_calls(f"{json.dumps(CALL)} {XML} {json.dumps(two)}")] == ["run", "run", "b"]


@given(st.text(st.sampled_from('{}[]":,name arguments<function=>`\n1'), max_size=60))
def test_any_text_is_read_without_an_error(text: str) -> None:
    parse_calls(text)


PLAIN = st.none() | st.booleans() | st.integers() | st.text()


@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8))
def test_arguments_come_back_as_they_were(value: Any) -> None:
    (call,) = parse_calls(f"so: {json.dumps({'name': 'f', 'arguments': {'v': value}})} end")
    assert call.arguments == {"v": value}
