"""The letter of a multiple choice, or the text of the answer that it stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from limbeck.errors import DataError
from limbeck.verifiers.base import RIGHT, Answer, Record, ReferenceVerifier, Verdict, no_answer, shown, wrong
from limbeck.verifiers.number import boxed_text

# the words in any case, the letter in its own: "the answer is a dog" names no choice
_SAID = re.compile(
    r"(?i:answer)(?:\s+(?i:is))?\s*[:=]?\s*(?i:option|choice)?\s*[*_(\[\"'$]{0,4}([A-Z0-9])(?![0-9A-Za-z])"
)
_ALONE = re.compile(r"^[\s*_(\[\"']{0,6}([A-Z0-9])(?:[\s*_)\]\"'.:,]|$)", re.MULTILINE)
_BRACKETED = re.compile(r"\(([A-Z0-9])\)")


class Choice(ReferenceVerifier):
    """The right one of several answers, by its letter or its text."""

    name: Literal["choice"] = "choice"
    """Which verifier."""
    choices_key: str = "choices"
    """Key of the answers in a record: a list, or one of ``text`` beside one of ``label``."""

    @property
    def keys(self) -> tuple[str, ...] | None:
        return (self.answer_key, "answerKey", self.choices_key, "messages")

    def check(self, record: Record) -> None:
        self._expected(record)

    def _expected(self, record: Record) -> tuple[str, list[str], list[str]]:
        """The right label, all labels, all texts."""
        labels, texts = _listed(record.get(self.choices_key))
        key = self.answer_key if record.get(self.answer_key) is not None else "answerKey"
        reference = record[key] if record.get(key) is not None else self.reference(record)
        # a bool is an int in Python
        if isinstance(reference, int) and not isinstance(reference, bool) and 0 <= reference < len(labels):
            return labels[reference], labels, texts
        said = str(reference).strip()
        if said in texts:
            return labels[texts.index(said)], labels, texts
        letter = said if len(said) == 1 else _letter(said, labels)
        if letter is None or (labels and letter not in labels):
            raise DataError(
                f"the right answer of the record is {shown(reference, 80)!r}; expected a letter or a number"
            )
        return letter, labels, texts

    def judge(self, answer: Answer, record: Record) -> Verdict:
        expected, labels, texts = self._expected(record)
        letter = _letter(answer.final, labels) or _by_text(answer.final, labels, texts)
        if letter is None:
            return no_answer("no choice in the answer")
        return RIGHT if letter == expected else wrong(f"{letter} is not {expected}")


def _listed(choices: Any) -> tuple[list[str], list[str]]:
    if isinstance(choices, Mapping):
        return [str(label) for label in choices.get("label", [])], [
            str(text).strip() for text in choices.get("text", [])
        ]
    texts = [str(text).strip() for text in choices] if isinstance(choices, list | tuple) else []
    return [chr(ord("A") + number) for number in range(min(len(texts), 26))], texts[:26]


def _letter(text: str, labels: list[str]) -> str | None:
    """The label that a text names; the last where it names several in one way."""
    known = set(labels) or set("ABCDEFGHIJ")
    boxed = boxed_text(text)
    if boxed is not None:
        letters = re.findall(r"(?<![A-Za-z0-9])([A-Z0-9])(?![A-Za-z0-9])", boxed)
        # a box is the answer: letters elsewhere in the text do not take its place
        return letters[-1] if letters and letters[-1] in known else None
    for pattern in (_SAID, _BRACKETED, _ALONE):
        letters = [label for label in pattern.findall(text) if label in known]
        if letters:
            return str(letters[-1])
    return None


def _by_text(text: str, labels: list[str], texts: list[str]) -> str | None:
    """The one choice whose text is named, by whole words."""
    low = text.lower()
    named = [
        label
        for label, one in zip(labels, texts, strict=False)
        if one and re.search(rf"(?<!\w){re.escape(one.lower())}(?!\w)", low)
    ]
    return named[0] if len(named) == 1 else None
