"""The sampler in processes of its own in a Ray cluster, with processors and GPUs of its own.

The student's weights go to them through Ray's object store as one safetensors buffer, prompts and answers as lists of
numbers. They write what the sampler in this process writes: the same text from the same seeds.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load, save

from limbeck.algorithms.build import tokenizer_of
from limbeck.algorithms.engine import Answer, EngineConfig, EngineSampler
from limbeck.distributed.comm import Comm
from limbeck.distributed.launch import load_ray
from limbeck.errors import ConfigError, LimbeckError
from limbeck.models.causal import unwrap
from limbeck.models.checkpoint import whole_weights
from limbeck.models.continuous import SamplerKind, make_local_sampler
from limbeck.models.generate import SamplingConfig
from limbeck.models.language_model import LanguageModel
from limbeck.models.loading import ModelConfig
from limbeck.models.policy import Policy
from limbeck.tokens import ByteVocab


def refuse_without_ray(launcher: str = "local") -> Any:
    """Ray, for a run that it launches (``launcher``), or launched: this process is then one of its own."""
    ray = load_ray()
    if launcher != "ray" and not ray.is_initialized():
        raise ConfigError("on_policy.engine.ray needs a run under Ray; set cluster.launcher to ray")
    return ray


class SamplerActor:
    """A process that samples: the student's model, without weights until it is given some.

    Args:
        policy: the run file's section, as far as it is about the model.
        sampling: how tokens are chosen.
        precision: type of the computation, as the student has it; width: of its weights.
    """

    def __init__(
        self,
        policy: Mapping[str, Any],
        sampling: Mapping[str, Any],
        kind: SamplerKind,
        end_ids: Sequence[int],
        precision: str,
        width: str,
    ) -> None:
        tokenizer = tokenizer_of(
            ModelConfig.model_validate({key: value for key, value in policy.items() if key != "lora"})
        )
        types = {"precision": precision, "param_dtype": width}
        plain: dict[str, Any] = {"init": "random", "compile": False, "dtensor_cfg": {}}
        # adapters come merged
        section = {key: value for key, value in policy.items() if key != "lora"}
        self.model = LanguageModel({**section, **types, **plain}, tokenizer, name="sampler")
        config = SamplingConfig.model_validate(sampling)
        self.sampler = make_local_sampler(self.model, kind, config, end_ids, ByteVocab.from_tokenizer(tokenizer))
        self._steps = 0

    def take(self, weights: bytes) -> None:
        """Go on with these weights."""
        parameters, received = unwrap(self.model.model).state_dict(keep_vars=True), load(weights)
        # of tied weights one name is enough
        reached = {parameters[name].data_ptr() for name in received if name in parameters}
        odd = [name for name in received if name not in parameters]
        odd += [name for name, value in parameters.items() if value.data_ptr() not in reached]
        if odd:
            raise LimbeckError(f"the student's weights do not fit the sampler's model: {odd[0]} is on one side alone")
        with torch.no_grad():
            for name, value in received.items():
                parameters[name].copy_(value)
        self._steps += 1
        self.sampler.sync(self.model, self._steps)

    def write(self, prompts: list[list[int]], n: int, seeds: list[int]) -> list[list[Answer]]:
        answers: list[list[Answer]] = [[] for _ in prompts]
        for one in self.sampler.sample([torch.tensor(ids) for ids in prompts], n=n, seed=seeds):
            answers[one.prompt].append((one.ids_T.tolist(), one.log_probs_T.tolist(), one.ended))
        return answers


class RaySampler(EngineSampler):
    """Continuations from processes of the Ray cluster that this one belongs to, one for each data-parallel rank.

    Args:
        patience: seconds that a hand-over may take; the first waits for the processes to be placed.
    """

    def __init__(
        self,
        config: EngineConfig,
        sampling: SamplingConfig,
        kind: SamplerKind,
        end_ids: Sequence[int],
        *,
        patience: float = 300.0,
    ) -> None:
        super().__init__(config)
        assert config.ray is not None
        self.placement, self.sampling, self.kind, self.end_ids = config.ray, sampling, kind, list(end_ids)
        self.patience = patience
        self._ray = refuse_without_ray()
        self._own: Any = None
        self._all: list[Any] = []

    def hand_over(self, model: Policy) -> None:
        if self._own is None:
            self._start(model)
        # on every rank: gathering shards is collective, though rank 0 alone has the result
        weights = whole_weights(model)
        with Comm.world().fail_together():
            if Comm.world().rank == 0:
                buffer = self._ray.put(save(weights))
                self._wait([one.take.remote(buffer) for one in self._all])

    def _start(self, model: Policy) -> None:
        """Have rank 0 make a process for each data-parallel rank, known to the others by name."""
        ranks, placement = model.dims.data, self.placement
        # all ranks, once: the name of this run's samplers
        name = Comm.world().broadcast_json(f"limbeck-sampler-{uuid.uuid4().hex}")
        with Comm.world().fail_together():
            if Comm.world().rank == 0:
                self._check_room(ranks.size)
                options = {
                    "num_cpus": placement.num_cpus,
                    "num_gpus": placement.num_gpus,
                    "resources": placement.resources or None,
                }
                policy = model.cfg.model_dump(mode="json", include=set(ModelConfig.model_fields))
                how = self.sampling.model_dump(mode="json", include=set(SamplingConfig.model_fields))
                width = str(unwrap(model.model).dtype).removeprefix("torch.")
                precision = str(model.precision).removeprefix("torch.")
                maker = self._ray.remote(SamplerActor)
                self._all = [
                    maker.options(name=f"{name}-{i}", **options).remote(
                        policy, how, self.kind, self.end_ids, precision, width
                    )
                    for i in range(ranks.size)
                ]
        # rank 0 has made the processes: before that there is nobody of this name
        Comm.world().barrier()
        self._own = self._ray.get_actor(f"{name}-{ranks.rank}")

    def _check_room(self, samplers: int) -> None:
        # asked beforehand: Ray itself would wait for room that no machine has
        has = self._ray.cluster_resources()
        needs = {"CPU": self.placement.num_cpus, "GPU": self.placement.num_gpus, **self.placement.resources}
        for name, amount in needs.items():
            if has.get(name, 0.0) < amount * samplers:
                raise ConfigError(
                    f"the Ray cluster has {has.get(name, 0.0):g} {name}, but {samplers} samplers of {amount:g} each "
                    f"need {amount * samplers:g}; lower on_policy.engine.ray, or add machines"
                )

    def write(self, prompts: Sequence[list[int]], n: int, seeds: Sequence[int]) -> Iterator[dict[int, list[Answer]]]:
        # no limit: patience is for finding a place, and writing takes as long as it takes
        (answers,) = self._wait([self._own.write.remote(list(prompts), n, list(seeds))], limited=False)
        yield dict(enumerate(answers))

    def _wait(self, asked: list[Any], *, limited: bool = True) -> list[Any]:
        errors = self._ray.exceptions
        try:
            return list(self._ray.get(asked, timeout=self.patience if limited else None))
        except errors.GetTimeoutError as error:
            raise LimbeckError(
                f"the Ray cluster found no place for the samplers in {self.patience:g} s "
                f"(free: {self._ray.available_resources()}); lower on_policy.engine.ray, or add machines"
            ) from error
        except errors.RayTaskError as error:
            raise LimbeckError(f"the sampler failed: {_line(error.cause)}") from error
        except errors.RayError as error:
            raise LimbeckError(
                f"the process that samples is gone ({_line(error)}); start the run again, and it goes on"
            ) from error

    def close(self) -> None:
        super().close()
        # its own, too: whoever waits for what it is writing goes on
        for one in self._all or [one for one in (self._own,) if one is not None]:
            self._ray.kill(one)


def _line(error: object) -> str:
    """The last line of what is said, which of a traceback is the reason."""
    said = [line for line in str(error).splitlines() if line.strip()]
    return " ".join(said[-1].split())[:300] if said else type(error).__name__
