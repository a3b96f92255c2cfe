"""Engines that sample for the student: vLLM behind its server or in this process, or a process of a Ray cluster.

They keep weights of their own, which are handed over before the first answer and every ``sync_period`` steps.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from limbeck.distributed.comm import Comm
from limbeck.errors import LimbeckError, LossError
from limbeck.models.generate import Sample, Sampler
from limbeck.models.language_model import LanguageModel
from limbeck.models.policy import Policy
from limbeck.teachers.server.client import ServerConfig

Answer: TypeAlias = tuple[list[int], list[float], bool]
"""Ids, their log-probabilities, and whether it was ended rather than cut off."""


class RayPlacement(BaseModel):
    """Resources that the sampler of each data-parallel rank reserves in a Ray cluster."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    num_cpus: float = Field(default=1.0, ge=0)
    """Processor cores."""
    num_gpus: float = Field(default=0.0, ge=0)
    """GPUs, or a share of one; it computes on the CPU without."""
    resources: dict[str, float] = {}
    """Own resources of the cluster's machines, such as ``{sampler: 1}``."""


class EngineConfig(BaseModel):
    """An engine that samples for the student, of one of three kinds."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    server: ServerConfig | None = None
    """vLLM behind its server, the address up to and including ``/v1``."""
    vllm: dict[str, Any] | None = None
    """vLLM in this process, with these arguments of ``vllm.LLM``, such as ``{gpu_memory_utilization: 0.4}``."""
    ray: RayPlacement | None = None
    """``on_policy.sampler`` in processes of their own in the Ray cluster of the run, one per data-parallel rank."""
    weights: str | None = None
    """vLLM: folder that it serves, on a disk that all see; it is overwritten with the student's weights."""
    sync_period: int = Field(default=1, ge=1)
    """Steps between two hand-overs of weights: answers are at most so many steps less one old."""
    max_gap: float | None = Field(default=0.5, gt=0)
    """Mean distance of the engine's log-probabilities from the trainer's, in nats, beyond which a run ends: right after
    a hand-over they should be nearly the same. null: any."""

    @model_validator(mode="after")
    def _one_kind(self) -> EngineConfig:
        kinds = [name for name in ("server", "vllm", "ray") if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise ValueError(f"an engine is server, vllm or ray, and {kinds or 'none'} of them is given; give one")
        if (self.weights is None) != (self.ray is not None):
            raise ValueError("vLLM reads weights from a folder, and Ray from memory; give weights with server or vllm")
        return self


class EngineSampler(Sampler):
    """Continuations from an engine. Ranks that share rows ask once.

    Attributes:
        staleness: steps that the engine's weights were behind at the last call of `sync`.
        together: ranks that share rows make the same calls of `sample`; False: one of them does, from any thread.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config, self.staleness, self.together = config, 0, True
        self._closed = False
        self._synced: int | None = None
        self._readers = Comm.alone()

    def sync(self, model: LanguageModel, step: int) -> None:
        """Hand the weights over where they are due. Collective."""
        assert isinstance(model, Policy)
        self._readers = model.dims.rows
        if self._synced is not None and step - self._synced < self.config.sync_period:
            self.staleness = step - self._synced
            return
        self.hand_over(model)
        self._synced, self.staleness = step, 0

    @abstractmethod
    def hand_over(self, model: Policy) -> None:
        """Give the engine the model's weights. Collective."""

    @abstractmethod
    def write(self, prompts: Sequence[list[int]], n: int, seeds: Sequence[int]) -> Iterator[dict[int, list[Answer]]]:
        """``n`` answers to each prompt, by its number, in one part or as they come; called on one of the ranks that
        share rows."""

    def sample(
        self,
        prompts: Sequence[Tensor],
        *,
        n: int = 1,
        seed: int | Sequence[int] = 0,
        heard: Callable[[list[Sample]], None] | None = None,
    ) -> list[Sample]:
        """See ``Sampler.sample``. vLLM's seeds are its own: the same one writes the same only as far as it says.

        heard: called with samples as soon as the engine has written them.
        """
        seeds = [seed + i for i in range(len(prompts))] if isinstance(seed, int) else list(seed)

        def ask() -> bytes:
            answers: list[list[Answer]] = [[] for _ in prompts]
            for part in self.write([prompt.tolist() for prompt in prompts], n, seeds):
                for number, choices in part.items():
                    answers[number] = choices
                if heard is not None:
                    heard([one for number, choices in part.items() for one in _samples(number, choices)])
            return json.dumps(answers).encode()

        if self._closed:
            raise LimbeckError("the engine was closed; start the run again, and it goes on")
        # ranks that read the same rows, per step: the answers, so that they learn from the same ones
        answers = json.loads((self._readers if self.together else Comm.alone()).first_only(ask))
        if [len(choices) for choices in answers] != [n] * len(prompts):
            raise LimbeckError(
                f"the engine gave {[len(choices) for choices in answers]} answers to {len(prompts)} prompts; expected "
                f"{n} to each"
            )
        return [one for number, choices in enumerate(answers) for one in _samples(number, choices)]

    def check_gap(self, gap: float) -> None:
        """Refuse an engine whose log-probabilities, with fresh weights, are ``gap`` nats from the trainer's."""
        most = self.config.max_gap
        # with older weights a distance is what was asked for by sync_period
        if most is not None and self.staleness == 0 and gap > most:
            raise LossError(
                f"right after a hand-over of weights the engine's log-probabilities are {gap:.2g} nats from the "
                f"trainer's on average (on_policy.engine.max_gap allows {most:g}): it samples from another model; see "
                "that it reads all weights anew, or raise max_gap"
            )

    def close(self) -> None:
        """Let go of the engine; what it is writing is given up where it can be, and nothing more is written."""
        self._closed = True


def _samples(number: int, choices: Sequence[Answer]) -> list[Sample]:
    return [
        Sample(number, torch.tensor(ids, dtype=torch.int64), torch.tensor(log_probs), ended)
        for ids, log_probs, ended in choices
    ]
