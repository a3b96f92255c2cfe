"""The protocol of an environment. Imported by its process, which needs nothing but Python."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Call = Mapping[str, Any]
"""A tool call: ``id``, ``name`` and ``arguments``. One that could not be read has no name, what was written as its
arguments, and an ``error``."""


class Environment(ABC):
    """An environment of one's own: ``kind: class, name: "module:Class"`` with ``settings`` as keyword arguments.

    An object plays one episode after another, in a process of its own; ``start`` begins the next one. What a method
    raises is counted and ends no run.
    """

    @abstractmethod
    def start(self, record: Mapping[str, Any]) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]]]:
        """Messages that an episode begins with, and the JSON schemas of its tools. ``record``: all keys of the training
        record, with its ``messages`` up to the last answer."""

    @abstractmethod
    def answer(self, calls: Sequence[Call]) -> Sequence[Message | str]:
        """Messages behind an answer of the student that made these calls, or none.

        A text stands for the result of the call at its place, and a message with ``is_error`` for one that failed.
        Where nothing comes back, the student has said its last word.
        """

    def reply(self, message: Message, calls: Sequence[Call]) -> Sequence[Message | str]:
        """What ``answer`` says, for an environment that reads the student's whole answer and not its calls alone."""
        return self.answer(calls)

    def judge(self, conversation: Sequence[Message]) -> tuple[float | None, bool]:
        """Reward so far, if any, and whether the episode is over. Asked after each answer of the student, the
        environment's messages behind it included."""
        return None, False
