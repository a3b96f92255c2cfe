"""Tasks of the package ``verifiers``: sums with a tool, and a guess in several turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """Its tools have names of their own."""

    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two small numbers."""
        if a > 99 or b > 99:
            raise ValueError("that is no small number")
        return a + b


class SumData(vf.TaskData):
    """A sum with its answer."""

    answer: str


class SumTaskConfig(vf.TaskConfig):
    """Where the tool runs."""

    adder: vf.ToolsetConfig = vf.ToolsetConfig()


class SumTask(vf.Task[SumData, vf.State, SumTaskConfig]):
    """Add two numbers with a tool."""

    @classmethod
    def toolsets(cls, config: SumTaskConfig) -> list[Any]:
        """The adder."""
        return [Adder(config.adder)]

    @vf.reward
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        """Whether the last answer has the sum."""
        return float(task.answer in trace.last_reply)


class SumTasksetConfig(vf.TasksetConfig):
    """Settings of the task's tools."""

    task: SumTaskConfig = SumTaskConfig()


class Sums(vf.Taskset[SumTask, SumTasksetConfig]):
    """Three sums."""

    def load(self) -> Iterator[SumTask]:
        """1 + 1, 2 + 2, 3 + 3."""
        for n in (1, 2, 3):
            data = SumData(prompt=f"What is {n} + {n}?", system_prompt="Use the tool.", answer=str(2 * n))
            yield SumTask(data, self.config.task)


__all__ = ["Sums"]

if __name__ == "__main__":
    Adder.run()
