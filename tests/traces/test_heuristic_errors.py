"""Failures that nothing flags: how many of the labelled results are found, and what is done with them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from limbeck.traces.failed_calls import FailedCallFinder
from limbeck.traces.heuristic_errors import heuristic_error, mark_heuristic_errors
from limbeck.traces.readers import ReadLog, read_traces
from limbeck.traces.schema import ToolCall, Trace
from tests.helpers.chats import answer, say
from tests.traces.material import read, write_lines

LABELLED = [json.loads(line) for line in (Path(__file__).parent / "outcomes.jsonl").read_text().splitlines()]


def call_of(row: dict[str, Any]) -> ToolCall:
    return ToolCall(id="c", name=row["tool"], arguments={"command": row["command"]} if "command" in row else {})


def test_precision_and_recall_on_labelled_results() -> None:
    outcomes = Counter((row["failed"], heuristic_error(row["text"], call_of(row)) is not None) for row in LABELLED)
    assert min(sum(row["failed"] is side for row in LABELLED) for side in (True, False)) >= 50
    found, missed, wrong = outcomes[True, True], outcomes[True, False], outcomes[False, True]
    assert found / (found + missed) >= 0.95
    assert found / (found + wrong) >= 0.95


def test_exit_codes_behind_pipes_are_told() -> None:
    text = "Traceback (most recent call last):\n  File\nKeyError: 'x'"
    for command, meta in (("python a.py", {}), ("python a.py | tail", {"piped": True}), ("x || true", {"piped": True})):
        signal = heuristic_error(text, ToolCall(id="c", name="bash", arguments={"command": command}))
        assert signal is not None
        assert (signal.detector, signal.meta) == ("traceback", meta)


def test_suspected_results_are_marked_in_what_traces_share_too() -> None:
    call = ToolCall(id="c", name="run", arguments={"command": "make | tail"})
    talk = [say("user", "?"), say("assistant", "", call), answer(call, "make: *** [Makefile:1: a.o] Error 1")]
    trace = Trace(id="t", messages=[*talk, say("assistant", "!")], context_until=3)
    whole = trace.model_copy(update={"context_until": 0})
    for as_errors in (True, False):
        marked, seen = mark_heuristic_errors(trace, as_errors=as_errors)
        own, of_own = mark_heuristic_errors(whole, as_errors=as_errors)
        assert marked.messages == own.messages != trace.messages
        assert (seen, of_own) == ([], ["tool_message"])


def test_suspected_results_are_shown_and_used_only_where_asked(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "run", "arguments": '{"command": "make | tail"}'}}
    talk = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "cc a.c\nmake: *** [Makefile:1: a.o] Error 1"},
        {"role": "assistant", "content": "!"},
    ]
    path = write_lines(tmp_path / "t.jsonl", [{"messages": talk}])
    (plain,), log = read(path)
    assert (plain.messages[2].suspected, plain.messages[2].is_error) == ("tool_message", False)
    assert log.suspected == Counter(tool_message=1)
    assert FailedCallFinder().find(plain) == []
    asked = ReadLog()
    (marked,) = read_traces([path], detectors="extended", log=asked)
    assert (marked.messages[2].is_error, marked.messages[2].detector) == (True, "tool_message")
    assert not asked.suspected
    stored = write_lines(tmp_path / "c.jsonl", [plain.to_json()])
    (again,) = read_traces([stored], detectors="extended")
    assert again.messages[2].is_error
    assert read(stored)[0] == [plain]
