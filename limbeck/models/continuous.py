"""A sampler on transformers' continuous batching: an answer that ends makes room for the next one at once.

Its own sampling knows one seed for all requests and the order in which they come. Here every request brings its own
chance along, one number per token, and a processor of scores chooses by it exactly as `LocalSampler` does.
"""

from __future__ import annotations

import copy
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from limbeck.errors import ConfigError, LimbeckError
from limbeck.models.attention import NAME as VARLEN
from limbeck.models.attention import PAGED, fits_varlen, register_paged_attention
from limbeck.models.causal import unwrap
from limbeck.models.generate import LocalSampler, SamplingConfig, answers_at_once, choose
from limbeck.models.language_model import LanguageModel
from limbeck.tokens import ByteVocab

SamplerKind = Literal["auto", "generate", "continuous"]

PAGE = 32
"""Tokens of a page of the cache."""
PREFILL = 1024
"""Tokens of prompts that one pass reads at most."""
SUPPORTED = "page_size" in {field.name for field in fields(ContinuousBatchingConfig)}
"""Whether the engine of the installed transformers is the one that this is written for; it was another before."""
_BITS = 31
_NATS = 32.0
"""See `_tell`."""


def make_local_sampler(
    model: LanguageModel, kind: SamplerKind, config: SamplingConfig, end_ids: Sequence[int], vocab: ByteVocab
) -> LocalSampler:
    """The sampler of a run file. auto: continuous batching where it pays, on a GPU with a flash kernel."""
    if kind == "continuous" or (kind == "auto" and _pays(model, config)):
        return ContinuousSampler(model, config, end_ids, vocab)
    return LocalSampler(model, config, end_ids, vocab)


def _pays(model: LanguageModel, config: SamplingConfig) -> bool:
    # without such a kernel all answers in work attend through one mask over all their keys
    return SUPPORTED and not model.sharding.is_sharded and not config.stop and attention_for(model) != "sdpa"


def attention_for(model: LanguageModel) -> str:
    """How the engine attends, by its name in transformers: a flash kernel on a GPU in a narrow type, where one is
    there (flash-attn's, else torch's own), otherwise torch's attention with a mask."""
    if model.precision == torch.float32 or model.device.type != "cuda":
        return "sdpa"
    if is_flash_attn_3_available():
        return "flash_attention_3"
    if is_flash_attn_2_available():
        return "flash_attention_2"
    config = unwrap(model.model).config
    plain = config._attn_implementation in ("sdpa", VARLEN)
    return PAGED if plain and fits_varlen(config, model.precision, model.device) else "sdpa"


class ContinuousSampler(LocalSampler):
    """Continuations by transformers' continuous batching, `answers_at_once` in work at any time.

    It works on a copy of the weights in the model's precision, which `sync` renews: the engine's cache wants one type
    throughout, and its thread no model that is being trained. For the arguments see `LocalSampler`.

    Args:
        attention: a name that `attention_for` gives; default: the one that it gives for this model.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: SamplingConfig,
        end_ids: Sequence[int] = (),
        vocab: ByteVocab | None = None,
        *,
        attention: str | None = None,
    ) -> None:
        super().__init__(model, config, end_ids, vocab)
        if model.sharding.is_sharded:
            raise ConfigError(
                "on_policy.sampler continuous needs the whole model in every process, and this one is split "
                "(tensor_parallel_size, context_parallel_size, fsdp); leave it at auto"
            )
        if not SUPPORTED:
            raise ConfigError(
                "on_policy.sampler continuous needs transformers 5.20 or later, and this is "
                f"{transformers.__version__}; leave it at auto"
            )
        self._engine = copy.deepcopy(unwrap(model.model)).requires_grad_(False).eval()
        for weight in self._engine.parameters():
            # not the buffers: positions in a narrow type are other positions
            weight.data = weight.data.to(model.precision)
        self.attention = attention or attention_for(model)
        if self.attention == PAGED:
            self._engine.config._attn_implementation = register_paged_attention()
        else:
            self._engine.set_attn_implementation(self.attention)
        self._manager: Any = None
        self._blocks, self._at_once = 0, answers_at_once(model, config)

    @torch.no_grad()
    def sync(self, model: LanguageModel, step: int) -> None:
        super().sync(model, step)
        weights = self._engine.state_dict(keep_vars=True)
        for name, value in unwrap(model.model).state_dict(keep_vars=True).items():
            weights[name].copy_(value)

    def _in_batches(self, rows: Sequence[Tensor], dice: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        if not rows:
            return []
        answers: dict[int, Any] = {}
        every = (torch.cat(list(dice)) * 2**_BITS).long().tolist()
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        # a new engine draws random numbers, which those of the run must not feel
        with torch.random.fork_rng(devices), self._running(rows, every) as manager:
            while len(answers) < len(rows):
                # with a timeout, or a thread that has died would be waited for without end
                one = manager.get_result(timeout=1)
                if one is None and not manager.is_running():
                    raise _failure(manager.background_thread_status.fatal_error)
                if one is not None and one.error is not None:
                    raise _failure(one.error)
                if one is not None and one.is_finished():
                    answers[int(one.request_id)] = one
        in_order = [answers[row] for row in range(len(rows))]
        return [
            # float64: `_heard` takes the difference of two numbers that are nearly equal for likely tokens
            (torch.tensor(one.generated_tokens), _heard(torch.tensor(one.logprobs, dtype=torch.float64)))
            for one in in_order
        ]

    @contextmanager
    def _running(self, rows: Sequence[Tensor], dice: Sequence[list[int]]) -> Iterator[Any]:
        """The engine at work on rows, each with its numbers; its cache is kept until there are longer rows."""
        new = self.config.max_new_tokens
        needed = min(self._at_once, len(rows)) * -(-(max(len(row) for row in rows) + new) // PAGE)
        if self._manager is not None and needed > self._blocks:
            self._manager.destroy()
            self._manager = None
        if self._manager is None:
            # a power of two, so that somewhat longer rows find the same engine again
            self._blocks = 1 << (needed - 1).bit_length()
            self._manager = self._make(self._blocks)
        manager = self._manager
        # all are there when it starts: which of them share a pass, and with that the last bits of what is written, must
        # not depend on how fast they come
        manager.background_thread_status.clear()
        # long prompts first: what is left at the end is short
        for row in sorted(range(len(rows)), key=lambda row: -len(rows[row])):
            ids = rows[row].tolist()
            manager.add_request(ids, f"{row}", new, dice=dice[row], prompt_size=len(ids))
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=True, keep_for_next_session=True)
            # answers of a round that an error cut short have numbers that the next round gives out again
            _drain(manager.output_router.output_queue)

    def _make(self, blocks: int) -> Any:
        # -1 is no token; for None the engine warns
        options = GenerationConfig(
            max_new_tokens=self.config.max_new_tokens, do_sample=False, eos_token_id=self.end_ids.tolist() or -1
        )
        engine = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=blocks,
            max_batch_tokens=PREFILL + self._at_once,
            max_requests_per_batch=self._at_once,
            # keys of a prompt must not outlive the weights that they were computed with
            allow_block_sharing=False,
            return_logprobs=True,
            # `attention_for` has chosen; by itself the engine may take a kernel from the hub
            auto_switch_to_flash=False,
        )
        manager = self._engine.init_continuous_batching(options, engine)
        chooser = _SeededChooser(self.config, self.model.vocab_size)
        manager.logit_processor = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([chooser]))
        # the list counts only processors that it has converted itself
        manager.logit_processor.tensors_required = 1
        return manager


class _SeededChooser(ContinuousBatchingLogitsProcessor):
    """Chooses each request's token by its own numbers; the engine, which takes the largest score, finds no other."""

    def __init__(self, config: SamplingConfig, vocab_size: int) -> None:
        self.config, self.vocab_size = config, vocab_size
        self.supported_kwargs, self.ignored_kwargs = {"dice": list, "prompt_size": int}, ()

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        return torch.tensor([_number(one.state) for one in requests_with_new_token], dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Any:
        log_p = scores[:, : self.vocab_size].float().log_softmax(-1)
        dice = tensor_arg[: scores.shape[0]].double() / 2**_BITS
        chosen = choose(log_p, self.config, dice)[:, None]
        return _tell(scores, chosen, log_p.gather(1, chosen))


def _number(state: Any) -> int:
    """Number of the token that comes next; the engine has moved the request's position on already."""
    settings = state.logit_processor_kwargs
    dice = settings.get("dice") or [0]
    written = state.position_offset - settings.get("prompt_size", 0)
    return int(dice[min(max(written, 0), len(dice) - 1)])


def _tell(scores: Tensor, chosen_N1: Tensor, log_p_N1: Tensor) -> Tensor:
    """Scores of which the chosen token's is the largest, and whose softmax there tells its log-probability: that is
    all that the engine sends along. A second token stands below it by as much as the first is unlikely."""
    out = torch.full_like(scores, -torch.inf)
    second = (chosen_N1 + 1) % scores.shape[1]
    # divided, or float32 would lose an unlikely token's probability beside 1; less 0.01, so the first stays the largest
    out.scatter_(1, second, (log_p_N1 / _NATS - 0.01).to(out))
    return out.scatter_(1, chosen_N1, 0.0)


def _heard(log_q_T: Tensor) -> Tensor:
    """The log-probabilities behind what `_tell` made the engine say, to about 1e-5."""
    log_p = (torch.expm1(-log_q_T).log() + 0.01) * _NATS
    return log_p.clamp(max=0.0).float()


def _failure(reason: object) -> LimbeckError:
    said = " ".join(str(reason).split())[:200]
    return LimbeckError(f"continuous batching failed ({said}); set on_policy.sampler to generate")


def _drain(waiting: queue.Queue[Any]) -> None:
    while not waiting.empty():
        waiting.get_nowait()
