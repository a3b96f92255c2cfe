"""Environments of the package ``verifiers``: one answer at a time, their tools and turns, their rewards.

The tasks are played with a stand-in that has the package's public surface, and with the package where it is installed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from limbeck.config import resolve
from limbeck.environments.channel import EnvironmentFailure
from limbeck.environments.session import Answered, EpisodeOver, ProcessPool, Session
from limbeck.environments.verifiers import VerifiersEnvironment
from limbeck.errors import ConfigError
from tests.patience import WAIT_SECONDS

HERE = Path(__file__).parent
INSTALLED = importlib.util.find_spec("verifiers") is not None
BOTH = ["stand-in", pytest.param("package", marks=pytest.mark.slow)]


@pytest.fixture(params=BOTH)
def found(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where a process finds the package."""
    if request.param == "package" and not INSTALLED:
        pytest.skip("verifiers is not installed")
    places = [str(HERE), *([str(HERE / "standin")] if request.param == "stand-in" else [])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")]))
    return str(request.param)


class Playing:
    """Sessions of one environment."""

    def __init__(self) -> None:
        self.pool: ProcessPool | None = None

    def start(self, record: dict[str, Any], **more: Any) -> tuple[Session, Any]:
        if self.pool is None:
            limits = {"call_seconds": 3 * WAIT_SECONDS, "max_seconds": 9 * WAIT_SECONDS}
            self.pool = ProcessPool(VerifiersEnvironment(**{**limits, **more}))
        session = Session(self.pool, None)
        return session, session.start({"messages": [{"role": "user", "content": "?"}], **record})


@pytest.fixture
def playing(found: str) -> Iterator[Playing]:
    made = Playing()
    yield made
    if made.pool is not None:
        made.pool.close()


def said(session: Session, content: str = "", **calls: dict[str, Any]) -> Any:
    """What an environment says to an answer, and its judgement."""
    read = [{"id": name, "name": call.pop("tool", "add"), "arguments": call} for name, call in calls.items()]
    functions = [{"name": call["name"], "arguments": call["arguments"]} for call in read]
    written = [{"id": c["id"], "type": "function", "function": f} for c, f in zip(read, functions, strict=True)]
    message = {"role": "assistant", "content": content, **({"tool_calls": written} if written else {})}
    return session.answer(read, message), session.judge([])


def test_tools_answer_calls_and_the_task_judges_the_last_answer(playing: Playing) -> None:
    session, (messages, tools) = playing.start({"idx": 1}, taskset="sums")
    assert [(m["role"], m["content"]) for m in messages] == [("system", "Use the tool."), ("user", "What is 2 + 2?")]
    assert [tool["function"]["name"] for tool in tools] == ["add"]
    right, judged = said(session, c1={"a": 2, "b": 2})
    assert (right.messages, right.failed) == ([{"role": "tool", "content": "4", "tool_call_id": "c1"}], 0)
    assert judged == (None, False)
    wrong, _ = said(session, "Once more.", c2={"a": 2, "b": 200}, c3={"tool": "subtract"})
    assert [bool(m.get("is_error")) for m in wrong.messages] == [True, True]
    assert wrong.failed == 2
    assert "no small number" in wrong.messages[0]["content"]
    assert "subtract" in wrong.messages[1]["content"]
    assert said(session, "It is 4.") == (Answered(), (1.0, True))
    session.close()

    # the same process plays the next one, of data of the record's own
    session, (messages, _) = playing.start({"task": {"prompt": "What is 5 + 5?", "answer": "10"}})
    assert messages == [{"role": "user", "content": "What is 5 + 5?"}]
    assert said(session, "It is 11.")[1] == (0.0, True)
    session.close()
    # records count on where there are more of them than tasks
    session, (messages, _) = playing.start({"idx": 4})
    assert messages[-1]["content"] == "What is 2 + 2?"


def test_turns_are_users_messages_and_an_abandoned_episode_leaves_nothing(playing: Playing) -> None:
    session, (messages, tools) = playing.start({"idx": 2}, taskset="guesses", max_turns=3)
    assert (messages, tools) == ([{"role": "user", "content": "Guess my number."}], [])
    answered, judged = said(session, "3")
    assert (answered.messages, judged) == ([{"role": "user", "content": "more"}], (None, False))
    # left in the middle
    session.close()
    session, _ = playing.start({"idx": 0})
    assert [said(session, guess)[0].messages[0]["content"] for guess in ("9", "1")] == ["less", "more"]
    assert said(session, "5") == (Answered(), (pytest.approx(1 / 3), True))
    session.close()


def test_the_environment_itself_ends_an_episode_of_so_many_turns_and_judges_it(playing: Playing) -> None:
    session, _ = playing.start({"idx": 0}, taskset="sums", max_turns=2)
    said(session, c1={"a": 1, "b": 1})
    answered, judged = said(session, c2={"a": 1, "b": 1})
    # nobody answers the last call, which is no failure of the student's
    assert (answered.failed, judged) == (0, (0.0, True))


def test_what_an_environment_of_somebodys_cannot_do_ends_the_episode(playing: Playing) -> None:
    session, _ = playing.start({"idx": 0}, taskset="guesses")
    # no number, over which it stumbles
    session.answer([], {"role": "assistant", "content": "many"})
    with pytest.raises(EpisodeOver, match="judge"):
        session.judge([])
    session.close()
    with pytest.raises(EpisodeOver, match="start"):
        playing.start({"task": {"no such": "data"}})
    session, _ = playing.start({"task": 7})
    assert said(session, "12")[1] == (1.0, True)


def test_an_environment_may_come_from_a_function(playing: Playing) -> None:
    session, _ = playing.start({"idx": 0}, source="guesses:single")
    assert said(session, "5")[1] == (1.0, True)


@pytest.mark.parametrize(
    ("source", "why"), [("guesses:duel", "2 seats"), ("sums:SumTaskConfig", "SumTaskConfig; expected an Env")]
)
def test_what_the_student_cannot_play_is_refused(found: str, source: str, why: str) -> None:
    with pytest.raises(EnvironmentFailure, match=why):
        VerifiersEnvironment(source=source, call_seconds=3 * WAIT_SECONDS).make_process()


@pytest.mark.skipif(INSTALLED, reason="verifiers is installed")
def test_without_the_package_one_sentence_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"limbeck\[environments\]"):
        VerifiersEnvironment(taskset="sums").ready()


@pytest.mark.parametrize("given", [{}, {"taskset": "sums", "source": "guesses:single"}])
def test_an_environment_has_one_source(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="taskset or source"):
        resolve(VerifiersEnvironment, {"kind": "verifiers", **given})
