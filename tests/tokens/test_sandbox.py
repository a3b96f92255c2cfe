"""The template sandbox: the same text as transformers', and nothing without end."""

from __future__ import annotations

import time
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from limbeck.errors import TemplateError
from limbeck.tokens import Tokenizer
from limbeck.tokens.chat import ChatTemplate, sandbox
from limbeck.tokens.chat.markers import Forms, canonical, lay_out
from limbeck.tokens.chat.template import render_errors
from tests import zoo
from tests.tokens.chat_cases import CONVERSATIONS, PLAIN, TOOL_CALL, TOOLS, answer, user

CASES = {**CONVERSATIONS, "texts": PLAIN, "weather": TOOL_CALL}
FORMS = [Forms(), Forms(json_arguments=True, no_content=None)]


def _both(source: str, messages: list[dict[str, Any]], tools: Any, arguments: dict[str, Any]) -> list[Any]:
    """What transformers and the sandbox make of a conversation: text and spans, or the class and words of a refusal."""
    found: list[Any] = []
    for prompt in (False, True):
        options = {**arguments, "tools": tools, "add_generation_prompt": prompt}
        try:
            texts, spans = render_jinja_template(
                [messages], chat_template=source, return_assistant_tokens_mask="generation" in source, **options
            )
            expected: Any = (texts[0], [tuple(span) for span in spans[0]] if spans else [])
        except render_errors() as error:
            expected = (type(error).__name__, str(error))
        try:
            made: Any = sandbox.render(source, {"messages": messages, "documents": None, **options})
        except render_errors() as error:
            made = (type(error).__name__, str(error))
        found.append((expected, made))
    return found


def _compare(source: str, arguments: dict[str, Any]) -> int:
    written = 0
    for messages in CASES.values():
        calls = any("tool_calls" in message for message in messages)
        for forms in FORMS if calls else [Forms(), Forms(parts=True)]:
            for expected, made in _both(source, canonical(messages, forms), TOOLS if calls else None, arguments):
                assert made == expected
                written += isinstance(made[1], list)
    return written


@pytest.mark.parametrize("name", zoo.CHAT_NAMES)
def test_templates_of_the_zoo_write_what_transformers_writes(name: str) -> None:
    tokenizer = Tokenizer.of(zoo.tokenizer(name))
    assert sum(_compare(source, tokenizer.named) for source in tokenizer.templates.values()) >= 8


@pytest.mark.parametrize("name", zoo.trl_templates())
def test_templates_of_trl_write_what_transformers_writes(name: str) -> None:
    assert _compare(zoo.trl_template(name), {"bos_token": "<s>", "eos_token": "</s>", "enable_thinking": True}) >= 8


def test_jinja_features_that_templates_use() -> None:
    source = """{%- macro hi(x) -%}<{{ x | upper }}>{%- endmacro -%}
{%- set ns = namespace(n=0, s="") -%}
{%- for m in messages if m.role != "system" -%}
{%- if loop.first %}{% continue %}{% endif -%}
{%- set ns.n = ns.n + 2 ** 3 * loop.index -%}{%- set ns.s = ns.s ~ m.content ~ ns.n -%}
{{ hi(m.content) }}{{ "%s|%5.2f" % (m.role, 1.5) }}{{ "{:>6}".format(ns.n) }}{{ "a-b".replace("-", "+") }}
{%- if loop.index > 3 %}{% break %}{% endif %}
{%- endfor %}
{{ ns.s }}{{ [1, 2] * 2 + [3] }}{{ dict(a=1) | tojson(indent=2) }}{{ {"ä": [1, None]} | tojson }}
{{ ["x", "y"] | join(", ") }}{{ "-".join(messages | map(attribute="role")) }}{{ "a\\nb" | indent(3) }}
{{ "x" | center(5) }}{{ messages[0].content | replace("i", "u") }}{{ none }}{{ missing }}{{ range(3) | list }}"""
    for expected, made in _both(source, canonical(PLAIN, Forms()), None, {}):
        assert made == expected


def test_values_that_are_no_json_are_inert() -> None:
    class Loud:
        def shout(self) -> str:
            raise AssertionError("called from a template")

    text, _ = sandbox.render("{{ x }} {{ y.a[0] }} {{ x.shout is defined }}", {"x": Loud(), "y": {"a": (1,)}})
    assert text == "<Loud> 1 False"


ENDLESS = {
    "loops": "{% set xs = range(90000) | list %}{% for a in xs %}{% for b in xs %}{% for c in xs %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "branching": "{% macro f(n) %}{% if n < 60 %}{% set a = f(n + 1) %}{% set b = f(n + 1) %}{% endif %}{% endmacro %}"
    "{{ f(0) }}",
}
HUGE = {
    "output": "{% for a in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
    "times": "{{ 'x' * 10000000000 }}",
    "list": "{{ [0] * 10000000000 }}",
    "doubling": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "adding": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "nested": "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x }}",
    "json": "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x | tojson }}",
    "power": "{{ 9 ** 9999999 }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "format_of_value": "{{ '{:>{w}}'.format(1, w=9999999999) }}",
    "ljust": "{{ 'x'.ljust(9999999999) }}",
    "replace": "{% set x = 'a' * 100000 %}{{ x.replace('a', x) }}",
    "join": "{% set x = 'a' * 100000 %}{{ x.join(x) }}",
    "join_filter": "{% set x = 'a' * 1000000 %}{{ ([x] * 1000) | join }}",
    "center": "{{ 'x' | center(9999999999) }}",
    "indent": "{{ 'x' | indent(9999999999, true) }}",
    "replace_filter": "{% set x = 'a' * 100000 %}{{ x | replace('a', x) }}",
    "wordwrap": "{% set x = 'a ' * 100000 %}{{ x | wordwrap(1, wrapstring=x) }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_stopped(name: str) -> None:
    begun = time.process_time()
    with pytest.raises(sandbox.LimitExceeded, match=r"more than 0\.5 s|calls itself too often"):
        sandbox.render(ENDLESS[name], {}, sandbox.Limits(seconds=0.5))
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("name", HUGE)
def test_a_template_that_writes_without_measure_is_stopped(name: str) -> None:
    with pytest.raises(sandbox.LimitExceeded, match="characters, more than the"):
        sandbox.render(HUGE[name], {}, sandbox.Limits(seconds=60, characters=1 << 22))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''['__class__'] }}",
        "{{ messages | attr('__class__') }}",
        "{% set ns = namespace(_x=1) %}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ lipsum() }}",
    ],
)
def test_a_template_does_not_get_out(source: str) -> None:
    try:
        text, _ = sandbox.render(source, {"messages": []})
    except render_errors():
        return
    assert text == ""


def test_a_limit_is_one_sentence_and_ends_the_trying() -> None:
    tokenizer = Tokenizer.of(zoo.tokenizer("smollm2"))
    template = ChatTemplate(tokenizer, template=ENDLESS["loops"], limits=sandbox.Limits(seconds=0.2))
    begun = time.process_time()
    with pytest.raises(TemplateError, match=r"ran for more than 0\.2 s; mend it, or pass another template"):
        lay_out(template, [user("q"), answer("a")], holds_special=lambda text: False)
    assert time.process_time() - begun < 2
