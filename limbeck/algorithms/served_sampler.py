"""A sampler behind a server: vLLM's OpenAI-compatible one, which reads the student's weights from a folder.

    VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER

The folder is written before the first answer and every ``sync_period`` steps, and the server told to read it again
(``/collective_rpc`` with ``reload_weights``, ``/reset_prefix_cache``). It answers ids with their log-probabilities.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from limbeck.distributed.comm import Comm
from limbeck.errors import ServerError
from limbeck.models.generate import Sample, Sampler, SamplingConfig
from limbeck.models.language_model import LanguageModel
from limbeck.models.policy import Policy
from limbeck.teachers.server.client import ServerClient, ServerConfig, ServerFailure


class EngineConfig(BaseModel):
    """A server that samples for the student."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    server: ServerConfig
    """The server, its address up to and including ``/v1``."""
    weights: str
    """Folder that the server serves, on a disk that both see; it is overwritten with the student's weights."""
    sync_period: int = Field(default=1, ge=1)
    """Steps between two hand-overs of weights: answers are at most so many steps less one old."""


class ServedSampler(Sampler):
    """Continuations from a server. Ranks that share rows ask once.

    Args:
        end_ids: tokens that end an answer.
        vocab_size: tokens that the student has; the server must answer no other.

    Attributes:
        staleness: steps that the served weights are behind.
    """

    def __init__(
        self,
        config: EngineConfig,
        sampling: SamplingConfig,
        end_ids: Sequence[int],
        vocab_size: int,
        *,
        client: ServerClient | None = None,
    ) -> None:
        self.config, self.sampling, self.end_ids, self.vocab_size = config, sampling, list(end_ids), vocab_size
        self.client = client or ServerClient(config.server)
        root = config.server.model_copy(update={"url": config.server.url.removesuffix("/v1")})
        self._control = ServerClient(root)
        self._synced: int | None = None
        self._model: str | None = config.server.model
        self._readers = Comm.alone()
        self.staleness = 0

    def sync(self, model: LanguageModel, step: int) -> None:
        """Hand the weights over where they are due. Collective."""
        assert isinstance(model, Policy)
        self._readers = model.dims.rows
        if self._synced is not None and step - self._synced < self.config.sync_period:
            self.staleness = step - self._synced
            return
        model.save_checkpoint(self.config.weights)
        with Comm.world().fail_together():
            if Comm.world().rank == 0:
                self._reload()
        self._synced, self.staleness = step, 0

    def _reload(self) -> None:
        for path, body in (("/collective_rpc", {"method": "reload_weights"}), ("/reset_prefix_cache", {})):
            status, answer = self._asked(self._control, path, body)
            if status != 200:
                raise ServerError(
                    f"the server {self._control.url} does not take weights over: {path} gave HTTP {status} "
                    f"({self.client.error_text(answer)}); start it with VLLM_SERVER_DEV_MODE=1"
                )

    @staticmethod
    def _asked(client: ServerClient, path: str, body: Any, *, tokens: int = 0) -> tuple[int, Any]:
        try:
            return client.request("POST", path, body, tokens=tokens)
        except ServerFailure as failure:
            raise ServerError(
                f"the server {client.url} that samples does not answer ({failure}); mend it and start the run again"
            ) from failure

    def sample(self, prompts: Sequence[Tensor], *, n: int = 1, seed: int | Sequence[int] = 0) -> list[Sample]:
        """See ``Sampler.sample``. A server's seeds are its own: the same one writes the same only as far as it says."""
        seeds = [seed + i for i in range(len(prompts))] if isinstance(seed, int) else list(seed)

        def ask() -> bytes:
            with ThreadPoolExecutor(max_workers=self.config.server.concurrency) as pool:
                found = pool.map(lambda i: self._one(prompts[i].tolist(), n, seeds[i]), range(len(prompts)))
                return json.dumps(list(found)).encode()

        # ranks that read the same rows, per step: the answers, so that they learn from the same ones
        answers = json.loads(self._readers.first_only(ask))
        return [
            Sample(number, torch.tensor(ids, dtype=torch.int64), torch.tensor(log_probs), ended)
            for number, choices in enumerate(answers)
            for ids, log_probs, ended in choices
        ]

    def _one(self, prompt: list[int], n: int, seed: int) -> list[tuple[list[int], list[float], bool]]:
        sampling = self.sampling
        body = {
            "model": self._name(),
            "prompt": prompt,
            "n": n,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed % 2**31,
            "stop_token_ids": self.end_ids,
            "stop": sampling.stop or None,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
        }
        status, answer = self._asked(
            self.client, "/completions", body, tokens=len(prompt) + n * sampling.max_new_tokens
        )
        if status != 200:
            text = self.client.error_text(answer)
            raise ServerError(f"the server {self.client.url} does not sample: HTTP {status} ({text})")
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != n:
            raise ServerError(f"the server {self.client.url} gave {_size(choices)} answers to a prompt; expected {n}")
        return [self._choice(choice, prompt) for choice in choices]

    def _choice(self, choice: Any, prompt: list[int]) -> tuple[list[int], list[float], bool]:
        where = f"the server {self.client.url}"
        if not isinstance(choice, dict) or not isinstance(choice.get("token_ids"), list):
            raise ServerError(
                f"{where} does not say which tokens it sampled (return_token_ids); use vLLM 0.10.2 or later"
            )
        if choice.get("prompt_token_ids") not in (None, prompt):
            raise ServerError(f"{where} read other tokens than it was sent; it must serve the student's own tokenizer")
        ids, said = choice["token_ids"], (choice.get("logprobs") or {}).get("token_logprobs")
        odd = [i for i in ids if not isinstance(i, int) or not 0 <= i < self.vocab_size]
        if odd:
            raise ServerError(
                f"{where} sampled token {odd[0]!r}, but the student has {self.vocab_size}; it must serve the student"
            )
        if not isinstance(said, list) or len(said) != len(ids) or not all(_is_log_prob(value) for value in said):
            raise ServerError(f"{where} gave {_size(said)} usable log-probabilities for {len(ids)} tokens")
        return ids, [float(value) for value in said], choice.get("finish_reason") == "stop"

    def _name(self) -> str:
        if self._model is None:
            status, answer = self.client.request("GET", "/models")
            served = [m.get("id") for m in (answer or {}).get("data", [])] if status == 200 else []
            if len(served) != 1:
                raise ServerError(
                    f"the server {self.client.url} serves {served or 'nothing'}; set on_policy.engine.server.model"
                )
            self._model = str(served[0])
        return self._model

    def close(self) -> None:
        """Close the connections."""
        self.client.close()
        self._control.close()


def _is_log_prob(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value <= 1e-3


def _size(value: Any) -> str:
    return str(len(value)) if isinstance(value, list) else "no"
