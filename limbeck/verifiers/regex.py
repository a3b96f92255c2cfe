"""A pattern that the answer must hold."""

from __future__ import annotations

from typing import Any, Literal

from limbeck.errors import ConfigError, DataError
from limbeck.utils.plugins import load_package
from limbeck.verifiers.base import RIGHT, Answer, Record, ReferenceVerifier, Verdict, no_answer, shown, wrong

SECONDS = 1.0
"""Time limit of one search: a pattern may take time that doubles with each character."""


class Regex(ReferenceVerifier):
    """The answer holds a match of a pattern, the record's or one for all."""

    name: Literal["regex"] = "regex"
    """Which verifier."""
    pattern: str | None = None
    """Regular expression that must match somewhere in the answer; default: the record's right answer is one."""

    def ready(self) -> None:
        engine = _engine()
        if self.pattern is not None:
            try:
                engine.compile(self.pattern)
            except engine.error as error:
                raise ConfigError(f"the verifier's pattern {shown(self.pattern, 80)!r} is none: {error}") from error

    def check(self, record: Record) -> None:
        if self.pattern is None and not isinstance(self.reference(record), str):
            raise DataError(f"{self.answer_key!r} of the record is {shown(self.reference(record), 80)!r}, no pattern")

    def judge(self, answer: Answer, record: Record) -> Verdict:
        if not answer.final:
            return no_answer("the answer is empty")
        pattern = self.pattern if self.pattern is not None else str(self.reference(record))
        match = _engine().search(pattern, answer.final, timeout=SECONDS)
        return RIGHT if match else wrong(f"no match of {shown(pattern, 80)!r}")


def _engine() -> Any:
    # unlike Python's own, it can be stopped
    return load_package("regex", "the verifier 'regex' needs the package regex; pip install regex")
