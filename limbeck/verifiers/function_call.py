"""Tool calls against the calls that are accepted, as the Berkeley Function-Calling Leaderboard writes them down.

A record's ground truth is a list with one entry per call, in any order: ``{"get_weather": {"city": ["Paris", "paris"],
"unit": ["celsius", ""]}}`` names the function and, of each argument, the values that are accepted; ``""`` among them
lets the argument be left out. An empty list: no function is to be called. ``{"name": ..., "arguments": {...}}`` is a
call with one accepted value for each argument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from limbeck.errors import DataError
from limbeck.tokens.chat.calls import WrittenCall
from limbeck.verifiers.base import RIGHT, Answer, Record, Verdict, Verifier, no_answer, shown, wrong

Accepted = tuple[str, dict[str, list[Any]]]
"""A function's name, and the values that are accepted for each argument."""
MOST_CALLS = 64
_LEFT_OUT = ""
_PUNCTUATION = re.compile(r"[ ,./\-_*^]")


class FunctionCall(Verifier):
    """Names and arguments of tool calls, with their types; the order of parallel calls does not count."""

    name: Literal["function_call"] = "function_call"
    """Which verifier."""
    answer_key: str = "ground_truth"
    """Key of the accepted calls in a record."""

    @property
    def keys(self) -> tuple[str, ...] | None:
        return (self.answer_key,)

    def check(self, record: Record) -> None:
        accepted_calls(record.get(self.answer_key), self.answer_key)

    def judge(self, answer: Answer, record: Record) -> Verdict:
        accepted = accepted_calls(record.get(self.answer_key), self.answer_key)
        calls = answer.tool_calls()
        if not accepted:
            return RIGHT if not calls else wrong(f"{calls[0].name} is called, and no function was to be")
        if not calls:
            return no_answer("no function is called")
        if len(calls) != len(accepted):
            return wrong(f"{len(calls)} calls; expected {len(accepted)}")
        return _matched(calls, accepted)


def accepted_calls(truth: Any, key: str) -> list[Accepted]:
    """The calls of a record's ground truth; a DataError where it is none."""
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{key!r} of the record is no JSON: {shown(error, 120)}") from error
    if not isinstance(truth, list) or len(truth) > MOST_CALLS:
        raise DataError(
            f"{key!r} of the record is {shown(truth, 80)}; expected a list of at most {MOST_CALLS} calls, empty where "
            "no function is to be called"
        )
    return [_accepted(entry, key) for entry in truth]


def _accepted(entry: Any, key: str) -> Accepted:
    if (
        isinstance(entry, Mapping)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("arguments"), Mapping)
    ):
        return entry["name"], {str(name): [value] for name, value in entry["arguments"].items()}
    if isinstance(entry, Mapping) and len(entry) == 1:
        ((name, arguments),) = entry.items()
        if isinstance(arguments, Mapping) and all(isinstance(one, list) for one in arguments.values()):
            return str(name), {str(argument): list(values) for argument, values in arguments.items()}
    raise DataError(
        f"{key!r} of the record holds {shown(entry, 80)}; expected {{name: {{argument: [accepted values]}}}}, or a "
        "call with name and arguments"
    )


def _matched(calls: Sequence[WrittenCall], accepted: Sequence[Accepted]) -> Verdict:
    """Whether each call can be given an accepted one of its own, whatever their order."""
    # a matching along augmenting paths: the first accepted call that fits may be the only one that fits a later call
    objections = [[_objection(call, one) for one in accepted] for call in calls]
    partner: dict[int, int] = {}

    def place(call: int, seen: set[int]) -> bool:
        for one in range(len(accepted)):
            if objections[call][one] is None and one not in seen:
                seen.add(one)
                if one not in partner or place(partner[one], seen):
                    partner[one] = call
                    return True
        return False

    for number in range(len(calls)):
        if not place(number, set()):
            # of all that could be said, what is said about the accepted call of the same name
            same = [i for i, (name, _) in enumerate(accepted) if name == calls[number].name and objections[number][i]]
            why = objections[number][same[0] if same else 0]
            return wrong(why or f"{calls[number].name} is called more often than expected")
    return RIGHT


def _objection(call: WrittenCall, accepted: Accepted) -> str | None:
    name, arguments = accepted
    if call.name != name:
        return f"{shown(call.name, 60)} is called; expected {name}"
    extra = [argument for argument in call.arguments if argument not in arguments]
    if extra:
        return f"{name} has no argument {shown(extra[0], 60)!r}"
    for argument, values in arguments.items():
        if argument not in call.arguments:
            if _LEFT_OUT not in values:
                return f"{name} lacks its argument {argument!r}"
        elif not any(
            _same(call.arguments[argument], value) for value in values if value != _LEFT_OUT or len(values) == 1
        ):
            value_text = shown(json.dumps(call.arguments[argument]), 60)
            return f"{argument} of {name} is {value_text}; expected {shown(values, 80)}"
    return None


def _same(value: Any, expected: Any) -> bool:
    """Equality with types: an integer may stand for a float, never a string for a number. Strings are compared without
    case and punctuation. Objects inside a value list the accepted values of each key in turn."""
    # first: for Python True is 1 and an int
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(expected, str):
        return isinstance(value, str) and _plain(value) == _plain(expected)
    if isinstance(expected, float):
        return isinstance(value, int | float) and value == expected
    if isinstance(expected, int):
        return isinstance(value, int) and value == expected
    if isinstance(expected, list | tuple):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(_same(a, b) for a, b in zip(value, expected, strict=True))
        )
    if isinstance(expected, Mapping):
        return isinstance(value, Mapping) and _same_object(value, expected)
    return value is None and expected is None


def _same_object(arguments: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    if set(arguments) - set(expected):
        return False
    for key, value in expected.items():
        values = value if isinstance(value, list) else [value]
        if key not in arguments:
            if _LEFT_OUT not in values:
                return False
        # a list may be the accepted value itself, or the accepted values
        elif not (_same(arguments[key], value) or any(_same(arguments[key], one) for one in values)):
            return False
    return True


def _plain(text: str) -> str:
    return _PUNCTUATION.sub("", text).lower().replace("'", '"')
