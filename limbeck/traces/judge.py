"""A model behind a chat endpoint as a judge: hints for failed calls, and scores for whole traces.

It reads what the agent had seen, shortened from the front, and answers in a sentence or with a number. Its answers are
kept on disk where a cache is given, by question.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from limbeck.traces.endpoint import Budget, EndpointConfig, EndpointProposer
from limbeck.traces.hints import HintRequest, shortened
from limbeck.traces.replay import NoAnswer
from limbeck.traces.schema import Message, Trace
from limbeck.utils.files import JsonCache

_HINT = (
    "You look over an agent's work. Its next action failed. Write the hint, in one or two sentences, that would have "
    "kept it from this mistake. Use only what the agent had seen before it acted, and the environment's answer. Do not "
    "write the corrected call itself. Answer NONE if the action was no mistake."
)
_SCORE = (
    "You judge an agent's work. Did it do what the user asked, and did the environment confirm it? Answer with one "
    "number from 0 (not at all) to 1 (entirely), and nothing else."
)
_MOST_CHARS, _MESSAGE_CHARS = 12000, 1500
_NUMBER = re.compile(r"(?<![\d.])(?:0(?:\.\d+)?|1(?:\.0+)?|\.\d+)(?!\.?\d)")


class EndpointJudge:
    """Asks an endpoint, one question at a time; ``close`` it.

    Attributes:
        counts: traces ``scored`` so far.
        failures: reason -> questions without a usable answer.
    """

    def __init__(self, config: EndpointConfig, cache: JsonCache | None = None, budget: Budget | None = None) -> None:
        self._endpoint = EndpointProposer(config, cache, Budget() if budget is None else budget)
        self.name = self._endpoint.name
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None

    def hint(self, request: HintRequest) -> str | None:
        """Advice that would have kept the agent from a failed call; None where the judge sees no mistake."""
        call = f"{request.call.name} {_arguments(request.call.arguments)}"
        said = shortened(request.trace.messages[request.target].content, _MESSAGE_CHARS)
        parts = [
            _transcript(request.trace.messages[: request.target]),
            f"# The action that failed\n{said}\n{call}",
            f"# The environment's answer\n{shortened(request.error_text, _MESSAGE_CHARS)}",
        ]
        answer = self._ask(_HINT, "\n\n".join(parts)).strip()
        return None if not answer or answer.strip(" .").upper() == "NONE" else answer

    def score(self, trace: Trace) -> float:
        """How well a trace did what the user asked, 0 to 1; ``NoAnswer`` where the judge does not say."""
        answer = self._ask(_SCORE, _transcript(trace.messages))
        number = _NUMBER.search(answer)
        if number is None:
            raise NoAnswer("no_number", shortened(answer, 80))
        return float(number[0])

    def scored(self, trace: Trace) -> Trace:
        """The trace with the judge's score as its reward, unless it has one; failures are counted."""
        if trace.final_reward is not None:
            return trace
        try:
            reward = self.score(trace)
        except NoAnswer as failure:
            self.failures[failure.reason] += 1
            return trace
        self.counts["scored"] += 1
        meta = {**trace.meta, "reward_source": f"judge {self.name}"}
        return trace.model_copy(update={"final_reward": reward, "meta": meta})

    def close(self) -> None:
        if self._loop is not None:
            self._loop.run_until_complete(self._endpoint.close())
            self._loop.close()
            self._loop = None

    def _ask(self, task: str, text: str) -> str:
        if self._loop is None:
            # one for all questions: connections belong to the loop that opened them
            self._loop = asyncio.new_event_loop()
        messages = [{"role": "system", "content": task}, {"role": "user", "content": text}]
        # a number in the reasoning must not be read as the score
        return self._loop.run_until_complete(self._endpoint.propose(messages, [])).without_reasoning().content


def _arguments(arguments: dict[str, Any] | str) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return shortened(text, _MESSAGE_CHARS)


def _transcript(messages: Sequence[Message]) -> str:
    """The first user message and as many of the last messages as fit."""
    first = next((i for i, message in enumerate(messages) if message.role == "user"), None)
    lines: list[str] = []
    room = _MOST_CHARS
    for index in range(len(messages) - 1, -1, -1):
        text = _written(messages[index])
        room -= len(text)
        if room < 0 and index != first:
            if first is not None and first < index:
                lines += ["[...]", _written(messages[first])]
            break
        lines.append(text)
    return "# What happened\n" + "\n\n".join(reversed(lines))


def _written(message: Message) -> str:
    calls = [f"calls {call.name} {_arguments(call.arguments)}" for call in message.tool_calls if not call.in_content]
    return "\n".join([f"## {message.role}", shortened(message.content, _MESSAGE_CHARS), *calls])
