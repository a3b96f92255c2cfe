"""Text that a model writes: continuations of prompts, with the log-probability of every token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import BatchingConfig, MicrobatchConfig, process_microbatch
from limbeck.distributed.comm import Comm
from limbeck.errors import ConfigError, DataError
from limbeck.models.causal import unwrap
from limbeck.models.language_model import LanguageModel
from limbeck.tokens import ByteVocab


class SamplingConfig(BaseModel):
    """How the next token is chosen, and how long an answer may be."""

    model_config = ConfigDict(extra="forbid")

    max_new_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    """0: always the most likely token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Choose among the most likely tokens that have this much probability together."""
    stop: list[str] = []
    """Texts that end an answer; the token that completes one is its last."""

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, stop: list[str]) -> list[str]:
        if "" in stop:
            raise ValueError("an empty text would end every answer at once; leave it out")
        return stop


@dataclass(frozen=True)
class Sample:
    """One continuation.

    Attributes:
        prompt: number of its prompt.
        ids_T: int64 ``[T]`` what was written, the token that ended it included.
        log_probs_T: float32 ``[T]`` of these tokens under the model itself: at temperature 1, nothing cut off.
        ended: False where the length limit cut it off.
    """

    prompt: int
    ids_T: Tensor
    log_probs_T: Tensor
    ended: bool


class Sampler(ABC):
    """Whatever writes continuations with a model's weights."""

    @abstractmethod
    def sync(self, model: LanguageModel, step: int) -> None:
        """Take over the weights that ``model`` has after ``step`` steps. Collective."""

    @abstractmethod
    def sample(self, prompts: Sequence[Tensor], *, n: int = 1, seed: int | Sequence[int] = 0) -> list[Sample]:
        """``n`` continuations of every prompt ``[T]``, in order of the prompts; the same seed writes the same.

        seed: one for all, from which each prompt's follows by its number, or one for every prompt.
        """


class LocalSampler(Sampler):
    """The model in this process, as it is at the moment.

    What is written after a prompt depends on the prompt and its seed, not on its neighbours. All ranks of a
    sharded model must make the same call; those that share rows give the same prompts, the others their own, or none.

    Args:
        end_ids: tokens that end an answer.
        vocab: what tokens spell; needed for stop texts.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: SamplingConfig,
        end_ids: Sequence[int] = (),
        vocab: ByteVocab | None = None,
    ) -> None:
        self.model, self.config, self.end_ids = model, config, torch.tensor(list(end_ids), dtype=torch.int64)
        if config.stop and vocab is None:
            raise ConfigError("stop texts need the student's vocabulary to be found in what it writes; give vocab")
        self._stops = _StopTexts(config.stop, vocab) if vocab is not None and config.stop else None

    def sync(self, model: LanguageModel, step: int) -> None:
        self.model = model

    def sample(self, prompts: Sequence[Tensor], *, n: int = 1, seed: int | Sequence[int] = 0) -> list[Sample]:
        seeds = [_seed_of(seed, i) for i in range(len(prompts))] if isinstance(seed, int) else list(seed)
        empty = [number for number, prompt in enumerate(prompts) if not len(prompt)]
        if empty:
            raise DataError(f"prompt {empty[0]} of {len(prompts)} has no token; give it at least one")
        with self.model.inference():
            if self.model.sharding.is_sharded:
                return self._together(prompts, n, seeds)
            return [sample for number in range(len(prompts)) for sample in self._alone(prompts, number, n, seeds)]

    def _alone(self, prompts: Sequence[Tensor], number: int, n: int, seeds: Sequence[int]) -> list[Sample]:
        """The answers to one prompt, by transformers with its cache."""
        config, device, causal = self.config, self.model.device, unwrap(self.model.model)
        ids = prompts[number][None].to(device)
        told = _LogProbs(self.model.vocab_size)
        stops = [] if self._stops is None else [_StopAfter(self._stops, ids.shape[1])]
        chosen = {"temperature": config.temperature, "top_p": config.top_p, "top_k": 0} if config.temperature else {}
        options = GenerationConfig(
            max_new_tokens=config.max_new_tokens,
            do_sample=config.temperature > 0,
            num_return_sequences=n if config.temperature else 1,
            eos_token_id=self.end_ids.tolist() or None,
            pad_token_id=0,
            **chosen,
        )
        with self.model.autocast(), _plain(causal), _seeded(seeds[number], device):
            out = causal.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=options,
                logits_processor=LogitsProcessorList([told]),
                stopping_criteria=StoppingCriteriaList(stops),
            )
        written, log_probs = out[:, ids.shape[1] :].cpu(), told.of_all(out).cpu()
        found = [self._cut(number, *row) for row in zip(written, log_probs, strict=True)]
        return found if len(found) == n else found * n

    def _together(self, prompts: Sequence[Tensor], n: int, seeds: Sequence[int]) -> list[Sample]:
        """All answers at once, token by token and without a cache: the model's ranks run every pass together, so none
        may stop before its peers."""
        model, new, count = self.model, self.config.max_new_tokens, len(prompts) * n
        rows = [prompt.cpu() for prompt in prompts for _ in range(n)] or [torch.zeros(1, dtype=torch.int64)]
        start, row = torch.tensor([len(r) for r in rows]), torch.arange(len(rows))
        ids = F.pad(pad_sequence(rows, batch_first=True), (0, new))
        log_probs = torch.zeros(len(rows), new)
        # a rank without prompts keeps the others company
        ended = torch.full((len(rows),), count == 0)
        dice = [torch.Generator().manual_seed(own) for own in seeds or [0]]
        layout = model.cfg.dtensor_cfg
        options = MicrobatchConfig(dynamic_batching=BatchingConfig(enabled=True), dtensor_cfg=layout)
        for step in range(new):
            # all ranks, per token: one number
            if not Comm.world().any(not bool(ended.all())):
                break
            data: BatchedDataDict = BatchedDataDict({"input_ids": ids, "input_lengths": start + step})
            inputs = process_microbatch(
                data, model.tokenizer, False, options, layout.context_parallel_size, device=model.device
            )
            assert inputs.row_start is not None
            hidden = model.forward_hidden(inputs)[inputs.row_start + (start + step - 1).to(model.device)]
            log_p = model.head(whole=True).logits(hidden).log_softmax(-1).cpu()
            chosen = torch.cat([self._choose(part, g) for part, g in zip(log_p.split(n), dice, strict=True)])
            # ranks that share rows, per token: they must go on with the same one, whatever their last bits are
            chosen = model.dims.rows.broadcast_(chosen)
            ids[row, start + step], log_probs[:, step] = chosen, log_p[row, chosen].float()
            ended |= torch.isin(chosen, self.end_ids)
            if self._stops is not None:
                so_far = (ids[r, start[r] : start[r] + step + 1] for r in range(len(rows)))
                ended |= torch.tensor([self._stops.size(one) is not None for one in so_far])
        model.sharding.release()
        written = [ids[r, start[r] : start[r] + new] for r in range(count)]
        return [self._cut(r // n, written[r], log_probs[r]) for r in range(count)]

    def _choose(self, log_p_NV: Tensor, dice: torch.Generator) -> Tensor:
        """One id ``[N]`` for every row."""
        if not self.config.temperature:
            return log_p_NV.argmax(-1)
        probs = (log_p_NV / self.config.temperature).softmax(-1)
        if self.config.top_p < 1:
            falling = probs.sort(-1, descending=True)
            out = falling.values.cumsum(-1) - falling.values >= self.config.top_p
            probs = probs.scatter(-1, falling.indices, falling.values.masked_fill(out, 0))
        return torch.multinomial(probs, 1, generator=dice)[:, 0]

    def _cut(self, prompt: int, ids_T: Tensor, log_probs_T: Tensor) -> Sample:
        """What was written up to the first end."""
        ends = torch.isin(ids_T, self.end_ids).nonzero()
        size = int(ends[0]) + 1 if len(ends) else len(ids_T)
        stopped = None if self._stops is None else self._stops.size(ids_T[:size])
        return Sample(
            prompt, ids_T[: stopped or size], log_probs_T[: stopped or size], bool(len(ends)) or bool(stopped)
        )


class _StopTexts:
    """Finds stop texts in what tokens spell."""

    def __init__(self, texts: Sequence[str], vocab: ByteVocab) -> None:
        self.texts, self.vocab = [text.encode() for text in texts], vocab

    def size(self, ids_T: Tensor) -> int | None:
        """Tokens up to the one that completes the first stop text; None: there is none."""
        ids = ids_T.tolist()
        data = self.vocab.join(ids)
        found = [at + len(text) for text in self.texts if (at := data.find(text)) >= 0]
        if not found:
            return None
        ends = self.vocab.byte_len[ids].cumsum()
        return int((ends < min(found)).sum()) + 1


class _StopAfter(StoppingCriteria):
    """Has ``generate`` stop rows whose answers, behind ``prompt_size`` tokens, hold a stop text."""

    def __init__(self, stops: _StopTexts, prompt_size: int) -> None:
        self.stops, self.prompt_size = stops, prompt_size

    def __call__(self, input_ids: Tensor, scores: Any, **more: Any) -> Tensor:
        rows = [self.stops.size(row[self.prompt_size :]) is not None for row in input_ids]
        return torch.tensor(rows, device=input_ids.device)


class _LogProbs(LogitsProcessor):
    """Keeps the log-probability of every token that ``generate`` chooses, one step behind it, and rules out the rows of
    a head that are no tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.log_p_NV: Tensor | None = None
        self.found: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._take(input_ids)
        scores[:, self.vocab_size :] = -torch.inf
        self.log_p_NV = scores.float().log_softmax(-1)
        return scores

    def _take(self, ids: Tensor) -> None:
        if self.log_p_NV is not None:
            self.found.append(self.log_p_NV.gather(1, ids[:, -1:]))

    def of_all(self, ids: Tensor) -> Tensor:
        """float32 ``[n, T]`` of all tokens that were written; ``ids``: what ``generate`` returned."""
        self._take(ids)
        return torch.cat(self.found, 1)


@contextmanager
def _plain(causal: Any) -> Iterator[None]:
    """Without what a model's folder says about sampling: it would fill in whatever is not set."""
    own, causal.generation_config = causal.generation_config, GenerationConfig()
    try:
        yield
    finally:
        causal.generation_config = own


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers of their own; those of the run are as before."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _seed_of(seed: int, prompt: int) -> int:
    """Another stream for every prompt."""
    return (seed * 1_000_003 + prompt) % 2**63
