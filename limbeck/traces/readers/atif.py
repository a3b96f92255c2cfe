"""ATIF, the agent trajectory interchange format that Harbor writes: steps of system, user and agent.

An agent's step holds its message, reasoning, calls, what the environment answered, and metrics. Token ids and
log-probs of the completion become the message's sampled ids, so that such a trace feeds the policy channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from limbeck.traces.errors import ErrorSignal, detect_prefix
from limbeck.traces.readers.base import (
    Builder,
    ReadLog,
    Record,
    RecordReader,
    Totals,
    as_dict,
    as_dicts,
    as_number,
    as_text,
    characters,
    openai_tools,
    plain_text,
    present,
    sampled_tokens,
)
from limbeck.traces.schema import Trace


class ATIFReader(RecordReader):
    """Trajectories of steps; one object is one trace."""

    name = "atif"

    def detect(self, data: Mapping[str, Any]) -> bool:
        """The schema's name."""
        return str(data.get("schema_version")).startswith("ATIF-")

    def convert(self, record: Record, log: ReadLog) -> Trace:
        data = record.data
        steps = present(as_dicts(data.get("steps")), record, "steps")
        agent = as_dict(data.get("agent"))
        builder = Builder(log, record.line, openai_tools(agent.get("tool_definitions")))
        for step in steps:
            _add(builder, step)
        name = as_text(data.get("trajectory_id")) or as_text(data.get("session_id"))
        rewards = (data.get("reward"), *(as_dict(data.get(key)).get("reward") for key in ("extra", "final_metrics")))
        return builder.trace(
            name,
            final_reward=next((value for value in map(as_number, rewards) if value is not None), None),
            meta={"model": model} if (model := as_text(agent.get("model_name"))) else {},
        )

    def totals(self, record: Record) -> Totals:
        return sum(map(_totals, as_dicts(record.data.get("steps"))), Totals())


def _results(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    return as_dicts(as_dict(step.get("observation")).get("results"))


def _totals(step: Mapping[str, Any]) -> Totals:
    said = characters(plain_text(step.get("message")), as_text(step.get("reasoning_content")))
    totals = Totals(len(as_dicts(step.get("tool_calls"))), 0, said)
    for result in _results(step):
        answers = result.get("source_call_id") is not None
        totals += Totals(results=int(answers), characters=characters(plain_text(result.get("content"))))
    return totals


def _add(builder: Builder, step: Mapping[str, Any]) -> None:
    source = step.get("source")
    thought = as_text(step.get("reasoning_content"))
    text = builder.text(step.get("message"))
    if source == "agent":
        ids, logprobs = sampled_tokens(as_dict(step.get("metrics")), "completion_token_ids")
        if ids is not None and logprobs is not None and len(ids) != len(logprobs):
            builder.skip("logprobs_of_other_tokens", f"{len(logprobs)} for {len(ids)} ids")
            logprobs = None
        calls = builder.calls(step.get("tool_calls"), id_key="tool_call_id", name_key="function_name")
        builder.assistant(text, reasoning=thought, calls=calls, weight=1.0, sampled_ids=ids, logprobs=logprobs)
    elif source in ("user", "system"):
        builder.say("user" if source == "user" else "system", text)
        lost = Totals(len(as_dicts(step.get("tool_calls"))), 0, characters(thought))
        if lost != Totals():
            builder.skip("call_by_another_role", str(source), lost)
    else:
        builder.skip("unknown_role", f"source {source!r}", _totals(step))
        return
    for result in _results(step):
        output, call_id = builder.text(result.get("content")), result.get("source_call_id")
        if call_id is None:
            # what the environment says without being asked is a turn of its own
            builder.say("user", output)
        else:
            builder.result(as_text(call_id) or "", output, signal=_failure(result, output))


def _failure(result: Mapping[str, Any], output: str) -> ErrorSignal | None:
    extra = as_dict(result.get("extra"))
    code = extra.get("exit_code", extra.get("return_code"))
    if isinstance(code, int) and not isinstance(code, bool) and code != 0:
        return ErrorSignal("exit_code", {"exit_code": code})
    if result.get("is_error") is True or extra.get("is_error") is True:
        return ErrorSignal("flag")
    return detect_prefix(output)
