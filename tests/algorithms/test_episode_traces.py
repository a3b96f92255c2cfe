"""Episodes as traces: what was played, failed calls marked by an explicit sign, nothing twice in the run folder."""

# ruff: noqa: F811 (fixtures of another file)

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.algorithms.dispatch import resolve_and_run
from limbeck.algorithms.episode_traces import trace_of
from limbeck.algorithms.rollouts import StepData
from limbeck.data.continuations import ReadAnswer
from limbeck.environments.functions import FunctionTools
from limbeck.models.generate import Sample
from limbeck.traces.failed_calls import FailedCallFinder
from limbeck.traces.files import IngestOptions, IngestStats, ingest
from limbeck.traces.hints import LayeredHints, RawErrorHints, TemplateHints
from limbeck.traces.readers import read_traces
from limbeck.traces.schema import Trace
from limbeck.utils.logger import Logger
from tests.algorithms.test_episodes import (  # noqa: F401
    TOOLS,
    Play,
    collator,
    count,
    data,
    folder,
    play,
    scripted,
    settings,
    up_by_one,
    written,
)
from tests.patience import WAIT_SECONDS


def stored(path: Path) -> list[Trace]:
    return [Trace.model_validate_json(line) for line in path.read_text(encoding="utf-8").splitlines()]


def asked(**more: Any) -> list[Any]:
    return [{"idx": 7, "messages": [{"role": "user", "content": "What is 2 + 3?"}], **more}]


def by_turn(*answers: str) -> Any:
    """A script of one episode, whose answers follow each other."""
    left = iter(answers)
    return lambda text, seed: next(left)


def test_a_trace_has_what_was_played(play: Play) -> None:
    episodes = play(up_by_one, n=2)
    batch = data(2, 1)
    (first, again, *others) = episodes.write(batch, 4).traces
    trace = Trace.model_validate(first)
    assert [m.role for m in trace.messages] == ["user", *["assistant", "tool"] * 2]
    assert [(c.name, c.arguments) for m in trace.messages for c in m.tool_calls] == [("raise", {"by": 1})] * 2
    assert [m.content for m in trace.messages if m.role == "tool"] == ["1", "2"]
    assert all(trace.caller_of(i) for i, m in enumerate(trace.messages) if m.role == "tool")
    assert trace.final_reward == 1.0
    assert trace.meta == {"step": 5, "record": trace.meta["record"], "copy": 0, "ending": "done"}
    assert trace.tools[0]["function"]["name"] == "raise"
    assert not any(m.is_error for m in trace.messages)
    vocab = episodes.rows.vocab
    for message in trace.messages:
        if message.role == "assistant":
            assert message.sampled_ids is not None
            assert vocab.join(message.sampled_ids).decode() == count(1)
            assert message.logprobs == [-1.0] * len(message.sampled_ids)
    # one of each record before a second of any, and no id twice
    assert again["meta"]["record"] != trace.meta["record"]
    assert [t["meta"]["copy"] for t in others] == [1, 1]
    assert len({t["id"] for t in (again, *others)} | {trace.id}) == 4
    groups = Counter(t["group_id"] for t in (again, *others, json.loads(trace.to_json())))
    assert set(groups.values()) == {2}


def test_failed_calls_are_marked_and_found_by_what_reads_traces(play: Play, tmp_path: Path) -> None:
    environment = FunctionTools(kind="functions", source=TOOLS, call_seconds=WAIT_SECONDS, max_seconds=WAIT_SECONDS)
    script = by_turn(
        written("add", a=1, b=2),
        '<tool_call>\n{"name": "fail", "arguments": {"why": "no such file"}}\n</tool_call>',
        written("subtract", a=1, b=2),
        "<tool_call>\n{broken\n</tool_call>",
        written("add", a=2, b=3),
        "It is 5. error: not at all",
    )
    episodes = play(script, environment=environment, rows=collator(size=4000))
    traces = episodes.write(StepData([], None, Counter(), asked()), 0).traces
    (trace,) = map(Trace.model_validate, traces)
    results = [m for m in trace.messages if m.role == "tool"]
    assert [m.is_error for m in results] == [False, True, True, True, False]
    assert [m.detector for m in results] == [None, *["environment_flag"] * 2, "malformed_call", None]
    assert results[2].error_kind == "unknown_tool"
    assert results[3].error_kind == "invalid_json"

    path = tmp_path / "episodes.jsonl"
    with Logger({"log_dir": str(tmp_path), "tensorboard_enabled": False, "progress": False}, rank=0) as logger:
        logger.log_episodes(traces)
    (read,) = read_traces([path])
    assert read.messages == trace.messages
    stats = IngestStats()
    (taken,) = ingest([path], IngestOptions(), stats)
    assert sum(stats.errors.values()) == 3
    found = FailedCallFinder(LayeredHints([TemplateHints(), RawErrorHints()])).find(taken)
    assert [one.error_kind for one in found] == [results[1].error_kind, "unknown_tool", "invalid_json"]
    # what was not read is no call that a template writes
    assert [len(m.get("tool_calls", [])) for m in trace.to_messages() if m["role"] == "assistant"] == [1, 1, 1, 0, 1, 0]


@pytest.mark.parametrize("redact", [True, False])
def test_secrets_are_taken_out_of_stored_episodes(play: Play, redact: bool) -> None:
    secret = "ghp_" + "aB3dE6gH9" * 4
    limits: Any = {"call_seconds": WAIT_SECONDS, "max_seconds": WAIT_SECONDS}
    environment = FunctionTools(kind="functions", source=TOOLS, redact=redact, **limits)
    said = f"<tool_call>\n{json.dumps({'name': 'fail', 'arguments': {'why': secret}})}\n</tool_call>"
    episodes = play(by_turn(said, "It is 5."), environment=environment, rows=collator(size=4000))
    (trace,) = episodes.write(StepData([], None, Counter(), asked(note=secret)), 0).traces
    assert (secret in json.dumps(trace)) is not redact
    calls, last = [m for m in Trace.model_validate(trace).messages if m.role == "assistant"]
    # the ids of what was taken out spell it still
    assert (calls.sampled_ids is None) is redact
    assert last.sampled_ids is not None


def test_what_a_record_brings_is_no_target_and_what_is_odd_is_text() -> None:
    answer = ReadAnswer({"role": "assistant", "content": "b"}, [], 0)
    sample = Sample(0, torch.tensor([5, 6]), torch.tensor([-1.0, math.nan]), True)
    odd: Any = [{"function": {"name": None, "arguments": [1]}}, "no call", {"name": "f", "arguments": {"x": "\ud800"}}]
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "\ud800"},
        {"role": "assistant", "content": "a", "tool_calls": odd, "reasoning_content": "why"},
        {"role": "tool", "content": "late", "is_error": True},
        answer.message,
    ]
    about: Any = {"tools": [], "reward": None, "step": 2, "record": 3, "copy": 0, "ending": "cut"}
    trace = Trace.model_validate_json(trace_of(messages, [(answer, sample)], **about).to_json().encode())
    assert [m.role for m in trace.messages] == ["system", "assistant", "tool", "assistant"]
    assert [m.weight for m in trace.messages if m.role == "assistant"] == [0.0, 1.0]
    assert trace.messages[1].tool_calls[0].arguments == "[1]"
    assert trace.messages[1].tool_calls[1].arguments == {"x": "\ufffd"}
    assert trace.messages[1].reasoning == "why"
    assert trace.messages[2].is_error
    assert (trace.messages[3].sampled_ids, trace.messages[3].logprobs) == ([5, 6], None)


@pytest.mark.slow
def test_a_run_keeps_some_of_each_step_and_repeats_none(
    folder: Path,
    tmp_path: Path,
    scripted: None,
) -> None:
    run_dir = tmp_path / "run"
    environment = {**settings(folder, run_dir, {})["on_policy"]["environment"], "keep_traces": 3}
    values = settings(folder, run_dir, {"environment": environment})
    path = run_dir / "episodes.jsonl"

    def go(steps: int, **more: Any) -> list[Trace]:
        resolve_and_run({**values, "distillation": {**values["distillation"], "max_num_steps": steps, **more}})
        return stored(path)

    first = go(2)
    assert Counter(trace.meta["step"] for trace in first) == {1: 3, 2: 3}
    # a kill behind the checkpoint: a step that is taken again, and half a line
    with path.open("a", encoding="utf-8") as stream:
        line = first[-1].model_copy(update={"meta": {**first[-1].meta, "step": 3}}).to_json()
        stream.write(f"{line}\n{line[:50]}")
    whole = go(3)
    assert whole[:6] == first
    assert Counter(trace.meta["step"] for trace in whole) == {1: 3, 2: 3, 3: 3}
    assert len({trace.id for trace in whole}) == 9


def test_no_traces_where_none_are_wanted(play: Play) -> None:
    assert play(up_by_one, keep_traces=0).write(data(2), 0).traces == []
