"""Where chat templates run: jinja2's immutable sandbox with a deadline and a bound on everything they can grow.

A template comes with a model, so it is code of a stranger. Every turn of a loop and every call looks at the clock;
every operation, method and filter that can make a long text out of a short one is measured before it runs.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, runtime
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from limbeck.errors import TemplateError

_MAX_BITS = 1 << 12
# Widths of five digits, or given by a value.
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\d{5}|\*)")
_WIDE_FORMAT = re.compile(r"\{[^{}]*:[^{}]*(?:\d{5}|\{)")


@dataclass(frozen=True)
class Limits:
    """What one rendering may take."""

    seconds: float = 10.0
    characters: int = 1 << 26


class LimitExceeded(TemplateError):
    """A template ran too long or wrote too much; there is no use in trying it another way."""


@dataclass
class _Meter:
    """One rendering under way: its limits, what it has written, and what it marked as the model's own."""

    limits: Limits
    deadline: float
    written: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)

    def look(self) -> None:
        if time.monotonic() > self.deadline:
            raise LimitExceeded(
                f"a chat template ran for more than {self.limits.seconds:g} s; mend it, or pass another template."
            )

    def size(self, characters: int) -> None:
        if characters > self.limits.characters:
            raise LimitExceeded(
                f"a chat template wrote {characters} characters, more than the {self.limits.characters} that are "
                "allowed; mend it, or pass another template."
            )


class _Running(threading.local):
    meter: _Meter | None = None


_running = _Running()


def _meter() -> _Meter:
    return _running.meter or _Meter(Limits(), float("inf"))


@contextmanager
def _metered(limits: Limits) -> Iterator[_Meter]:
    before = _running.meter
    meter = _running.meter = _Meter(limits, time.monotonic() + limits.seconds)
    try:
        yield meter
    finally:
        _running.meter = before


def render(
    source: str, variables: Mapping[str, Any], limits: Limits | None = None
) -> tuple[str, list[tuple[int, int]]]:
    """The text that a template writes, and the character spans that its generation markers enclose.

    Raises:
        LimitExceeded: it ran too long or wrote too much.
        jinja2.TemplateError, TypeError, ...: its own refusal, or an operation that does not fit the data.
    """
    template = _compiled(source)
    parts: list[str] = []
    with _metered(limits or Limits()) as meter:
        try:
            for part in template.generate({key: plain(value) for key, value in variables.items()}):
                parts.append(part)
                meter.written += len(part)
                meter.size(meter.written)
                meter.look()
        except RecursionError:
            raise LimitExceeded("a chat template calls itself too often; mend it, or pass another template.") from None
    return "".join(parts), meter.spans


def plain(value: Any) -> Any:
    """A copy of JSON types alone; anything else, which could have methods, becomes the name of its type."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else list(map(plain, value))
    return f"<{type(value).__name__}>"


@lru_cache(maxsize=256)
def _compiled(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except (RecursionError, MemoryError, SyntaxError):
        # of Python's own compiler, to which jinja2 hands a template
        raise LimitExceeded("a chat template is nested too deeply; mend it, or pass another template.") from None


@lru_cache(maxsize=1)
def _environment() -> _Sandbox:
    return _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}``: what the model writes."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        text, meter = caller(), _meter()
        meter.spans.append((meter.written, meter.written + len(text)))
        return text


class _Namespace(Namespace):
    """jinja2's ``namespace`` without names that could reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set the attribute {name!r} of a namespace")


class _Dict:
    """``dict`` for templates: a function, not the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_printable, **options)
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        self.filters |= {name: _measured(self.filters[name], measure) for name, measure in _FILTERS.items()}
        self.filters |= {"tojson": _tojson, "join": _join(self.filters["join"])}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(tick).set_lineno(loop.lineno))
        _Joins().visit(tree)
        return tree

    @staticmethod
    def tick() -> None:
        """Called in every turn of a loop, for the sake of :meth:`call`."""

    @staticmethod
    def joined(*parts: Any) -> str:
        """``a ~ b``."""
        return "".join(str(_printable(part)) for part in _bounded(parts))

    def call(__self, __context: runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter()
        meter.look()
        owner = getattr(__obj, "__self__", None)
        measure = _METHODS.get(__obj.__name__) if isinstance(owner, str) else None
        if measure is not None:
            args = tuple(list(a) if isinstance(a, Iterator) else a for a in args)
            meter.size(measure(owner, *args, **kwargs))
        return super().call(__context, __obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        _check_format(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _check_format(obj, argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)


class _Joins(NodeTransformer):
    """``a ~ b`` as a call, so that its length is known before it is made."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        join = nodes.EnvironmentAttribute("joined")
        return nodes.Call(join, node.nodes, [], None, None).set_lineno(node.lineno)


# -- what templates find -----------------------------------------------------------------------------------------------


def _refuse(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As templates know it: without the escapes for HTML that jinja2's own filter makes."""
    wide = indent if isinstance(indent, int) else len(indent or "")
    _meter().size(_weight(value) * (1 + wide))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# -- measures ----------------------------------------------------------------------------------------------------------


def _weight(value: Any) -> int:
    """About how many characters a value has as text; stops counting where it is more than is allowed."""
    limit = _meter().limits.characters
    total, stack = 0, [value]
    while stack and total <= limit:
        item = stack.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            stack += [part for pair in item.items() for part in pair]
            total += len(item)
        elif isinstance(item, (list, tuple)):
            stack += item
            total += len(item)
        else:
            total += 1
    return total


def _bounded(value: Any) -> Any:
    _meter().size(_weight(value))
    return value


def _printable(value: Any) -> Any:
    """Every value that a template prints passes here."""
    return value if isinstance(value, str) else _bounded(value)


def _check_operation(operator: str, left: Any, right: Any) -> None:
    numbers = isinstance(left, int) and isinstance(right, int)
    size = 0
    if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
        size = len(left) + len(right)
    elif operator == "*" and not numbers:
        sized, count = (right, left) if isinstance(left, int) else (left, right)
        size = len(sized) * count if isinstance(sized, (str, list, tuple)) and isinstance(count, int) else 0
    elif operator == "%" and isinstance(left, str):
        size = _weight(right) + len(left) if not _WIDE_PERCENT.search(left) else 1 << 62
    elif numbers and operator in ("*", "**"):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        size = 1 << 62 if bits > _MAX_BITS else 0
    _meter().size(size)


def _check_format(value: Any, attribute: Any) -> None:
    if isinstance(value, str) and attribute in ("format", "format_map") and _WIDE_FORMAT.search(value):
        _meter().size(1 << 62)


def _replaced(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    text, old, new = str(text), str(old), str(new)
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def _joined_by(separator: str, parts: Any) -> int:
    return _weight(list(parts)) + len(separator) * len(parts)


def _padded(text: Any, width: int = 80, *_: Any, **__: Any) -> int:
    return max(len(str(text)), width)


def _wrapped(text: Any, width: int = 79, break_long_words: bool = True, wrapstring: str | None = None, *_: Any) -> int:
    return len(str(text)) * (1 + len(wrapstring or ""))


def _indented(text: Any, width: int | str = 4, *_: Any, **__: Any) -> int:
    lines = str(text).split("\n")
    return sum(map(len, lines)) + len(lines) * (1 + (width if isinstance(width, int) else len(width)))


def _linked(text: Any, *arguments: Any, **named: Any) -> int:
    return len(str(text)) * (64 + _weight([*arguments, *named.values()]))


def _formatted(text: Any, *arguments: Any, **named: Any) -> int:
    wide = _WIDE_PERCENT.search(str(text))
    return 1 << 62 if wide else len(str(text)) + _weight([*arguments, *named.values()])


def _rows(_: Any, count: int, *__: Any, **___: Any) -> int:
    return 8 * count


_METHODS: dict[str, Callable[..., int]] = {
    "center": _padded,
    "ljust": _padded,
    "rjust": _padded,
    "zfill": _padded,
    "replace": _replaced,
    "join": _joined_by,
    "expandtabs": lambda text, tabsize=8: len(text) + text.count("\t") * tabsize,
    "translate": lambda text, table: len(text) * (1 + _weight(table)),
}
_FILTERS: dict[str, Callable[..., int]] = {
    "center": _padded,
    "indent": _indented,
    "replace": _replaced,
    "format": _formatted,
    "wordwrap": _wrapped,
    "urlize": _linked,
    "batch": _rows,
    "slice": _rows,
}


def _measured(made: Callable[..., Any], measure: Callable[..., int]) -> Callable[..., Any]:
    """A filter of jinja2 that is measured first; the context that some of them take comes in front."""
    takes_context = hasattr(made, "jinja_pass_arg")

    @wraps(made)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _meter().size(measure(*args[takes_context:], **kwargs))
        return made(*args, **kwargs)

    return checked


def _join(made: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(made)
    def checked(context: Any, value: Any, d: str = "", attribute: str | int | None = None) -> Any:
        parts = list(value)
        _meter().size(_weight(parts) + len(str(d)) * len(parts))
        return made(context, parts, d, attribute)

    return checked
