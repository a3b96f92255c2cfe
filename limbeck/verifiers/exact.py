"""The very text of the right answer."""

from __future__ import annotations

from typing import Literal

from limbeck.verifiers.base import RIGHT, Answer, Record, ReferenceVerifier, Verdict, no_answer, shown, wrong


class Exact(ReferenceVerifier):
    """The answer is the text of the record's, blanks around both and reasoning before it aside."""

    name: Literal["exact"] = "exact"
    """Which verifier."""

    def judge(self, answer: Answer, record: Record) -> Verdict:
        if not answer.final:
            return no_answer("the answer is empty")
        expected = str(self.reference(record)).strip()
        if answer.final == expected:
            return RIGHT
        return wrong(f"{shown(answer.final, 80)!r} is not {shown(expected, 80)!r}")
