"""The template sandbox: the same text as transformers', and nothing without end."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from limbeck.errors import TemplateError
from limbeck.tokens import ByteTokenizer, render_chat
from limbeck.tokens.chat import ChatTemplate, render_ahead, sandbox
from limbeck.tokens.chat.placeholders import MessageFormat, canonical, render_with_placeholders
from limbeck.tokens.chat.template import render_errors
from tests import zoo
from tests.gates import wait_until
from tests.patience import WAIT_SECONDS
from tests.tokens.chat_cases import CONVERSATIONS, PLAIN, TOOL_CALL, TOOLS, answer, user

CASES = {**CONVERSATIONS, "texts": PLAIN, "weather": TOOL_CALL}
FORMATS = [MessageFormat(), MessageFormat(json_arguments=True, no_content=None)]


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
        for message_format in FORMATS if calls else [MessageFormat(), MessageFormat(parts=True)]:
            for expected, made in _both(
                source, canonical(messages, message_format), TOOLS if calls else None, arguments
            ):
                assert made == expected
                written += isinstance(made[1], list)
    return written


@pytest.mark.parametrize("name", zoo.CHAT_NAMES)
def test_templates_of_the_zoo_write_what_transformers_writes(name: str) -> None:
    tokenizer = ByteTokenizer.of(zoo.tokenizer(name))
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
    for expected, made in _both(source, canonical(PLAIN, MessageFormat()), None, {}):
        assert made == expected


def test_values_that_are_no_json_are_inert() -> None:
    class Loud:
        def shout(self) -> str:
            raise AssertionError("called from a template")

    text, _ = sandbox.render("{{ x }} {{ y.a[0] }} {{ x.shout is defined }}", {"x": Loud(), "y": {"a": (1,)}})
    assert text == "<Loud> 1 False"


_NESTED = (
    "{% set ns = namespace(a=['x'], b=['x']) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
ENDLESS = {
    "loops": "{% set xs = range(90000) | list %}{% for a in xs %}{% for b in xs %}{% for c in xs %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "branching": "{% macro f(n) %}{% if n < 60 %}{% set a = f(n + 1) %}{% set b = f(n + 1) %}{% endif %}{% endmacro %}"
    "{{ f(0) }}",
    "equal": _NESTED + "{{ ns.a == ns.b }}",
    "in": _NESTED + "{{ ns.a in [ns.b] }}",
    "sort": _NESTED + "{{ [ns.a, ns.b, ns.a] | sort | length }}",
    "unique": _NESTED + "{{ [(ns.a | string)] | unique | list | length }}",
    "tuple_key": "{% set ns = namespace(t=(1,)) %}{% for i in range(60) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}"
    "{{ {ns.t: 1} | length }}",
    "sum": "{{ ([[0] * 1000] * 90000) | sum(start=[]) | length }}",
    "power": "{{ 9 ** 9999999999 }}",
    "find": "{% set x = 'a' * 3000000 %}{% set y = 'a' * 1500000 ~ 'b' ~ 'a' * 1000 %}"
    "{% for i in range(90000) %}{{ x.count(y) }}{{ x.rfind(y) }}{% endfor %}",
}
HUGE = {
    "output": "{% for a in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
    "times": "{{ 'x' * 10000000000 }}",
    "list": "{{ ([0] * 10000000000) | length }}",
    "doubling": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "json": "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x | tojson }}",
    "percent": "{{ '%999999999d' % 1 }}",
    "format_of_value": "{{ '{:>{w}}'.format(1, w=999999999) }}",
    "to_bytes": "{{ (5).to_bytes(8000000000, 'big') | length }}",
    "set_block": "{% set x %}{% for i in range(200) %}{{ 'y' * 60000000 }}{% endfor %}{% endset %}{{ x | length }}",
    "indent": "{{ 'x' | indent(9999999999, true) }}",
    "join_filter": "{% set x = 'a' * 1000000 %}{{ ([x] * 10000) | join }}",
    "batch": "{{ [1] | batch(9999999999, 0) | list | length }}",
    "pieces": "{{ ('a,' * 30000000).split(',') | length }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_stopped(name: str) -> None:
    with pytest.raises(sandbox.LimitExceeded):
        sandbox.render(ENDLESS[name], {}, sandbox.Limits(seconds=0.2))


@pytest.mark.parametrize("name", HUGE)
def test_a_template_that_takes_without_measure_is_stopped(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(sandbox.LimitExceeded):
        sandbox.render(HUGE[name], {}, sandbox.Limits(seconds=1, characters=1 << 22, memory=1 << 28))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


@pytest.mark.parametrize(
    "source", ["{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "{{" + "(" * 500 + "1" + ")" * 500 + "}}"]
)
def test_a_template_that_nests_without_measure_is_refused(source: str) -> None:
    with pytest.raises(sandbox.LimitExceeded):
        sandbox.render(source, {})


def test_what_a_stopped_template_leaves_behind_is_a_process_for_the_next_one() -> None:
    assert sandbox.render("{{ x }}", {"x": 1})[0] == "1"
    assert sandbox._process is not None
    first = sandbox._process._child
    with pytest.raises(sandbox.LimitExceeded):
        sandbox.render(ENDLESS["equal"], {}, sandbox.Limits(seconds=0.1))
    assert first.returncode == -signal.SIGPROF
    assert sandbox.render("{{ x }}", {"x": 2})[0] == "2"
    second = sandbox._process._child
    assert second.pid != first.pid
    # whatever else ends it is no fault of the template
    second.kill()
    assert sandbox.render("{{ x }}", {"x": 3})[0] == "3"
    assert second.returncode == -signal.SIGKILL


def test_an_exchange_that_was_broken_off_is_not_answered_to_the_next_request() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            sandbox.render(ENDLESS["loops"], {}, sandbox.Limits(seconds=60))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert sandbox.render("next", {})[0] == "next"


def test_a_batch_that_was_broken_off_leaves_no_process_behind() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    endless = sandbox.Request.of(ENDLESS["loops"], {}, sandbox.Limits(seconds=60))
    sandbox.render_ahead([endless, sandbox.Request.of("{{ x }}", {"x": 1})])
    assert sandbox._process is not None
    child = sandbox._process._child
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            sandbox.render_ahead(sandbox.Request.of("{{ x }}", {"x": x}) for x in (2, 3))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert sandbox._process is None
    assert child.returncode == -signal.SIGKILL
    assert sandbox.render("{{ x }}", {"x": 4})[0] == "4"


def test_more_templates_than_are_kept() -> None:
    for turn in range(2):
        for number in range(300):
            assert sandbox.render(f"{number}-{{{{ x }}}}", {"x": turn})[0] == f"{number}-{turn}"


def test_a_conversation_that_is_no_json_leaves_the_template_usable() -> None:
    source = "seen {{ x | length }} times"
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for wrong in ({"x": deep}, {"x": {(1, 2): 3}}):
        with pytest.raises(render_errors()):
            sandbox.render(source, wrong)
    assert sandbox.render(source, {"x": [1, 2]})[0] == "seen 2 times"


@pytest.mark.parametrize("text", ["\ud83d\ude00 \ud800x", "😀" * 10, "\0\x1b\u2028", "x" * 3_000_000])
def test_text_arrives_as_it_is(text: str) -> None:
    assert sandbox.render("{% generation %}{{ x }}{% endgeneration %}.", {"x": text}) == (f"{text}.", [(0, len(text))])


@pytest.mark.slow
def test_the_process_has_no_variables_and_no_more_life_than_its_parent() -> None:
    """A forked process has one of its own, and both end with their parents, however these end."""
    code = """
import os, signal, sys, torch
from torch.utils.data import DataLoader
from limbeck.tokens.chat import sandbox

def pid():
    assert sandbox.render("{{ x }}", {"x": os.getpid()})[0] == str(os.getpid())
    return sandbox._process._child.pid

class Records(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, number): return pid()

here = pid()
variables = open(f"/proc/{here}/environ").read() if os.path.exists("/proc") else ""
assert "sk-secret" not in variables, variables
there = {int(x) for batch in DataLoader(Records(), num_workers=2, multiprocessing_context="fork") for x in batch}
assert len(there) == 2 and here not in there and pid() == here
child = os.fork()
if not child:
    print(pid(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
assert pid() == here
print(here, *there, flush=True)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    for how, ends in (("exit", 0), ("kill", -signal.SIGKILL)):
        done = subprocess.run(
            [sys.executable, "-c", code, how],
            env={**os.environ, "LIMBECK_API_KEY": "sk-secret"},
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
        )
        assert done.returncode == ends, done.stderr
        pids = [int(word) for word in done.stdout.split()]
        assert len(pids) == 4
        wait_until(lambda pids=pids: not any(map(_lives, pids)), "the processes of templates to end")  # type: ignore[misc]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    # what nobody has waited for yet has ended all the same
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


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
    tokenizer = ByteTokenizer.of(zoo.tokenizer("smollm2"))
    template = ChatTemplate(tokenizer, template=ENDLESS["loops"], limits=sandbox.Limits(seconds=0.2))
    with pytest.raises(sandbox.LimitExceeded):
        render_with_placeholders(template, [user("q"), answer("a")], holds_special=lambda text: False)
    assert sandbox._process is None


def test_conversations_of_one_form_are_asked_for_once() -> None:
    """What placeholders become is kept: of two conversations with the same roles, the second takes one exchange."""
    tokenizer = ByteTokenizer.of(zoo.tokenizer("smollm2"))
    render_chat(tokenizer, [{"role": "user", "content": "one"}, {"role": "assistant", "content": " two "}])
    before = sandbox._kept.cache_info()
    render_chat(tokenizer, [{"role": "user", "content": "three"}, {"role": "assistant", "content": " four "}])
    after = sandbox._kept.cache_info()
    assert after.misses == before.misses
    assert after.hits > before.hits


def _answers(requests: list[tuple[str, dict[str, Any], sandbox.Limits | None]]) -> list[Any]:
    answers: list[Any] = []
    for request in requests:
        try:
            answers.append(sandbox.render(*request))
        except render_errors() as error:
            answers.append((type(error), str(error)))
        except sandbox.LimitExceeded as error:
            answers.append(str(error))
    return answers


@pytest.mark.parametrize("ends", ["equal", "to_bytes", None])
def test_what_is_asked_for_ahead_is_what_is_asked_for_alone(ends: str | None) -> None:
    """Each with limits of its own, in any order, though one of them ends the process."""
    limits = sandbox.Limits(seconds=0.1, memory=1 << 28)
    requests: list[tuple[str, dict[str, Any], sandbox.Limits | None]] = [
        ("{{ x }}{% generation %}{{ y }}{% endgeneration %}", {"x": "ä\ud800" * number, "y": "z"}, None)
        for number in range(6)
    ]
    requests += [("{{ x.y.z }}", {"x": 1}, None), ("{{ raise_exception('no') }}", {}, None), ("{% if %}", {}, None)]
    requests += [("{{ x }}", {"x": "long" * 100_000}, None), ("{{ 'x' * 99 }}", {}, sandbox.Limits(characters=9))]
    if ends is not None:
        requests.insert(3, ({**ENDLESS, **HUGE}[ends], {}, limits))
    alone = _answers(requests)
    assert sum(isinstance(answer, str) for answer in alone) == 1 + (ends is not None)
    for order in (requests, requests[::-1], requests[::2], [*requests, *requests]):
        sandbox.render_ahead(sandbox.Request.of(*request) for request in requests)
        assert _answers(order) == [alone[requests.index(request)] for request in order]


def test_a_batch_is_one_exchange() -> None:
    requests: list[Any] = [("{{ x }}", {"x": "x" * number}, None) for number in range(1, 5)]
    sandbox.render("warm", {})
    process = sandbox._process
    assert process is not None
    sandbox.render_ahead(sandbox.Request.of(*request) for request in requests)
    assert len(process.awaited) == 4
    # the last one's answer lies behind those of the others, which are kept until they are asked for
    assert _answers(requests[3:]) == [("xxxx", [])]
    assert not process.awaited
    process._child.kill()
    assert _answers(requests[:3]) == [("x", []), ("xx", []), ("xxx", [])]
    assert sandbox._process is process


def test_a_process_that_ends_under_a_batch_costs_nothing_but_time() -> None:
    requests: list[Any] = [("{{ x }}", {"x": number}, None) for number in range(4)]
    for kill_first in (True, False):
        sandbox.render("warm", {})
        assert sandbox._process is not None
        child = sandbox._process._child
        if kill_first:
            child.kill()
        sandbox.render_ahead(sandbox.Request.of(*request) for request in requests)
        child.kill()
        assert _answers(requests) == [(str(number), []) for number in range(4)]


def test_conversations_rendered_ahead_have_the_same_ids() -> None:
    tokenizer = ByteTokenizer.of(zoo.tokenizer("smollm2"))
    conversations: list[dict[str, Any]] = [{"tokenizer": tokenizer, "messages": m} for m in CASES.values()]
    conversations += [{**one, "add_generation_prompt": True} for one in conversations]

    def ids() -> list[Any]:
        made: list[Any] = []
        for conversation in conversations:
            try:
                rendering = render_chat(**conversation)
                made.append((rendering.ids.tolist(), rendering.loss_mask.tolist(), rendering.segments))
            except TemplateError as error:
                made.append(str(error))
        return made

    alone = ids()
    render_ahead([*conversations, {"tokenizer": tokenizer, "messages": []}, {"tokenizer": tokenizer, "messages": [1]}])
    assert sandbox._process is not None
    assert len(sandbox._process.awaited) >= len(conversations) / 2
    assert ids() == alone


def test_kept_texts_are_those_of_their_values_and_of_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [sandbox.render_kept("{{ x }}", {"x": x}) for x in (1, "1", 2, [1], 1)] == ["1", "1", "2", "[1]", "1"]
    long = "y" * 100_000
    assert sandbox.render_kept("{{ x }}", {"x": long}) == long
    source = "{{ strftime_now('%Y') }}{{ x }}"
    misses = sandbox._kept.cache_info().misses
    for now in (10.0, 10.5, 11.0):
        monkeypatch.setattr(sandbox.time, "time", lambda now=now: now)
        sandbox.render_kept(source, {"x": "kept"})
    assert sandbox._kept.cache_info().misses == misses + 2
    with pytest.raises(render_errors()):
        sandbox.render_kept("{{ x.y.z }}", {"x": 1})
