"""Spans on many more templates than there are vocabularies at hand: every template that trl ships, as strings."""

from __future__ import annotations

import json

import pytest

from limbeck.errors import TemplateError
from limbeck.tokens import ByteTokenizer
from limbeck.tokens.chat import ChatTemplate
from limbeck.tokens.chat.assistant_spans import TurnFinder
from limbeck.tokens.chat.placeholders import render_with_placeholders
from tests import zoo
from tests.tokens.chat_cases import CONVERSATIONS, TOOLS, Message, answer, call, user


def _regions(template_name: str, messages: list[Message], tools: list[dict] | None) -> dict[int, str] | None:
    """Supervised text by message, without end-of-turn tokens; None where the template refuses in its own words."""
    template = ChatTemplate(
        ByteTokenizer.of(zoo.tokenizer("smollm2")),
        tools=tools,
        template=zoo.trl_template(template_name),
        name=template_name,
    )
    try:
        rendered = render_with_placeholders(template, messages, holds_special=lambda text: False)
    except TemplateError as error:
        if template_name in str(error) and ("refuses it" in str(error) or "leaves out" in str(error)):
            return None
        raise
    turns = TurnFinder(rendered, []).find([i for i, m in enumerate(messages) if m["role"] == "assistant"])
    found: dict[int, str] = {}
    for turn in turns:
        found[turn.message] = found.get(turn.message, "") + rendered.text[slice(*turn.region)]
        for kind, start, end in turn.segments:
            if kind == "content":
                content = messages[turn.message]["content"]
                assert rendered.text[start:end].strip() in content
    return found


@pytest.mark.parametrize("name", zoo.trl_templates())
def test_every_string_is_found_or_the_template_refuses(name: str) -> None:
    taken = 0
    for label, messages in CONVERSATIONS.items():
        found = _regions(name, messages, TOOLS if label in ("tool", "parallel") else None)
        if found is None:
            continue
        taken += 1
        for i, message in enumerate(messages):
            text = found.get(i, "")
            if message["role"] == "assistant" and not message.get("tool_calls"):
                assert message["content"].split("</think>")[-1].strip() in text
            for number in message.get("tool_calls", ()):
                assert number["function"]["name"] in text
                assert str(number["function"]["arguments"]["city"]).split('"')[0] in text
        others = [m["content"] for m in messages if m["role"] != "assistant" and len(m["content"]) > 2]
        assert not [text for text in others for region in found.values() if text in region]
    assert taken >= 3, "at least plain, reasoning and empty conversations fit every template"


def test_arguments_are_found_in_whatever_form_they_are_written() -> None:
    value = "quote \" ' slash \\ é 🌤 </b>"
    tokenizer = ByteTokenizer.of(zoo.tokenizer("smollm2"))
    writings = {
        "json": "{{ c.arguments | tojson }}",
        "ascii": "{{ c.arguments | tojson(ensure_ascii=True) }}",
        "python": "{{ c.arguments }}",
        "nested": "{{ (c.arguments | tojson) | tojson }}",
        "html": "{{ c.arguments.v | e }}",
        "plain": "{{ c.arguments.v }}",
    }
    for label, writing in writings.items():
        source = "{% for m in messages %}[{{ m.content }}{% for t in m.tool_calls or [] %}{% set c = t.function %}"
        source += f"({{{{ c.name }}}}:{writing}){{% endfor %}}]{{% endfor %}}"
        template = ChatTemplate(tokenizer, template=source, name=label)
        rendered = render_with_placeholders(
            template,
            [user("q"), answer("", tool_calls=[call(1, {"v": value}, name="f")])],
            holds_special=lambda t: False,
        )
        (argument,) = [p for p in rendered.spans if rendered.string(p).kind == "argument"]
        written = rendered.text[argument.start : argument.end]
        if label == "plain":
            assert written == value
        elif label in ("json", "ascii"):
            assert json.loads(f'"{written}"') == value


def test_a_template_that_looks_at_names_is_followed() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for t in m.tool_calls or [] %}"
        "{% if t.function.name == 'python' %}<code>{{ t.function.arguments.code }}</code>{% else %}"
        "{{ raise_exception('unknown tool') }}{% endif %}{% endfor %};{% endfor %}"
    )
    template = ChatTemplate(ByteTokenizer.of(zoo.tokenizer("smollm2")), template=source, name="code")
    messages = [user("q"), answer("go", tool_calls=[call(1, {"code": "1+1"}, name="python")])]
    rendered = render_with_placeholders(template, messages, holds_special=lambda text: False)
    (turn,) = TurnFinder(rendered, []).find([1])
    assert rendered.text[slice(*turn.region)] == "go<code>1+1</code>;"
    messages[1]["tool_calls"][0]["function"]["name"] = "perl"
    with pytest.raises(TemplateError, match=r"'code', message 1 .*unknown tool"):
        render_with_placeholders(template, messages, holds_special=lambda text: False)
