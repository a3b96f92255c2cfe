r"""The number that an answer ends with: behind ``####``, in ``\boxed{}``, or the last one of the text."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, Literal

from limbeck.errors import DataError
from limbeck.verifiers.base import RIGHT, Answer, Record, ReferenceVerifier, Verdict, no_answer, shown, wrong

MOST_DIGITS = 400
"""Longer numbers are none: they would take time and say nothing."""
_PLAIN = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(
    rf"(?<![0-9A-Za-z_.])(?P<sign>(?<![0-9A-Za-z)\]])[-+])?\s?[$€£¥]?\s?(?P<top>{_PLAIN})"
    rf"(?:[eE](?P<exponent>[-+]?[0-9]{{1,2}})(?![0-9])|\s?/\s?(?P<bottom>[0-9]+(?:\.[0-9]+)?)(?![0-9])"
    rf"|\s(?P<part>[0-9]+)/(?P<of>[0-9]+)(?![0-9]))?"
)
# a digit starts a match once: from each of a million digits the rest would be read again
_FRACTION = re.compile(
    r"(?:(?<![0-9])(?P<whole>[0-9]{1,20}))?\\[dt]?frac\s?\{(?P<top>[^{}]{1,60})\}\s?\{(?P<bottom>[^{}]{1,60})\}"
)
_NOISE = re.compile(r"\{,\}|\\[,!; ]|(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3})|\*\*|\\\$|\\text\{[^{}]*\}")
_MARK = "####"


class Number(ReferenceVerifier):
    """Compares numbers by value: 1,234.50 is 1234.5, and 1/2 is 0.5; units and currency signs do not count."""

    name: Literal["number"] = "number"
    """Which verifier."""

    def check(self, record: Record) -> None:
        self._expected(record)

    def _expected(self, record: Record) -> Fraction:
        reference = self.reference(record)
        expected = number_of(reference)
        if expected is None:
            raise DataError(f"{self.answer_key!r} of the record is {shown(reference, 80)!r}, which holds no number")
        return expected

    def judge(self, answer: Answer, record: Record) -> Verdict:
        expected, number = self._expected(record), number_of(answer.final)
        if number is None:
            return no_answer("no number in the answer")
        return RIGHT if number == expected else wrong(f"{spelled(number)} is not {spelled(expected)}")


def number_of(value: Any) -> Fraction | None:
    r"""The number that a text ends with; None where it has none.

    >>> [str(number_of(text)) for text in ("so 3 + 4 = 7.", "#### 1,234", r"\boxed{\frac{1}{2}} of 8", "none")]
    ['7', '1234', '1/2', 'None']
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return Fraction(value)
    text = str(value)
    boxed = boxed_text(text)
    if boxed is not None:
        return _last(boxed)
    if _MARK in text:
        return _first(text.rpartition(_MARK)[2].lstrip().split("\n", 1)[0])
    return _last(text)


def boxed_text(text: str) -> str | None:
    r"""Text in the last ``\boxed{}``; None where there is none, or where it does not end."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, first = 0, start + len("\\boxed")
    for index in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if not depth:
            return text[first + 1 : index]
    return None


def spelled(value: Fraction) -> str:
    """A number in few characters."""
    if value.denominator == 1 and abs(value) < 10**15:
        return str(value.numerator)
    # a float ends at 1.8e308, where Python raises OverflowError
    return f"{float(value):.10g}" if abs(value) < 10**300 else "a number of more than 300 digits"


def _clean(text: str) -> str:
    # the minus sign of typeset mathematics
    return _NOISE.sub("", text.replace("\u2212", "-"))


def _all(text: str) -> list[tuple[int, int, re.Match[str]]]:
    text = _clean(text)
    fractions = [(m.start(), m.end(), m) for m in _FRACTION.finditer(text)]
    return fractions + [
        (m.start("top"), m.end(), m)
        for m in _NUMBER.finditer(text)
        # of the last fraction alone: numbers inside another come neither first nor last, and to ask all is quadratic
        if not any(a <= m.start("top") < b for a, b, _ in fractions[-1:])
    ]


def _last(text: str) -> Fraction | None:
    numbers = sorted(_all(text), key=lambda one: one[0])
    return _value(numbers[-1][2]) if numbers else None


def _first(text: str) -> Fraction | None:
    numbers = sorted(_all(text), key=lambda one: one[0])
    return _value(numbers[0][2]) if numbers else None


def _value(match: re.Match[str]) -> Fraction | None:
    if match.end() - match.start() > MOST_DIGITS:
        return None
    parts = match.groupdict()
    if match.re is _FRACTION:
        top, bottom = _last(parts["top"]), _last(parts["bottom"])
        if top is None or not bottom:
            return None
        whole = int(parts["whole"] or 0)
        sign = -1 if match.string[: match.start()].endswith("-") else 1
        return sign * (whole + top / bottom)
    value = Fraction(parts["top"].replace(",", ""))
    if parts["exponent"]:
        value *= Fraction(10) ** int(parts["exponent"])
    for below, above in ((parts["bottom"], None), (parts["of"], parts["part"])):
        if below is None:
            continue
        divisor = Fraction(below)
        if not divisor:
            return None
        value = value / divisor if above is None else value + Fraction(above) / divisor
    return -value if parts["sign"] == "-" else value
