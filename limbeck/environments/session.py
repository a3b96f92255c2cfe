"""One episode's dealings with its environment: processes fail, episodes end with a reason, runs go on."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from limbeck.environments.channel import EnvironmentFailure, EnvironmentProcess
from limbeck.environments.settings import EnvironmentSettings

_ROLES = ("tool", "user", "system")
_FIRST_ROLES = (*_ROLES, "developer", "assistant")
_KEYS = ("role", "content", "name", "tool_call_id", "is_error", "tool_calls", "reasoning_content")


class EpisodeOver(Exception):
    """The environment ends an episode; the argument is the reason."""


class ProcessPool:
    """Processes of an environment, kept from one episode to the next."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self.settings = settings
        self._free: list[EnvironmentProcess] = []
        self._all: set[EnvironmentProcess] = set()
        self._closings = 0
        self._lock = threading.Lock()

    def take(self) -> EnvironmentProcess:
        """A process for one episode; an ``EnvironmentFailure`` where the pool was closed while it started."""
        with self._lock:
            if self._free:
                return self._free.pop()
            closings = self._closings
        # outside the lock: a start takes seconds, and other threads give processes back meanwhile
        process = self.settings.make_process()
        with self._lock:
            if closings == self._closings:
                self._all.add(process)
                return process
        process.close()
        raise EnvironmentFailure("died", "the environment was closed while a process of it started")

    def give(self, process: EnvironmentProcess) -> None:
        """Take a process back."""
        with self._lock:
            if process.is_open:
                self._free.append(process)
            else:
                self._all.discard(process)

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            every, self._all, self._free = list(self._all), set(), []
            self._closings += 1
        for process in every:
            process.close()


@dataclass
class Answered:
    """Messages of the environment behind an answer, and how many of them say that a call failed."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    failed: int = 0


class Session:
    """One episode of an environment. Methods wait for its process, and raise `EpisodeOver` alone.

    Args:
        tools: of all episodes; None: ``start`` gives them.
    """

    def __init__(self, pool: ProcessPool, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self.pool, self.settings = pool, pool.settings
        self.tools = None if tools is None else [dict(tool) for tool in tools]
        self.seconds = 0.0
        self._process: EnvironmentProcess | None = None
        self._record: Mapping[str, Any] = {}

    def start(self, record: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The messages that the episode begins with, and its tools."""
        self._record = record
        try:
            reply = self._begin()
            messages = _messages(reply.get("messages"), _FIRST_ROLES)
        except (EnvironmentFailure, OSError):
            raise EpisodeOver("start") from None
        if self.tools is not None:
            return messages, self.tools
        tools = reply.get("tools") or []
        if not messages or not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise EpisodeOver("start")
        return messages, tools

    def _begin(self) -> dict[str, Any]:
        def take() -> dict[str, Any]:
            self._process = self.pool.take()
            return self._process.ask({"method": "start", "record": self._record}, self._left())

        return self._timed(take)

    def _timed(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        begin = time.monotonic()
        try:
            return work()
        finally:
            # also of calls that fail, which may have taken longest
            self.seconds += time.monotonic() - begin
            if self._process is not None and not self._process.is_open:
                self.close()

    def _left(self) -> float:
        return min(self.settings.call_seconds, self.settings.max_seconds - self.seconds)

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._left() <= 0:
            raise EpisodeOver("seconds")
        if self._process is None:
            self._begin()
        process = self._process
        assert process is not None
        # asked only then: a start just before has used some of the time
        return self._timed(lambda: process.ask(request, self._left()))

    def answer(self, calls: Sequence[Mapping[str, Any]], message: Mapping[str, Any] | None = None) -> Answered:
        """What the environment says to an answer with these calls; ``message`` is the whole of it."""
        # calls that know nothing of each other fail alone
        groups = [[call] for call in calls] if self.settings.restarts else [list(calls)]
        out = Answered()
        for group in groups:
            try:
                reply = self._ask({"method": "answer", "calls": group, "message": message})
                messages = self._results(reply.get("messages"), group)
            except (EnvironmentFailure, OSError) as failure:
                trouble = failure.trouble if isinstance(failure, EnvironmentFailure) else "died"
                if trouble in ("timeout", "died") and not self.settings.restarts:
                    raise EpisodeOver(trouble) from None
                if not group:
                    raise EpisodeOver("error") from None
                messages = [_result(call, f"error: {failure}", failed=True) for call in group]
            for message in messages:
                out.failed += bool(message.get("is_error"))
                message["content"] = self._cut(message["content"])
            out.messages += messages
        return out

    def _results(self, messages: Any, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages whose results name the calls that they answer; calls passed over are answered with the reason."""
        if not isinstance(messages, list):
            raise EnvironmentFailure("error", "its reply has no list of messages")
        out, places = list[dict[str, Any]](), iter(calls)
        # of all messages beforehand: a result without an id must not take the call that a later one names
        answered = {m.get("tool_call_id") for m in messages if isinstance(m, dict) and m.get("tool_call_id")}
        for message in messages:
            if isinstance(message, str):
                message = {"role": "tool", "content": message}
            if isinstance(message, dict) and message.get("role", "tool") == "tool" and not message.get("tool_call_id"):
                call = next((c for c in places if c.get("id") not in answered), None)
                if call is None:
                    raise EnvironmentFailure("error", "it gave a result that belongs to no call")
                answered.add(call["id"])
                message = _result(call, message.get("content"), failed=bool(message.get("is_error")))
            out += _messages([message], _ROLES)
        missing = [call for call in calls if call["id"] not in answered]
        # results come first: templates expect them directly behind their calls
        results = [m for m in out if m["role"] == "tool"]
        results += [_result(call, "error: no result", failed=True) for call in missing]
        return results + [m for m in out if m["role"] != "tool"]

    def _cut(self, text: str) -> str:
        most = self.settings.max_answer_chars
        return text if len(text) <= most else f"{text[:most]} [cut off]"

    def judge(self, conversation: Sequence[Mapping[str, Any]]) -> tuple[float | None, bool]:
        """Reward so far, if any, and whether the episode is over."""
        if self.settings.restarts:
            return None, False
        try:
            reply = self._ask({"method": "judge", "conversation": list(conversation)})
        except (EnvironmentFailure, OSError):
            raise EpisodeOver("judge") from None
        reward = reply.get("reward")
        if reward is not None:
            # Python's JSON reads NaN and Infinity, and a bool is an int
            if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
                raise EpisodeOver("judge")
            reward = float(reward)
        # whatever else a program of somebody's sends, such as "false", ends no episode
        return reward, reply.get("done") is True

    def close(self) -> None:
        """Hand the process back."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(OSError):
                self.pool.give(process)


def _result(call: Mapping[str, Any], content: Any, *, failed: bool) -> dict[str, Any]:
    """The result of a call. One that could not be read has no call to name: a user message answers it."""
    more = {"is_error": True} if failed else {}
    if call.get("error"):
        return {"role": "user", "content": content, **more}
    return {"role": "tool", "tool_call_id": call["id"], "name": call["name"], "content": content, **more}


def _messages(value: Any, roles: Sequence[str]) -> list[dict[str, Any]]:
    """Messages that a conversation can hold; an `EnvironmentFailure` where one is none."""
    if not isinstance(value, list):
        raise EnvironmentFailure("error", "its reply has no list of messages")
    for message in value:
        if not isinstance(message, dict) or message.get("role") not in roles:
            raise EnvironmentFailure("error", "one of its messages has no role")
        if not isinstance(message.get("content"), str):
            raise EnvironmentFailure("error", "one of its messages has no text")
    return [{key: message[key] for key in _KEYS if message.get(key) is not None} for message in value]
