"""Prompts out of files, each with the record that it is from: what a teacher answers, and what tasks ask."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from limbeck.data.forms import chat_form
from limbeck.data.readers import BadRecord, expand, from_json, open_reader
from limbeck.data.sources import checked_context, checked_messages
from limbeck.errors import DataError
from limbeck.tokens import ByteTokenizer
from limbeck.tokens.chat.render import render_chat
from limbeck.tokens.chat.teacher_context import Context

USUAL_KEYS = ("prompt", "question", "instruction", "problem")
"""Keys under which a record that is no conversation may have its prompt."""
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class PromptReading(BaseModel):
    """How prompts are read."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    prompt_key: str | None = None
    """Key of the prompt in a record: what a user says, or messages. Default: the conversation up to its last answer, or
    ``prompt``, ``question``, ``instruction`` or ``problem``."""
    teacher_context_key: str | None = "teacher_context"
    """Key of what a teacher alone reads, as in ``data``; null: not read."""
    hub_subset: str | None = None
    """``hf:`` data: the configuration of the data set."""
    hub_split: str = "train"
    """``hf:`` data: the split."""


@dataclass(frozen=True)
class Problem:
    """A prompt.

    Attributes:
        number: of its record, over all files.
        messages: up to the answer that is to be written.
        record: as it is stored; of a conversation in another form with its ``messages``.
        source: file and line.
        context: what a teacher reads besides, and a student does not.
    """

    number: int
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    record: Mapping[str, Any]
    source: str
    context: Context | None = None


class Problems:
    """The prompts of files, globs, folders or ``hf:`` ids, by number."""

    def __init__(self, paths: str | Sequence[str], reading: PromptReading | None = None) -> None:
        self.reading = reading or PromptReading()
        self.paths = expand(paths if isinstance(paths, str) else list(paths))
        self._readers = [
            open_reader(
                path,
                format="auto",
                columns=list,
                text_key="prompt",
                cache_dir=None,
                hub_subset=self.reading.hub_subset,
                hub_split=self.reading.hub_split,
            )
            for path in self.paths
        ]
        self._first = np.cumsum([0, *map(len, self._readers)])

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, number: int) -> Problem:
        """The prompt of a record; raises BadRecord."""
        file = int(np.searchsorted(self._first, number, side="right")) - 1
        index = number - int(self._first[file])
        row = self._readers[file].row(index)
        messages, record = prompt_of(row, self.reading.prompt_key)
        tools = from_json(row.get("tools"), "tools")
        if tools is not None and not isinstance(tools, list):
            raise BadRecord("wrong_type", f"'tools' is a {type(tools).__name__}, not a list")
        context = checked_context(row, self.reading.teacher_context_key, "chat").get("teacher_context")
        return Problem(number, messages, tools or None, record, self._readers[file].location(index), context)

    def location(self, number: int) -> str:
        """File and line of a record."""
        file = int(np.searchsorted(self._first, number, side="right")) - 1
        return self._readers[file].location(number - int(self._first[file]))


def prompt_of(row: Mapping[str, Any], prompt_key: str | None = None) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
    """The messages before a record's answer, and the record with its conversation; raises BadRecord."""
    if prompt_key is None and row.get("messages") is not None:
        messages = checked_messages(row["messages"], "messages")
        return _asked(messages), {**row, "messages": messages}
    key = prompt_key or next((name for name in USUAL_KEYS if row.get(name) is not None), None)
    form = chat_form(row, "the record") if prompt_key is None else None
    if form is not None:
        messages = checked_messages(form.convert(row), form.keys)
        return _asked(messages), {**row, "messages": messages}
    value = None if key is None else row.get(key)
    if isinstance(value, list):
        return _asked(checked_messages(value, str(key))), row
    if not isinstance(value, str) or not value.strip():
        wanted = repr(prompt_key) if prompt_key else f"'messages', {', '.join(map(repr, USUAL_KEYS))}"
        raise BadRecord(
            "no_prompt", f"the record has no text under {wanted}, only {', '.join(sorted(row)) or 'no keys'}"
        )
    return [{"role": "user", "content": value + _choices(row.get("choices"))}], row


def _asked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    asked = list(messages)
    while asked and asked[-1]["role"] == "assistant":
        asked.pop()
    if not any(message["role"] in ("user", "tool") for message in asked):
        raise BadRecord("no_prompt", "the conversation has no message of a user before an answer")
    return asked


def _choices(choices: Any) -> str:
    """The answers of a multiple choice, to be written below its question."""
    labels: Any = list(_LETTERS)
    texts = choices
    if isinstance(choices, Mapping):
        labels, texts = choices.get("label"), choices.get("text")
    if not isinstance(texts, list) or not isinstance(labels, list) or not texts:
        return ""
    # letters go on behind the last answer
    listed = "\n".join(f"{label}. {text}" for label, text in zip(labels, texts, strict=False))
    return f"\n{listed}\nAnswer with the letter of the right answer."


def choose(problems: Problems, number: int | None, seed: int = 0) -> Iterator[int]:
    """Numbers of so many records, or all, in an order that is always the same: a smaller number is a part of it."""
    order = list(range(len(problems)))
    random.Random(seed).shuffle(order)
    return iter(order[:number])


def encode_prompt(
    tokenizer: ByteTokenizer,
    problem: Problem,
    *,
    template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    name: str = "the model",
) -> torch.Tensor:
    """int64 ``[T]``: the conversation with the header of the answer; of a tokenizer without a chat template the
    contents of the messages, end to end."""
    if template is None and not tokenizer.templates:
        text = "\n\n".join(str(message.get("content") or "") for message in problem.messages)
        rendering = tokenizer.encode(f"{text}\n", bos=tokenizer.adds_bos)
    else:
        rendering = render_chat(
            tokenizer,
            problem.messages,
            tools=problem.tools,
            template=template,
            template_kwargs={**(template_kwargs or {}), **(problem.record.get("template_kwargs") or {})},
            name=name,
            add_generation_prompt=True,
        )
    if not len(rendering):
        raise DataError(f"{problem.source}: the prompt has no token")
    return torch.from_numpy(rendering.ids.astype("int64"))
