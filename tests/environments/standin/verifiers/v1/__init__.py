"""A stand-in for the package ``verifiers`` (0.4): what of its public surface the adapter and the test's tasks use.

It plays episodes in this process, without the server between an agent and its model. ``tests/environments`` plays the
same tasks with the package where that is installed, so that the two cannot part unseen.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel, ConfigDict

TOOLS: dict[str, dict[str, Any]] = {}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Named:
    """A class that is made with other classes in brackets."""

    parts: tuple[Any, ...] = ()

    def __class_getitem__(cls, parts: Any) -> Any:
        return type(cls.__name__, (cls,), {"parts": parts if isinstance(parts, tuple) else (parts,)})


class HarnessConfig(_Model):
    id: str = "bash"
    tool_timeout: float = 600.0


class EvalClientConfig(_Model):
    base_url: str
    api_key_var: str


class AgentConfig(_Model):
    harness: HarnessConfig | None = None
    runtime: dict[str, Any] = {"type": "prime"}
    client: EvalClientConfig | None = None
    max_turns: int | None = None


class ToolsetConfig(_Model):
    pass


class TaskConfig(_Model):
    pass


class TasksetConfig(_Model):
    id: str = ""
    task: TaskConfig = TaskConfig()


class EnvConfig(_Model):
    id: str = ""
    taskset: TasksetConfig = TasksetConfig()


class SingleAgentEnvConfig(EnvConfig):
    agent: AgentConfig = AgentConfig()


class State(_Model):
    pass


class TaskData(_Model):
    idx: int | None = None
    prompt: str | list[Any] | None = None
    system_prompt: str | None = None


@dataclass
class ModelContext:
    model: str
    client: EvalClientConfig


@dataclass
class ProgramResult:
    exit_code: int
    stdout: str
    stderr: str


def tool(function: Any) -> Any:
    function.is_tool = True
    return function


def reward(function: Any) -> Any:
    function.is_reward = True
    return function


def _marked(thing: Any, mark: str) -> dict[str, Any]:
    return {name: getattr(thing, name) for name, value in vars(type(thing)).items() if hasattr(value, mark)}


class Toolset(_Named):
    def __init__(self, config: Any) -> None:
        self.config = config


class Trace:
    def __init__(self, seat: str) -> None:
        self.agent = SimpleNamespace(name=seat)
        self.messages: list[Any] = []
        self.rewards: list[float] = []
        self.errors: list[Any] = []
        self.num_turns = 0

    @property
    def last_reply(self) -> str:
        return str(self.messages[-1]["content"]).strip()

    @property
    def reward(self) -> float:
        return sum(self.rewards)

    def record_reward(self, name: str, value: float) -> None:
        self.rewards.append(value)


class Task(_Named):
    def __init__(self, data: Any, config: Any = None) -> None:
        self.data, self.config = data, config

    @classmethod
    def data_type(cls) -> Any:
        return cls.parts[0]

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return []


class Taskset(_Named):
    INFINITE = False

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def bounded(self) -> bool:
        return not self.INFINITE

    def __iter__(self) -> Any:
        return iter(self.load())  # type: ignore[attr-defined]

    @classmethod
    def task_type(cls) -> Any:
        return cls.parts[0]


class Harness(_Named):
    def __init__(self, config: Any) -> None:
        self.config = config

    def resolve_prompt(self, data: Any) -> Any:
        return data.system_prompt, data.prompt


class _Agent:
    """A seat; ``context.client`` is asked directly, once a turn, and no more than ``max_turns`` times."""

    def __init__(self, env: Any, name: str, context: Any, traces: list[Any]) -> None:
        self.name, self.config, self.context, self.traces = name, getattr(env.config, name), context, traces
        kind = _exported(self.config.harness.id, Harness)
        self.harness = kind(self.config.harness)

    async def _segment(self, task: Any, trace: Any) -> Any:
        import httpx

        urls = {}
        for number, toolset in enumerate(task.toolsets(task.config)):
            TOOLS[f"{id(trace)}-{number}"] = _marked(toolset, "is_tool")
            urls[str(number)] = f"{id(trace)}-{number}"
        left, post = [self.config.max_turns], httpx.AsyncClient.post

        async def counted(client: Any, url: str, *, json: Any, headers: Any) -> Any:
            if left[0] is not None and trace.num_turns >= left[0]:
                return httpx.Response(400, text="no further turn")
            reply = await post(client, url, json=json, headers=headers)
            trace.num_turns += 1
            trace.messages = [*json["messages"], reply.json()["choices"][0]["message"]]
            return reply

        httpx.AsyncClient.post = counted  # type: ignore[assignment, method-assign]
        try:
            return await self.harness.launch(
                self.context, trace, None, self.context.client.base_url, "secret", urls, task.data
            )
        finally:
            httpx.AsyncClient.post = post  # type: ignore[method-assign]

    async def run(self, task: Any) -> None:
        trace = Trace(self.name)
        await self._segment(task, trace)
        for judge in _marked(task, "is_reward").values():
            trace.record_reward("", await judge(task=task.data, trace=trace))
        self.traces.append(trace)

    @contextlib.asynccontextmanager
    async def interaction(self, task: Any) -> Any:
        trace, agent = Trace(self.name), self

        class Interaction:
            async def turn(self, said: str | None = None) -> Any:
                prompt: Any = task.data.prompt
                if said is not None:
                    prompt = [*trace.messages, {"role": "user", "content": said}]
                next_task = type(task)(task.data.model_copy(update={"prompt": prompt}), task.config)
                result = await agent._segment(next_task, trace)
                return SimpleNamespace(terminated=bool(result.exit_code), last_reply=trace.last_reply)

        yield Interaction()
        self.traces.append(trace)


@dataclass
class Episode:
    traces: list[Any] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    ok: bool = False


class Env(_Named):
    def __init__(self, config: Any) -> None:
        self.config = config
        self.taskset = _exported(config.taskset.id, Taskset)(config.taskset)

    @contextlib.asynccontextmanager
    async def serving(self) -> Any:
        yield

    async def finalize(self, task: Any, episode: Any) -> None:
        pass

    async def run_episode(self, task: Any, context: Any) -> Any:
        episode = Episode()
        seats = {name: value for name, value in self.config if isinstance(value, AgentConfig)}
        agents = SimpleNamespace(**{name: _Agent(self, name, context, episode.traces) for name in seats})
        try:
            await self.run(task, agents)  # type: ignore[attr-defined]
            await self.finalize(task, episode)
            episode.ok = True
        except asyncio.CancelledError:
            raise
        except Exception as error:
            episode.errors.append(SimpleNamespace(type=type(error).__name__, message=str(error)))
        return episode


class SingleAgentEnv(Env[SingleAgentEnvConfig]):  # type: ignore[type-arg, misc]
    async def run(self, task: Any, agents: Any) -> None:
        await agents.agent.run(task)


def _exported(ident: str, base: Any) -> Any:
    module = importlib.import_module(ident.replace("-", "_"))
    found = [getattr(module, name) for name in module.__all__]
    return next((kind for kind in found if issubclass(kind, base)), None)


def env_config_type(taskset_id: str, env_id: str = "") -> Any:
    env = _exported(taskset_id, Env)
    return SingleAgentEnvConfig if env is None else env.parts[0]


def resolve_env_config(data: Any) -> Any:
    taskset = _exported(data["taskset"]["id"], Taskset).parts[1].model_validate(data["taskset"])
    return env_config_type(data["taskset"]["id"]).model_validate({**data, "taskset": taskset})


def load_environment(config: Any) -> Any:
    return (_exported(config.taskset.id, Env) or SingleAgentEnv)(config)
