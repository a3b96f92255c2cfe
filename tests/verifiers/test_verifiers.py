"""Verifiers on right, wrong and hostile answers."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limbeck.errors import ConfigError, DataError
from limbeck.tokens.chat.calls import WrittenCall
from limbeck.verifiers import NAMES, Answer, Exact, Number, Regex, Verdict, make_verifier
from limbeck.verifiers.base import MOST_CHARACTERS
from limbeck.verifiers.number import number_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
BALL = [{"f": {"city": ["Paris", "Paris, France"], "days": [3], "unit": ["celsius", ""], "loud": [True]}}]


def judged(spec: Any, text: str, **record: Any) -> Verdict:
    return make_verifier(spec).verify(Answer(text), record)


# -- right and wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("She has 16 - 4 = 12 eggs.", "12"),
        ("#### 1,234.50", "#### 1234.5"),
        ("so \\boxed{\\frac{1}{2}} of 8", "0.5"),
        ("\\boxed{1{,}000}", 1000),
        ("it costs $-5", "-5"),
        ("\u22127", "-7"),
        ("1 1/2", "1.5"),
        ("3/4 of it", "0.75"),
        ("2\\frac{1}{2}", "2.5"),
        ("-\\frac{3}{4}", "-0.75"),
        ("2.5e3 m", "2500"),
        ("The answer is 50%.", "50"),
        ("5-3", "3"),
        ("<think>is it 4? 5?</think>\n12", "12"),
    ],
)
def test_numbers(text: str, right: Any) -> None:
    assert judged("number", text, answer=right).right
    assert judged("number", text, answer="99991").reason == "wrong"


@given(st.fractions(max_denominator=10**6).filter(lambda f: abs(f) < 10**12), st.booleans())
def test_a_number_is_read_as_it_was_written(value: Any, grouped: bool) -> None:
    top = f"{value.numerator:,}" if grouped else f"{value.numerator}"
    assert number_of(f"We get {top}/{value.denominator} at last") == value
    assert number_of(f"We get \\boxed{{\\frac{{{value.numerator}}}{{{value.denominator}}}}}, not 3") == value


@pytest.mark.parametrize("text", ["", "none", "٣", "１８", "3/0", "\\boxed{x}", "#### none", "<think>it is 12", "²"])
def test_no_number(text: str) -> None:
    assert judged("number", text, answer="12").reason == "no_answer"


LETTERS = {"choices": ["red", "green", "blue"], "answer": "B"}


@pytest.mark.parametrize(
    "text",
    [
        "B",
        "b is no label, so the answer is (B).",
        "**B**",
        "Answer: B",
        "A? No.\nB. green",
        "\\boxed{B}",
        "it is green",
    ],
)
def test_choices(text: str) -> None:
    assert judged("choice", text, **LETTERS).right
    assert judged("choice", text, choices=LETTERS["choices"], answer=1).right
    assert judged("choice", text, choices={"text": LETTERS["choices"], "label": ["A", "B", "C"]}, answerKey="B").right
    assert judged("choice", text, choices=LETTERS["choices"], answer="blue").reason == "wrong"


@pytest.mark.parametrize("text", ["", "A dog.", "red or green", "the answer is D", "\\boxed{red}"])
def test_no_choice(text: str) -> None:
    verdict = judged("choice", text, **LETTERS)
    assert not verdict.right


def test_exact_text_and_patterns() -> None:
    assert judged("exact", " yes\n", answer="yes").right
    assert judged("exact", "<think>no</think>yes", answer="yes").right
    assert judged("exact", "Yes", answer="yes").reason == "wrong"
    assert judged({"name": "regex", "pattern": r"\bcat\b"}, "a cat sat").right
    assert judged("regex", "a cart", answer=r"\bcat\b").reason == "wrong"
    conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]
    assert judged("exact", "yes", messages=conversation).right


def test_json_by_a_schema(tmp_path: Path) -> None:
    assert judged("json_schema", 'Here:\n```json\n{"a": 1}\n```', schema=SCHEMA).right
    assert judged("json_schema", '{"a": 1}', schema=json.dumps(SCHEMA)).right
    assert "a" in judged("json_schema", '{"a": "1"}', schema=SCHEMA).why
    assert judged("json_schema", "I cannot", schema=SCHEMA).reason == "no_answer"
    (tmp_path / "s.json").write_text(json.dumps(SCHEMA))
    assert judged({"name": "json_schema", "file": str(tmp_path / "s.json")}, '{"a": 1}').right
    with pytest.raises(ConfigError):
        make_verifier({"name": "json_schema", "file": str(tmp_path / "none.json")})


def call(name: str = "f", **arguments: Any) -> WrittenCall:
    return WrittenCall(name, arguments)


GOOD = {"city": "paris", "days": 3, "loud": True}


@pytest.mark.parametrize(
    ("calls", "right"),
    [
        ([call(**GOOD)], True),
        ([call(**GOOD, unit="Celsius")], True),
        ([call(**GOOD, unit="kelvin")], False),
        ([call(**{**GOOD, "days": "3"})], False),
        ([call(**{**GOOD, "days": True})], False),
        ([call(**{**GOOD, "loud": 1})], False),
        ([call(city="Paris", days=3)], False),
        ([call(**GOOD, more=1)], False),
        ([call("g", **GOOD)], False),
        ([call(**GOOD), call(**GOOD)], False),
        ([], False),
    ],
)
def test_a_function_call(calls: list[WrittenCall], right: bool) -> None:
    verdict = make_verifier("function_call").verify(Answer("", calls), {"ground_truth": BALL})
    assert verdict.right is right
    assert bool(verdict.why) is not right
    text = "\n".join(json.dumps({"name": one.name, "arguments": one.arguments}) for one in calls)
    assert judged("function_call", text, ground_truth=json.dumps(BALL)).right is right


def test_parallel_calls_in_any_order_and_no_call() -> None:
    verifier = make_verifier("function_call")
    # the first accepted call takes either, so that a greedy choice would fail
    truth = [{"f": {"x": [1, 2]}}, {"f": {"x": [1]}}]
    for order in ([1, 2], [2, 1]):
        assert verifier.verify(Answer("", [call(x=x) for x in order]), {"ground_truth": truth}).right
    assert not verifier.verify(Answer("", [call(x=2), call(x=2)]), {"ground_truth": truth}).right
    assert verifier.verify(Answer("I cannot do that."), {"ground_truth": []}).right
    assert not verifier.verify(Answer("", [call()]), {"ground_truth": []}).right
    nested = [{"f": {"x": [{"a": [1, 2], "b": ["u", ""]}], "y": [[1.5, 2]]}}]
    assert verifier.verify(Answer("", [call(x={"a": 2}, y=[1.5, 2])]), {"ground_truth": nested}).right
    assert not verifier.verify(Answer("", [call(x={"a": 3}, y=[1.5, 2])]), {"ground_truth": nested}).right


def test_functions_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_verifiers.py").write_text(
        "def score(answer, record): return {'a': True, 'b': 0.5, 'c': (False, 'too short'), 'd': 'x'}[answer]\n"
        "NUMBER = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {text: judged("own_verifiers:score", text) for text in "abcde"}
    assert [found[text].reason for text in "abcde"] == ["right", "wrong", "wrong", "failed", "failed"]
    assert (found["b"].score, found["c"].why) == (0.5, "too short")
    for name in ("own_verifiers:NUMBER", "own_verifiers:none", "no_such_module:f"):
        with pytest.raises(ConfigError):
            make_verifier(name)


def test_math_verify_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError):
        make_verifier("math")
    # the package need not be installed here: the same calls, on sums of numbers
    stub = types.ModuleType("math_verify")
    stub.parse = lambda text, parsing_timeout: [sum(map(int, text.split("+")))] if text else []  # type: ignore[attr-defined]
    stub.verify = lambda gold, found, timeout_seconds: gold == found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "math_verify", stub)
    assert judged("math", "1+3", answer="2+2").right
    assert judged("math", "1+2", answer="2+2").reason == "wrong"
    assert judged("math", "", answer="2+2").reason == "no_answer"
    assert judged("math", "a", answer="2+2").reason == "failed"


# -- names and records -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    ["nothing", {"name": "number", "answr_key": "a"}, {"answer_key": "a"}, 3, {"name": "regex", "pattern": "("}],
)
def test_what_is_no_verifier(spec: Any) -> None:
    with pytest.raises(ConfigError):
        make_verifier(spec)


def test_a_record_says_what_is_right_or_is_refused() -> None:
    for spec in ("exact", "number", "choice", "regex", "json_schema", "function_call", "python"):
        verifier = make_verifier(spec)
        for record in ({}, {"text": "a"}, {"messages": []}, {"messages": [{"role": "user", "content": "?"}]}):
            with pytest.raises(DataError):
                verifier.check(record)
    for name, record in {
        "number": {"answer": "none"},
        "choice": {"answer": "none"},
        "json_schema": {"schema": {"type": 3}},
        "function_call": {"ground_truth": [{"f": 3}]},
        "python": {"test_list": [3]},
    }.items():
        with pytest.raises(DataError):
            make_verifier(name).check(record)


# -- hostile answers ---------------------------------------------------------------------------------------------------

RECORDS: dict[str, dict[str, Any]] = {
    "exact": {"answer": "yes"},
    "number": {"answer": "3"},
    "choice": LETTERS,
    "regex": {"answer": "(a+)+$"},
    "json_schema": {"schema": SCHEMA},
    "function_call": {"ground_truth": BALL},
}
HOSTILE = {
    "huge": "a" * (MOST_CHARACTERS + 1),
    "digits": "9" * 500_000,
    "grouped": "1,111" * 100_000,
    "many numbers": "1 " * 100_000,
    "exponent": "1e999999999",
    "nested json": '{"a":' * 20_000,
    "nested lists": '{"name":"f","arguments":{"city":' + "[" * 50_000,
    "closed lists": "[" * 5_000 + "]" * 5_000,
    "boxes": "\\boxed{" * 50_000,
    "fractions": "\\frac{1}{" * 50_000,
    "fences": "```json\n" * 20_000,
    "backtracking": "a" * 40 + "b",
    "unicode digits": "٣٣٣ ３ ³ Ⅲ 三",
    "surrogates": "\ud800 3 \udfff",
    "zero bytes": "3\0\0\0",
    "thoughts": "<think>" * 50_000,
    "empty": "",
    "big number in json": '{"a": ' + "9" * 5_000 + "}",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", RECORDS)
def test_hostile_answers_get_a_verdict(name: str) -> None:
    verifier = make_verifier(name)
    for kind, text in HOSTILE.items():
        verdict = verifier.verify(Answer(text), RECORDS[name])
        assert len(verdict.why) <= 320, kind
        if kind not in ("unicode digits", "surrogates", "zero bytes", "many numbers", "big number in json"):
            assert not verdict.right, kind


def test_a_verifier_that_raises_has_failed() -> None:
    assert Number().verify(Answer("3"), {}).reason == "failed"
    assert Exact().verify(Answer("3"), {}).reason == "failed"
    assert Regex(pattern="(a+)+$").verify(Answer("a" * 60 + "b"), {}).reason in ("failed", "wrong")
    assert judged({"name": "function", "function": f"{__name__}:endless"}, "a").reason == "failed"


def endless(answer: str, record: Any) -> float:
    return float("nan")


def test_every_name_is_known() -> None:
    assert len(set(NAMES)) == len(NAMES) == 9
