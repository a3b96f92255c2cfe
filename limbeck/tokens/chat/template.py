"""One chat template bound to one tokenizer: messages in, string out, every refusal a TemplateError."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2

from limbeck.errors import TemplateError
from limbeck.tokens.chat import sandbox
from limbeck.tokens.tokenizer import ByteTokenizer

Message = dict[str, Any]
Span = tuple[int, int]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_QUOTED = r"""(?:'([^'\n]+)'|"([^"\n]+)")"""
_TESTED = re.compile(rf"{_QUOTED}\s+(?:not\s+)?in\b|\.(?:startswith|endswith|split|rsplit|find|index)\(\s*{_QUOTED}")


class ChatTemplate:
    """A Jinja chat template with the arguments it is rendered with.

    Attributes:
        name: what error messages call it.
        source: the template's text.
        tools: JSON schemas passed to every rendering, or None.
        reads_tools: whether the template mentions tools at all.
        has_generation_markers: whether the template marks what the model writes.
    """

    def __init__(
        self,
        tokenizer: ByteTokenizer,
        *,
        tools: Sequence[Any] | None = None,
        template: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        name: str | None = None,
        limits: sandbox.Limits | None = None,
    ) -> None:
        self.limits = limits
        self.name = name or tokenizer.name
        self.tools = _schemas(tools)
        self.source = self._resolve(tokenizer, template)
        self._arguments = {**tokenizer.named, **(arguments or {})}
        self.reads_tools, self.has_generation_markers = _traits(self.source)

    def _resolve(self, tokenizer: ByteTokenizer, template: str | None) -> str:
        templates = tokenizer.templates
        if template is not None:
            return templates.get(template, template)
        if not templates:
            raise TemplateError(
                f"tokenizer {self.name!r} has no chat template, which rendering a conversation needs; set its "
                "chat_template (policy.tokenizer.chat_template in a run file), or train on plain text."
            )
        source = templates.get("tool_use" if self.tools and "tool_use" in templates else "default")
        if source is None:
            names = ", ".join(sorted(templates))
            raise TemplateError(
                f"tokenizer {self.name!r} has the chat templates {names} and no default one; pass the name of one of "
                "them as template=."
            )
        return source

    def render(
        self, messages: Sequence[Message], *, tools: list[Any] | None = None, generation_prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """The conversation as a string, and the character spans that generation markers enclose.

        Raises the template's own error, which :meth:`refusal` turns into a :class:`TemplateError`; ``LimitExceeded``
        where it runs too long or writes too much.
        """
        return sandbox.render(self.source, self._variables(messages, tools, generation_prompt), self.limits)

    def request(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> sandbox.Request:
        """What :meth:`render` asks for, to be asked for ahead."""
        return sandbox.Request.of(self.source, self._variables(messages, None, generation_prompt), self.limits)

    def render_skeleton(self, messages: Sequence[Message], tools: list[Any] | None, generation_prompt: bool) -> str:
        """The string of a conversation of placeholders, the same for all of one form, so it is kept."""
        variables = self._variables(messages, tools, generation_prompt)
        return sandbox.render_kept(self.source, variables, self.limits)

    def _variables(
        self, messages: Sequence[Message], tools: list[Any] | None, generation_prompt: bool
    ) -> dict[str, Any]:
        return {
            "messages": list(messages),
            "tools": self.tools if tools is None else tools,
            "documents": None,
            "add_generation_prompt": generation_prompt,
            **self._arguments,
        }

    def refusal(self, error: BaseException, messages: Sequence[Message]) -> TemplateError:
        """The template's error with the first message that provokes it, found by rendering ever longer prefixes."""
        reason = one_line(error)
        index = len(messages) - 1
        for stop in range(1, len(messages)):
            try:
                self.render(messages[:stop])
            except render_errors() as early:
                if one_line(early) == reason:
                    index = stop - 1
                    break
        return self.error(index, messages, f"refuses it: {reason}")

    def error(self, index: int, messages: Sequence[Message], what: str) -> TemplateError:
        """A TemplateError that names the template, the message and the remedy."""
        where = f"message {index} (role {messages[index].get('role')!r})" if 0 <= index < len(messages) else "tools"
        return TemplateError(
            f"chat template {self.name!r}, {where}: the template {what}; change the conversation or pass another "
            "template."
        )

    def generation_prompt(self) -> str:
        """Text that the template writes in front of an answer to a user, or "" where it writes nothing."""
        return _generation_prompt(self)

    def tested_strings(self) -> frozenset[str]:
        """Markup such as ``</think>`` that the template looks for inside messages, as far as its text shows."""
        return _tested_strings(self.source)

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChatTemplate) and self._key() == other._key()

    def _key(self) -> tuple[str, str]:
        return self.source, repr(sorted(self._arguments.items()))


def render_errors() -> tuple[type[Exception], ...]:
    """Errors that a template can raise while it renders: its own refusals and operations that do not fit the data."""
    return (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


def one_line(error: BaseException) -> str:
    """An error's text on one line, its class in front where the text alone would say nothing."""
    text = " ".join(str(error).split())
    return text if len(text) > 12 else f"{type(error).__name__}: {text}"


def _schemas(tools: Sequence[Any] | None) -> list[Any] | None:
    if not tools:
        return None
    if any(map(callable, tools)):
        try:
            from transformers.utils import get_json_schema
        except ImportError:
            raise TemplateError(
                "a tool is given as a function, whose schema the training parts read: pip install 'limbeck[train]', or "
                "give the JSON schema."
            ) from None
    return [get_json_schema(tool) if callable(tool) else tool for tool in tools]


@lru_cache(maxsize=64)
def _traits(source: str) -> tuple[bool, bool]:
    """Whether a template mentions tools, and whether it has generation markers."""
    return re.search(r"\btools\b", source) is not None, _GENERATION.search(source) is not None


@lru_cache(maxsize=64)
def _generation_prompt(template: ChatTemplate) -> str:
    question = [{"role": "user", "content": "question"}]
    try:
        plain, _ = template.render(question, tools=[])
        prompted, _ = template.render(question, tools=[], generation_prompt=True)
    except render_errors():
        return ""
    return prompted[len(plain) :] if prompted.startswith(plain) else ""


@lru_cache(maxsize=64)
def _tested_strings(source: str) -> frozenset[str]:
    literals = {text for match in _TESTED.finditer(source) for text in match.groups() if text}
    unescaped = {text.replace("\\n", "\n").strip() for text in literals}
    # Plain words are field names ('content' in message), not markup.
    return frozenset(text for text in unescaped if len(text) > 2 and not re.fullmatch(r"\w+", text))
