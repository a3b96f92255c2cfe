"""A reader of agent logs, whole: a line such as STEPS is one trace. docs/how_to_add.md says where the file goes.

python examples/reader.py
"""

from collections.abc import Mapping
from typing import Any

from limbeck.traces.errors import ErrorSignal
from limbeck.traces.readers.base import (
    Builder,
    ReadLog,
    Record,
    RecordReader,
    Totals,
    as_dict,
    as_dicts,
    as_text,
    characters,
    openai_tools,
)
from limbeck.traces.schema import ToolCall, Trace

STEPS = {
    "task": "t-1",
    "ask": "What is in a.txt?",
    "reward": 0.0,
    "steps": [{"say": "Look it up.", "tool": "read", "args": {"path": "a.txt"}, "out": "no such file", "ok": False}],
}


class StepsReader(RecordReader):
    """One line is one trace."""

    name = "steps"

    def detect(self, data: Mapping[str, Any]) -> bool:
        """By structure alone; no other reader may recognise the same record."""
        steps = as_dicts(data.get("steps"))
        return "ask" in data and bool(steps) and all("tool" in step or "say" in step for step in steps)

    def convert(self, record: Record, log: ReadLog) -> Trace:
        """The messages in order; what has no place is counted. Any field may be missing or of another type."""
        builder = Builder(log, record.line, openai_tools(record.data.get("tools")))
        builder.say("user", as_text(record.data.get("ask")) or "")
        for number, step in enumerate(as_dicts(record.data.get("steps"))):
            said, tool, out = (as_text(step.get(key)) or "" for key in ("say", "tool", "out"))
            if not tool:
                builder.assistant(said)
                if out:
                    builder.skip("result_without_call", totals=Totals(characters=characters(out)))
                continue
            call = ToolCall(id=f"call_{number}", name=tool, arguments=as_dict(step.get("args")))
            builder.assistant(said, calls=[call])
            # an explicit sign of a failure, never a guess
            failed = ErrorSignal("flag") if step.get("ok") is False else None
            builder.result(call.id, out, signal=failed)
        return builder.trace(as_text(record.data.get("task")), final_reward=record.data.get("reward"))

    def totals(self, record: Record) -> Totals:
        """Counted apart from ``convert``: what went in must come out, or the file is refused."""
        steps = as_dicts(record.data.get("steps"))
        calls = sum(as_text(step.get("tool")) is not None for step in steps)
        texts = [as_text(record.data.get("ask")), *(as_text(step.get(key)) for step in steps for key in ("say", "out"))]
        return Totals(calls=calls, results=calls, characters=characters(*texts))


if __name__ == "__main__":
    record = Record(line=1, data=STEPS)
    trace = StepsReader().convert(record, ReadLog())
    assert trace.messages[2].is_error
    assert Totals.of_messages(trace.messages) == StepsReader().totals(record)
    print(f"{len(trace.messages)} messages, the call failed")
