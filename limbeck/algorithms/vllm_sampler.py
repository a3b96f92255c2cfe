"""vLLM in this process. It reads the student's weights from a folder, as a server would."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from limbeck.algorithms.engine import Answer, EngineConfig, EngineSampler
from limbeck.distributed.comm import Comm
from limbeck.errors import ConfigError, LimbeckError
from limbeck.models.generate import SamplingConfig
from limbeck.models.policy import Policy
from limbeck.utils.state import capture_rng, restore_rng


def load_vllm() -> Any:
    """vLLM, which is no part of the installation."""
    # the engine's own process would read its functions by pickle, and hold a second context of the GPU
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        return import_module("vllm")
    except ImportError as error:
        raise ConfigError(
            "on_policy.engine.vllm needs vLLM in this environment; pip install vllm, or leave on_policy.engine out"
        ) from error


class VllmSampler(EngineSampler):
    """Continuations by ``vllm.LLM``, which is made at the first hand-over: the folder holds the student from then on.

    Args:
        end_ids: tokens that end an answer.
        vocab_size: tokens that the student has; the engine must answer no other.
    """

    def __init__(self, config: EngineConfig, sampling: SamplingConfig, end_ids: Sequence[int], vocab_size: int) -> None:
        super().__init__(config)
        self.sampling, self.end_ids, self.vocab_size = sampling, list(end_ids), vocab_size
        self._vllm = load_vllm()
        self._engine: Any = None

    def hand_over(self, model: Policy) -> None:
        assert self.config.weights is not None
        model.save_checkpoint(self.config.weights)
        # rank 0 has written
        Comm.world().barrier()
        # ranks that read the same rows share one engine
        if model.dims.rows.rank != 0:
            return
        try:
            if self._engine is None:
                # the trainer's own precision: its log-probabilities are compared with the engine's
                options = {"dtype": str(model.precision).removeprefix("torch."), **(self.config.vllm or {})}
                # vLLM seeds this process's generators, whose numbers are the run's
                state = capture_rng()
                try:
                    self._engine = self._vllm.LLM(model=self.config.weights, **options)
                finally:
                    restore_rng(state)
                return
            self._engine.collective_rpc("reload_weights")
            # kept keys and values are those of the old weights
            self._engine.reset_prefix_cache()
        except Exception as error:  # the engine raises whatever its parts raise
            raise _failure("does not take the student's weights over", error) from error

    def write(self, prompts: Sequence[list[int]], n: int, seeds: Sequence[int]) -> Iterator[dict[int, list[Answer]]]:
        sampling = self.sampling
        asked = [
            self._vllm.SamplingParams(
                n=n,
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=seed % 2**31,
                stop_token_ids=self.end_ids,
                stop=sampling.stop or None,
                include_stop_str_in_output=True,
                skip_special_tokens=False,
                # stop texts are looked for in text; otherwise ids are all that is taken
                detokenize=bool(sampling.stop),
                logprobs=0,
            )
            for seed in seeds
        ]
        try:
            requests = self._engine.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
        except Exception as error:  # as above
            raise _failure("does not sample", error) from error
        for prompt, request in zip(prompts, requests, strict=False):
            if list(request.prompt_token_ids or prompt) != list(prompt):
                raise LimbeckError("vLLM read other tokens than it was given; it must have the student's own tokenizer")
        yield {number: [self._answer(one) for one in request.outputs] for number, request in enumerate(requests)}

    def _answer(self, one: Any) -> Answer:
        ids = list(one.token_ids)
        by_position = list(one.logprobs or ())
        odd = [i for i in ids if not 0 <= i < self.vocab_size]
        if odd:
            raise LimbeckError(f"vLLM sampled token {odd[0]}, but the student has {self.vocab_size}")
        if len(by_position) != len(ids) or any(i not in entry for i, entry in zip(ids, by_position, strict=True)):
            raise LimbeckError(f"vLLM gave {len(by_position)} usable log-probabilities for {len(ids)} tokens")
        said = [float(entry[i].logprob) for i, entry in zip(ids, by_position, strict=True)]
        if not all(math.isfinite(value) for value in said):
            raise LimbeckError("vLLM gave log-probabilities that are none for tokens that it sampled")
        return ids, said, one.finish_reason == "stop"


def _failure(what: str, error: Exception) -> LimbeckError:
    said = " ".join(str(error).split())[:200]
    return LimbeckError(f"vLLM {what} ({type(error).__name__}: {said})")
