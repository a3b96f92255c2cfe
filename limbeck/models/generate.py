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
from limbeck.distributed.device import memory_total
from limbeck.errors import ConfigError, DataError
from limbeck.models.attention import cached_attention
from limbeck.models.budget import model_shape
from limbeck.models.causal import unwrap
from limbeck.models.language_model import LanguageModel
from limbeck.tokens import ByteVocab


class SamplingConfig(BaseModel):
    """How the next token is chosen, and how long an answer may be."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    max_new_tokens: int = Field(default=64, ge=1)
    """Most tokens of an answer."""
    temperature: float = Field(default=1.0, ge=0)
    """0: always the most likely token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Choose among the most likely tokens that have this much probability together."""
    batch_size: int | None = Field(default=None, ge=1)
    """Answers that are written at a time; null: 32 on a CPU, on an accelerator as many as its memory has room for,
    at most 256."""
    stop: list[str] = []
    """Texts that end an answer; the token that completes one is its last."""

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, stop: list[str]) -> list[str]:
        if "" in stop:
            raise ValueError("an empty text would end every answer at once; leave it out")
        return stop


CPU_ANSWERS = 32
MOST_ANSWERS = 256
"""Tried on an H200; other numbers were not compared with it."""
_CACHE_SHARE = 0.15
_PROMPT = 1024
"""Tokens of a prompt that are reckoned with; longer ones take memory that was left to others."""


def answers_at_once(model: LanguageModel, config: SamplingConfig) -> int:
    """Answers that are written at a time: what the settings say, else what a share of the device's memory holds.

    By all of the memory and not by what is free, so that a resumed run writes the same to the last bit.
    """
    if config.batch_size is not None:
        return config.batch_size
    if model.device.type == "cpu":
        return CPU_ANSWERS
    shape = model_shape(unwrap(model.model).config, 0)
    answer = 2 * shape.layers * shape.kv_heads * shape.head_dim * 2 * (_PROMPT + config.max_new_tokens)
    fitting = int(_CACHE_SHARE * memory_total(model.device) / answer)
    return min(max(fitting, 8), MOST_ANSWERS)


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

    What is written after a prompt depends on the prompt and its seed, and on its neighbours by no more than the last
    bits of sums. All ranks of a sharded model must make the same call; those that share rows give the same prompts, the
    others their own, or none.

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
        # without chance all answers to a prompt are one, which is written once
        copies = n if self.config.temperature else 1
        rows = [(number, copy) for number in range(len(prompts)) for copy in range(copies)]
        dice = [_dice(prompt_seed, copies, self.config.max_new_tokens) for prompt_seed in seeds]
        with self.model.inference():
            if self.model.sharding.is_sharded:
                answers = self._together([prompts[number] for number, _ in rows], dice)
            else:
                answers = self._in_batches([prompts[number] for number, _ in rows], dice)
        cut = [self._cut(number, *one) for (number, _), one in zip(rows, answers, strict=True)]
        return cut if copies == n else [one for one in cut for _ in range(n)]

    def _in_batches(self, rows: Sequence[Tensor], dice: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """(ids, log-probabilities) behind every row, rows of about one length at a time."""
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        every = torch.cat(list(dice)) if dice else torch.zeros(0)
        answers: dict[int, tuple[Tensor, Tensor]] = {}
        size = answers_at_once(self.model, self.config)
        for first in range(0, len(order), size):
            batch = order[first : first + size]
            written = self._generate([rows[row] for row in batch], every[batch])
            answers |= dict(zip(batch, written, strict=True))
        return [answers[row] for row in range(len(rows))]

    def _generate(self, rows: Sequence[Tensor], dice_NT: Tensor) -> list[tuple[Tensor, Tensor]]:
        """One batch, by transformers with its cache; short prompts are padded in front."""
        device, causal = self.model.device, unwrap(self.model.model)
        width = max(len(row) for row in rows)
        ids = torch.stack([F.pad(row, (width - len(row), 0)) for row in rows]).to(device)
        real = torch.stack([F.pad(torch.ones_like(row), (width - len(row), 0)) for row in rows]).to(device)
        chooser = _Chooser(self.config, self.model.vocab_size, dice_NT.to(device), width)
        stops = [] if self._stops is None else [_StopAfter(self._stops, width)]
        options = GenerationConfig(
            max_new_tokens=self.config.max_new_tokens,
            do_sample=False,
            eos_token_id=self.end_ids.tolist() or None,
            # any id will do: `_cut` drops what follows an end
            pad_token_id=0,
        )
        with self.model.autocast(), self.model.uncompiled(), _plain(causal), cached_attention(causal):
            out = causal.generate(
                input_ids=ids,
                attention_mask=real,
                generation_config=options,
                logits_processor=LogitsProcessorList([chooser]),
                stopping_criteria=StoppingCriteriaList(stops),
            )
        return list(zip(out[:, width:].cpu(), torch.stack(chooser.log_probs, 1).cpu(), strict=True))

    def _together(self, prompts: Sequence[Tensor], dice: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """All rows at once, token by token and without a cache: the model's ranks run every pass together, so none may
        stop before its peers."""
        model, new = self.model, self.config.max_new_tokens
        rows = [prompt.cpu() for prompt in prompts] or [torch.zeros(1, dtype=torch.int64)]
        dice_NT = torch.cat(list(dice)) if dice else torch.zeros(1, new)
        start, row = torch.tensor([len(r) for r in rows]), torch.arange(len(rows))
        ids = F.pad(pad_sequence(rows, batch_first=True), (0, new))
        log_probs = torch.zeros(len(rows), new)
        # a rank without prompts keeps the others company
        ended = torch.full((len(rows),), not prompts)
        layout = model.cfg.dtensor_cfg
        # cut to the longest row so far: the rest of the width is not written yet
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
            # ranks that share rows, per token: they must go on with the same one, whatever their last bits are
            chosen = model.dims.rows.broadcast_(choose(log_p, self.config, dice_NT[:, step]))
            ids[row, start + step], log_probs[:, step] = chosen, log_p[row, chosen].float()
            ended |= torch.isin(chosen, self.end_ids)
            if self._stops is not None:
                so_far = (ids[r, start[r] : start[r] + step + 1] for r in range(len(rows)))
                ended |= torch.tensor([self._stops.size(one) is not None for one in so_far])
        model.sharding.release()
        return [(ids[r, start[r] : start[r] + new], log_probs[r]) for r in range(len(prompts))]

    def _cut(self, prompt: int, ids_T: Tensor, log_probs_T: Tensor) -> Sample:
        """Ids up to the first end."""
        ends = torch.isin(ids_T, self.end_ids).nonzero()
        size = int(ends[0]) + 1 if len(ends) else len(ids_T)
        stopped = None if self._stops is None else self._stops.size(ids_T[:size])
        return Sample(
            prompt, ids_T[: stopped or size], log_probs_T[: stopped or size], bool(len(ends)) or bool(stopped)
        )


class _StopTexts:
    """Finds stop texts in what tokens spell."""

    def __init__(self, texts: Sequence[str], vocab: ByteVocab) -> None:
        # bytes, for what is written so far may end inside a character
        self.texts, self.vocab = [text.encode() for text in texts], vocab

    def size(self, ids_T: Tensor) -> int | None:
        """Tokens up to the one that completes the first stop text; None: there is none."""
        ids = ids_T.tolist()
        data = self.vocab.join(ids)
        starts = [offset + len(text) for text in self.texts if (offset := data.find(text)) >= 0]
        if not starts:
            return None
        ends = self.vocab.byte_len[ids].cumsum()
        return int((ends < min(starts)).sum()) + 1


class _StopAfter(StoppingCriteria):
    """Has ``generate`` stop rows whose answers, behind ``prompt_size`` tokens, hold a stop text."""

    def __init__(self, stops: _StopTexts, prompt_size: int) -> None:
        self.stops, self.prompt_size = stops, prompt_size

    def __call__(self, input_ids: Tensor, scores: Any, **more: Any) -> Tensor:
        rows = [self.stops.size(row[self.prompt_size :]) is not None for row in input_ids]
        return torch.tensor(rows, device=input_ids.device)


def choose(log_p_NV: Tensor, config: SamplingConfig, dice_N: Tensor) -> Tensor:
    """The next id ``[N]`` of every row: the one in whose share of the probability its number in [0, 1) falls."""
    if not config.temperature:
        return log_p_NV.argmax(-1)
    probs = (log_p_NV / config.temperature).softmax(-1)
    if config.top_p < 1:
        falling = probs.sort(-1, descending=True)
        # less its own share: the token that crosses top_p stays in, so there is always one
        out = falling.values.cumsum(-1) - falling.values >= config.top_p
        probs = probs.scatter(-1, falling.indices, falling.values.masked_fill(out, 0))
    # in float64: float32 sums of a hundred thousand probabilities swallow those of rare tokens
    reached = probs.double().cumsum(-1)
    # scaled by the last sum, which rounding and top-p leave below 1
    chosen = torch.searchsorted(reached, (dice_N.to(reached) * reached[:, -1])[:, None], right=True)
    # the product may be rounded up to the last sum itself, and the search then ends behind the last token
    return chosen.squeeze(1).clamp(max=log_p_NV.shape[1] - 1)


class _Chooser(LogitsProcessor):
    """Chooses each token for ``generate``, which then finds no other, and keeps its log-probability; rows of a head
    that are no tokens are out."""

    def __init__(self, config: SamplingConfig, vocab_size: int, dice_NT: Tensor, prompt_size: int) -> None:
        self.config, self.vocab_size, self.dice_NT, self.prompt_size = config, vocab_size, dice_NT, prompt_size
        self.log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        log_p = scores[:, : self.vocab_size].float().log_softmax(-1)
        chosen = choose(log_p, self.config, self.dice_NT[:, input_ids.shape[1] - self.prompt_size])[:, None]
        self.log_probs.append(log_p.gather(1, chosen).squeeze(1))
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


@contextmanager
def _plain(causal: Any) -> Iterator[None]:
    """Without what a model's folder says about sampling: it would fill in whatever is not set."""
    config, causal.generation_config = causal.generation_config, GenerationConfig()
    try:
        yield
    finally:
        causal.generation_config = config


def _dice(seed: int, copies: int, tokens: int) -> Tensor:
    """float64 ``[copies, tokens]`` in [0, 1): all the chance in the answers to one prompt."""
    return torch.rand(copies, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _seed_of(seed: int, prompt: int) -> int:
    """Another stream for every prompt."""
    return (seed * 1_000_003 + prompt) % 2**63
