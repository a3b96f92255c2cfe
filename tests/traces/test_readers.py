"""Readers: every format, damaged input, and the counts on real logs."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from limbeck.errors import TraceError
from limbeck.traces.errors import check_call, classify_error, detect_prefix, detect_swe_agent
from limbeck.traces.files import IngestOptions, IngestStats, ingest
from limbeck.traces.readers import READERS, ReadLog, read_traces
from limbeck.traces.readers.openai_chat import OpenAIChatReader
from limbeck.traces.schema import SCHEMA_VERSION, ToolCall
from tests.traces.material import EXAMPLES, read, real_logs, write_lines

# -- Claude Code -------------------------------------------------------------------------------------------------------


def event(uuid: str, parent: str | None, role: str, content: Any, **fields: Any) -> dict[str, Any]:
    message = {"role": role, "content": content, **fields.pop("message", {})}
    base = {"type": role, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "isSidechain": False}
    return {**base, "message": message, **fields}


def use(call_id: str, name: str = "Read", **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def result(call_id: str, content: Any = "ok", is_error: bool | None = None) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, "is_error": is_error}


PARALLEL = [
    event("u", None, "user", "Look at both."),
    event("a1", "u", "assistant", [{"type": "thinking", "thinking": "Two files."}], message={"id": "m1"}),
    event("a2", "a1", "assistant", [{"type": "text", "text": "Reading."}], message={"id": "m1"}),
    event("a3", "a2", "assistant", [use("c1")], message={"id": "m1"}),
    event("a4", "a3", "assistant", [use("c2")], message={"id": "m1"}),
    event("r2", "a4", "user", [result("c2", [{"type": "text", "text": "two"}])]),
    event("r1", "a3", "user", [result("c1", "<tool_use_error>File does not exist.</tool_use_error>", True)]),
    event("a5", "r1", "assistant", [{"type": "text", "text": "Done."}], message={"id": "m2"}),
]


def test_parallel_calls_are_one_message_and_no_branch(tmp_path: Path) -> None:
    (trace,), report = read(write_lines(tmp_path / "s.jsonl", PARALLEL))
    assert [m.role for m in trace.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    said = trace.messages[1]
    assert (said.reasoning, said.content, [c.id for c in said.tool_calls]) == ("Two files.", "Reading.", ["c1", "c2"])
    failed = trace.messages[2]
    assert (failed.tool_call_id, failed.is_error, failed.error_kind, failed.detector) == (
        "c1",
        True,
        "file_not_found",
        "flag",
    )
    assert not trace.messages[3].is_error
    assert not report.skipped


def test_the_same_log_without_message_ids_and_with_a_filtered_row_reads_the_same(tmp_path: Path) -> None:
    rows = json.loads(json.dumps(PARALLEL))
    for row in rows:
        row["message"].pop("id", None)
    rows[4]["parentUuid"] = "filtered-progress-row"
    (expected,), _ = read(write_lines(tmp_path / "s.jsonl", PARALLEL))
    (trace,), _ = read(write_lines(tmp_path / "s.jsonl", rows))
    assert trace.messages == expected.messages


def test_a_late_block_joins_the_message_whose_calls_are_still_running(tmp_path: Path) -> None:
    rows = [
        event("u", None, "user", "Go."),
        event("a1", "u", "assistant", [use("c1")]),
        event("a2", "a1", "assistant", [use("c2")]),
        event("r2", "a2", "user", [result("c2")]),
        event("a3", "lost", "assistant", [use("c3")]),
        event("r1", "a1", "user", [result("c1")]),
        event("r3", "a3", "user", [result("c3")]),
    ]
    (trace,), _ = read(write_lines(tmp_path / "s.jsonl", rows))
    assert [m.role for m in trace.messages] == ["user", "assistant", "tool", "tool", "tool"]


def test_an_edited_prompt_becomes_a_branch_that_shares_its_beginning(tmp_path: Path) -> None:
    rows = [
        event("u", None, "user", "Hello."),
        event("a", "u", "assistant", "Hello. What now?", message={"id": "m1"}),
        event("u1", "a", "user", "First try."),
        event("a1", "u1", "assistant", "One.", message={"id": "m2"}),
        event("u2", "a", "user", "Second try."),
        event("a2", "u2", "assistant", "Two.", message={"id": "m3"}),
        event("u3", "a", "user", "Never answered."),
    ]
    traces, report = read(write_lines(tmp_path / "s.jsonl", rows))
    assert [[m.content for m in t.messages][-1] for t in traces] == ["One.", "Two."]
    assert [t.context_until for t in traces] == [0, 2]
    assert len({t.id for t in traces}) == 2
    assert report.skipped == Counter(branch_without_assistant=1)
    stats = IngestStats()
    for trace in traces:
        stats.add(trace)
    assert stats.turns == 6


def test_side_chains_and_compactions_start_their_own_traces(tmp_path: Path) -> None:
    rows = [
        event("u", None, "user", "Main."),
        event("a", "u", "assistant", [use("c1", "Task")]),
        event("su", None, "user", "Sub-task.", isSidechain=True),
        event("sa", "su", "assistant", "Sub-answer.", isSidechain=True),
        event("r", "a", "user", [result("c1", "Sub-answer.")]),
        event("b", "r", "assistant", "Main answer."),
        {"type": "system", "subtype": "compact_boundary", "uuid": "k", "parentUuid": None, "sessionId": "s"},
        event("cu", "k", "user", "Summary of it all.", isCompactSummary=True),
        event("ca", "cu", "assistant", "Going on."),
    ]
    traces, _ = read(write_lines(tmp_path / "s.jsonl", rows))
    assert sorted([m.content for m in t.messages][-1] for t in traces) == ["Going on.", "Main answer.", "Sub-answer."]
    side = next(t for t in traces if t.meta.get("sidechain"))
    assert [m.content for m in side.messages] == ["Sub-task.", "Sub-answer."]
    assert all(t.context_until == 0 for t in traces)


def test_cycles_orphans_duplicates_and_synthetic_messages_are_counted(tmp_path: Path) -> None:
    rows = [
        event("u", None, "user", "Go."),
        event("a", "u", "assistant", [use("c1")]),
        event("r", "a", "user", [result("c1")]),
        event("r", "a", "user", [result("c1")]),
        event("r9", "r", "user", [result("c1", "again")]),
        event("o", "r9", "user", [result("nobody")]),
        event("e", "o", "assistant", "API Error", message={"model": "<synthetic>"}),
        event("b", "e", "assistant", "Done."),
        event("x", "y", "assistant", "cycle"),
        event("y", "x", "user", "cycle"),
        event("z", "z", "user", "self"),
        {"type": "summary", "summary": "s", "leafUuid": "b"},
        {"type": "something-new", "data": 1},
    ]
    (trace,), report = read(write_lines(tmp_path / "s.jsonl", rows))
    assert [m.role for m in trace.messages] == ["user", "assistant", "tool", "assistant"]
    assert report.skipped == Counter(
        cyclic_parent=3,
        duplicate_event=1,
        duplicate_result=1,
        result_without_call=1,
        synthetic_message=1,
        event_without_message=1,
        unknown_event=1,
    )
    assert any(place.startswith("s.jsonl:6: result_without_call") for place in report.places)


def test_an_unknown_version_is_read_and_named(tmp_path: Path) -> None:
    rows = [event("u", None, "user", "Hi.", version="9.0.0"), event("a", "u", "assistant", "Hi.", version="9.0.0")]
    traces, report = read(write_lines(tmp_path / "s.jsonl", rows))
    assert len(traces) == 1
    assert report.versions == Counter({"claude 9.0.0": 2})


def test_a_session_of_thousands_of_events_needs_no_recursion(tmp_path: Path) -> None:
    rows = [event("0", None, "user", "0")]
    rows += [event(str(i), str(i - 1), "assistant" if i % 2 else "user", str(i)) for i in range(1, 5000)]
    (trace,), _ = read(write_lines(tmp_path / "s.jsonl", rows))
    assert len(trace.messages) == 5000


# -- OpenAI-style ------------------------------------------------------------------------------------------------------


def openai_call(call_id: str, arguments: str, name: str = "f") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_openai_messages_with_tools_rewards_and_groups(tmp_path: Path) -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}
    row = {
        "task_id": 3,
        "trial": 1,
        "reward": 0.5,
        "tools": [{"type": "function", "function": tool}],
        "traj": [
            {"role": "developer", "content": "Rules."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {}}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "R",
                "tool_calls": [openai_call("c", '{"y": 1}')],
            },
            {"role": "tool", "tool_call_id": "c", "content": "Error: boom"},
            {"role": "assistant", "content": None, "tool_calls": [openai_call("d", "{broken")]},
            {"role": "tool", "tool_call_id": "d", "content": "no flag and no prefix: error"},
            {"role": "tool", "tool_call_id": "gone", "content": "orphan"},
            {"role": "assistant", "content": "Bye", "weight": 0, "logprobs": {"content": [{"logprob": -0.5}]}},
        ],
    }
    (trace,), report = read(write_lines(tmp_path / "runs.jsonl", [row]))
    assert (trace.id, trace.group_id, trace.final_reward) == ("runs/task-3/1", "runs/task-3", 0.5)
    assert [m.role for m in trace.messages][:2] == ["system", "user"]
    assert trace.messages[2].reasoning == "R"
    assert (trace.messages[3].error_kind, trace.messages[3].error_meta["missing"]) == ("missing_argument", ["x"])
    assert trace.messages[4].tool_calls[0].arguments == "{broken"
    assert not trace.messages[5].is_error
    assert (trace.messages[6].weight, trace.messages[6].logprobs) == (0.0, [-0.5])
    assert report.skipped == Counter(non_text_part=1, result_without_call=1)


def test_legacy_function_calls_and_results_without_ids(tmp_path: Path) -> None:
    row = {
        "messages": [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "1"},
            {"role": "assistant", "content": "1"},
        ]
    }
    (trace,), report = read(write_lines(tmp_path / "ft.jsonl", [row]))
    assert trace.caller_of(2) == (1, 0)
    assert not report.skipped


def test_preference_fine_tuning_records_become_pairs(tmp_path: Path) -> None:
    row = {
        "input": {"messages": [{"role": "user", "content": "?"}]},
        "preferred_output": [{"role": "assistant", "content": "good"}],
        "non_preferred_output": [{"role": "assistant", "content": "bad"}],
    }
    (trace,), _ = read(write_lines(tmp_path / "dpo.jsonl", [row]))
    (pair,) = trace.preference_pairs
    assert (pair.chosen.content, pair.rejected.content, pair.state()[0].content) == ("good", "bad", "?")


def test_one_json_document_is_read_like_lines(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": str(i)}]} for i in range(3)
    ]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=2))
    for name in ("a.json", "b.json"):
        traces, report = read(tmp_path / name)
        assert [t.messages[1].content for t in traces] == ["0", "1", "2"]
        assert len({t.id for t in traces}) == 3
        assert not report.skipped


# -- SWE-agent and OpenHands -------------------------------------------------------------------------------------------


def test_swe_agent_text_steps_keep_the_response_and_the_command(tmp_path: Path) -> None:
    reply = "Let me look.\n```\nls\n```"
    bad_edit = "Your proposed edit has introduced new syntax error(s). Please read this."
    data = {
        "history": [
            {"role": "system", "content": "S", "agent": "main"},
            {"role": "user", "content": "Issue", "agent": "main"},
            {"role": "assistant", "content": reply, "action": "ls\n", "agent": "main"},
            {"role": "user", "content": "a.py\n(Open file: n/a)\nbash-$", "agent": "main"},
        ],
        "trajectory": [
            {"thought": "Let me look.", "action": "ls\n", "observation": "a.py", "response": reply},
            {"thought": "t", "action": "edit 1:1", "observation": bad_edit, "response": "```\nedit 1:1\n```"},
        ],
        "info": {"exit_status": "submitted"},
    }
    (tmp_path / "x.traj").write_text(json.dumps(data, indent=1))
    (trace,), report = read(tmp_path / "x.traj")
    assert not report.skipped
    assert [m.role for m in trace.messages] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert trace.messages[2].content == reply
    assert trace.messages[2].tool_calls[0] == ToolCall(
        id="step_0", name="bash", arguments={"command": "ls"}, in_content=True
    )
    assert trace.messages[3].content.endswith("bash-$")
    assert (trace.messages[5].error_kind, trace.messages[5].detector) == ("syntax_error", "edit_rejected")
    assert [m["role"] for m in trace.to_messages()] == ["system", "user", "assistant", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("observation", "detector"),
    [
        ("Traceback (most recent call last):\n  File", "traceback"),
        ("some output\nEXECUTION TIMED OUT BECAUSE NO OUTPUT WAS PRODUCED\nPLEASE REFINE", "timed_out"),
        ("strings: 'x.img': No such file", "shell_message"),
        ("/root/*: cannot open `/root/*' (No such file or directory)", "shell_message"),
        ("[File: a.py (3 lines)]\n1: raise ValueError('Error: No such file')\n2:\n3:", None),
        ("def f():\n    # Traceback (most recent call last)\n", None),
        ("Script completed successfully, no errors.", None),
        ("", None),
    ],
)
def test_swe_agent_detectors_do_not_search_for_words(observation: str, detector: str | None) -> None:
    signal = detect_swe_agent(observation)
    assert (signal.detector if signal else None) == detector


def openhands_events() -> list[dict[str, Any]]:
    def act(number: int, call_id: str, response: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        message = {"content": "Thinking aloud.", "tool_calls": calls}
        metadata = {"tool_call_id": call_id, "model_response": {"id": response, "choices": [{"message": message}]}}
        return {"id": number, "source": "agent", "action": "run", "args": {}, "tool_call_metadata": metadata}

    def saw(number: int, call_id: str, code: int, content: str, kind: str = "run") -> dict[str, Any]:
        extras = {"metadata": {"exit_code": code}}
        base = {"id": number, "source": "agent", "observation": kind, "content": content, "extras": extras}
        return {**base, "tool_call_metadata": {"tool_call_id": call_id}}

    both = [openai_call("c1", '{"command": "ls"}', "bash"), openai_call("c2", '{"command": "pwd"}', "bash")]
    return [
        {"id": 0, "source": "agent", "action": "system", "args": {"content": "S", "tools": []}},
        {"id": 1, "source": "user", "action": "message", "args": {"content": "Go."}},
        {"id": 2, "source": "user", "action": "recall", "args": {"query": "Go."}},
        act(3, "c1", "r1", both),
        saw(4, "c1", 127, "bash: ls: command not found"),
        act(5, "c2", "r1", both),
        saw(6, "c2", 0, "/home"),
        {
            "id": 7,
            "source": "agent",
            "observation": "error",
            "content": "Parameter 'command' is required",
            "extras": {},
        },
        {"id": 8, "source": "agent", "action": "think", "args": {"thought": "hm"}},
        {"id": 9, "source": "agent", "observation": "think", "cause": 8, "content": "Your thought has been logged."},
        {"id": 10, "source": "agent", "action": "edit", "args": {"path": "a", "thought": "t", "is_input": False}},
        {
            "id": 11,
            "source": "agent",
            "observation": "edit",
            "cause": 10,
            "content": "ERROR:\nNo replacement was performed.",
        },
        {"id": 12, "source": "agent", "observation": "run", "cause": 99, "content": "whose?"},
    ]


@pytest.mark.parametrize("form", ["history", "pairs", "array", "lines"])
def test_openhands_events_in_all_their_containers(tmp_path: Path, form: str) -> None:
    events = openhands_events()
    path = tmp_path / "run.jsonl"
    if form == "array":
        path.write_text(json.dumps(events))
    elif form == "lines":
        write_lines(path, events)
    else:
        history = events if form == "history" else [events[i : i + 2] for i in range(0, len(events), 2)]
        write_lines(path, [{"instance_id": "i", "history": history, "test_result": {"report": {"resolved": True}}}])
    (trace,), report = read(path)
    roles = ["system", "user", "assistant", "tool", "tool", "tool", "assistant", "tool", "assistant", "tool"]
    assert [m.role for m in trace.messages] == roles
    assert [c.id for c in trace.messages[2].tool_calls] == ["c1", "c2"]
    assert [m.detector for m in trace.messages if m.is_error] == ["exit_code", "error_observation"]
    assert (trace.messages[3].error_kind, trace.messages[3].error_meta) == ("command_not_found", {"exit_code": 127})
    assert trace.messages[5].tool_call_id is None
    assert trace.messages[7].is_ack
    assert trace.messages[8].tool_calls[0].arguments == {"path": "a"}
    assert report.suspected == Counter(editor_prefix=1)
    assert report.skipped == Counter(event_recall=1, result_without_call=1)
    if form == "history":
        assert (trace.final_reward, trace.group_id) == (1.0, "i")
        (wider,), _ = read(path, detectors="extended")
        assert wider.messages[9].error_kind == "no_match"


# -- damaged and foreign input -----------------------------------------------------------------------------------------


def test_malformed_lines_are_counted_with_file_and_line_and_reading_goes_on(tmp_path: Path) -> None:
    good = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
    path = tmp_path / "logs.jsonl"
    lines = [
        b"{broken",
        json.dumps(good).encode(),
        b"",
        b"\xff\xfe\x00",
        b'"text"',
        b"[" * 100_000,
        json.dumps({"id": "other", "messages": good["messages"][:1] * 2 + good["messages"][1:]}).encode(),
    ]
    path.write_bytes(b"\n".join(lines))
    traces, report = read(path)
    assert len(traces) == 2
    assert report.skipped == Counter(malformed_line=3, not_an_object=1)
    assert [place.split(": ")[0] for place in report.places] == [f"logs.jsonl:{n}" for n in (1, 4, 5, 6)]


def test_lone_surrogates_cannot_break_the_output(tmp_path: Path) -> None:
    row = '{"messages": [{"role": "user", "content": "\\ud83d"}, {"role": "assistant", "content": "x \\uD83D\\uDE00"}]}'
    (trace,), _ = read(write_lines(tmp_path / "a.jsonl", [row]))
    assert trace.messages[0].content == "\ufffd"
    assert trace.messages[1].content == "x 😀"
    trace.to_json().encode()


def test_unknown_formats_versions_and_files(tmp_path: Path) -> None:
    traces, report = read(write_lines(tmp_path / "q.jsonl", [{"question": "?", "answer": "!"}]))
    assert (traces, report.skipped) == ([], Counter(unknown_format=1))
    newer = {"schema_version": "limbeck.trace/99", "id": "x", "messages": []}
    traces, report = read(write_lines(tmp_path / "n.jsonl", [newer]))
    assert (traces, report.skipped) == ([], Counter(unknown_version=1))
    with pytest.raises(TraceError, match=r"no trace file .*gone\.jsonl"):
        list(read_traces([tmp_path / "gone.jsonl"]))
    with pytest.raises(TraceError, match="unknown trace format 'yaml'"):
        list(read_traces([tmp_path / "n.jsonl"], format="yaml"))


def test_a_log_that_would_lose_its_calls_is_refused(tmp_path: Path) -> None:
    """Another maker's messages look like OpenAI's, but hold their calls and results inside the content."""
    talk = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "text", "text": "So."}, use("c1")]},
        {"role": "user", "content": [result("c1", "two files")]},
        {"role": "assistant", "content": "Done."},
    ]
    path = write_lines(tmp_path / "a.jsonl", [{"messages": talk}])
    told = (
        r"a\.jsonl holds 1 calls, 1 results and 21 characters; read as openai_chat, its traces hold 0 calls, 0 results "
        r"and 13 characters, and 0 calls, 0 results and 0 characters were skipped"
    )
    with pytest.raises(TraceError, match=told):
        read(path, format="openai_chat")


def test_an_unknown_role_costs_its_message_alone(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "Look."},
        {"role": "critic", "content": "Hm."},
        {"role": "assistant", "content": "Done."},
    ]
    (trace,), report = read(write_lines(tmp_path / "a.jsonl", [{"messages": talk}]))
    assert [message.role for message in trace.messages] == ["user", "assistant"]
    assert report.skipped == Counter(unknown_role=1)


class Greedy(OpenAIChatReader):
    """A reader that claims a log of another."""

    name = "greedy"

    def detect(self, data: Mapping[str, Any]) -> bool:
        return "messages" in data


def test_a_log_that_two_readers_recognise_is_refused_by_both_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    path = write_lines(tmp_path / "a.jsonl", [{"note": 1}, {"messages": talk}])
    monkeypatch.setitem(READERS, Greedy.name, Greedy())
    told = r"a\.jsonl:2 looks like openai_chat and greedy \(a record with keys messages\): say which with --format"
    with pytest.raises(TraceError, match=told):
        read(path)
    assert len(read(path, format="greedy")[0]) == 1


def test_every_record_of_every_format_is_recognised_by_one_reader() -> None:
    for log in LOGS:
        found = [{reader.name for reader in READERS.values() if reader.detect(record)} for record in log]
        assert all(len(names) == 1 for names in found)
        assert len(set.union(*found)) == 1


def test_an_unknown_format_is_shown_by_what_was_seen(tmp_path: Path) -> None:
    rows = [{"question": "?", "answer": "!"}, {"question": "?", "answer": "!"}, {str(i): i for i in range(12)}, {}]
    _, report = read(write_lines(tmp_path / "q.jsonl", rows))
    assert report.places == [
        "q.jsonl:1: unknown_format (records: 2 with keys answer, question; "
        "1 with keys 0, 1, 10, 11, 2, 3, 4, 5 and 4 more; 1 with keys none)"
    ]


def test_what_is_read_twice_counts_once(tmp_path: Path) -> None:
    log = ReadLog()
    traces = list(read_traces([EXAMPLES / "workshop.jsonl"] * 2, log=log))
    assert len({t.id for t in traces}) == len(traces) == 12
    assert log.skipped == Counter(duplicate_trace=12)


def test_ids_come_from_content_and_not_from_the_order_of_files(tmp_path: Path) -> None:
    def talk(text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "!"}]}

    one, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write_lines(one, [talk("x"), talk("y"), {"id": "n", **talk("x again")}])
    write_lines(other, [talk("y"), talk("z"), {"id": "n", **talk("w")}])
    log = ReadLog()
    there = {t.messages[0].content: t.id for t in read_traces([one, other], log=log)}
    back = {t.messages[0].content: t.id for t in read_traces([other, one])}
    assert set(there) == set(back) == {"x", "y", "z", "x again", "w"}
    assert all(there[text] == back[text] for text in ("x", "y", "z"))
    assert len(set(there.values())) == 5
    assert there["x again"] == "n"
    assert there["w"].startswith("n~")
    assert log.skipped == Counter(duplicate_trace=1)


def test_equal_rollouts_of_one_group_are_not_duplicates(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    row = {"prompt": talk[:1], "completion": talk[1:], "reward": 0, "example_id": 1}
    path = write_lines(tmp_path / "v.jsonl", [row, row])
    log = ReadLog()
    traces = list(read_traces([path, path], log=log))
    assert len({trace.id for trace in traces}) == len(traces) == 2
    assert log.skipped == Counter(duplicate_trace=2)


def test_a_resumed_copy_of_a_session_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    first = write_lines(tmp_path / "s.jsonl", PARALLEL)
    more = [event("u9", "a5", "user", "More."), event("a9", "u9", "assistant", "More done.")]
    resumed = [{**row, "sessionId": "resumed"} for row in [*PARALLEL, *more]]
    second = write_lines(tmp_path / "r.jsonl", resumed)
    log, stats = ReadLog(), IngestStats()
    traces = list(read_traces([first, second], log=log))
    for trace in traces:
        stats.add(trace)
    assert [(trace.id, trace.context_until, len(trace.messages)) for trace in traces] == [
        ("s", 0, 5),
        ("resumed", 5, 7),
    ]
    assert (stats.tool_calls, stats.turns) == (2, 7)
    assert log.skipped == Counter(read_before=3)


HOSTILE: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    10**40,
    "",
    "x",
    "\x00",
    [],
    [[]],
    {},
    {"a": []},
    [None, 1, "t", {}],
    {"": {}},
)


def damage(value: Any, chance: random.Random, rate: float) -> Any:
    """The same JSON value with some of its parts replaced, dropped or repeated."""
    if chance.random() < rate:
        return chance.choice(HOSTILE)
    if isinstance(value, dict):
        kept = {key: damage(item, chance, rate) for key, item in value.items() if chance.random() > rate / 2}
        return (
            {**kept, chance.choice(sorted(kept)): chance.choice(HOSTILE)} if kept and chance.random() < rate else kept
        )
    if isinstance(value, list):
        return [damage(item, chance, rate) for item in value for _ in range(2 if chance.random() < rate else 1)]
    return value


def logs_of_all_formats() -> list[list[dict[str, Any]]]:
    tools = [{"function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}, "required": ["x"]}}}]
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [openai_call("c", '{"x": 1}')],
            "logprobs": {"content": []},
        },
        {"role": "tool", "tool_call_id": "c", "content": "Error: no"},
        {"role": "assistant", "content": "!", "token_ids": [1], "weight": 1},
    ]
    pair = {
        "input": {"messages": talk[:1], "tools": tools},
        "preferred_output": talk[3:],
        "non_preferred_output": talk[3:],
    }
    step = {"thought": "t", "action": "ls", "observation": "Traceback (most recent call last)", "response": "ls"}
    history = [
        {"role": "system", "content": "s", "agent": "m"},
        {"role": "assistant", "action": "ls", "tool_calls": []},
    ]
    canonical = [json.loads(line) for line in (EXAMPLES / "workshop.jsonl").read_text().splitlines()[:2]]
    return [
        PARALLEL,
        [{"messages": talk, "tools": tools, "reward": 1, "task_id": 1, "info": {"reward": 1}}, pair],
        [{"steps": [step, step], "history": history, "info": {"exit_status": "x"}}],
        [{"instance_id": "i", "history": openhands_events(), "test_result": {"report": {"resolved": True}}}],
        openhands_events(),
        canonical,
    ]


LOGS = logs_of_all_formats()


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    seed=st.integers(0, 2**32),
    which=st.integers(0, len(LOGS) - 1),
    rate=st.sampled_from([0.02, 0.1, 0.3]),
    foreign=st.booleans(),
)
def test_no_damage_whatsoever_stops_a_reader(tmp_path: Path, seed: int, which: int, rate: float, foreign: bool) -> None:
    chance = random.Random(seed)
    path = write_lines(tmp_path / "h.jsonl", [damage(row, chance, rate) for row in LOGS[which]])
    for trace in read_traces([path], format=chance.choice(list(READERS)) if foreign else None, detectors="extended"):
        trace.to_messages()
        trace.to_json()
        for index in range(len(trace.messages)):
            trace.caller_of(index)


# -- kinds -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Exit code 2\n1 test failed: string to replace not found", "nonzero_exit"),
        ("Exit code 127\nbash: x: command not found", "command_not_found"),
        ("<tool_use_error>String to replace not found in file.</tool_use_error>", "no_match"),
        ("The user doesn't want to proceed with this tool use.", "declined"),
        ("<tool_use_error>Sibling tool call errored</tool_use_error>", "cancelled"),
        ("Error: Permission denied", "permission"),
        ("Error: gift card balance is not enough", "environment"),
        ("Parameter 'command' is expected to be one of ['a']", "bad_argument"),
        ("Parameter `old_str` is required for command", "missing_argument"),
    ],
)
def test_kinds_of_established_failures(text: str, kind: str) -> None:
    assert classify_error(text)[0] == kind


def test_schemas_name_the_fault_of_a_call() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "m": {"enum": ["a"]}},
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": {**schema, "required": ["n"]}}}]

    def kind(name: str, arguments: Any) -> str | None:
        problem = check_call(ToolCall(id="1", name=name, arguments=arguments), tools)
        return problem[0] if problem else None

    assert kind("f", {"n": 1, "m": "a"}) is None
    assert kind("g", {"n": 1}) == "unknown_tool"
    assert kind("f", {}) == "missing_argument"
    assert kind("f", {"n": 1, "z": 0}) == "extra_argument"
    assert kind("f", {"n": "1"}) == "bad_argument"
    assert kind("f", {"n": True}) == "bad_argument"
    assert kind("f", {"n": 1, "m": "b"}) == "bad_argument"
    assert kind("f", "{broken") == "invalid_json"


def test_a_prefix_is_a_prefix() -> None:
    assert detect_prefix("Error: x") is not None
    assert detect_prefix("No Error: x") is None
    assert detect_prefix("Errors are listed below") is None


# -- real logs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "errors", "results", "detectors"),
    [
        ("taubench_*.jsonl", 73, 1052, {"error_prefix": 73}),
        ("openhands_*.jsonl", 21, 103, {"exit_code": 19, "error_observation": 2}),
        ("swe_agent_*.jsonl", 21, 227, {"edit_rejected": 13, "traceback": 3, "timed_out": 3, "shell_message": 2}),
        ("claude_code_*.jsonl", 25, 513, {"flag": 25}),
    ],
)
def test_error_counts_of_real_logs(pattern: str, errors: int, results: int, detectors: dict[str, int]) -> None:
    stats = IngestStats()
    for trace in ingest(real_logs(pattern), IngestOptions(), stats):
        for index, message in trace.new_messages():
            if message.role == "tool" and message.tool_call_id is not None:
                caller = trace.caller_of(index)
                assert caller is not None
                assert trace.messages[caller[0]].tool_calls[caller[1]].id == message.tool_call_id
    summary = stats.summary()
    assert (summary["errors"], summary["tool_results"]) == (errors, results)
    by_detector: Counter[str] = Counter()
    for (_, detector), count in stats.errors.items():
        by_detector[detector] += count
    assert by_detector == detectors
    assert set(stats.log.skipped) <= {"event_recall", "no_steps"}


def test_real_claude_sessions_lose_no_call_and_no_text() -> None:
    for path in real_logs("claude_code_*.jsonl"):
        uses, texts = [], []
        for line in path.read_text().splitlines():
            row = json.loads(line)
            blocks = row["message"]["content"] if isinstance(row["message"]["content"], list) else []
            uses += [block["id"] for block in blocks if block["type"] == "tool_use"]
            texts += [block["text"] for block in blocks if block["type"] == "text" and row["type"] == "assistant"]
        traces, _ = read(path)
        messages = [message for trace in traces for _, message in trace.new_messages()]
        assert sorted(uses) == sorted(c.id for message in messages for c in message.tool_calls)
        said = "\n".join(message.content for message in messages if message.role == "assistant")
        assert all(text in said for text in texts if text.strip())


def test_canonical_traces_of_real_logs_survive_a_second_reading(tmp_path: Path) -> None:
    paths = [real_logs(pattern)[0] for pattern in ("openhands_*.jsonl", "swe_agent_*.jsonl")]
    first = list(read_traces(paths))
    again, report = read(write_lines(tmp_path / "c.jsonl", [t.to_json() for t in first]))
    assert again == first
    assert not report.skipped
    assert all(json.loads(t.to_json())["schema_version"] == SCHEMA_VERSION for t in first)
