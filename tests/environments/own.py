"""An environment as a user could write it."""

from __future__ import annotations

from typing import Any

from limbeck.environments import Environment


class Echo(Environment):
    """Says one word to whatever happens, and half likes every conversation that there is."""

    def __init__(self, word: str) -> None:
        self.word = word

    def start(self, record: Any) -> Any:
        return record["messages"], []

    def answer(self, calls: Any) -> Any:
        return [self.word] if calls else [{"role": "user", "content": f"{self.word}?"}]

    def judge(self, conversation: Any) -> Any:
        return conversation and 0.5, False
