"""The canonical agent trace: what every reader produces and everything downstream consumes.

A trace is stored as one JSON object per line. It keeps what training needs and nothing of the logger that wrote it:
the messages as the model saw and produced them, which tool results failed and how that was found out, the sampled
token ids where they exist, and the final reward.

Example:
    >>> call = ToolCall(id="c1", name="read", arguments={"path": "a.txt"})
    >>> trace = Trace(id="t", messages=[
    ...     Message(role="user", content="What is in a.txt?"),
    ...     Message(role="assistant", tool_calls=[call]),
    ...     Message(role="tool", tool_call_id="c1", content="No such file", is_error=True)])
    >>> trace.caller_of(2)
    (1, 0)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from limbeck.errors import TraceError

SCHEMA_VERSION: Literal["limbeck.trace/1"] = "limbeck.trace/1"

Role = Literal["system", "user", "assistant", "tool"]

_THINK_BLOCK = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)


class _Model(BaseModel):
    # json.dumps would write NaN and Infinity, which are no JSON
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class ToolCall(_Model):
    """One call that an assistant message made.

    Attributes:
        arguments: The parsed arguments; the raw string where the model's JSON does not parse to an object.
        in_content: The call is already written out in the message's content (agents that act through text blocks), so
            a chat template must not render it a second time.
    """

    id: str
    name: str
    arguments: dict[str, Any] | str = Field(default_factory=dict)
    in_content: bool = False

    def key(self) -> tuple[str, str]:
        """Structural identity: the name, and the arguments with sorted keys."""
        if isinstance(self.arguments, str):
            return self.name, " ".join(self.arguments.split())
        return self.name, json.dumps(self.arguments, sort_keys=True, ensure_ascii=False)


class Message(_Model):
    """One message of a trace.

    Attributes:
        content: The text; empty for a message that only calls tools.
        reasoning: The assistant's hidden reasoning, where the log has it.
        tool_call_id: On a tool message, the call it answers; None where the environment reported a failure that belongs
            to no recorded call.
        is_error: The tool result is a failure, by an explicit signal named in ``detector``.
        error_kind: One of ``limbeck.traces.errors.ERROR_KINDS``.
        error_meta: Facts about the failure (exit code, missing argument, ...), handed to hint generators.
        suspected: A detector that takes this result for a failure although the log does not flag it; not used unless
            asked.
        is_ack: A fixed acknowledgement by the harness of a call that never reached the environment.
        weight: Supervision weight of an assistant message (0 leaves it out).
        sampled_ids: The token ids that the behaviour policy sampled for this message.
        logprobs: The behaviour policy's log-probabilities, one per sampled id.
    """

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None
    name: str | None = None
    is_error: bool = False
    error_kind: str | None = None
    error_meta: dict[str, Any] = Field(default_factory=dict)
    detector: str | None = None
    suspected: str | None = None
    is_ack: bool = False
    weight: float = Field(default=1.0, ge=0.0)
    sampled_ids: list[int] | None = None
    logprobs: list[float] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a {self.role} message cannot make tool calls")
        if self.role != "tool" and (self.is_error or self.tool_call_id is not None):
            raise ValueError(f"is_error and tool_call_id belong to tool messages, not to a {self.role} message")
        if self.sampled_ids is not None and self.logprobs is not None and len(self.sampled_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.sampled_ids)} sampled ids but {len(self.logprobs)} log-probs")
        return self

    def without_reasoning(self) -> Message:
        """The message without its reasoning, including a leading ``<think>`` block in the content.

        Sampled ids and log-probs cover the reasoning too, so they go with it.
        """
        content = _THINK_BLOCK.sub("", self.content) if self.role == "assistant" else self.content
        if self.reasoning is None and content == self.content:
            return self
        return self.model_copy(update={"reasoning": None, "content": content, "sampled_ids": None, "logprobs": None})


class PreferencePair(_Model):
    """Two assistant messages for one state; ``chosen`` is preferred.

    The state is ``prompt`` (complete messages, with ``tools``) where it is given, else the first ``message_index``
    messages of the trace ``trace_id``. ``provenance`` says who voted how.
    """

    chosen: Message
    rejected: Message
    trace_id: str | None = None
    message_index: int | None = Field(default=None, ge=0)
    prompt: list[Message] | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    weight: float = Field(default=1.0, ge=0.0)
    provenance: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_one_state(self) -> PreferencePair:
        if self.prompt is None and self.message_index is None:
            raise ValueError("a preference pair needs either a prompt or a message_index")
        if self.chosen.role != "assistant" or self.rejected.role != "assistant":
            raise ValueError("both sides of a preference pair are assistant messages")
        return self

    def state(self, trace: Trace | None = None) -> list[Message]:
        """The messages in front of the choice; ``trace`` is needed where the pair stores only an index."""
        if self.prompt is not None:
            return self.prompt
        if trace is None or self.message_index is None:
            raise TraceError(f"the pair at message {self.message_index} of trace {self.trace_id!r} needs its trace")
        return trace.messages[: self.message_index]


class Origin(_Model):
    """Where a trace was read: the format's name, the file's name and the 1-based line where it starts."""

    format: str
    file: str = ""
    line: int | None = None


class Trace(_Model):
    """A conversation with tools, ready for the three training channels.

    Attributes:
        group_id: Traces of one prompt share it; None where the log has no groups.
        tools: JSON schemas in the chat template's form (``{"type": "function", "function": {...}}``).
        final_reward: The outcome's reward; None where the log has none.
        context_until: Messages before this index also stand in another trace of the same file (a branch): they are
            context here, never counted or supervised again.
    """

    schema_version: Literal["limbeck.trace/1"] = SCHEMA_VERSION
    id: str = Field(min_length=1)
    group_id: str | None = None
    origin: Origin | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    messages: list[Message] = Field(default_factory=list)
    final_reward: float | None = None
    context_until: int = Field(default=0, ge=0)
    preference_pairs: list[PreferencePair] = Field(default_factory=list)
    meta: dict[str, Any] = Field(default_factory=dict)

    def new_messages(self) -> Iterator[tuple[int, Message]]:
        """The messages that this trace alone carries, with their indices."""
        for index in range(min(self.context_until, len(self.messages)), len(self.messages)):
            yield index, self.messages[index]

    def caller_of(self, index: int) -> tuple[int, int] | None:
        """The assistant message and the position of the call that the tool message at ``index`` answers.

        Logs reuse call ids, so the nearest earlier call with this id counts.
        """
        call_id = self.messages[index].tool_call_id
        if call_id is None:
            return None
        for earlier in range(index - 1, -1, -1):
            for position, call in enumerate(self.messages[earlier].tool_calls):
                if call.id == call_id:
                    return earlier, position
        return None

    def callers(self) -> dict[int, tuple[int, int]]:
        """``caller_of`` for every tool message that answers a call, in one pass."""
        latest: dict[str, tuple[int, int]] = {}
        callers: dict[int, tuple[int, int]] = {}
        for index, message in enumerate(self.messages):
            if message.tool_call_id is not None and message.tool_call_id in latest:
                callers[index] = latest[message.tool_call_id]
            # Of two calls of one message with one id the first counts.
            for position in reversed(range(len(message.tool_calls))):
                latest[message.tool_calls[position].id] = (index, position)
        return callers

    def to_messages(self) -> list[dict[str, Any]]:
        """The messages in the chat-template form, one for one, so indices stay valid.

        A result of a call that was written as text, or of no recorded call, was shown to the model as a user turn and
        is rendered as one.
        """
        as_text = {call.id for message in self.messages for call in message.tool_calls if call.in_content}
        return [_chat_dict(message, as_text) for message in self.messages]

    def without_reasoning(self) -> Trace:
        """The trace with the reasoning taken out of every message, both sides of every preference pair included."""
        pairs = [
            pair.model_copy(
                update={
                    "chosen": pair.chosen.without_reasoning(),
                    "rejected": pair.rejected.without_reasoning(),
                    "prompt": None if pair.prompt is None else [m.without_reasoning() for m in pair.prompt],
                }
            )
            for pair in self.preference_pairs
        ]
        messages = [message.without_reasoning() for message in self.messages]
        return self.model_copy(update={"messages": messages, "preference_pairs": pairs})

    def to_json(self) -> str:
        """One line of JSON; fields at their defaults are left out."""
        body = self.model_dump(mode="json", exclude_defaults=True)
        # the version is a default too, and every line must have it
        return json.dumps({"schema_version": self.schema_version, **body}, ensure_ascii=False)


def _chat_dict(message: Message, as_text: set[str]) -> dict[str, Any]:
    if message.role == "tool" and (message.tool_call_id is None or message.tool_call_id in as_text):
        return {"role": "user", "content": message.content}
    chat: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        chat["reasoning_content"] = message.reasoning
    calls = [call for call in message.tool_calls if not call.in_content]
    if calls:
        chat["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    if message.role == "tool":
        chat["tool_call_id"] = message.tool_call_id
        if message.name:
            chat["name"] = message.name
    return chat


def messages_to_chat(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages outside a trace (a pair's prompt) in the chat-template form; see ``Trace.to_messages``."""
    return Trace(id="-", messages=messages).to_messages()


def describe_validation(error: ValidationError) -> str:
    """The first problem of a pydantic error as a short phrase with its place."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    return f"{field}: {first['msg']}" if field else str(first["msg"])
