"""Hints: generators, their failures, the leak check, and placement on real chat templates."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from limbeck.errors import TemplateError
from limbeck.tokens.chat import PLACEMENTS, insert_hint, probe_placement
from limbeck.traces.errors import ERROR_KINDS
from limbeck.traces.hints import (
    HintGenerator,
    HintRequest,
    HookHints,
    JudgeHints,
    LayeredHints,
    RawErrorHints,
    TemplateHints,
    leaks,
)
from limbeck.traces.readers import read_traces
from limbeck.traces.schema import Trace
from tests import zoo
from tests.helpers.chats import answer, call, say
from tests.traces.material import EXAMPLES


def request(
    error: str = "Error: nothing there", *later: Any, tools: tuple[dict, ...] = (), **arguments: Any
) -> HintRequest:
    made = call("c", **arguments)
    messages = [say("user", "Please look at item AB_12."), say("assistant", "", made), answer(made, error, True, tools)]
    return HintRequest(Trace(id="t", tools=list(tools), messages=[*messages, *later]), 1, 2, made)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


# -- generators --------------------------------------------------------------------------------------------------------


def test_templates_name_what_is_wrong() -> None:
    generate = TemplateHints()
    assert "`find`, `open`" in (generate(request(tools=(tool("open"), tool("find")))) or "")
    assert "`x`" in (generate(request(tools=(tool("look", x={"type": "integer"}),))) or "")
    assert "of type integer" in (generate(request(tools=(tool("look", x={"type": "integer"}),), x="1")) or "")
    extra = generate(request(tools=(tool("look", x={"type": "integer"}),), x=1, y=2)) or ""
    assert "does not accept `y`" in extra
    assert "it accepts `x`" in extra
    assert "exit code 3" in (generate(request("Exit code 3\nboom")) or "")
    assert generate(request("Error: the gift card is empty")) is None


def test_every_kind_gets_a_hint_from_the_default_layers() -> None:
    for kind in ERROR_KINDS:
        asked = request()
        asked.trace.messages[2] = asked.trace.messages[2].model_copy(update={"error_kind": kind, "error_meta": {}})
        hint = LayeredHints()(asked)
        assert hint is not None
        assert hint.source in ("template", "raw_error")


def test_raw_errors_are_shortened_in_the_middle() -> None:
    text = RawErrorHints(max_chars=100)(request("Error: start " + "x" * 5000 + " end")) or ""
    assert "Error: start" in text
    assert text.endswith(" end".strip())
    assert len(text) < 300


def test_the_published_hook_is_called_with_kind_and_facts() -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    def hook(kind: str, meta: dict[str, Any]) -> str | None:
        seen.append((kind, meta))
        return "Try another."

    hint = LayeredHints([HookHints(hook)])(request("Exit code 3\nboom"))
    assert hint is not None
    assert (hint.text, hint.source) == ("Try another.", "hook")
    assert seen == [("nonzero_exit", {"exit_code": 3})]


class Misbehaving(HintGenerator):
    def __init__(self, name: str, result: Any) -> None:
        self.name = name
        self.result = result
        self.asked = 0

    def __call__(self, request: HintRequest) -> str | None:
        self.asked += 1
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def test_whatever_a_generator_does_is_counted_and_asked_once() -> None:
    bad = [
        Misbehaving("raises", RuntimeError("no")),
        Misbehaving("number", 7),
        Misbehaving("blank", " \n"),
        Misbehaving("endless", "x" * 5000),
        Misbehaving("binary", "a\x00b"),
        Misbehaving("silent", None),
    ]
    good = Misbehaving("good", "  Look again. ")
    layers = LayeredHints([*bad, good])
    hint = layers(request())
    assert hint is not None
    assert (hint.text, hint.source) == ("Look again.", "good")
    assert [g.asked for g in [*bad, good]] == [1] * 7
    assert layers.problems == Counter(
        {
            "raises: raised RuntimeError": 1,
            "number: returned int": 1,
            "blank: empty": 1,
            "endless: too long": 1,
            "binary: control characters": 1,
        }
    )
    assert all(isinstance(g, HintGenerator) for g in bad)


def test_judge_answers_are_kept_on_disk_per_question_and_judge(tmp_path: Path) -> None:
    asked: list[str] = []

    def judge(question: HintRequest) -> str | None:
        asked.append(question.error_text)
        return None if "silent" in question.error_text else f"About {question.error_text[:9]}"

    for _ in range(2):
        generate = JudgeHints(judge, tmp_path, name="v1")
        assert generate(request("Error: a")) == "About Error: a"
        assert generate(request("Error: silent")) is None
    assert asked == ["Error: a", "Error: silent"]
    JudgeHints(judge, tmp_path, name="v2")(request("Error: a"))
    assert len(asked) == 3
    for path in tmp_path.rglob("*.json"):
        path.write_text("{damaged")
    generate = JudgeHints(judge, tmp_path, name="v1")
    assert generate(request("Error: a")) == "About Error: a"
    assert generate.cache is not None
    assert generate.cache.damaged == 1


# -- leaks -------------------------------------------------------------------------------------------------------------

LATER = "The reservation HAT_284 leaves from gate seventeen at half past four in the afternoon."


@pytest.mark.parametrize(
    ("hint", "leak"),
    [
        ("It leaves from gate seventeen at   half past FOUR in the afternoon.", True),
        ("Use hat_284.", True),
        ("Item AB_12 is the one the user named.", False),
        ("The environment said: Error: nothing there", False),
        ("Look at the gate.", False),
    ],
)
def test_text_of_later_observations_is_a_leak(hint: str, leak: bool) -> None:
    other = call("d")
    asked = request("Error: nothing there", say("assistant", "", other), answer(other, LATER))
    assert (leaks(hint, asked) is not None) == leak
    assert leaks(hint, request()) is None


def test_the_same_error_later_does_not_make_the_raw_error_a_leak() -> None:
    text = "Error: payment amount does not add up, total price is 375, but paid 299"
    other = call("d")
    asked = request(text, say("assistant", "", other), answer(other, text, True))
    assert leaks(RawErrorHints()(asked) or "", asked) is None


def test_a_sibling_result_is_a_later_observation() -> None:
    one, two = call("c"), call("d")
    messages = [say("user", "?"), say("assistant", "", one, two), answer(one, "Error: x", True), answer(two, LATER)]
    assert leaks("HAT_284", HintRequest(Trace(id="t", messages=messages), 1, 2, one)) is not None


# -- placement ---------------------------------------------------------------------------------------------------------

EXPECTED = {
    "llama3_2": "system",
    "qwen3": "system",
    "qwen2_5": "system",
    "smollm2": "system",
    "internlm2": "system",
    "mistral_nemo": "append",
    "gptoss": "append",
    "deepseek_v3": "append",
    "command_r_plus": "append",
    "gemma3": "append",
    "gemma2": "append",
}
HINT = "Hint-31f: list the folder first."


@pytest.mark.parametrize("name", EXPECTED)
def test_placement_on_real_chat_templates(name: str) -> None:
    tokenizer = zoo.tokenizer(name)
    placement = probe_placement(tokenizer)
    assert placement == EXPECTED[name]
    talk = [
        ("user", "Q1"),
        ("assistant", "A1"),
        ("user", "Q2"),
        ("assistant", "A2-target"),
        ("user", "Q3"),
        ("assistant", "A3"),
    ]
    messages = [{"role": role, "content": content} for role, content in talk]
    text = tokenizer.apply_chat_template(insert_hint(messages, 3, HINT, placement), tokenize=False)
    assert text.count(HINT) == 1
    assert text.index("Q2") < text.index(HINT) < text.index("A2-target")
    start = text.index(HINT)
    without = tokenizer.apply_chat_template(messages, tokenize=False)
    tail = without[without.index("A2-target") :]
    assert text.endswith(tail), "what follows the hint must not change"
    assert start < len(text) - len(tail)


def small_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"x": 0}, unk_token="x")))
    tokenizer.chat_template = template
    return tokenizer


TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
NO_SYSTEM = "{% if 'system' in messages | map(attribute='role') %}{{ raise_exception('no system') }}{% endif %}" + TURNS
SYSTEM_FIRST = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
SWALLOWS = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
HOISTS = SYSTEM_FIRST + SWALLOWS
TWICE = SYSTEM_FIRST + TURNS
ONLY_WORDS = "{% for m in messages if m.role != 'system' %}{{ m.content.split('\\n')[0] }};{% endfor %}"
CONSTANT = "{{ messages[-1].content }}{{ messages[-2].content[:10] }}"


@pytest.mark.parametrize(
    ("template", "placement"),
    [
        (TURNS, "system"),
        (NO_SYSTEM, "append"),
        (HOISTS, "append"),
        (SWALLOWS, "append"),
        (TWICE, "append"),
        (ONLY_WORDS, "user"),
    ],
)
def test_placement_is_probed_not_guessed(template: str, placement: str) -> None:
    assert probe_placement(small_tokenizer(template)) == placement


def test_a_template_is_probed_once() -> None:
    class Counting:
        chat_template = TURNS + "{# counted once #}"

        def __init__(self) -> None:
            self.inner = small_tokenizer(self.chat_template)
            self.renders = 0

        def apply_chat_template(self, conversation: Any, *, tokenize: bool) -> Any:
            self.renders += 1
            return self.inner.apply_chat_template(conversation, tokenize=tokenize)

    first, second = Counting(), Counting()
    assert probe_placement(first) == probe_placement(second) == "system"
    assert first.renders > 0
    assert second.renders == 0


def test_templates_that_cannot_show_a_hint_are_refused_by_name() -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        probe_placement(small_tokenizer(None))
    with pytest.raises(TemplateError, match="refuses"):
        probe_placement(small_tokenizer("{{ raise_exception('never') }}"))
    with pytest.raises(TemplateError, match="neither"):
        probe_placement(small_tokenizer(CONSTANT))


chat = st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1, max_size=8).map(
    lambda roles: [{"role": role, "content": f"<{index}>"} for index, role in enumerate(roles)]
)


@given(chat, st.data())
def test_inserting_keeps_all_messages_and_puts_the_hint_before_the_target(
    messages: list[dict], data: st.DataObject
) -> None:
    target = data.draw(st.integers(0, len(messages) - 1))
    before = [dict(message) for message in messages]
    for placement in PLACEMENTS:
        result = insert_hint(messages, target, HINT, placement)
        moved = target + len(result) - len(messages)
        assert result[moved] == messages[target]
        assert result[moved + 1 :] == messages[target + 1 :]
        head = "".join(message["content"] for message in result[:moved])
        assert head.count(HINT) == 1
        assert head.replace(f"\n\n{HINT}", "").replace(HINT, "") == "".join(m["content"] for m in messages[:target])
        assert insert_hint(messages, target, "", placement) == messages
    assert messages == before


def test_bad_targets_and_placements_are_named() -> None:
    messages = [{"role": "user", "content": "?"}]
    with pytest.raises(TemplateError, match=r"message 1 .* 1 messages"):
        insert_hint(messages, 1, HINT, "system")
    with pytest.raises(TemplateError, match="unknown hint placement 'top'"):
        insert_hint(messages, 0, HINT, "top")  # type: ignore[arg-type]


def test_shipped_traces_take_their_hints_on_templates_with_tools() -> None:
    from limbeck.traces.failed_calls import FailedCallFinder

    traces = list(read_traces([EXAMPLES / "workshop.jsonl"]))
    for name, trace in itertools.product(["qwen3", "smollm2", "gptoss"], traces):
        tokenizer = zoo.tokenizer(name)
        for site in FailedCallFinder().find(trace):
            messages = insert_hint(trace.to_messages(), site.target, site.hint, probe_placement(tokenizer))
            text = tokenizer.apply_chat_template(messages, tools=trace.tools, tokenize=False)
            # gpt-oss writes results, and what is appended to them, as JSON
            assert text.count(site.hint) + text.count(json.dumps(site.hint)[1:-1]) * ("\n" in site.hint) == 1
