"""Mathematical expressions by value, as the package math-verify compares them."""

from __future__ import annotations

import threading
from typing import Any, Literal

from limbeck.utils.plugins import load_package
from limbeck.verifiers.base import RIGHT, Answer, Record, ReferenceVerifier, Verdict, no_answer, shown, wrong

SECONDS = 5
"""Time limit of one reading, and of one comparison."""


class Math(ReferenceVerifier):
    """Formulas, sets, intervals and numbers that are equal whatever they look like; needs math-verify."""

    name: Literal["math"] = "math"
    """Which verifier."""

    def ready(self) -> None:
        _library()

    def judge(self, answer: Answer, record: Record) -> Verdict:
        library = _library()
        # its limits of time are alarms, which Python hands to the main thread alone
        seconds = SECONDS if threading.current_thread() is threading.main_thread() else None
        expected = str(self.reference(record))
        gold = library.parse(expected, parsing_timeout=seconds)
        parsed = library.parse(answer.final, parsing_timeout=seconds)
        if not parsed:
            return no_answer("no expression in the answer")
        if library.verify(gold, parsed, timeout_seconds=seconds):
            return RIGHT
        return wrong(f"{shown(parsed[-1], 80)} is not {shown(expected, 80)}")


def _library() -> Any:
    return load_package(
        "math_verify", "the verifier 'math' needs the package math-verify; pip install 'limbeck[verify]'"
    )
