"""An environment of the package ``verifiers`` as one of ours; runs in a process of its own.

An environment of that package runs an episode by itself and asks an OpenAI-compatible server for each turn of its
model. This is that server: a request waits until the student has answered, and what the next request has more than the
last one is what the environment said.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from queue import Queue
from types import ModuleType
from typing import Any

import httpx
import verifiers.v1 as vf

from limbeck.environments.base import Environment

HARNESS = "limbeck_loop"
"""Id by which the package finds `LoopHarness`."""
_KEY_NAME = "LIMBECK_NO_KEY"


_FAILED: set[str] = set()
"""Ids of calls of the episode whose results are errors; what goes to the model does not say so."""


class EnvironmentOver(Exception):
    """The environment cannot go on; the argument says why."""


class LoopHarness(vf.Harness[vf.HarnessConfig]):
    """The model's turns and the calls of tools, in this process: what the package's ``null`` harness does in a program
    of its own that `uv` installs."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        """See the base class."""
        from verifiers.v1.harnesses.utils.mcp import connect_mcp, mcp_content_to_chat_content

        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(_as_dict, prompt or [])
        timeout = self.config.tool_timeout
        servers = {name: {"url": url, "timeout": timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, places, connections = await connect_mcp({"mcpServers": servers}, stack)
            # the student takes as long as it takes
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None, trust_env=False))
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                headers = {"Authorization": f"Bearer {secret}"}
                reply = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
                if reply.is_error:
                    # of a limit or a stop of the task, which the trace has, or of the request
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=reply.text[:2000])
                message = reply.json()["choices"][0]["message"]
                messages.append({key: value for key, value in message.items() if value is not None})
                calls = message.get("tool_calls") or []
                if not calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in calls:
                    content, is_error = await self._call(call, places, connections, mcp_content_to_chat_content)
                    if is_error:
                        _FAILED.add(call["id"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})

    @staticmethod
    async def _call(call: Any, places: Any, connections: Any, as_content: Any) -> tuple[Any, bool]:
        name = call["function"]["name"]
        if name not in places:
            return f"error: there is no tool {name!r}; there are {', '.join(places)}", True
        server, tool = places[name]
        arguments = json.loads(call["function"]["arguments"])
        try:
            result = await connections[server].run(lambda client: client.call_tool(tool, arguments))
        except Exception as error:  # whatever a server of somebody's does is the result of this call
            return f"error: {type(error).__name__}: {error}", True
        return as_content(result.content), bool(result.is_error)


def _register() -> None:
    """Make the harness one that the package finds by its id: it imports a module of that name."""
    module = ModuleType(HARNESS)
    module.__all__ = ["LoopHarness"]  # type: ignore[attr-defined]
    module.LoopHarness = LoopHarness  # type: ignore[attr-defined]
    sys.modules[HARNESS] = module


class Verifiers(Environment):
    """Plays tasks of an environment of ``verifiers``. For the arguments see ``VerifiersEnvironment``."""

    def __init__(self, taskset: Any, source: str | None, settings: Mapping[str, Any], max_turns: int) -> None:
        _register()
        # tool servers are programs of their own, which look for modules where this one does
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._requests: Queue[tuple[dict[str, Any], Future[dict[str, Any]]] | None] = Queue()
        self._pending: Future[dict[str, Any]] | None = None
        self._episode: asyncio.Task[Any] | None = None
        self._said: list[dict[str, Any]] = []
        self._end: tuple[float | None, str | None] | None = None
        self._tasks: list[Any] = []
        self._env = _environment(taskset, source, settings, max_turns)
        self._seat = _student_seat(self._env.config)
        server = _serve(self._answered)
        client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key_var=_KEY_NAME)
        self._context = vf.ModelContext(model="student", client=client)
        self._stack = AsyncExitStack()
        self._wait(self._stack.enter_async_context(self._env.serving()))

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _answered(self, body: dict[str, Any]) -> dict[str, Any]:
        """The student's answer to a request; of a thread of the server, which waits for it."""
        answered: Future[dict[str, Any]] = Future()
        self._requests.put((body, answered))
        return answered.result()

    # ---- the protocol ----

    def start(self, record: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        self._stop()
        _FAILED.clear()
        self._said, self._end = [], None
        task = self._task(record)
        self._wait(self._begin(task))
        asked = self._next()
        if asked is None:
            raise EnvironmentOver(self._why() or "the task ended before the student's first turn")
        self._said = asked["messages"]
        return [_in_our_form(message) for message in self._said], list(asked.get("tools") or [])

    def answer(self, calls: Sequence[Mapping[str, Any]]) -> Any:
        raise NotImplementedError("the package reads whole answers")

    def reply(self, message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> Any:
        answer = _in_their_form(message)
        before = len(self._said)
        pending, self._pending = self._pending, None
        if pending is None:
            raise EnvironmentOver("the environment has not asked for an answer")
        pending.set_result(answer)
        asked = self._next()
        if asked is None:
            # of calls that nobody will answer, whether they ran or not
            return [
                {"role": "tool", "tool_call_id": call["id"], "content": ""} for call in answer.get("tool_calls", [])
            ]
        messages = asked["messages"]
        if [_plain(m) for m in messages[: before + 1]] != [_plain(m) for m in [*self._said, answer]]:
            self._stop()
            self._end = None, "the environment rewrites the conversation, or begins another one"
            return []
        self._said = messages
        return [_in_our_form(one) for one in messages[before + 1 :]]

    def judge(self, conversation: Sequence[Mapping[str, Any]]) -> tuple[float | None, bool]:
        """See the base class; the package judges once the episode is over."""
        if self._end is None:
            return None, False
        reward, why = self._end
        if why is not None:
            raise EnvironmentOver(why)
        return reward, True

    # ---- an episode ----

    async def _begin(self, task: Any) -> None:
        self._episode = self._loop.create_task(self._env.run_episode(task, self._context))
        # an episode that has ended leaves nobody who would put anything there
        self._episode.add_done_callback(lambda done: self._requests.put(None))

    def _task(self, record: Mapping[str, Any]) -> Any:
        task = record.get("task", record.get("idx", 0))
        tasks = self._env.taskset
        if isinstance(task, Mapping):
            kind = type(tasks).task_type()
            return kind(kind.data_type().model_validate({"idx": 0, **task}), tasks.config.task)
        number = int(task)
        if "task" not in record and tasks.bounded and number >= len(self._tasks):
            # read once; records count on from the beginning where there are more of them
            self._tasks = self._tasks or list(tasks)
            number %= len(self._tasks)
        while len(self._tasks) <= number:
            more = list(islice(iter(tasks), len(self._tasks), number + 1))
            if not more:
                raise EnvironmentOver(f"the record's task is {number}, but there are {len(self._tasks)}")
            self._tasks += more
        return self._tasks[number]

    def _next(self) -> dict[str, Any] | None:
        """The next request for a turn of the student; None: the episode is over."""
        got = self._requests.get()
        if got is None:
            self._end = self._ended()
            return None
        body, self._pending = got
        return body

    def _ended(self) -> tuple[float | None, str | None]:
        assert self._episode is not None
        try:
            episode = self._episode.result()
        except BaseException as error:
            return None, f"{type(error).__name__}: {error}"
        mine = [trace for trace in episode.traces if trace.agent.name == self._seat]
        errors = [*episode.errors, *(error for trace in mine for error in trace.errors)]
        if not episode.ok or len(mine) != 1:
            said = "; ".join(f"{error.type}: {error.message}" for error in errors)
            return None, said[:500] or f"{len(mine)} rollouts of {self._seat!r}, expected one"
        return float(mine[0].reward), None

    def _why(self) -> str | None:
        return None if self._end is None else self._end[1]

    def _stop(self) -> None:
        """End the episode that is played, if any."""
        if self._episode is not None:
            self._wait(self._cancel(self._episode))
        if self._pending is not None:
            # a thread of the server waits for it
            self._pending.cancel()
        self._episode = self._pending = None
        # only now: until its end the old episode asks and says that it has ended
        self._requests = Queue()

    @staticmethod
    async def _cancel(episode: asyncio.Task[Any]) -> None:
        episode.cancel()
        await asyncio.wait([episode])


def _serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> ThreadingHTTPServer:
    """A server on loopback that speaks as a model would, as long as the process lives."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            kind, data = _completion(answer(body), streamed=bool(body.get("stream")))
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _completion(message: Mapping[str, Any], *, streamed: bool) -> tuple[str, bytes]:
    """A message as a chat completion, or as a stream of one: content type and bytes."""
    calls = message.get("tool_calls") or []
    choice = {"index": 0, "finish_reason": "tool_calls" if calls else "stop"}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    about = {"id": "student", "created": 0, "model": "student", "usage": usage}
    if not streamed:
        whole = {**about, "object": "chat.completion", "choices": [{**choice, "message": message}]}
        return "application/json", json.dumps(whole).encode()
    delta = {**message, **({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]} if calls else {})}
    event = {**about, "object": "chat.completion.chunk", "choices": [{**choice, "delta": delta}]}
    return "text/event-stream", f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()


def _environment(taskset: Any, source: str | None, settings: Mapping[str, Any], max_turns: int) -> Any:
    if source is not None:
        module, _, name = source.partition(":")
        env = getattr(importlib.import_module(module), name)(**settings)
        if not isinstance(env, vf.Env):
            raise TypeError(f"{source} returned a {type(env).__name__}; expected an Env of verifiers.v1")
        return env
    block = {**settings, "taskset": {"id": taskset} if isinstance(taskset, str) else dict(taskset)}
    kind = vf.env_config_type(block["taskset"]["id"], str(block.get("id") or ""))
    for name, field in kind.model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            given = dict(block.get(name) or {})
            # the package's own would be a shell in a rented machine
            if field.default.harness is None:
                given.setdefault("harness", {"id": HARNESS})
            given.setdefault("runtime", {"type": "subprocess"})
            if field.default.client is None and given.get("client") is None:
                # the environment ends the episode itself, and judges it
                given.setdefault("max_turns", max_turns)
            block[name] = given
    return vf.load_environment(vf.resolve_env_config(block))


def _student_seat(config: Any) -> str:
    """The seat that the student takes: the one whose turns no other model is named for."""
    seats = {name: value for name, value in config if isinstance(value, vf.AgentConfig)}
    free = [name for name, seat in seats.items() if seat.client is None]
    if len(free) != 1:
        raise ValueError(
            f"the environment has {len(free)} seats without a client of their own ({', '.join(free) or 'none'}); the "
            "student plays one: give the others a client and a model in settings"
        )
    return free[0]


# -- messages ----------------------------------------------------------------------------------------------------------


def _as_dict(message: Any) -> dict[str, Any]:
    from verifiers.v1.dialects.chat import message_to_wire

    return dict(message_to_wire(message))


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.get("type") != "text" for part in content):
        raise EnvironmentOver("a message has parts other than text, which the student cannot read")
    return "".join(part["text"] for part in content)


def _in_our_form(message: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message["role"], "content": _text(message.get("content"))}
    if message["role"] == "tool":
        out["tool_call_id"] = message["tool_call_id"]
        if message["tool_call_id"] in _FAILED:
            out["is_error"] = True
    if message.get("tool_calls"):
        out["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return out


def _in_their_form(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message.get("tool_calls") or []
    ]
    out: dict[str, Any] = {"role": "assistant", "content": message.get("content") or ""}
    if message.get("reasoning_content"):
        out["reasoning_content"] = message["reasoning_content"]
    return {**out, "tool_calls": calls} if calls else out


def _plain(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two copies of a message must have in common; programs drop and add keys on the way."""
    calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
    return message["role"], _text(message.get("content")), message.get("tool_call_id"), calls
