"""The process of an environment; ``channel.py`` starts it as a script, and it needs Python alone.

It reads requests from its standard input and writes answers to its standard output, a JSON object a line:
``{"method": "start", "record": ...}``, ``{"method": "answer", "calls": ..., "message": ...}`` and
``{"method": "judge", "conversation": ...}``.
Another program that does so takes its place once the limits are set.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

_PARENT_PERIOD = 2.0


def _limit(limits: dict[str, int | None]) -> None:
    wanted = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: limits.get("file")}
    if sys.platform != "darwin":
        wanted[resource.RLIMIT_AS] = limits.get("memory")
    for kind, most in wanted.items():
        hard = resource.getrlimit(kind)[1]
        if most is not None:
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))


def _leave_with(parent: int) -> None:
    """End this process once the one that started it is gone, also in the middle of a call."""

    def look() -> None:
        # its number came with the order: asked for here, it would be another's once the parent is gone
        while os.getppid() == parent:
            time.sleep(_PARENT_PERIOD)
        # sys.exit would end this thread alone
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()


# -- tools that are functions ------------------------------------------------------------------------------------------


def load_module(source: str) -> ModuleType:
    """A module by its name, or by its file, whose neighbours it can import."""
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{source} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # before it runs: dataclasses look their module up there
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def load_functions(source: str) -> dict[str, Callable[..., Any]]:
    """The functions of ``__all__``, or the public ones that a module defines."""
    module = load_module(source)
    functions = {name: value for name, value in vars(module).items() if inspect.isfunction(value)}
    if "__all__" in vars(module):
        return {name: vars(module)[name] for name in vars(module)["__all__"]}
    defined_here = {name: function for name, function in functions.items() if function.__module__ == module.__name__}
    return {name: function for name, function in defined_here.items() if not name.startswith("_")}


class Functions:
    """Answers calls by Python functions; an episode begins with its record's messages."""

    def __init__(self, source: str, most: int) -> None:
        self.functions, self.most = load_functions(source), most

    def start(self, record: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """Its record's messages; the tools are known where the schemas are."""
        return record["messages"], []

    def reply(self, message: Any, calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The result of each call, or why there is none."""
        return [self._result(call) for call in calls]

    def judge(self, conversation: Sequence[dict[str, Any]]) -> tuple[None, bool]:
        """Functions have no opinion."""
        return None, False

    def _result(self, call: dict[str, Any]) -> dict[str, Any]:
        if call.get("error"):
            return self._failed(call["error"])
        function = self.functions.get(call["name"])
        if function is None:
            return self._failed(f"there is no tool {call['name']!r}; there are {', '.join(self.functions)}")
        try:
            # by itself: a TypeError out of the function is no fault of the arguments
            inspect.signature(function).bind(**call["arguments"])
        except TypeError as error:
            return self._failed(f"{call['name']}: {error}")
        try:
            value = function(**call["arguments"])
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except BaseException as error:  # SystemExit, too: a tool ends no episode
            return self._failed(f"{type(error).__name__}: {_said(error)}")
        # one more than fits, by which the run sees that something was cut off
        return {"content": text[: self.most + 1]}

    def _failed(self, why: str) -> dict[str, Any]:
        return {"content": f"error: {why}"[: self.most], "is_error": True}


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return "..."


def schemas(source: str) -> list[dict[str, Any]]:
    """JSON schemas of the functions of a module, from their signatures and docstrings."""
    from transformers.utils.chat_template_utils import get_json_schema

    return [get_json_schema(function) for function in load_functions(source).values()]


# -- requests ----------------------------------------------------------------------------------------------------------


def _reply(environment: Any, request: dict[str, Any]) -> dict[str, Any]:
    method = request["method"]
    if method == "start":
        messages, tools = environment.start(request["record"])
        return {"messages": list(messages), "tools": list(tools)}
    if method == "answer":
        return {"messages": list(environment.reply(request["message"], request["calls"]))}
    reward, done = environment.judge(request["conversation"])
    return {"reward": reward, "done": bool(done)}


def serve(environment: Any, requests: TextIO, replies: TextIO) -> None:
    """Answer requests until there are no more."""
    for line in requests:
        try:
            reply = json.dumps(_reply(environment, json.loads(line)), default=str)
        except BaseException as error:  # whatever it raises is reported, and the next request is answered
            reply = json.dumps({"error": f"{type(error).__name__}: {_said(error)}"[:2000]})
        replies.write(reply + "\n")
        replies.flush()


def _make(order: dict[str, Any]) -> Any:
    if order["kind"] == "functions":
        return Functions(order["source"], order["most"])
    module, _, name = order["source"].partition(":")
    return getattr(importlib.import_module(module), name)(**order["settings"])


def main() -> None:
    """Follow the order, which is the only argument."""
    order = json.loads(sys.argv[1])
    _limit(order["limits"])
    if order["kind"] == "process":
        os.execvp(order["command"][0], order["command"])
    # the folder of this script is no place to import from
    sys.path[:] = [*sys.path[1:], order["folder"]]
    _leave_with(order["parent"])
    # what tools print must not mix with replies
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    # nor may a tool that reads its input swallow requests
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    try:
        environment = None if order["kind"] == "schemas" else _make(order)
        tools = schemas(order["source"]) if environment is None else None
    except BaseException as error:
        replies.write(json.dumps({"error": f"{type(error).__name__}: {_said(error)}"[:2000]}) + "\n")
        replies.flush()
        return
    replies.write(json.dumps({"ready": True, "tools": tools}) + "\n")
    replies.flush()
    if environment is not None:
        serve(environment, requests, replies)


if __name__ == "__main__":
    main()
