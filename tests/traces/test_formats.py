"""Readers of published formats: each on a small log of its own, recognised by its structure and read without loss."""

from __future__ import annotations

import json
import random
import zipfile
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from limbeck.errors import TraceError
from limbeck.traces.files import find_files
from limbeck.traces.readers import READERS, ReadLog, detect_reader, read_traces
from limbeck.traces.readers.base import Record
from limbeck.traces.schema import Trace
from tests.traces.material import read, write_lines
from tests.traces.test_readers import damage

TOOL = {"name": "run", "description": "Runs.", "parameters": {"type": "object", "properties": {}}}
FUNCTION = {"type": "function", "function": TOOL}


def openai_call(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "run", "arguments": json.dumps(arguments)}}


ANTHROPIC = {
    "system": [{"type": "text", "text": "Be brief."}],
    "tools": [{"name": "run", "description": "Runs.", "input_schema": TOOL["parameters"]}],
    "messages": [
        {"role": "user", "content": "List it."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Where?"},
                {"type": "text", "text": "Looking."},
                {"type": "tool_use", "id": "c1", "name": "run", "input": {"cmd": "ls x"}},
                {"type": "tool_use", "id": "c2", "name": "run", "input": {"cmd": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "No such file", "is_error": True},
                {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "a.txt"}]},
                {"type": "text", "text": "Go on."},
            ],
        },
        {"role": "assistant", "content": "Done."},
    ],
}


def line(kind: str, **payload: Any) -> dict[str, Any]:
    return {"timestamp": "2026-01-01T00:00:00Z", "type": kind, "payload": payload}


def item_message(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


ITEMS = [
    item_message("user", "List it."),
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Where?"}], "encrypted_content": "x"},
    item_message("assistant", "Looking."),
    {"type": "function_call", "name": "run", "arguments": '{"cmd": "ls x"}', "call_id": "c1"},
    {"type": "function_call", "name": "run", "arguments": '{"cmd": "ls"}', "call_id": "c2"},
    {
        "type": "function_call_output",
        "call_id": "c1",
        "output": json.dumps({"output": "No such file", "metadata": {"exit_code": 2}}),
    },
    {"type": "function_call_output", "call_id": "c2", "output": "a.txt"},
    item_message("user", "Go on."),
    item_message("assistant", "Done."),
]

CODEX = [
    line("session_meta", id="s-1", cwd="/x", cli_version="0.65.0", base_instructions={"text": "Be brief."}),
    line("turn_context", model="m"),
    *(line("response_item", **item) for item in ITEMS[:5]),
    line("event_msg", type="agent_message", message="Looking."),
    *(line("response_item", **item) for item in ITEMS[5:]),
]

RESPONSES = {
    "instructions": "Be brief.",
    "input": ITEMS[:8],
    "output": ITEMS[8:],
    "tools": [{"type": "function", **TOOL}],
}


def gemini_result(**response: Any) -> list[dict[str, Any]]:
    return [{"functionResponse": {"id": "x", "name": "run", "response": response}}]


GEMINI = {
    "sessionId": "g-1",
    "projectHash": "ab",
    "messages": [
        {"id": "0", "type": "info", "content": "Update available."},
        {"id": "1", "type": "user", "content": "List it."},
        {
            "id": "2",
            "type": "gemini",
            "content": "Looking.",
            "thoughts": [{"subject": "Where?", "description": ""}],
            "toolCalls": [
                {
                    "id": "c1",
                    "name": "run",
                    "args": {"cmd": "ls x"},
                    "status": "error",
                    "result": gemini_result(error="No such file"),
                },
                {
                    "id": "c2",
                    "name": "run",
                    "args": {"cmd": "ls"},
                    "status": "success",
                    "result": gemini_result(output="a.txt"),
                },
            ],
        },
        {"id": "3", "type": "user", "content": [{"text": "Go on."}]},
        {"id": "4", "type": "gemini", "content": "Done."},
    ],
}

GEMINI_CONTENTS = [
    {"role": "user", "parts": [{"text": "List it."}]},
    {
        "role": "model",
        "parts": [
            {"text": "Where?", "thought": True},
            {"text": "Looking."},
            {"functionCall": {"id": "c1", "name": "run", "args": {"cmd": "ls x"}}},
            {"functionCall": {"id": "c2", "name": "run", "args": {"cmd": "ls"}}},
        ],
    },
    {
        "role": "user",
        "parts": [
            {"functionResponse": {"id": "c1", "name": "run", "response": {"error": "No such file"}}},
            {"functionResponse": {"id": "c2", "name": "run", "response": {"output": "a.txt"}}},
        ],
    },
    {"role": "user", "parts": [{"text": "Go on."}]},
    {"role": "model", "parts": [{"text": "Done."}]},
]

MINI = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "List it."},
    {"role": "assistant", "content": "Looking.\n```bash\nls x\n```"},
    {"role": "user", "content": "<returncode>2</returncode>\n<output>\nNo such file</output>"},
    {"role": "assistant", "content": "Again.\n```bash\nls\n```"},
    {"role": "user", "content": "<returncode>0</returncode>\n<output>\na.txt</output>"},
    {"role": "assistant", "content": "Done."},
]

ATIF = {
    "schema_version": "ATIF-v1.4",
    "session_id": "h-1",
    "agent": {"name": "a", "version": "1", "model_name": "m", "tool_definitions": [FUNCTION]},
    "steps": [
        {"step_id": 1, "source": "system", "message": "Be brief."},
        {"step_id": 2, "source": "user", "message": "List it."},
        {
            "step_id": 3,
            "source": "agent",
            "message": "Looking.",
            "reasoning_content": "Where?",
            "tool_calls": [
                {"tool_call_id": "c1", "function_name": "run", "arguments": {"cmd": "ls x"}},
                {"tool_call_id": "c2", "function_name": "run", "arguments": {"cmd": "ls"}},
            ],
            "observation": {
                "results": [
                    {"source_call_id": "c1", "content": "No such file", "extra": {"exit_code": 2}},
                    {"source_call_id": "c2", "content": "a.txt"},
                ]
            },
            "metrics": {"completion_token_ids": [5, 6], "logprobs": [-0.5, -0.25]},
        },
        {"step_id": 4, "source": "user", "message": "Go on."},
        {
            "step_id": 5,
            "source": "agent",
            "message": "Done.",
            "metrics": {"completion_token_ids": [7], "logprobs": [-1]},
        },
    ],
    "final_metrics": {"total_steps": 5},
}


def inspect_call(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "function": "run", "arguments": arguments, "type": "function"}


SAMPLE = {
    "id": 7,
    "epoch": 1,
    "input": "List it.",
    "target": "a.txt",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "attachment://ab12", "source": "input"},
        {
            "role": "assistant",
            "content": [{"type": "reasoning", "reasoning": "Where?"}, {"type": "text", "text": "Looking."}],
            "tool_calls": [inspect_call("c1", cmd="ls x"), inspect_call("c2", cmd="ls")],
        },
        {
            "role": "tool",
            "content": "",
            "tool_call_id": "c1",
            "function": "run",
            "error": {"type": "file_not_found", "message": "No such file"},
        },
        {"role": "tool", "content": "a.txt", "tool_call_id": "c2", "function": "run"},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "Done."},
    ],
    "attachments": {"ab12": "List it."},
    "scores": {"match": {"value": "C", "answer": "a.txt"}},
    "events": [{"event": "model", "tools": [TOOL]}],
}
INSPECT = {"version": 2, "status": "success", "eval": {"task": "listing", "model": "m"}, "samples": [SAMPLE]}


def action(
    event_id: str, call_id: str, thought: str = "", reasoning: str | None = None, **given: Any
) -> dict[str, Any]:
    return {
        "kind": "ActionEvent",
        "id": event_id,
        "source": "agent",
        "thought": [{"type": "text", "text": thought}] if thought else [],
        "reasoning_content": reasoning,
        "action": {"kind": "TerminalAction", **given},
        "tool_name": "run",
        "tool_call_id": call_id,
        "tool_call": {"id": call_id, "name": "run", "arguments": json.dumps(given)},
        "llm_response_id": "r1",
    }


def observed(call_id: str, text: str, code: int) -> dict[str, Any]:
    seen = {"kind": "TerminalObservation", "content": [{"type": "text", "text": text}], "exit_code": code}
    return {"kind": "ObservationEvent", "source": "environment", "tool_call_id": call_id, "observation": seen}


def event_message(role: str, text: str) -> dict[str, Any]:
    source = "user" if role == "user" else "agent"
    return {
        "kind": "MessageEvent",
        "source": source,
        "llm_message": {"role": role, "content": [{"type": "text", "text": text}]},
    }


OPENHANDS_V1 = [
    {
        "kind": "SystemPromptEvent",
        "source": "agent",
        "system_prompt": {"type": "text", "text": "Be brief."},
        "tools": [FUNCTION],
    },
    event_message("user", "List it."),
    action("a", "c1", "Looking.", "Where?", cmd="ls x"),
    action("b", "c2", cmd="ls"),
    observed("c1", "No such file", 2),
    observed("c2", "a.txt", 0),
    {"kind": "ConversationStateUpdateEvent", "source": "environment", "key": "stats", "value": {}},
    event_message("user", "Go on."),
    event_message("assistant", "Done."),
]

TALK = [
    {"role": "user", "content": "List it."},
    {
        "role": "assistant",
        "content": "Looking.",
        "reasoning_content": "Where?",
        "tool_calls": [openai_call("c1", cmd="ls x"), openai_call("c2", cmd="ls")],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "Error: No such file"},
    {"role": "tool", "tool_call_id": "c2", "content": "a.txt"},
    {"role": "user", "content": "Go on."},
    {"role": "assistant", "content": "Done."},
]


def with_text_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [json.dumps(call) for call in calls]} if calls else message


VERIFIERS = {
    "example_id": 4,
    "task": "listing",
    "prompt": [{"role": "system", "content": "Be brief."}, TALK[0]],
    "completion": [with_text_calls(message) for message in TALK[1:]],
    "reward": 0.5,
    "info": {"oai_tools": [FUNCTION]},
    "trajectory": [
        {"tokens": {"completion_ids": [5, 6], "completion_logprobs": [-0.5, -0.25]}},
        {"tokens": {"completion_ids": [7], "completion_logprobs": [-1.0]}},
    ],
}


def tau2_call(call_id: str, requestor: str = "assistant", **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "name": "run", "arguments": arguments, "requestor": requestor}


TAU2 = {
    "info": {"environment_info": {"domain_name": "d", "policy": "Be brief."}},
    "tasks": [{"id": "t"}],
    "simulations": [
        {
            "id": "sim",
            "task_id": "t",
            "trial": 0,
            "reward_info": {"reward": 1.0},
            "messages": [
                {"role": "user", "content": "List it.", "tool_calls": None},
                {
                    "role": "assistant",
                    "content": "Looking.",
                    "tool_calls": [tau2_call("c1", cmd="ls x"), tau2_call("c2", cmd="ls")],
                },
                {"role": "tool", "id": "c1", "content": "Error: No such file", "error": True, "requestor": "assistant"},
                {"role": "tool", "id": "c2", "content": "a.txt", "error": False, "requestor": "assistant"},
                {"role": "user", "content": None, "tool_calls": [tau2_call("u1", "user", cmd="look")]},
                {"role": "tool", "id": "u1", "content": "mine", "error": False, "requestor": "user"},
                {"role": "user", "content": "Go on."},
                {"role": "assistant", "content": "Done."},
            ],
        }
    ],
}

SPOKEN = [
    {"role": "user", "parts": [{"type": "text", "content": "List it."}]},
    {
        "role": "assistant",
        "parts": [
            {"type": "reasoning", "content": "Where?"},
            {"type": "text", "content": "Looking."},
            {"type": "tool_call", "id": "c1", "name": "run", "arguments": {"cmd": "ls x"}},
            {"type": "tool_call", "id": "c2", "name": "run", "arguments": {"cmd": "ls"}},
        ],
    },
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "Error: No such file"}]},
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c2", "response": "a.txt"}]},
    {"role": "user", "parts": [{"type": "text", "content": "Go on."}]},
    {"role": "assistant", "parts": [{"type": "text", "content": "Done."}], "finish_reason": "stop"},
]


def span(count: int) -> dict[str, Any]:
    """A request that carries the first messages of the conversation, and its answer."""
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be brief."}]),
        "gen_ai.input.messages": json.dumps(SPOKEN[:count]),
        "gen_ai.output.messages": json.dumps(SPOKEN[count : count + 1]),
        "gen_ai.tool.definitions": json.dumps([FUNCTION]),
    }
    pairs = [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()]
    return {"name": f"chat {count}", "traceId": "t-1", "spanId": str(count), "attributes": pairs}


OTEL = {"resourceSpans": [{"scopeSpans": [{"spans": [span(1), {"name": "execute_tool"}, span(5)]}]}]}

SHAREGPT = {
    "id": "g",
    "system": "Be brief.",
    "tools": json.dumps([TOOL]),
    "conversations": [
        {"from": "human", "value": "List it."},
        {"from": "gpt", "value": "Looking."},
        {
            "from": "function_call",
            "value": json.dumps(
                [{"name": "run", "arguments": {"cmd": "ls x"}}, {"name": "run", "arguments": {"cmd": "ls"}}]
            ),
        },
        {"from": "observation", "value": "Error: No such file"},
        {"from": "observation", "value": "a.txt"},
        {"from": "human", "value": "Go on."},
        {"from": "gpt", "value": "Done."},
    ],
}


def parts(role: str, *typed: tuple[str, str]) -> dict[str, Any]:
    return {"role": role, "content": [{"type": kind, "value": value} for kind, value in typed]}


LLAMAFACTORY = {
    "tools": json.dumps([TOOL]),
    "messages": [
        parts("system", ("text", "Be brief.")),
        parts("user", ("text", "List it.")),
        parts(
            "assistant",
            ("reasoning", "Where?"),
            ("text", "Looking."),
            ("tool_call", json.dumps({"name": "run", "arguments": {"cmd": "ls x"}})),
            ("tool_call", json.dumps({"name": "run", "arguments": {"cmd": "ls"}})),
        ),
        parts("tool", ("text", "Error: No such file")),
        parts("tool", ("text", "a.txt")),
        parts("user", ("text", "Go on.")),
        parts("assistant", ("text", "Done.")),
    ],
}

LOGS: dict[str, list[Any]] = {
    "anthropic": [ANTHROPIC],
    "atif": [ATIF],
    "codex": CODEX,
    "gemini": [GEMINI],
    "inspect": [INSPECT],
    "llamafactory": [LLAMAFACTORY],
    "mini_swe_agent": [
        {"messages": MINI, "info": {"exit_status": "Submitted"}, "trajectory_format": "mini-swe-agent-1"}
    ],
    "openai_responses": [RESPONSES],
    "openhands_v1": OPENHANDS_V1,
    "otel": [OTEL],
    "sharegpt": [SHAREGPT],
    "tau2": [TAU2],
    "verifiers": [VERIFIERS],
}
PARALLEL = ["user", "assistant", "tool", "tool", "user", "assistant"]


def one(path: Path, **options: Any) -> tuple[Trace, Counter[str]]:
    (trace,), log = read(path, **options)
    return trace, log.skipped


@pytest.mark.parametrize("name", sorted(set(LOGS) - {"mini_swe_agent"}))
def test_calls_results_and_text_of_every_format(tmp_path: Path, name: str) -> None:
    trace, skipped = one(write_lines(tmp_path / "log.jsonl", LOGS[name]))
    assert trace.origin is not None
    assert trace.origin.format == name
    messages = trace.messages
    roles = [message.role for message in messages]
    if roles[0] == "system":
        assert messages[0].content == "Be brief."
        messages = messages[1:]
    assert [message.role for message in messages] == PARALLEL
    assert [messages[0].content, messages[4].content, messages[5].content] == ["List it.", "Go on.", "Done."]
    said = messages[1]
    assert said.content == "Looking."
    assert [(call.name, call.arguments) for call in said.tool_calls] == [
        ("run", {"cmd": "ls x"}),
        ("run", {"cmd": "ls"}),
    ]
    assert said.reasoning == (None if name in ("sharegpt", "tau2") else "Where?")
    assert [message.tool_call_id for message in messages[2:4]] == [call.id for call in said.tool_calls]
    assert [message.is_error for message in messages[2:4]] == [True, False]
    assert "No such file" in messages[2].content
    assert (messages[2].error_kind, messages[3].content) == ("file_not_found", "a.txt")
    assert all(reason.startswith("event_") or reason in ("continued_span", "tool_of_the_user") for reason in skipped)
    assert trace.tools == ([] if name in ("codex", "gemini", "tau2") else [FUNCTION])


def test_tokens_and_log_probs_feed_the_policy_channel(tmp_path: Path) -> None:
    for name in ("atif", "verifiers"):
        trace, _ = one(write_lines(tmp_path / f"{name}.jsonl", LOGS[name]))
        answers = [message for message in trace.messages if message.role == "assistant"]
        assert [(message.sampled_ids, message.logprobs) for message in answers] == [
            ([5, 6], [-0.5, -0.25]),
            ([7], [-1.0]),
        ]
    broken = json.loads(json.dumps(ATIF))
    broken["steps"][2]["metrics"]["logprobs"] = [-0.5]
    trace, skipped = one(write_lines(tmp_path / "b.jsonl", [broken]))
    assert skipped == Counter(logprobs_of_other_tokens=1)
    assert trace.messages[2].logprobs is None


def test_rewards_and_groups(tmp_path: Path) -> None:
    found = {name: one(write_lines(tmp_path / "log.jsonl", LOGS[name]))[0] for name in ("inspect", "tau2", "verifiers")}
    assert {name: trace.final_reward for name, trace in found.items()} == {
        "inspect": 1.0,
        "tau2": 1.0,
        "verifiers": 0.5,
    }
    assert [trace.group_id for trace in found.values()] == ["listing/7", "log/t", "listing/4"]


def test_commands_written_as_text(tmp_path: Path) -> None:
    for form in (LOGS["mini_swe_agent"][0], MINI):
        path = tmp_path / "mini.json"
        path.write_text(json.dumps(form, indent=1))
        trace, skipped = one(path)
        assert [m.role for m in trace.messages] == [
            "system",
            "user",
            "assistant",
            "tool",
            "assistant",
            "tool",
            "assistant",
        ]
        assert [call.arguments for m in trace.messages for call in m.tool_calls] == [
            {"command": "ls x"},
            {"command": "ls"},
        ]
        assert all(call.in_content for m in trace.messages for call in m.tool_calls)
        assert [(m.is_error, m.error_meta) for m in trace.messages if m.role == "tool"] == [
            (True, {"exit_code": 2}),
            (False, {}),
        ]
        assert not skipped


def test_commands_of_newer_versions_are_calls(tmp_path: Path) -> None:
    rows = [
        *MINI[:2],
        {**TALK[1], "extra": {"actions": []}},
        {"role": "tool", "tool_call_id": "c1", "content": "<returncode>2</returncode>", "extra": {"returncode": 2}},
        {"role": "tool", "tool_call_id": "c2", "content": "a.txt", "extra": {"returncode": 0}},
        {"role": "assistant", "content": "Done."},
        {"role": "exit", "content": "submitted"},
    ]
    trace, skipped = one(
        write_lines(tmp_path / "m.jsonl", [{"messages": rows, "trajectory_format": "mini-swe-agent-1.1"}])
    )
    assert [m.role for m in trace.messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert trace.messages[2].reasoning == "Where?"
    assert [m.is_error for m in trace.messages[3:5]] == [True, False]
    assert skipped == Counter(event_exit=1)


def test_bare_lists_of_messages_are_one_trace_each(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    for messages, name in ((TALK, "openai_chat"), (ANTHROPIC["messages"], "anthropic"), (GEMINI_CONTENTS, "gemini")):
        path.write_text(json.dumps(messages, indent=1))
        trace, skipped = one(path)
        assert trace.origin is not None
        assert (trace.origin.format, [message.role for message in trace.messages]) == (name, PARALLEL)
        assert not skipped
    traces, _ = read(write_lines(tmp_path / "lists.jsonl", [TALK, TALK[:2]]))
    assert [len(trace.messages) for trace in traces] == [6, 2]


def test_requests_with_their_responses(tmp_path: Path) -> None:
    last = {"role": "assistant", "content": [{"type": "text", "text": "Done."}], "stop_reason": "end_turn"}
    request = {**ANTHROPIC, "messages": ANTHROPIC["messages"][:-1]}
    trace, _ = one(write_lines(tmp_path / "a.jsonl", [{"request": request, "response": last}]))
    assert [m.content for m in trace.messages][-2:] == ["Go on.", "Done."]
    choices = [{"index": 0, "message": TALK[5], "finish_reason": "stop"}]
    logged = {"request": {"messages": TALK[:5], "tools": [FUNCTION]}, "response": {"choices": choices}}
    trace, _ = one(write_lines(tmp_path / "o.jsonl", [logged]))
    assert ([m.role for m in trace.messages], trace.tools) == (PARALLEL, [FUNCTION])
    response = {"object": "response", "id": "resp_1", "output": ITEMS[8:]}
    logged = {"request": {"input": ITEMS[:8], "instructions": "Be brief."}, "response": response}
    trace, _ = one(write_lines(tmp_path / "r.jsonl", [logged]))
    assert (trace.id, trace.messages[-1].content, trace.messages[0].role) == ("resp_1", "Done.", "system")


def test_older_codex_sessions_exit_codes_of_events_and_compactions(tmp_path: Path) -> None:
    head = {"id": "s-0", "timestamp": "2025-01-01", "instructions": "Be brief."}
    trace, _ = one(write_lines(tmp_path / "old.jsonl", [head, {"record_type": "state"}, *ITEMS]))
    assert (trace.id, len(trace.messages)) == ("s-0", 7)
    rows = [
        *CODEX[:7],
        line("event_msg", type="exec_command_end", call_id="c2", exit_code=3),
        *CODEX[8:10],
        line("compacted", message="So far: listed."),
        *CODEX[10:],
    ]
    (first, second), log = read(write_lines(tmp_path / "new.jsonl", rows))
    assert [m.is_error for m in first.messages if m.role == "tool"] == [True, True]
    assert first.messages[-1].error_meta == {"exit_code": 3}
    shown = "Chunk ID: 1\nWall time: 0.1 seconds\nProcess exited with code 4\nOutput:\nExit code: 0"
    ended = [*ITEMS[:5], {**ITEMS[5], "output": shown}, *ITEMS[6:]]
    trace, _ = one(write_lines(tmp_path / "ended.jsonl", [head, *ended]))
    assert trace.messages[3].error_meta == {"exit_code": 4}
    assert (second.id, second.messages[0].content) == ("s-1#2", "So far: listed.")
    assert log.skipped_totals == type(log.skipped_totals)()


def test_a_session_with_a_message_per_line(tmp_path: Path) -> None:
    head = {key: GEMINI[key] for key in ("sessionId", "projectHash")}
    trace, _ = one(write_lines(tmp_path / "g.jsonl", [head, *GEMINI["messages"][1:]]))
    assert (trace.id, [m.role for m in trace.messages]) == ("g-1", PARALLEL)


def test_a_folder_with_a_file_per_event_is_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "conv-1" / "events"
    folder.mkdir(parents=True)
    stored = {"kind": "TerminalTool", "title": "run", "description": "Runs.", "action_type": "TerminalAction"}
    newer = {"kind": "HookExecutionEvent", "source": "hook"}
    events = [{**OPENHANDS_V1[0], "tools": [stored]}, *OPENHANDS_V1[1:4], newer, *OPENHANDS_V1[4:]]
    for number, row in enumerate(events):
        (folder / f"event-{number:05d}-abc.json").write_text(json.dumps(row))
    log = ReadLog()
    (trace,) = read_traces(find_files([tmp_path]), log=log)
    assert [message.role for message in trace.messages[1:]] == PARALLEL
    assert trace.tools == [{"type": "function", "function": {"name": "run", "description": "Runs."}}]
    assert log.skipped == Counter(event_ConversationStateUpdateEvent=1, unknown_event=1)
    assert trace.origin is not None
    assert trace.origin.file == "conv-1"


def test_archives_of_samples(tmp_path: Path) -> None:
    path = tmp_path / "log.eval"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", json.dumps(INSPECT))
        archive.writestr("samples/7_epoch_1.json", json.dumps(SAMPLE))
        archive.writestr("samples/8_epoch_1.json", "{broken")
    trace, skipped = one(path)
    assert (trace.final_reward, len(trace.messages), skipped) == (1.0, 7, Counter(malformed_line=1))
    path.write_bytes(b"no archive")
    with pytest.raises(TraceError, match=r"log\.eval.*unpacked"):
        read(path)


def test_older_span_attributes(tmp_path: Path) -> None:
    attributes = {
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": "List it.",
        "gen_ai.prompt.1.role": "assistant",
        "gen_ai.prompt.1.tool_calls.0.id": "c1",
        "gen_ai.prompt.1.tool_calls.0.name": "run",
        "gen_ai.prompt.1.tool_calls.0.arguments": '{"cmd": "ls"}',
        "gen_ai.prompt.2.role": "tool",
        "gen_ai.prompt.2.tool_call_id": "c1",
        "gen_ai.prompt.2.content": "a.txt",
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": "Done.",
    }
    row = {"name": "chat", "context": {"trace_id": "0x1", "span_id": "0x2"}, "attributes": attributes}
    trace, _ = one(write_lines(tmp_path / "s.jsonl", [row]))
    assert [m.role for m in trace.messages] == ["user", "assistant", "tool", "assistant"]
    assert trace.messages[1].tool_calls[0].arguments == {"cmd": "ls"}


def test_spans_that_another_one_continues_are_not_read_twice(tmp_path: Path) -> None:
    trace, skipped = one(write_lines(tmp_path / "s.jsonl", [span(1), span(5)]))
    assert (len(trace.messages), skipped) == (7, Counter(continued_span=1))
    other = json.loads(json.dumps(span(1)).replace("Looking.", "Guessing."))
    traces, _ = read(write_lines(tmp_path / "s.jsonl", [other, span(5)]))
    assert [len(trace.messages) for trace in traces] == [3, 7]


def test_calls_inside_the_text_of_an_answer(tmp_path: Path) -> None:
    written = 'So.\n<tool_call>\n{"name": "run", "arguments": {"cmd": "ls"}}\n</tool_call>'
    turns = [
        ("human", "List it."),
        ("gpt", written),
        ("tool", "<tool_response>a.txt</tool_response>"),
        ("gpt", "Done."),
    ]
    row = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    trace, _ = one(write_lines(tmp_path / "h.jsonl", [row]))
    (call,) = trace.messages[1].tool_calls
    assert (call.name, call.in_content, trace.messages[1].content) == ("run", True, written)
    assert trace.messages[2].tool_call_id == call.id


def test_every_log_is_recognised_by_one_reader_alone() -> None:
    for name, rows in LOGS.items():
        for row in rows:
            reader = detect_reader([Record(1, row)])
            assert reader is None or reader.name == name


def test_results_without_calls_and_calls_without_names_are_counted(tmp_path: Path) -> None:
    odd = json.loads(json.dumps(ANTHROPIC))
    odd["messages"][1]["content"][2]["name"] = None
    odd["messages"].insert(1, {"role": "critic", "content": "Hm."})
    trace, skipped = one(write_lines(tmp_path / "a.jsonl", [odd]))
    assert skipped == Counter(unusable_call=1, result_without_call=1, unknown_role=1)
    assert [m.role for m in trace.messages] == ["system", "user", "assistant", "tool", "user", "assistant"]


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(sorted(LOGS)), rate=st.sampled_from([0.02, 0.1, 0.3]))
def test_damage_is_counted_or_refused_in_one_sentence(tmp_path: Path, seed: int, name: str, rate: float) -> None:
    chance = random.Random(seed)
    path = write_lines(tmp_path / "h.jsonl", [damage(row, chance, rate) for row in LOGS[name]])
    for format in (name, chance.choice(list(READERS)), None):
        # a foreign format may refuse what it would lose; its own has to count all of it
        with nullcontext() if format == name else suppress(TraceError):
            for trace in read_traces([path], format=format, detectors="extended"):
                trace.to_messages()
                trace.to_json()


def test_rollouts_of_nemo_gym_keep_their_prompt(tmp_path: Path) -> None:
    asked = {key: RESPONSES[key] for key in ("instructions", "input", "tools")}
    row = {
        "responses_create_params": asked,
        "response": {"object": "response", "output": RESPONSES["output"]},
        "reward": 0.5,
    }
    plain, _ = one(write_lines(tmp_path / "plain.jsonl", [RESPONSES]))
    trace, skipped = one(write_lines(tmp_path / "log.jsonl", [row]))
    assert trace.messages == plain.messages
    assert trace.tools == plain.tools
    assert trace.final_reward == 0.5
    assert not skipped


def test_steps_that_repeat_what_was_said_before_are_one_conversation(tmp_path: Path) -> None:
    whole = [*RESPONSES["input"], *RESPONSES["output"]]
    other = [*whole[:1], {"type": "message", "role": "assistant", "content": "No."}]
    row = {
        "responses_create_params": {"input": [], "instructions": "Be brief."},
        "response": {"object": "response", "output": [whole[:4], whole, other]},
    }
    trace, skipped = one(write_lines(tmp_path / "log.jsonl", [row]))
    assert trace.messages == one(write_lines(tmp_path / "plain.jsonl", [RESPONSES]))[0].messages
    assert skipped == Counter(other_transition=1)


def test_a_trajectory_of_actions_that_are_objects_is_not_of_swe_agent(tmp_path: Path) -> None:
    row = {**RESPONSES, "trajectory": [{"action": {"name": "noop"}, "observation": {"cell": 1}}]}
    assert one(write_lines(tmp_path / "log.jsonl", [row]))[0].origin.format == "openai_responses"  # type: ignore[union-attr]


def test_empty_text_is_text_and_text_under_another_key_is_not_lost_in_silence(tmp_path: Path) -> None:
    empty = {"role": "assistant", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "Hm."}]}
    trace, skipped = one(write_lines(tmp_path / "log.jsonl", [{"messages": [{"role": "user", "content": "a"}, empty]}]))
    assert trace.messages[1].content == "Hm."
    assert not skipped
    with pytest.raises(TraceError, match=r"other\.jsonl.*openai_chat.*--format"):
        one(write_lines(tmp_path / "other.jsonl", [LLAMAFACTORY]), format="openai_chat")


def test_an_http_exchange_is_read_with_its_answer(tmp_path: Path) -> None:
    body = {**ANTHROPIC, "messages": ANTHROPIC["messages"][:-1]}
    row = {
        "request": {"method": "POST", "body": body},
        "response": {"status_code": 200, "body": ANTHROPIC["messages"][-1]},
    }
    trace, skipped = one(write_lines(tmp_path / "log.jsonl", [row]))
    assert trace.messages == one(write_lines(tmp_path / "plain.jsonl", [ANTHROPIC]))[0].messages
    assert not skipped


def test_a_prompt_that_the_completion_repeats_is_read_once(tmp_path: Path) -> None:
    row = {**VERIFIERS, "completion": [*VERIFIERS["prompt"], *VERIFIERS["completion"]]}
    trace, skipped = one(write_lines(tmp_path / "log.jsonl", [row]))
    assert trace.messages == one(write_lines(tmp_path / "plain.jsonl", [VERIFIERS]))[0].messages
    assert not skipped


def test_what_codex_prints_is_read(tmp_path: Path) -> None:
    command = {"id": "i1", "type": "command_execution", "command": "ls x"}
    rows = [
        {"type": "thread.started", "thread_id": "t-1"},
        {"type": "turn.started"},
        {"type": "item.completed", "item": {"id": "i0", "type": "reasoning", "text": "Where?"}},
        {"type": "item.started", "item": {**command, "aggregated_output": "", "status": "in_progress"}},
        {
            "type": "item.completed",
            "item": {**command, "aggregated_output": "No such file", "exit_code": 2, "status": "failed"},
        },
        {"type": "item.completed", "item": {"id": "i2", "type": "agent_message", "text": "Done."}},
        {"type": "item.completed", "item": {"id": "i3", "type": "todo_list", "items": []}},
        {"type": "turn.completed", "usage": {"input_tokens": 1}},
    ]
    trace, skipped = one(write_lines(tmp_path / "log.jsonl", rows))
    assert trace.id == "t-1"
    assert [m.role for m in trace.messages] == ["assistant", "tool", "assistant"]
    assert trace.messages[0].reasoning == "Where?"
    assert trace.messages[0].tool_calls[0].arguments == {"command": "ls x"}
    assert (trace.messages[1].is_error, trace.messages[1].content) == (True, "No such file")
    assert trace.messages[2].content == "Done."
    assert skipped["unknown_item"] == 1


def test_a_command_that_failed_in_the_sandbox_of_codex(tmp_path: Path) -> None:
    said = "failed in sandbox MacosSeatbelt with execution error: sandbox denied exec error, exit code: 2, stderr: x"
    rows = [
        line("session_meta", id="s-1"),
        line("response_item", type="function_call", name="shell", arguments="{}", call_id="c1"),
        line("response_item", type="function_call_output", call_id="c1", output=said),
    ]
    trace, _ = one(write_lines(tmp_path / "log.jsonl", rows))
    assert trace.messages[1].is_error
    assert trace.messages[1].error_meta == {"exit_code": 2}


def test_requests_that_repeat_the_conversation_so_far_train_nothing_twice(tmp_path: Path) -> None:
    messages = ANTHROPIC["messages"]
    first = {"request": {**ANTHROPIC, "messages": messages[:1]}, "response": messages[1]}
    second = {"request": {**ANTHROPIC, "messages": messages[:-1]}, "response": messages[-1]}
    (short, long), log = read(write_lines(tmp_path / "log.jsonl", [first, second]))
    assert [m.role for m in short.messages] == ["system", "user", "assistant"]
    assert long.context_until == len(short.messages)
    assert long.messages[: long.context_until] == short.messages
    assert log.skipped == Counter(read_before=3)
    # another conversation that begins alike is not a continuation
    other = {"request": {**ANTHROPIC, "messages": messages[:1]}, "response": {"role": "assistant", "content": "No."}}
    traces, _ = read(write_lines(tmp_path / "log.jsonl", [first, other]))
    assert [trace.context_until for trace in traces] == [0, 0]
