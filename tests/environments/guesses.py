"""An environment of the package ``verifiers`` in turns: the student guesses a number, and is told more or less."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class Secret(vf.TaskData):
    """The number."""

    number: int


class GuessTask(vf.Task[Secret, vf.State, vf.TaskConfig]):
    """Guess a number."""


class GuessConfig(vf.EnvConfig):
    """One seat."""

    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    """Answers each guess by a user's message."""

    async def run(self, task: Any, agents: Any) -> None:
        """See the base class."""
        async with agents.player.interaction(task) as interaction:
            said = await interaction.turn()
            while not said.terminated and said.last_reply != str(task.data.number):
                said = await interaction.turn("more" if int(said.last_reply) < task.data.number else "less")

    async def finalize(self, task: Any, episode: Any) -> None:
        """See the base class."""
        (trace,) = episode.traces
        trace.record_reward("few", 1.0 / trace.num_turns)


class Guesses(vf.Taskset[GuessTask, vf.TasksetConfig]):
    """Numbers without an end."""

    INFINITE = True

    def load(self) -> Iterator[GuessTask]:
        """5, 6, 7, ..."""
        number = 5
        while True:
            yield GuessTask(Secret(prompt="Guess my number.", number=number), self.config.task)
            number += 1


class Duel(GuessConfig):
    """Two seats."""

    judge: vf.AgentConfig = vf.AgentConfig()


class DuelEnv(vf.Env[Duel]):
    """An environment with two seats."""

    async def run(self, task: Any, agents: Any) -> None:
        """See the base class."""


def duel(**settings: Any) -> Any:
    """An environment that a function makes."""
    return DuelEnv(Duel(taskset={"id": "guesses"}, **settings))


def single() -> Any:
    """An environment whose seats are all set."""
    seat = {"harness": {"id": "limbeck_loop"}, "runtime": {"type": "subprocess"}, "max_turns": 2}
    return GuessEnv(GuessConfig.model_validate({"taskset": {"id": "guesses"}, "player": seat}))


__all__ = ["GuessEnv", "Guesses"]
