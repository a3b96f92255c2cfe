"""A sampler behind a server: vLLM's OpenAI-compatible one, which reads the student's weights from a folder.

    VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER

The folder is written before the first answer and every ``sync_period`` steps, and the server is asked to read it again
(``/collective_rpc`` with ``reload_weights``, ``/reset_prefix_cache``). It answers ids with their log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, ThreadPoolExecutor, wait
from typing import Any

from limbeck.algorithms.engine import Answer, EngineConfig, EngineSampler
from limbeck.distributed.comm import Comm
from limbeck.errors import ServerError
from limbeck.models.generate import SamplingConfig
from limbeck.models.policy import Policy
from limbeck.teachers.server.client import ServerClient, ServerFailure


class ServedSampler(EngineSampler):
    """Continuations from a server.

    Args:
        end_ids: tokens that end an answer.
        vocab_size: tokens that the student has; the server must answer no other.
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
        super().__init__(config)
        assert config.server is not None
        self.server, self.sampling, self.end_ids, self.vocab_size = config.server, sampling, list(end_ids), vocab_size
        self.client = client or ServerClient(self.server)
        # vLLM's control addresses lie beside /v1, not below it
        root = self.server.model_copy(update={"url": self.server.url.removesuffix("/v1")})
        self._control = ServerClient(root)
        self._model: str | None = self.server.model

    def hand_over(self, model: Policy) -> None:
        assert self.config.weights is not None
        model.save_checkpoint(self.config.weights)
        with Comm.world().fail_together():
            if Comm.world().rank == 0:
                self._reload()

    def _reload(self) -> None:
        # in this order: kept keys and values are those of the old weights
        for path, body in (("/collective_rpc", {"method": "reload_weights"}), ("/reset_prefix_cache", {})):
            status, answer = self._asked(self._control, path, body)
            if status != 200:
                raise ServerError(
                    f"the server {self._control.url} does not take weights over: {path} gave HTTP {status} "
                    f"({self.client.error_text(answer)}); start it with VLLM_SERVER_DEV_MODE=1"
                )

    @staticmethod
    def _asked(client: ServerClient, path: str, body: Any = None, *, tokens: int = 0) -> tuple[int, Any]:
        try:
            return client.request("GET" if body is None else "POST", path, body, tokens=tokens)
        except ServerFailure as failure:
            raise ServerError(
                f"the server {client.url} that samples does not answer ({failure}); correct it and start the run again"
            ) from failure

    def write(self, prompts: Sequence[list[int]], n: int, seeds: Sequence[int]) -> Iterator[dict[int, list[Answer]]]:
        with ThreadPoolExecutor(self.server.concurrency, thread_name_prefix="limbeck-sampler") as pool:
            waiting = {pool.submit(self._one, prompts[i], n, seeds[i]): i for i in range(len(prompts))}
            try:
                while waiting:
                    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                    yield {waiting.pop(one): one.result() for one in sorted(done, key=waiting.__getitem__)}
            finally:
                # of no use where one has failed, or whoever asked has
                pool.shutdown(wait=False, cancel_futures=True)

    def _one(self, prompt: list[int], n: int, seed: int) -> list[Answer]:
        if self._closed:
            raise CancelledError
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
            # no alternatives: the sampled token's alone
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

    def _choice(self, choice: Any, prompt: list[int]) -> Answer:
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
            status, answer = self._asked(self.client, "/models")
            served = [m.get("id") for m in (answer or {}).get("data", [])] if status == 200 else []
            if len(served) != 1:
                raise ServerError(
                    f"the server {self.client.url} serves {served or 'nothing'}; set on_policy.engine.server.model"
                )
            self._model = str(served[0])
        return self._model

    def close(self) -> None:
        """Close the connections, which ends what the server is writing."""
        super().close()
        self.client.close()
        self._control.close()


def _is_log_prob(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value <= 1e-3


def _size(value: Any) -> str:
    return str(len(value)) if isinstance(value, list) else "no"
