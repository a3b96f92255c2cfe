"""A function of the user's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from numbers import Real
from typing import Any, Literal

from limbeck.errors import ConfigError, DataError
from limbeck.utils.plugins import load_object
from limbeck.verifiers.base import Answer, Record, Verdict, Verifier, shown, wrong


class Function(Verifier):
    """``module:function`` of the environment or the working folder, called with the answer and the record."""

    name: Literal["function"] = "function"
    """Which verifier."""
    function: str
    """``module:function``; returns True or False, a score (right from 1 up), either with a reason beside it, or a
    ``Verdict``."""

    @property
    def keys(self) -> tuple[str, ...] | None:
        return None

    def ready(self) -> None:
        _ = self._loaded

    @cached_property
    def _loaded(self) -> Callable[..., Any]:
        function = load_object(self.function, "the verifier's function")
        if not callable(function):
            raise ConfigError(f"the verifier's function {self.function!r} is a {type(function).__name__}, no function")
        return function

    def judge(self, answer: Answer, record: Record) -> Verdict:
        verdict, why = self._loaded(answer.text, dict(record)), ""
        if isinstance(verdict, tuple) and len(verdict) == 2:
            verdict, why = verdict
        if isinstance(verdict, Verdict):
            return verdict
        # numpy's truth values are no Real; their type is bool in numpy 2 and bool_ before
        if not isinstance(verdict, Real) and type(verdict).__name__ not in ("bool", "bool_"):
            raise DataError(f"{self.function} returned {shown(verdict, 80)}; expected True, False or a number")
        score = float(verdict)
        if score >= 1:
            return Verdict(score, "right")
        return wrong(str(why or f"{self.function} scores it {score:g}"), score)
