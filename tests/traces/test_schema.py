"""The canonical trace: round trips, resolution of calls, and the chat form."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from limbeck.errors import TraceError
from limbeck.traces.schema import Message, PreferencePair, ToolCall, Trace, messages_to_chat
from tests.helpers.chats import answer, call, say
from tests.traces.material import EXAMPLES, read

text = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
arguments = st.dictionaries(text, st.recursive(st.none() | st.integers() | text, st.lists, max_leaves=4), max_size=3)
calls = st.builds(ToolCall, id=text, name=text, arguments=arguments | text, in_content=st.booleans())
messages = st.one_of(
    st.builds(Message, role=st.sampled_from(["system", "user"]), content=text),
    st.builds(
        Message,
        role=st.just("assistant"),
        content=text,
        reasoning=st.none() | text,
        tool_calls=st.lists(calls, max_size=3),
    ),
    st.builds(
        Message,
        role=st.just("tool"),
        content=text,
        tool_call_id=st.none() | text,
        is_error=st.booleans(),
        is_ack=st.booleans(),
    ),
)
traces = st.builds(
    Trace,
    id=text.filter(bool),
    group_id=st.none() | text,
    messages=st.lists(messages, max_size=8),
    final_reward=st.none() | st.floats(-1, 1),
)


@given(traces)
def test_a_line_of_json_gives_the_trace_back(trace: Trace) -> None:
    line = trace.to_json()
    assert "\n" not in line
    assert Trace.model_validate_json(line) == trace


@given(traces)
def test_the_chat_form_keeps_the_indices_and_the_texts(trace: Trace) -> None:
    chat = trace.to_messages()
    assert [m["content"] for m in chat] == [m.content for m in trace.messages]
    for message, rendered in zip(trace.messages, chat, strict=True):
        shown = [c["function"]["name"] for c in rendered.get("tool_calls", [])]
        assert shown == [c.name for c in message.tool_calls if not c.in_content]
        assert message.role == rendered["role"] or (message.role == "tool" and rendered["role"] == "user")


def test_reused_call_ids_resolve_to_the_nearest_earlier_call() -> None:
    made = call("same")
    trace = Trace(
        id="t", messages=[say("assistant", "", made), answer(made, "1"), say("assistant", "", made), answer(made, "2")]
    )
    assert trace.caller_of(1) == (0, 0)
    assert trace.caller_of(3) == (2, 0)


def test_a_result_before_its_call_has_no_caller() -> None:
    made = call("late")
    trace = Trace(id="t", messages=[answer(made, "?"), say("assistant", "", made)])
    assert trace.caller_of(0) is None


def test_calls_written_as_text_are_not_rendered_twice() -> None:
    made = ToolCall(id="s", name="bash", arguments={"command": "ls"}, in_content=True)
    chat = messages_to_chat([say("assistant", "```\nls\n```", made), answer(made, "a.txt")])
    assert chat == [{"role": "assistant", "content": "```\nls\n```"}, {"role": "user", "content": "a.txt"}]


def test_stripping_reasoning_reaches_both_sides_of_a_pair_and_drops_the_sampled_ids() -> None:
    thinking = Message(
        role="assistant",
        content="<think>hm\n</think>\n\nYes.",
        reasoning="r",
        sampled_ids=[1, 2],
        logprobs=[-0.1, -0.2],
    )
    plain = say("assistant", "Yes.", sampled_ids=[7])
    pair = PreferencePair(chosen=thinking, rejected=plain, prompt=[thinking])
    trace = Trace(id="t", messages=[thinking, plain, say("user", "<think>mine</think>")], preference_pairs=[pair])
    bare = trace.without_reasoning()
    assert [m.content for m in bare.messages] == ["Yes.", "Yes.", "<think>mine</think>"]
    assert bare.messages[0].reasoning is None
    assert bare.messages[0].sampled_ids is None
    assert bare.messages[1].sampled_ids == [7]
    kept = bare.preference_pairs[0]
    assert kept.chosen.content == kept.rejected.content == kept.state()[0].content == "Yes."


@pytest.mark.parametrize(
    "fields",
    [
        {"role": "user", "tool_calls": [{"id": "a", "name": "b"}]},
        {"role": "assistant", "is_error": True},
        {"role": "assistant", "sampled_ids": [1], "logprobs": [0.0, 0.0]},
        {"role": "robot"},
        {"role": "user", "colour": "red"},
    ],
)
def test_contradictory_messages_are_refused(fields: dict) -> None:
    with pytest.raises(ValidationError):
        Message.model_validate(fields)


def test_a_pair_has_exactly_one_state_and_finds_it_in_its_trace() -> None:
    yes, no = say("assistant", "yes"), say("assistant", "no")
    with pytest.raises(ValidationError, match="message_index"):
        PreferencePair(chosen=yes, rejected=no)
    pair = PreferencePair(chosen=yes, rejected=no, trace_id="t", message_index=1)
    trace = Trace(id="t", messages=[say("user", "?"), no])
    assert pair.state(trace) == [trace.messages[0]]
    with pytest.raises(TraceError, match=r"message 1 .*'t'"):
        pair.state()


def test_shipped_examples_are_canonical_and_cover_groups_rewards_kinds_and_pairs(tmp_path) -> None:
    found, report = read(EXAMPLES / "workshop.jsonl")
    assert not report.skipped
    assert len(found) == 12
    rewards: dict[str, set[float]] = {}
    for trace in found:
        if trace.group_id:
            rewards.setdefault(trace.group_id, set()).add(trace.final_reward)
    assert all(values == {0.0, 1.0} for values in rewards.values())
    kinds = {m.error_kind for trace in found for m in trace.messages if m.is_error}
    assert len(kinds) >= 10
    assert sum(len(trace.preference_pairs) for trace in found) == 4
    assert "".join(f"{trace.to_json()}\n" for trace in found) == (EXAMPLES / "workshop.jsonl").read_text()


def test_call_keys_ignore_the_order_of_arguments_and_nothing_else() -> None:
    one = ToolCall(id="1", name="f", arguments=json.loads('{"a": 1, "b": {"c": 2, "d": 3}}'))
    two = ToolCall(id="2", name="f", arguments=json.loads('{"b": {"d": 3, "c": 2}, "a": 1}'))
    assert one.key() == two.key()
    assert one.key() != ToolCall(id="1", name="f", arguments={"a": "1", "b": {"c": 2, "d": 3}}).key()
