"""Hints for failed calls: text that the teacher reads directly before the message that went wrong.

Generators are tried in order: a sentence by error kind, a judge where such a sentence would say little, the
environment's own error text. A generator is anything with a name that maps a ``HintRequest`` to text or None. Whatever
it does wrong (an exception, an empty or oversized answer, something that is no text) is counted, never fatal, and never
retried: each generator is asked at most once per failed call.

A hint must not contain what the agent could only learn later. ``leaks`` checks that.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from limbeck.errors import ConfigError
from limbeck.traces.schema import Message, ToolCall, Trace
from limbeck.utils.files import JsonCache, content_hash

MAX_HINT_CHARS = 2000


@dataclass(frozen=True)
class HintRequest:
    """One failed call, as a generator sees it.

    Attributes:
        target: Index of the assistant message to correct.
        cause: Index of the failed tool result.
        call: The call that failed.
        check: What the agent had seen when; shared by the requests of one trace.
    """

    trace: Trace
    target: int
    cause: int
    call: ToolCall
    check: LeakCheck | None = field(default=None, compare=False, repr=False)

    @property
    def error_kind(self) -> str:
        return self.trace.messages[self.cause].error_kind or "environment"

    @property
    def error_meta(self) -> dict[str, Any]:
        return self.trace.messages[self.cause].error_meta

    @property
    def error_text(self) -> str:
        return self.trace.messages[self.cause].content

    def key(self) -> str:
        """Identity of the question: the failure, and everything the agent had seen before it."""
        check = self.check or LeakCheck(self.trace)
        failed = [self.call.name, self.call.arguments, self.error_kind, self.error_meta, self.error_text]
        return content_hash([check.digest(self.target), failed])


class HintGenerator(ABC):
    """Maps a failed call to a hint, or to None where it has nothing to say; asked at most once per failed call."""

    name: str

    @abstractmethod
    def __call__(self, request: HintRequest) -> str | None: ...


@dataclass(frozen=True)
class Hint:
    """A hint and the generator that wrote it."""

    text: str
    source: str


# -- generators --------------------------------------------------------------------------------------------------------


def _names(values: Any, limit: int = 20) -> str:
    names = [f"`{value}`" for value in values]
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def _unknown_tool(tool: str, meta: Mapping[str, Any]) -> str | None:
    known = meta.get("known_tools")
    available = f"The available tools are {_names(known)}." if known else "Use one of the tools that are available."
    return f"There is no tool named `{tool}`. {available}"


def _missing(tool: str, meta: Mapping[str, Any]) -> str | None:
    missing = meta.get("missing")
    return f"A call of `{tool}` needs the argument {_names(missing)}: give it a value." if missing else None


def _extra(tool: str, meta: Mapping[str, Any]) -> str | None:
    if not meta.get("extra"):
        return None
    return f"`{tool}` does not accept {_names(meta['extra'])}; it accepts {_names(meta.get('known_arguments', ()))}."


def _bad(tool: str, meta: Mapping[str, Any]) -> str | None:
    if "argument" not in meta:
        return None
    return f"The argument `{meta['argument']}` of `{tool}` must be {meta['expected']}."


def _exit(tool: str, meta: Mapping[str, Any]) -> str | None:
    code = meta.get("exit_code")
    status = f"exit code {code}" if code is not None else "a failure"
    return f"The `{tool}` command that comes to mind here ends with {status}."


def shortened(text: str, most: int) -> str:
    """A text without its middle where it is longer than ``most`` characters."""
    text = text.strip()
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half].rstrip()}\n[...]\n{text[-half:].lstrip()}"


# a hint stands in front of the failed message: it tells of an action that comes to mind, not of one that was done
_TEMPLATES: dict[str, str | Callable[[str, Mapping[str, Any]], str | None]] = {
    "unknown_tool": _unknown_tool,
    "tool_not_found": _unknown_tool,
    "missing_argument": _missing,
    "extra_argument": _extra,
    "bad_argument": _bad,
    "nonzero_exit": _exit,
    "invalid_json": (
        "The arguments of `{tool}` must be one valid JSON object: double quotes, escaped line breaks, no trailing text."
    ),
    "file_not_found": (
        "The path that comes to mind for `{tool}` does not exist. Find the right one first, for instance by listing "
        "the directory."
    ),
    "command_not_found": (
        "The program that comes to mind for `{tool}` is not installed here. Use one that is, or install it first."
    ),
    "permission": "`{tool}` is not permitted to do that here. Choose a path or an action that the rules allow.",
    "timeout": (
        "The `{tool}` command that comes to mind here does not finish in time, or waits for input. Run it in the "
        "background, limit its work, or give it its input."
    ),
    "no_match": (
        "The text to replace must stand in the file exactly once, character for character, without line numbers. Read "
        "that part of the file and copy it."
    ),
    "syntax_error": (
        "The edit that comes to mind leaves the file with a syntax error. Keep the indentation of the lines around it "
        "and replace whole statements."
    ),
    "too_large": (
        "The result of `{tool}` would be too large. Ask for a part of it, with an offset and a limit or a search."
    ),
    "declined": "The user does not want this action taken. Ask, or choose a smaller step.",
}


class TemplateHints(HintGenerator):
    """A sentence by error kind, with the facts of the failure; None for kinds that need the error's own words.

    The hint for a failed command ends with the environment's own message, which often says what to do.

    Args:
        only_facts: Only kinds whose sentence names what is wrong with the call by its schema; the others say little
            that the message does not say better.
    """

    name = "template"

    def __init__(self, *, only_facts: bool = False) -> None:
        self.only_facts = only_facts

    def __call__(self, request: HintRequest) -> str | None:
        template = _TEMPLATES.get(request.error_kind)
        if template is None or (self.only_facts and request.error_kind not in _FACTUAL):
            return None
        if self.only_facts and template is _unknown_tool and not request.error_meta.get("known_tools"):
            return None
        name = request.call.name
        sentence = template(name, request.error_meta) if callable(template) else template.replace("{tool}", name)
        is_command = request.error_kind == "nonzero_exit" or "exit_code" in request.error_meta
        if sentence is None or not is_command:
            return sentence
        said = shortened(_EXIT_LINE.sub("", request.error_text), _MESSAGE_CHARS)
        return f"{sentence} It is answered with:\n{said}" if said else f"{sentence} {_CHECK}"


_FACTUAL = {"unknown_tool", "tool_not_found", "missing_argument", "extra_argument", "bad_argument", "invalid_json"}
_MESSAGE_CHARS = 600
_EXIT_LINE = re.compile(r"\A\s*(?:Error: )?Exit code \d+\s*")
_CHECK = "Check what it depends on (paths, options, earlier steps) and run one that succeeds."


class RawErrorHints(HintGenerator):
    """The environment's own error text, shortened in the middle to ``max_chars``."""

    name = "raw_error"

    def __init__(self, max_chars: int = 600) -> None:
        self.max_chars = max_chars

    def __call__(self, request: HintRequest) -> str | None:
        text = shortened(request.error_text, self.max_chars)
        if not text:
            return None
        return f"The action that comes to mind here, a call of `{request.call.name}`, is answered with:\n{text}"


def with_judge(generators: Sequence[HintGenerator], judge: HintGenerator) -> list[HintGenerator]:
    """Generators with a judge among them: asked where no sentence names what is wrong, before the weaker ones."""
    first = [g for g in generators if isinstance(g, HookHints)]
    has_templates = any(isinstance(g, TemplateHints) for g in generators)
    facts: list[HintGenerator] = [TemplateHints(only_facts=True)] if has_templates else []
    return [*first, *facts, judge, *(g for g in generators if not isinstance(g, HookHints))]


class HookHints(HintGenerator):
    """Adapter for the published hook ``(error_kind, error_meta) -> str | None``."""

    def __init__(self, hook: Callable[[str, dict[str, Any]], str | None], name: str = "hook") -> None:
        self.hook = hook
        self.name = name

    def __call__(self, request: HintRequest) -> str | None:
        return self.hook(request.error_kind, dict(request.error_meta))


class JudgeHints(HintGenerator):
    """A judge, usually a model, asked once per distinct failure; its answers are kept on disk.

    Args:
        judge: Maps a request to a hint or None.
        cache: Where answers are kept, or its folder; None asks every time.
        name: Name and version of the judge, part of the cache key: a new judge does not read an old one's answers.
    """

    def __init__(
        self, judge: Callable[[HintRequest], str | None], cache: Path | JsonCache | None = None, name: str = "judge"
    ) -> None:
        self.judge = judge
        self.name = name
        self.cache = JsonCache(cache) if isinstance(cache, Path) else cache

    def __call__(self, request: HintRequest) -> str | None:
        key = content_hash([self.name, request.key()])
        stored = self.cache.get(key) if self.cache is not None else None
        # a kept None is an answer as well: this judge has nothing to say
        if stored is not None and "hint" in stored:
            return stored["hint"]
        hint = self.judge(request)
        if self.cache is not None and (hint is None or isinstance(hint, str)):
            self.cache.put(key, {"hint": hint})
        return hint


def as_generators(hints: Any) -> tuple[HintGenerator, ...]:
    """Generators from what a user may give: nothing (the two cheap generators), a generator, or the published hook."""
    if hints is None:
        return TemplateHints(), RawErrorHints()
    if isinstance(hints, HintGenerator):
        return (hints,)
    if not callable(hints):
        raise ConfigError(f"hint_generator is {hints!r:.60}; expected a callable (error_kind, error_meta) -> str")
    return (HookHints(hints),)


@dataclass
class LayeredHints:
    """The first usable hint of several generators.

    Attributes:
        problems: ``generator: what`` -> count, for answers that were not usable.
    """

    generators: Sequence[HintGenerator] = field(default_factory=lambda: as_generators(None))
    max_chars: int = MAX_HINT_CHARS
    problems: Counter[str] = field(default_factory=Counter)

    def __call__(self, request: HintRequest) -> Hint | None:
        """The hint, or None where no generator has a usable one; ``problems`` says why."""
        for generator in self.generators:
            try:
                text = generator(request)
            except Exception as error:  # a user's generator may raise anything; one failed call must not end the run
                self.problems[f"{generator.name}: raised {type(error).__name__}"] += 1
                continue
            if text is None:
                continue
            problem = self._problem(text, request)
            if problem is None:
                return Hint(text.strip(), generator.name)
            self.problems[f"{generator.name}: {problem}"] += 1
        return None

    def _problem(self, text: Any, request: HintRequest) -> str | None:
        if not isinstance(text, str):
            return f"returned {type(text).__name__}"
        if not text.strip():
            return "empty"
        if len(text) > self.max_chars:
            return "too long"
        if any(ord(character) < 32 and character not in "\n\t\r" for character in text):
            return "control characters"
        check = request.check or LeakCheck(request.trace)
        return "leak" if check.leak(text, request) else None


# -- leak check --------------------------------------------------------------------------------------------------------

_WINDOW = 32
_TOKEN = re.compile(r"[\w./:@-]{5,}")
_WORD = re.compile(r"\w+")


class LeakCheck:
    """Record of what a trace's agent had seen when, for telling whether hints give away more.

    The messages are brought into one normal form and indexed by their words once; a part of a hint is then looked for
    only where its rarest word stands.

    Attributes:
        searched: characters looked through so far; the cost that must stay linear in the trace.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.searched = 0
        self._observed = _Index(
            (i, m.content) for i, m in enumerate(trace.messages) if m.role in ("tool", "user") and not m.is_ack
        )
        # -1: seen before any message
        schemas = [(-1, json.dumps(trace.tools, ensure_ascii=False))] if trace.tools else []
        self._seen = _Index([*schemas, *((i, " ".join(_texts(m))) for i, m in enumerate(trace.messages))])
        self._digests = [""]

    def digest(self, count: int) -> str:
        """Identity of the first ``count`` messages."""
        # each builds on the one before: hashing every prefix by itself is quadratic in turns
        while len(self._digests) <= count:
            message = self.trace.messages[len(self._digests) - 1]
            body = message.model_dump(mode="json", exclude_defaults=True)
            self._digests.append(content_hash([self._digests[-1], body]))
        return self._digests[count]

    def leak(self, hint: str, request: HintRequest) -> str | None:
        """The part of a hint that stands only in later observations; None where there is none."""
        text, error_text = _normal(hint), _normal(request.error_text)
        for word in re.finditer(r"\S+", text):
            window = text[word.start() : word.start() + _WINDOW]
            # The last word may be cut, and the first may end a longer one.
            if len(window) == _WINDOW and self._is_later(
                window.rstrip(), _WORD.findall(window)[1:-1], error_text, request
            ):
                return window
        for match in _TOKEN.finditer(text):
            token = match[0].strip(".:/-")
            named = len(token) >= 5 and re.search(r"[\d/_]", token) is not None
            if named and self._is_later(token, _WORD.findall(token), error_text, request):
                return token
        return None

    def _is_later(self, needle: str, words: Sequence[str], error_text: str, request: HintRequest) -> bool:
        """Whether a text stands in an observation after the target, and in nothing that was seen until then."""
        if needle in error_text:
            return False
        target = request.target
        later = (i for i in self._observed.candidates(words) if i > target and i != request.cause)
        if not self._found(self._observed, needle, later):
            return False
        return not self._found(self._seen, needle, (i for i in self._seen.candidates(words) if i <= target))

    def _found(self, index: _Index, needle: str, messages: Iterable[int]) -> bool:
        for message in messages:
            self.searched += len(index.texts[message])
            if needle in index.texts[message]:
                return True
        return False


class _Index:
    """Texts of messages in normal form, and in which of them a word stands."""

    def __init__(self, texts: Iterable[tuple[int, str]]) -> None:
        self.texts = {message: _normal(text) for message, text in texts}
        self._places: dict[str, list[int]] = {}
        for message, text in self.texts.items():
            for word in set(_WORD.findall(text)):
                self._places.setdefault(word, []).append(message)

    def candidates(self, words: Sequence[str]) -> Iterable[int]:
        """Messages that can hold a text with these words, in order: those that hold the rarest of them."""
        if not words:
            return self.texts
        return min((self._places.get(word, []) for word in words), key=len)


def leaks(hint: str, request: HintRequest) -> str | None:
    """The part of a hint that stands only in later observations; None where there is none.

    Everything the agent had seen, its own message and the failed result are fair. Beyond these, a run of ``32``
    characters or a name-like token (with a digit, a slash or an underscore) that a later tool or user message contains
    is taken as a leak. White space and case are ignored.
    """
    return LeakCheck(request.trace).leak(hint, request)


def _texts(message: Message) -> list[str]:
    calls = [f"{call.name} {json.dumps(call.arguments, ensure_ascii=False)}" for call in message.tool_calls]
    return [message.content, message.reasoning or "", *calls]


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())


HintSource = Literal["template", "raw"]
"""A sentence by the kind of error, or the error's own words."""


def layered_hints(sources: Sequence[HintSource]) -> LayeredHints:
    """Hints of these sources, the first that has one."""
    generators: dict[HintSource, HintGenerator] = {"template": TemplateHints(), "raw": RawErrorHints()}
    return LayeredHints(tuple(generators[name] for name in sources))
