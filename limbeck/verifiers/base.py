"""Base of verifiers. A verifier is settings, and a judgement of an answer by what its record says is right.

A verifier is one file with a subclass of :class:`Verifier`; its ``name`` is a ``Literal``, by which run files and the
command line choose it. It joins the union in ``limbeck/verifiers/__init__.py``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from limbeck.errors import DataError
from limbeck.tokens.chat.calls import WrittenCall, written_calls

Record = Mapping[str, Any]
Reason = Literal["right", "wrong", "no_answer", "failed"]
"""``no_answer``: there is no answer to judge; ``failed``: the verifier itself raised an error."""

MOST_CHARACTERS = 1_000_000
"""Longest answer that is read at all."""
_THOUGHT_END = "</think>"


@dataclass(frozen=True)
class Answer:
    """Answer of a model; ``calls``: its tool calls where a server has parsed them already."""

    text: str
    calls: Sequence[WrittenCall] | None = None

    @cached_property
    def said(self) -> str:
        """The text behind the reasoning."""
        # from the right: a text without the mark is all of it behind the mark, as partition would not have it
        return self.text.rpartition(_THOUGHT_END)[2]

    @cached_property
    def final(self) -> str:
        """The same without the blanks around it."""
        return self.said.strip()

    def tool_calls(self) -> list[WrittenCall]:
        """The calls as the server gave them, or as the text has them."""
        return list(self.calls) if self.calls is not None else written_calls(self.final)


@dataclass(frozen=True)
class Verdict:
    """Judgement of an answer: a score, right from 1 up, and for any other why it is not right."""

    score: float
    reason: Reason
    why: str = ""

    @property
    def right(self) -> bool:
        """Whether the answer counts as right."""
        return self.reason == "right"


RIGHT = Verdict(1.0, "right")


def wrong(why: str, score: float = 0.0) -> Verdict:
    """A verdict on an answer that is not right."""
    return Verdict(score, "wrong", shown(why))


def no_answer(why: str) -> Verdict:
    """A verdict on a text in which no answer is found."""
    return Verdict(0.0, "no_answer", shown(why))


def shown(value: object, size: int = 200) -> str:
    """A value in one line of limited length."""
    # cut before it is split, too: an answer may have a million characters
    return " ".join(str(value)[: 20 * size].split())[:size]


class Verifier(BaseModel):
    """Judges answers. Its fields are its settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    parallel: ClassVar[bool] = False
    """Whether a judgement waits for another process, so that several are made at a time."""

    name: str
    """Which verifier."""

    @property
    def keys(self) -> tuple[str, ...] | None:
        """Keys of a record that it reads where a record has them; None: all."""
        return ("messages",)

    @abstractmethod
    def judge(self, answer: Answer, record: Record) -> Verdict:
        """The verdict; may raise whatever it likes."""

    def check(self, record: Record) -> None:
        """Raise a DataError where a record does not say what is right."""

    def ready(self) -> None:
        """Raise a ConfigError where it cannot be used here, such as without a package that it needs."""

    def verify(self, answer: Answer, record: Record) -> Verdict:
        """The verdict on an answer; of a verifier that raises an error, that it failed.

        >>> from limbeck.verifiers import Number
        >>> Number().verify(Answer("18 eggs less 4 is 14, so 14 x 2 = 28."), {"answer": "#### 28"}).right
        True
        """
        if len(answer.text) > MOST_CHARACTERS:
            return wrong(f"the answer has {len(answer.text):,} characters; at most {MOST_CHARACTERS:,} are read")
        if _THOUGHT_END not in answer.text and answer.text.lstrip().startswith("<think>"):
            return no_answer("the reasoning does not end")
        try:
            verdict = self.judge(answer, record)
        except Exception as error:  # an answer is anything, and so is what a verifier makes of it
            return Verdict(0.0, "failed", shown(f"{type(error).__name__}: {error}"))
        # as a reward it would make the advantages of all samples of its prompt NaN
        if not math.isfinite(verdict.score):
            return Verdict(0.0, "failed", f"the score is {verdict.score}")
        return verdict

    def verify_all(self, answers: Sequence[Answer], records: Sequence[Record], workers: int = 4) -> list[Verdict]:
        if not self.parallel or len(answers) < 2:
            return [self.verify(*one) for one in zip(answers, records, strict=True)]
        with ThreadPoolExecutor(max_workers=workers) as pool:
            return list(pool.map(self.verify, answers, records))


class ReferenceVerifier(Verifier):
    """One that compares with the right answer of the record."""

    answer_key: str = "answer"
    """Key of the right answer in a record; a conversation without it is compared with its last assistant message."""

    @property
    def keys(self) -> tuple[str, ...] | None:
        return (self.answer_key, "messages")

    def reference(self, record: Record) -> Any:
        """The right answer of a record; a DataError where it has none."""
        reference = record.get(self.answer_key)
        if reference is None:
            messages = record.get("messages")
            last = messages[-1] if isinstance(messages, list) and messages else None
            if isinstance(last, Mapping) and last.get("role") == "assistant" and isinstance(last.get("content"), str):
                reference = last["content"]
        if reference is None:
            keys = ", ".join(sorted(map(str, record))) or "none"
            raise DataError(
                f"the record has no {self.answer_key!r} to verify against, only {shown(keys)}; set the verifier's "
                "answer_key to the key of the right answer"
            )
        return reference

    def check(self, record: Record) -> None:
        self.reference(record)
