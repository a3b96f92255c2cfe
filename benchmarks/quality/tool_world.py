"""A small world of file tools with an agent of bad habits: who knows the right call is the environment, not a judge.

Twelve tools fail by habit, two of each of six kinds of error; three never do. A logged agent mostly makes the habitual
call, often twice, before it makes the right one; where a note of the harness (a system turn, in the words of limbeck's
own hints) stands in front, it makes the right one at once. A model of these logs therefore errs as the agent does, and
knows what notes mean. `Habits` says how often, `traces` writes logs, `judge` executes a call.

The right call always follows from what the user said: path, number and mode are copied from there. Paths are quoted
as in calls, so that they are the same tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from limbeck.traces.errors import ErrorSignal, check_call, mark_error
from limbeck.traces.hints import HintRequest, LayeredHints
from limbeck.traces.schema import Message, ToolCall, Trace

STEMS = ("report", "notes", "budget", "letter", "plan", "sketch", "recipe", "diary")
FOLDERS = ("docs", "work", "music", "office", "garden", "travel")
WORDS = ("total", "draft", "final", "paid", "open", "late")
MODES = {"keep": "and keep what is there", "replace": "and replace what is there", "ask": "and ask about what is there"}

SEEN = ("copy_file", "show_head", "search_text", "erase_file", "read_table", "write_note")
"""Tools whose failures the arms learn from."""
UNSEEN = ("move_file", "show_tail", "count_text", "print_file", "read_image", "write_list")
"""Tools with the same faults, which no arm's sites hold."""
NEUTRAL = ("list_folder", "file_size", "file_date")
"""Tools without a bad habit: what was right must stay so."""

TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def _schema(name: str, **arguments: str | list[str]) -> dict[str, Any]:
    properties = {
        key: {"type": "string", "enum": kind} if isinstance(kind, list) else {"type": kind}
        for key, kind in arguments.items()
    }
    parameters = {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = [
    *(_schema(name, source="string", target="string", mode=list(MODES)) for name in ("copy_file", "move_file")),
    *(_schema(name, path="string", lines="integer") for name in ("show_head", "show_tail")),
    *(_schema(name, word="string", path="string") for name in ("search_text", "count_text")),
    *(_schema(name, path="string") for name in ("erase_file", "print_file", "read_table", "read_image", *NEUTRAL)),
    *(_schema(name, path="string", text="string") for name in ("write_note", "write_list")),
]


@dataclass(frozen=True)
class Task:
    """What a user asks: the calls that do it, in order, and the call that the agent makes out of habit."""

    tool: str
    said: str
    right: tuple[tuple[str, dict[str, Any]], ...]
    habit: tuple[str, dict[str, Any]] | None = None

    @property
    def group(self) -> str:
        return next(n for n, tools in (("seen", SEEN), ("unseen", UNSEEN), ("kept", NEUTRAL)) if self.tool in tools)


def make_task(tool: str, dice: random.Random) -> Task:
    """A task for that tool; files and folders as the dice fall."""
    name = dice.choice(STEMS)
    folder, other = dice.sample(FOLDERS, 2)
    path = f"{folder}/{name}"
    if tool in ("copy_file", "move_file"):
        mode, verb = dice.choice(list(MODES)), tool.split("_")[0].capitalize()
        arguments = {"source": path, "target": f"{other}/{name}"}
        said = f'{verb} "{path}" to "{other}" {MODES[mode]}.'
        return Task(tool, said, ((tool, arguments | {"mode": mode}),), (tool, arguments))
    if tool in ("show_head", "show_tail"):
        lines, end = dice.randrange(2, 60), "first" if tool == "show_head" else "last"
        said = f'Show the {end} {lines} lines of "{path}".'
        right = {"path": path, "lines": lines}
        return Task(tool, said, ((tool, right),), (tool, right | {"lines": str(lines)}))
    if tool in ("search_text", "count_text"):
        word, verb = dice.choice(WORDS), "Find" if tool == "search_text" else "Count"
        right = {"word": word, "path": path}
        return Task(tool, f'{verb} "{word}" in "{path}".', ((tool, right),), (tool, right | {"deep": True}))
    if tool in ("erase_file", "print_file"):
        verb, habit = ("Erase", "delete_file") if tool == "erase_file" else ("Print", "cat_file")
        return Task(tool, f'{verb} "{path}".', ((tool, {"path": path}),), (habit, {"path": path}))
    if tool in ("read_table", "read_image"):
        right_calls = (("list_folder", {"path": folder}), (tool, {"path": path}))
        return Task(tool, f'Read the {tool.split("_")[1]} "{path}".', right_calls, (tool, {"path": name}))
    if tool in ("write_note", "write_list"):
        word, kind = dice.choice(WORDS), tool.split("_")[1]
        right = {"path": f"shared/{path}", "text": word}
        return Task(tool, f'Write the {kind} "{word}" to "{path}".', ((tool, right),),
                    (tool, right | {"path": path}))  # fmt: skip
    if tool == "list_folder":
        path = f"{folder}/{other}/{dice.choice(STEMS)}"
        return Task(tool, f'What is in "{path}"?', ((tool, {"path": path}),))
    what = "large" if tool == "file_size" else "old"
    return Task(tool, f'How {what} is "{path}"?', ((tool, {"path": path}),))


def judge(call: ToolCall) -> str | None:
    """What the environment has against a call; None where it does what it says."""
    problem = check_call(call, TOOLS)
    if problem is not None:
        kind, facts = problem
        return {
            "unknown_tool": f"Error: unknown tool {call.name}",
            "missing_argument": f"Error: missing required argument {facts.get('missing')}",
            "extra_argument": f"Error: unexpected argument {facts.get('extra')}",
        }.get(kind, f"Error: {facts.get('argument')} must be {facts.get('expected')}")
    assert isinstance(call.arguments, dict), "arguments that are no object are a problem above"
    path = str(call.arguments.get("path", ""))
    if call.name.startswith("read_") and "/" not in path:
        return f"Error: no such file {path}"
    if call.name.startswith("write_") and not path.startswith("shared/"):
        return f"Error: permission denied for {path}"
    return None


# -- logs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Habits:
    """How the logged agent works: shares of tasks with a note in front, of habitual calls where there is none, of
    failures that are repeated, and of retries with a note in front."""

    noted: float = 0.25
    wrong: float = 0.8
    repeated: float = 0.6
    noted_retry: float = 0.2


ALWAYS_WRONG = Habits(noted=0.0, wrong=1.0, repeated=0.5, noted_retry=0.0)


class _Log:
    """One trace in the making."""

    def __init__(self, name: str) -> None:
        self.trace = Trace(id=name, tools=TOOLS, final_reward=1.0)

    def say(self, role: Literal["system", "user", "assistant"], text: str) -> None:
        self.trace.messages.append(Message(role=role, content=text))

    def call(self, name: str, arguments: dict[str, Any]) -> None:
        """The agent's call, and what the environment answers."""
        call = ToolCall(id=f"call{len(self.trace.messages):05d}", name=name, arguments=arguments)
        complaint = judge(call)
        result = Message(role="tool", tool_call_id=call.id, name=name, content=complaint or "ok")
        if complaint is not None:
            result = mark_error(result, ErrorSignal("error_prefix"), call=call, tools=TOOLS)
        self.trace.messages += [Message(role="assistant", tool_calls=[call]), result]


def note_for(name: str, arguments: dict[str, Any]) -> str:
    """What limbeck's own hint in front of that call would be."""
    log = _Log("note")
    log.say("user", "-")
    log.call(name, arguments)
    call = log.trace.messages[1].tool_calls[0]
    hint = LayeredHints()(HintRequest(log.trace, 1, 2, call))
    assert hint is not None, f"no hint for {name}"
    return hint.text


def _work(log: _Log, task: Task, habits: Habits, dice: random.Random) -> None:
    log.say("user", task.said)
    if task.habit is not None:
        if dice.random() < habits.noted:
            log.say("system", note_for(*task.habit))
        elif dice.random() < habits.wrong:
            log.call(*task.habit)
            if dice.random() < habits.repeated:
                log.call(*task.habit)
            if dice.random() < habits.noted_retry:
                log.say("system", note_for(*task.habit))
    for name, arguments in task.right:
        log.call(name, arguments)
    log.say("assistant", "Done.")


def other_tasks(tools: tuple[str, ...], dice: random.Random, used: set[str]) -> Iterator[Task]:
    """Tasks for these tools in turn, none of which is among those used."""
    while True:
        for tool in tools:
            tried = (make_task(tool, dice) for _ in range(1000))
            task = next((task for task in tried if task.said not in used), None)
            if task is None:
                raise ValueError(f"every task for {tool} is held out; ask for fewer held-out states or sites")
            yield task


def traces(
    tools: tuple[str, ...], count: int, habits: Habits, dice: random.Random, used: set[str], *, name: str
) -> list[Trace]:
    """Logs of the agent, each of one task that is none of those used, called `name-0`, `name-1` and so on."""
    source, made = other_tasks(tools, dice, used), list[Trace]()
    for number in range(count):
        log = _Log(f"{name}-{number}")
        _work(log, next(source), habits, dice)
        made.append(log.trace)
    return made


def asked(rows: list[Trace]) -> set[str]:
    """What the users of these logs said."""
    return {row.messages[0].content for row in rows}


def echoes(count: int, dice: random.Random) -> list[Trace]:
    """Conversations in which paths are said back: a small model learns there to copy, sooner than from calls."""
    made = []
    for number in range(count):
        paths = [f"{dice.choice(FOLDERS)}/{dice.choice(STEMS)}" for _ in range(8)]
        said, log = " ".join(f'"{path}"' for path in paths), _Log(f"echo-{number}")
        log.say("user", f"Repeat {said}")
        log.say("assistant", said)
        made.append(log.trace)
    return made


def kept_traces(count: int, dice: random.Random, used: set[str]) -> list[Trace]:
    """States at which the recorded call is right, marked as failed so that an evaluation of failures stops there: its
    `repeated` is the share of right calls that stayed."""
    made = []
    for trace in traces(NEUTRAL, count, Habits(), dice, used, name="kept"):
        trace.messages[2] = trace.messages[2].model_copy(
            update={"is_error": True, "error_kind": "environment", "content": "Error: marked", "detector": "world"}
        )
        made.append(trace.model_copy(update={"messages": trace.messages[:3]}))
    return made


def hinted(trace: Trace) -> Trace:
    """The trace with its first failed call's hint in front of that call."""
    call = trace.messages[1].tool_calls[0]
    assert isinstance(call.arguments, dict)
    note = Message(role="system", content=note_for(call.name, call.arguments))
    messages = [trace.messages[0], note, *trace.messages[1:]]
    return trace.model_copy(update={"id": f"hinted-{trace.id}", "messages": messages})


def write(path: Path, rows: list[Trace]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row.to_json() + "\n" for row in rows), encoding="utf-8")


def train_tokenizer(logs: list[Trace], folder: Path, size: int = 1024) -> None:
    """A byte-level BPE of these logs, single digits, with the template of the world."""
    texts = [text for trace in logs for message in trace.messages for text in (
        message.content, *(json.dumps({"name": c.name, "arguments": c.arguments}) for c in message.tool_calls),
    )]  # fmt: skip
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
