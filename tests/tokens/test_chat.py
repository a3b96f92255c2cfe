"""What a rendered conversation supervises, on real templates of many families."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from limbeck.errors import ConfigError, TemplateError
from limbeck.tokens import ByteTokenizer
from limbeck.tokens.chat import render_chat
from tests import zoo
from tests.tokens.chat_cases import (
    END,
    MIDDLE_END,
    PLAIN,
    TEXTS,
    TOOL_CALL,
    TOOLS,
    TRIMS,
    Message,
    answer,
    call,
    result,
    segments,
    supervised,
    user,
)


@pytest.mark.parametrize("name", zoo.CHAT_NAMES)
def test_plain_conversation_supervises_content_and_end_of_turn(name: str) -> None:
    tokenizer = zoo.tokenizer(name)
    rendering = render_chat(tokenizer, PLAIN)
    ends = [MIDDLE_END[name], MIDDLE_END[name], END[name]]
    assert supervised(tokenizer, rendering) == [text + end for text, end in zip(TEXTS, ends, strict=True)]
    assert segments(rendering) == [(2 * i + 1, "content", text) for i, text in enumerate(TEXTS)]
    assert rendering.skipped == {}


@pytest.mark.train
@pytest.mark.parametrize("name", zoo.CHAT_NAMES)
def test_ids_are_those_of_the_tokenizer_itself(name: str) -> None:
    """On text without special-token strings there is nothing to protect: same ids, and the BOS token only once."""
    tokenizer = zoo.tokenizer(name)
    expected = tokenizer.apply_chat_template(PLAIN, tokenize=True, return_dict=False)
    assert render_chat(tokenizer, PLAIN).ids.tolist() == expected


@pytest.mark.parametrize("name", zoo.CHAT_NAMES)
def test_white_space_at_the_edges_is_told_from_the_templates(name: str) -> None:
    tokenizer = zoo.tokenizer(name)
    text = " \n two lines \n\n"
    rendering = render_chat(tokenizer, [user("\n q \n"), answer(text), user("x"), answer("y")])
    kept = text.strip() if name in TRIMS else text
    assert [s[2] for s in segments(rendering)] == [kept, "y"]


@pytest.mark.parametrize("name", zoo.CHAT_NAMES)
def test_empty_answer_supervises_its_end_of_turn(name: str) -> None:
    tokenizer = zoo.tokenizer(name)
    rendering = render_chat(tokenizer, [user("q"), answer(""), user("again"), answer("x")])
    assert supervised(tokenizer, rendering) == [MIDDLE_END[name], "x" + END[name]]
    assert [s.kind for s in rendering.segments] == ["content", "eot", "content", "eot"]


@pytest.mark.parametrize("name", sorted(set(zoo.CHAT_NAMES) - {"gemma2"}))
def test_system_turn_is_context(name: str) -> None:
    tokenizer = zoo.tokenizer(name)
    rendering = render_chat(tokenizer, [{"role": "system", "content": "Be brief."}, user("q"), answer("a")])
    assert supervised(tokenizer, rendering) == ["a" + END[name]]
    # The Nemo template shows a system message only in front of a final user turn.
    lost = {"unrendered_context": 1} if name == "mistral_nemo" else {}
    assert rendering.skipped == lost
    assert (b"Be brief." in rendering.source) == (not lost)


@pytest.mark.parametrize("name", ["llama3_2", "qwen3", "qwen2_5", "gptoss", "deepseek_v3", "smollm2", "internlm2"])
def test_adjacent_turns_of_one_role(name: str) -> None:
    tokenizer = zoo.tokenizer(name)
    rendering = render_chat(tokenizer, [user("one"), user("two"), answer("three"), answer("four")])
    got = supervised(tokenizer, rendering)
    assert got == ["three" + MIDDLE_END[name], "four" + END[name]]


CALLS = {
    "llama3_2": '{"name": "get_weather", "parameters": {"city": "Pa\\"ris\\n", "days": 2}}<|eot_id|>',
    "qwen3": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa\\"ris\\n", "days": 2}}\n'
    "</tool_call><|im_end|>",
    "qwen2_5": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa\\"ris\\n", "days": 2}}\n'
    "</tool_call><|im_end|>",
    "mistral_nemo": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Pa\\"ris\\n", "days": 2}, '
    '"id": "abcdefgh1"}]</s>',
    "gptoss": " to=functions.get_weather<|channel|>commentary json<|message|>"
    '{"city": "Pa\\"ris\\n", "days": 2}<|call|>',
    # This template ends only a second call with an end token.
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Pa\\"ris\\n", "days": 2}\n```<｜tool▁call▁end｜>',
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("form", ["object", "json"])
@pytest.mark.parametrize("content", [None, ""])
def test_tool_call_is_supervised_with_its_syntax(name: str, form: str, content: str | None) -> None:
    tokenizer = zoo.tokenizer(name)
    messages: list[Message] = json.loads(json.dumps(TOOL_CALL))
    messages[1]["content"] = content
    if form == "json":
        function = messages[1]["tool_calls"][0]["function"]
        function["arguments"] = json.dumps(function["arguments"])
    rendering = render_chat(tokenizer, messages, tools=TOOLS)
    assert supervised(tokenizer, rendering) == [CALLS[name], "It is 21 degrees." + END[name]]
    assert [s[:2] for s in segments(rendering)] == [(1, "tool_call"), (3, "content")]
    before = rendering.source[: rendering.segments[0].start]
    if name == "deepseek_v3":  # a template that knows no tools
        assert rendering.skipped == {"no_end_of_turn": 1, "unrendered_tools": 1}
    else:
        assert rendering.skipped == {}
        assert b"get_weather" in before


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5"])
def test_parallel_calls_beside_content(name: str) -> None:
    tokenizer = zoo.tokenizer(name)
    calls = [call(1, {"city": "Paris"}), call(2, {"city": "Rome"})]
    messages = [user("Weather?"), answer("Let me see.", tool_calls=calls), result(1, "1"), result(2, "2"), answer("ok")]
    rendering = render_chat(tokenizer, messages, tools=TOOLS)
    one, two = (
        f'\n<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
        for city in ("Paris", "Rome")
    )
    assert supervised(tokenizer, rendering) == [f"Let me see.{one}{two}<|im_end|>", "ok<|im_end|>"]
    assert segments(rendering) == [
        (1, "content", "Let me see."),
        (1, "tool_call", one + two),
        (4, "content", "ok"),
    ]


def test_parallel_calls_in_a_list() -> None:
    tokenizer = zoo.tokenizer("mistral_nemo")
    calls = [call(1, {"city": "Paris"}), call(2, {})]
    messages = [user("Weather?"), answer("", tool_calls=calls), result(1, "1"), result(2, "2"), answer("ok")]
    got = supervised(tokenizer, render_chat(tokenizer, messages, tools=TOOLS))
    assert got == [
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdefgh1"}, '
        '{"name": "get_weather", "arguments": {}, "id": "abcdefgh2"}]</s>',
        "ok</s>",
    ]


def test_reasoning_is_supervised_where_the_template_shows_it() -> None:
    messages = [user("q"), answer("a1", reasoning_content="r1"), user("q2"), answer("a2", reasoning="why\n\nso")]
    qwen = zoo.tokenizer("qwen3")
    rendering = render_chat(qwen, messages)
    assert supervised(qwen, rendering) == ["a1<|im_end|>", "<think>\nwhy\n\nso\n</think>\n\na2<|im_end|>"]
    assert segments(rendering) == [(1, "content", "a1"), (3, "reasoning", "why\n\nso"), (3, "content", "a2")]
    assert rendering.skipped == {"unrendered_reasoning": 1}
    oss = zoo.tokenizer("gptoss")
    rendering = render_chat(oss, messages)
    thought = "<|channel|>analysis<|message|>why\n\nso<|end|><|start|>assistant<|channel|>final<|message|>a2<|return|>"
    assert supervised(oss, rendering) == ["a1<|end|>", thought]
    assert segments(rendering)[1:] == [(3, "reasoning", "why\n\nso"), (3, "content", "a2")]


def test_reasoning_inside_the_content_is_parsed_by_the_template() -> None:
    tokenizer = zoo.tokenizer("qwen3")
    inline = "<think>\nwhy\n</think>\n\nso"
    rendering = render_chat(tokenizer, [user("q"), answer(inline), user("q2"), answer(inline)])
    assert supervised(tokenizer, rendering) == ["so<|im_end|>", inline + "<|im_end|>"]


def test_an_injected_empty_thought_is_scaffolding() -> None:
    tokenizer = zoo.tokenizer("qwen3")
    messages = [user("q"), answer("", tool_calls=[call(1, {"city": "Rome"})])]
    rendering = render_chat(tokenizer, messages, tools=TOOLS)
    assert b"<think>\n\n</think>\n\n<tool_call>" in rendering.source
    assert supervised(tokenizer, rendering)[0].startswith("<tool_call>")
    rendering = render_chat(tokenizer, [user("q"), answer("a")], template_kwargs={"enable_thinking": False})
    assert supervised(tokenizer, rendering) == ["a<|im_end|>"]


def test_template_arguments_and_generation_prompt_are_passed_through() -> None:
    llama = zoo.tokenizer("llama3_2")
    source = render_chat(llama, [user("q"), answer("a")], template_kwargs={"date_string": "1 May 1999"}).source
    assert b"Today Date: 1 May 1999" in source
    qwen = zoo.tokenizer("qwen3")
    rendering = render_chat(qwen, [user("q")], add_generation_prompt=True, template_kwargs={"enable_thinking": False})
    assert rendering.source.endswith(b"assistant\n<think>\n\n</think>\n\n")
    assert not rendering.loss_mask.any()


def test_choice_of_supervised_messages() -> None:
    tokenizer = zoo.tokenizer("smollm2")
    messages = [user("a"), answer("one"), user("b"), answer("two", supervise=False), user("c"), answer("three")]
    full = render_chat(tokenizer, messages)
    assert supervised(tokenizer, full) == ["one<|im_end|>", "three<|im_end|>"]
    messages[3] = answer("two", weight=0)
    assert supervised(tokenizer, render_chat(tokenizer, messages)) == ["one<|im_end|>", "three<|im_end|>"]
    last = render_chat(tokenizer, messages, train_on="last")
    assert supervised(tokenizer, last) == ["three<|im_end|>"]
    assert np.array_equal(last.ids, full.ids)
    with pytest.raises(ConfigError, match=r"'first'.*'all' or 'last'"):
        render_chat(tokenizer, messages, train_on="first")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", "<think>\n\n</think>\n\nIt is 21 degrees.<|im_end|>"),
        ("gptoss", "<|channel|>final<|message|>It is 21 degrees.<|return|>"),
        ("qwen2_5", "It is 21 degrees.<|im_end|>"),
    ],
)
def test_generation_markers_decide_what_the_model_writes(name: str, expected: str) -> None:
    tokenizer = zoo.tokenizer(name)
    rendering = render_chat(tokenizer, TOOL_CALL, tools=TOOLS, template=zoo.training_template(name))
    got = supervised(tokenizer, rendering)
    assert got[1] == expected
    assert got[0].endswith(CALLS[name])
    assert "Weather" not in "".join(got)


def test_a_token_across_the_edge_is_left_out_and_counted() -> None:
    tokenizer = zoo.tokenizer("smollm2")
    rendering = render_chat(tokenizer, [user("q"), answer("\n\nindented")])
    # The header's newline and the answer's form one token.
    assert rendering.skipped == {"straddle": 1}
    assert supervised(tokenizer, rendering) == ["\nindented<|im_end|>"]
    (content, _) = rendering.segments
    assert rendering.source[content.start : content.end] == b"\n\nindented"


REFUSALS: list[tuple[str, list[Message], int, str]] = [
    ("gemma2", [{"role": "system", "content": "s"}, user("q"), answer("a")], 0, "System role not supported"),
    ("gemma3", [user("a"), user("b"), answer("c")], 1, "must alternate"),
    ("gemma3", TOOL_CALL, 2, "must alternate"),
    ("mistral_nemo", [user("a"), answer("b"), answer("c")], 2, "must alternate"),
    ("command_r_plus", [user("a"), user("b")], 1, "must alternate"),
    ("llama3_2", [user("q"), answer("", tool_calls=[call(1, {}), call(2, {})])], 1, "single tool-calls"),
    ("gptoss", [user("q"), answer("", tool_calls=[call(1, {"a": "b"}), call(2, {})])], 1, "leaves out a tool call"),
    ("smollm2", [user("q"), answer("", tool_calls=[call(1, {"a": "b"})])], 1, "leaves out a tool call"),
    ("deepseek_v3", [user("q"), answer("x", tool_calls=[call(1, {})])], 1, "leaves out a tool call"),
    ("mistral_nemo", [user("q"), answer(None, tool_calls=[{**call(1, {}), "id": "short"}])], 1, "length 9"),
]


@pytest.mark.parametrize(("name", "messages", "index", "reason"), REFUSALS)
def test_refusal_names_template_and_message(name: str, messages: list[Message], index: int, reason: str) -> None:
    with pytest.raises(TemplateError) as caught:
        render_chat(zoo.tokenizer(name), messages)
    text = str(caught.value)
    assert name in text
    assert f"message {index} " in text
    assert reason in text
    assert "\n" not in text


def test_bad_input_is_refused_in_words() -> None:
    tokenizer = zoo.tokenizer("smollm2")
    with pytest.raises(TemplateError):
        render_chat(tokenizer, [])
    with pytest.raises(TemplateError, match=r"message 1 is .*'role'"):
        render_chat(tokenizer, [user("q"), {"content": "a"}])
    with pytest.raises(TemplateError, match=r"gpt2.*chat_template"):
        render_chat(zoo.tokenizer("gpt2"), [user("q")])
    with pytest.raises(TemplateError, match=r"'short'.*message 1 .*found"):
        render_chat(
            tokenizer,
            [user("q"), answer("a long answer")],
            template="{% for m in messages %}{{ m.content[:4] }}{% endfor %}",
            name="short",
        )


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 1 / (messages | length - 2) }}", "refuses it: .*division by zero"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "refuses it: Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls itself too often"),
        (f"{{{{ {'(' * 500}1{')' * 500} }}}}", "nested too deeply"),
        (f"{'{% for i in [1] %}' * 30}x{'{% endfor %}' * 30}", "nested too deeply"),
    ],
    ids=["division", "range", "recursion", "parentheses", "loops"],
)
def test_a_template_that_fails_in_python_is_one_sentence(template: str, said: str) -> None:
    with pytest.raises(TemplateError, match=said) as caught:
        render_chat(zoo.tokenizer("smollm2"), [user("q"), answer("a")], template=template)
    assert "\n" not in str(caught.value)


def test_one_tokenization_per_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = zoo.tokenizer("llama3_2")
    encoder = ByteTokenizer.of(tokenizer)
    seen: list[str] = []

    class Counting:
        def __init__(self, backend: Any) -> None:
            self._backend = backend

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            seen.extend(texts)
            return self._backend.encode_batch_fast(texts, **options)

        def __getattr__(self, name: str) -> Any:
            if name.startswith("encode"):
                raise AssertionError(f"tokenised by {name}")
            return getattr(self._backend, name)

    monkeypatch.setattr(encoder, "_backend", Counting(encoder._backend))
    render_chat(tokenizer, PLAIN * 20)
    assert len(seen) == 1


_contents = st.text(st.characters(codec="utf-8"), max_size=40)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["llama3_2", "qwen3", "smollm2", "gptoss"]), st.lists(_contents, min_size=1, max_size=3), _contents
)
def test_any_unicode_content_is_found(name: str, contents: list[str], question: str) -> None:
    tokenizer = zoo.tokenizer(name)
    messages = [m for content in contents for m in (user(question), answer(content))]
    rendering = render_chat(tokenizer, messages)
    expected = [content.strip() if name in TRIMS else content for content in contents]
    if name == "qwen3":  # shows the last answer after a thought of its own, without leading newlines
        expected[-1] = expected[-1].lstrip("\n")
    assert [s[2] for s in segments(rendering)] == expected
    assert sum(s.kind == "eot" for s in rendering.segments) == len(contents)
    straddling = rendering.skipped.get("straddle", 0)
    for segment in rendering.segments:
        inside = rendering.loss_mask[segment.token_start : segment.token_end]
        assert inside.all()
        straddling -= segment.kind == "content" and segment.end > segment.start and inside.size == 0
    assert rendering.loss_mask.sum() == sum(s.token_end - s.token_start for s in rendering.segments)
    begins = np.concatenate([[0], rendering.byte_ends[:-1]])
    owner = [s for s in rendering.segments if s.kind == "content"]
    for i in np.flatnonzero(rendering.loss_mask & ~rendering.special).tolist():
        assert any(s.start <= begins[i] and rendering.byte_ends[i] <= s.end for s in owner)


def test_source_and_ids_agree_in_long_conversations() -> None:
    """Positions stay right over thousands of messages, and the work stays linear."""
    tokenizer = zoo.tokenizer("smollm2")
    messages = [m for i in range(1500) for m in (user(f"q{i} ✓"), answer(f"answer {i} é"))]
    rendering = render_chat(tokenizer, messages)
    assert segments(rendering) == [(2 * i + 1, "content", f"answer {i} é") for i in range(1500)]
    assert rendering.loss_mask.sum() == sum(s.token_end - s.token_start for s in rendering.segments)


def test_the_page_about_it_tells_the_truth() -> None:
    """The example of docs/conversations.md, on a template with tools."""
    tokenizer = zoo.tokenizer("qwen3")
    calls = [{"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}]
    messages = [
        user("Weather in Rome?"),
        answer("", tool_calls=calls),
        {"role": "tool", "tool_call_id": "c1", "content": "21 degrees"},
        answer("It is 21 degrees."),
    ]
    rendering = render_chat(tokenizer, messages, tools=TOOLS, template_kwargs={"enable_thinking": False})
    assert [s.kind for s in rendering.segments] == ["tool_call", "eot", "content", "eot"]
    assert [s.message for s in rendering.segments] == [1, 1, 3, 3]
