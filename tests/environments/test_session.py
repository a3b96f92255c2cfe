"""Environments: whatever a tool does, its episode goes on or ends with a reason."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from limbeck.environments.channel import EnvironmentFailure, EnvironmentProcess
from limbeck.environments.functions import FunctionTools
from limbeck.environments.own import OwnEnvironment
from limbeck.environments.process import ProgramEnvironment
from limbeck.environments.session import EpisodeOver, ProcessPool, Session
from limbeck.environments.settings import EnvironmentSettings
from limbeck.errors import ConfigError
from tests.patience import WAIT_SECONDS

HERE = Path(__file__).parent
ASKED = [{"role": "user", "content": "hello"}]
UNREAD = {"id": "c9", "name": None, "arguments": "{", "error": "the tool call could not be read"}


def call(name: str, number: int = 0, **arguments: Any) -> dict[str, Any]:
    return {"id": f"c{number}", "name": name, "arguments": arguments}


def program(*arguments: str, **more: Any) -> ProgramEnvironment:
    command = [sys.executable, str(HERE / "program.py"), *arguments]
    return ProgramEnvironment(**{"command": command, "call_seconds": WAIT_SECONDS, **more})


class Playing:
    """Sessions of an environment whose processes end with the test."""

    def __init__(self) -> None:
        self.pools: list[ProcessPool] = []

    def session(self, settings: EnvironmentSettings, tools: Any = None) -> Session:
        self.pools.append(ProcessPool(settings))
        return Session(self.pools[-1], tools)


@pytest.fixture
def playing() -> Iterator[Playing]:
    made = Playing()
    yield made
    for pool in made.pools:
        pool.close()


def test_a_process_that_starts_while_its_pool_is_closed_ends() -> None:
    """One thread starts a process, which takes seconds; another closes the pool meanwhile."""
    starting, closed = threading.Event(), threading.Event()
    made: list[EnvironmentProcess] = []

    class Slow(ProgramEnvironment):
        def make_process(self, **more: Any) -> EnvironmentProcess:
            starting.set()
            assert closed.wait(WAIT_SECONDS)
            made.append(super().make_process(**more))
            return made[-1]

    pool = ProcessPool(Slow(command=[sys.executable, str(HERE / "program.py")], call_seconds=WAIT_SECONDS))
    with ThreadPoolExecutor() as threads:
        taken = threads.submit(pool.take)
        assert starting.wait(WAIT_SECONDS)
        pool.close()
        closed.set()
        with pytest.raises(EnvironmentFailure):
            taken.result(WAIT_SECONDS)
    assert not made[0].is_open
    # a pool that was closed makes new ones
    process = pool.take()
    assert process.is_open
    pool.close()
    assert not process.is_open


@pytest.fixture(scope="module")
def functions() -> FunctionTools:
    return FunctionTools(
        source=str(HERE / "tools.py"), max_seconds=WAIT_SECONDS, call_seconds=WAIT_SECONDS, max_answer_chars=50
    )


def test_functions_are_tools_by_their_signatures_and_docstrings(functions: FunctionTools) -> None:
    tools = {tool["function"]["name"]: tool["function"] for tool in functions.tools()}
    assert set(tools) == {"add", "fail", "leave", "die", "hang", "flood", "hoard"}
    assert tools["add"]["parameters"]["properties"]["a"] == {"type": "integer", "description": "The first."}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (call("add", a=1), "'b'"),
        (call("nothing"), "no tool 'nothing'"),
        (call("fail", why="because"), "ValueError: because"),
        (call("leave"), "SystemExit"),
        (call("die"), "ended"),
        (call("hoard"), "MemoryError"),
        (UNREAD, "could not be read"),
    ],
    ids=lambda value: str(value["name"]) if isinstance(value, dict) else "",
)
def test_a_hostile_function_gives_an_error_as_its_result_and_the_next_call_works(
    playing: Playing, functions: FunctionTools, asked: dict[str, Any], said: str
) -> None:
    session = playing.session(functions, [])
    assert session.start({"messages": ASKED})[0] == ASKED
    answered = session.answer([asked, call("add", 1, a=1, b=2)])
    assert answered.failed == 1
    failed = next(m for m in answered.messages if m.get("is_error"))
    assert said in failed["content"]
    # of a call that could not be read nothing says which result it waits for
    assert failed["role"] == ("user" if asked is UNREAD else "tool")
    assert {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "3"} in answered.messages
    session.close()


def test_a_function_that_hangs_or_floods_costs_its_own_time_and_no_more(playing: Playing) -> None:
    settings = FunctionTools(source=str(HERE / "tools.py"), call_seconds=1.0, max_answer_chars=50)
    session = playing.session(settings, [])
    session.start({"messages": ASKED})
    (hung,) = session.answer([call("hang")]).messages
    assert hung["is_error"]
    (long,) = session.answer([call("flood")]).messages
    assert long["content"] == "x" * 50 + " [cut off]"
    session.close()


@pytest.mark.parametrize(("tool", "ending"), [("die", "died"), ("hang", "timeout")])
def test_a_program_that_dies_or_hangs_ends_its_episode_and_the_next_one_has_a_new_process(
    playing: Playing, tool: str, ending: str
) -> None:
    session = playing.session(program(call_seconds=2.0))
    messages, tools = session.start({"goal": 2})
    assert messages == [{"role": "user", "content": "Count to 2."}]
    assert tools[0]["function"]["name"] == "raise"
    with pytest.raises(EpisodeOver) as over:
        session.answer([call(tool)])
    assert over.value.args == (ending,)
    again = Session(session.pool, None)
    again.start({"goal": 2})
    assert again.answer([call("raise", by=2)]).messages[0]["content"] == "2"
    assert again.judge([]) == (1.0, True)
    again.close()


def test_a_reply_that_is_no_json_is_an_error_for_the_student(playing: Playing) -> None:
    session = playing.session(program())
    session.start({"goal": 2})
    (message,) = session.answer([call("mumble")]).messages
    assert message["is_error"]
    session.close()


def test_a_program_that_never_answers_ends_the_episode_at_its_start(playing: Playing) -> None:
    session = playing.session(program("deaf", call_seconds=0.5))
    with pytest.raises(EpisodeOver) as over:
        session.start({"goal": 1})
    assert over.value.args == ("start",)


def test_the_environments_time_in_an_episode_is_limited(playing: Playing) -> None:
    session = playing.session(program())
    session.start({"goal": 3})
    session.seconds = session.settings.max_seconds
    with pytest.raises(EpisodeOver) as over:
        session.answer([call("raise")])
    assert over.value.args == ("seconds",)


def test_a_class_of_ones_own_plays_in_its_process(playing: Playing) -> None:
    settings = OwnEnvironment(name="tests.environments.own:Echo", settings={"word": "so"}, call_seconds=WAIT_SECONDS)
    settings.ready()
    session = playing.session(settings)
    messages, tools = session.start({"messages": ASKED})
    assert (messages, tools) == (ASKED, [])
    # whoever calls nothing is talked to as well
    assert session.answer([]).messages == [{"role": "user", "content": "so?"}]
    # one result for two calls: the other one is told that there is none
    first, second = session.answer([call("say", 0), call("say", 1)]).messages
    assert (first["content"], second["content"]) == ("so", "error: no result")
    assert session.judge([{"role": "user", "content": "x"}]) == (0.5, False)
    with pytest.raises(EpisodeOver) as over:
        session.judge([])
    assert over.value.args == ("judge",)
    session.close()


@pytest.mark.parametrize(
    "settings",
    [
        FunctionTools(source="no_such_file.py"),
        FunctionTools(source="no_such_module_at_all"),
        FunctionTools(source=str(HERE / "untold.py")),
        OwnEnvironment(name="tests.environments.own:Nothing"),
        ProgramEnvironment(command=["no-such-program-at-all"]),
    ],
    ids=["file", "module", "docstring", "class", "program"],
)
def test_what_cannot_be_started_is_refused_before_the_run(settings: EnvironmentSettings) -> None:
    with pytest.raises(ConfigError):
        settings.ready()
