"""What the student writes in a step: seeds, continuations, and the figures that show when it goes astray."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.continuations import Continuation, ContinuationCollator, Prompt
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator, DatumSpec
from limbeck.models.generate import Sample, Sampler
from limbeck.utils.metrics import Metrics

NGRAM = 4
"""Tokens of the runs that repetition is counted by."""


def is_prompt(seed: int, idx: int, fraction: float) -> bool:
    """Whether a record is sampled from; the same on every rank, in every epoch and for every order of the records."""
    if fraction in (0.0, 1.0):
        return fraction == 1.0
    return float(np.random.default_rng([seed, idx]).random()) < fraction


def sample_seed(seed: int, step: int, idx: int) -> int:
    """Of what is written after a record's prompt in a step."""
    return int(np.random.SeedSequence([seed, step, idx]).generate_state(1, np.uint64)[0] >> np.uint64(1))


@dataclass
class StepData:
    """The records of one step on one rank: prompts, and the rows of those that are learnt from as they are stored."""

    prompts: list[Prompt]
    stored: BatchedDataDict | None
    dropped: Counter[str]


class StepCollate:
    """Records to prompts and stored rows; runs in loader processes."""

    def __init__(
        self, rows: ContinuationCollator, stored: CrossTokenizerCollator, *, seed: int, fraction: float
    ) -> None:
        self.rows, self.stored, self.seed, self.fraction = rows, stored, seed, fraction

    def __call__(self, records: list[DatumSpec]) -> StepData:
        chosen = [is_prompt(self.seed, int(record["idx"]), self.fraction) for record in records]
        prompts, dropped = self.rows.prompts([r for r, own in zip(records, chosen, strict=True) if own])
        if self.fraction == 1:
            return StepData(prompts, None, dropped)
        stored = self.stored([r for r, own in zip(records, chosen, strict=True) if not own])
        for counts in stored["dropped"]:
            dropped.update(counts)
        return StepData(prompts, stored, dropped)


@dataclass
class Rollout:
    """What was written in a step: rows for the losses, the samples behind them, and figures of this rank."""

    batch: BatchedDataDict
    samples: list[Sample]
    metrics: Metrics


class Rollouts:
    """Draws continuations of a step's prompts.

    Args:
        n: continuations of each prompt.
        seed: of the run.
    """

    def __init__(self, sampler: Sampler, rows: ContinuationCollator, *, n: int, seed: int) -> None:
        self.sampler, self.rows, self.n, self.seed = sampler, rows, n, seed

    def draw(self, prompts: Sequence[Prompt], step: int) -> Rollout:
        """Continuations of these prompts. All ranks of a sharded model must make the same call."""
        start = time.perf_counter()
        ids = [torch.from_numpy(prompt.student.ids) for prompt in prompts]
        seeds = [sample_seed(self.seed, step, prompt.idx) for prompt in prompts]
        samples = self.sampler.sample(ids, n=self.n, seed=seeds)
        seconds = time.perf_counter() - start
        written = [Continuation(prompts[s.prompt], s.ids_T.numpy(), s.ended) for s in samples]
        metrics = measure(samples)
        metrics.add({"sample/tokens_per_s": (float(sum(len(s.ids_T) for s in samples)), seconds)})
        return Rollout(self.rows.batch(written), samples, metrics)


def measure(samples: Sequence[Sample]) -> Metrics:
    """Figures of samples as (sum, count): ``length`` in tokens; ``ended`` and ``cut``: share that the student ended
    itself, or the limit did; ``log_prob`` per token under the student; ``repeated``: share of runs of tokens that were
    there before in the same sample."""
    count, tokens = float(len(samples)), float(sum(len(s.ids_T) for s in samples))
    ended = float(sum(s.ended for s in samples))
    repeated, runs = (float(sum(x)) for x in zip(*(_repeated(s.ids_T.tolist()) for s in samples), (0, 0), strict=True))
    return Metrics(
        {
            "sample/length": (tokens, count),
            "sample/ended": (ended, count),
            "sample/cut": (count - ended, count),
            "sample/log_prob": (float(sum(float(s.log_probs_T.double().sum()) for s in samples)), tokens),
            "sample/repeated": (repeated, runs),
        }
    )


def _repeated(ids: list[Any]) -> tuple[int, int]:
    """Runs of tokens that came before, and all runs."""
    runs = [tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
    return len(runs) - len(set(runs)), len(runs)
