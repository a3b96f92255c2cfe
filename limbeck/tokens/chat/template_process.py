"""The process that renders chat templates; ``sandbox`` starts it as a script, and it needs jinja2 alone.

It reads batches of requests from its standard input and writes answers to its standard output until the input ends:
each request and each answer as 8 bytes of length and as many bytes, a batch as the length of all its requests in front
of them. A request is JSON. An answer is JSON, or a rendering: a zero byte, the number of its spans, their begins and
ends, and the text: setting JSON up takes longer than most templates. Every request has limits of its own, those of the
operating system, which also hold inside of an operation: a CPU timer whose signal ends the process, and the size of its
address space.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_READ = 1 << 16
"""What a pipe holds."""


class _TooMuch(Exception):
    """``args``: which limit, by the word that the other side knows."""


# -- what templates find -----------------------------------------------------------------------------------------------


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}``: what the model writes."""

    tags = {"generation"}  # noqa: RUF012
    written = 0
    spans: list[tuple[int, int]] = []  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        text = caller()
        self.spans.append((self.written, self.written + len(text)))
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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _new_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    del environment.globals["lipsum"]
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    environment.filters["tojson"] = _tojson
    return environment


# -- one request -------------------------------------------------------------------------------------------------------

_ENVIRONMENT = _new_environment()
_sources: dict[int, str] = {}


@lru_cache(maxsize=256)
def _compiled(source: str) -> jinja2.Template:
    try:
        return _ENVIRONMENT.from_string(source)
    except (RecursionError, MemoryError, SyntaxError):
        # of Python's own compiler, to which jinja2 hands a template
        raise _TooMuch("nesting") from None


def _render(source: str, variables: dict[str, Any], characters: int) -> tuple[str, list[tuple[int, int]]]:
    marks = _ENVIRONMENT.extensions[_Generation.identifier]
    assert isinstance(marks, _Generation)
    marks.written, marks.spans = 0, []
    parts = []
    for part in _compiled(source).generate(variables):
        parts.append(part)
        marks.written += len(part)
        if marks.written > characters:
            raise _TooMuch("characters")
    return "".join(parts), marks.spans


def _answer(request: bytearray) -> bytes:
    """The rendering, the limit that it broke, or the classes and the words of its error."""
    try:
        number, source, seconds, characters, memory, variables = json.loads(request.decode("utf-8", "surrogatepass"))
        if source is not None:
            _sources[number] = source
        _limit_memory(memory)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        text, spans = _render(_sources[number], variables, characters)
        numbers = struct.pack(f"<BQ{2 * len(spans)}Q", 0, len(spans), *(place for span in spans for place in span))
        return numbers + text.encode("utf-8", "surrogatepass")
    except _TooMuch as error:
        return _json({"limit": error.args[0]})
    except MemoryError:
        return _json({"limit": "memory"})
    except RecursionError:
        return _json({"limit": "calls"})
    except Exception as error:
        return _json(_described(error))


@lru_cache(maxsize=1)
def _limit_memory(size: int) -> None:
    with suppress(ValueError, OSError):  # macOS knows no such limit
        resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _described(error: Exception) -> dict[str, Any]:
    words = error.args if error.args and all(isinstance(one, str) for one in error.args) else (str(error),)
    if isinstance(error, jinja2.TemplateSyntaxError):
        words = (str(error),)
    return {"error": [one.__name__ for one in type(error).__mro__], "words": [one[:10_000] for one in words]}


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


# -- the pipe ----------------------------------------------------------------------------------------------------------


def _read() -> Iterator[bytearray]:
    """The requests of the next batch, of which there is one at a time; all of it is read before the first."""
    data = bytearray(os.read(0, _READ))
    while data:
        if len(data) >= 8 and len(data) - 8 == struct.unpack_from("<Q", data)[0]:
            break
        part = os.read(0, _READ)
        if not part:
            os._exit(0)
        data += part
    else:
        os._exit(0)
    begin = 8
    while begin < len(data):
        (size,) = struct.unpack_from("<Q", data, begin)
        yield data[begin + 8 : begin + 8 + size]
        begin += 8 + size


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def main() -> None:
    """Answer requests until there are no more."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # what a request makes is gone with its answer, but for a few cycles of jinja2's
    gc.freeze()
    gc.set_threshold(50_000)
    while True:
        for request in _read():
            answer = _answer(request)
            _write(struct.pack("<Q", len(answer)) + answer)
            signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
