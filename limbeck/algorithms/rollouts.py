"""Text that the student writes in a step: seeds, continuations, and the figures that show when it goes astray."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch

from limbeck.algorithms.engine import EngineSampler
from limbeck.algorithms.rewards import Asked, Reward
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.continuations import Continuation, ContinuationCollator, Prompt
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator, DatumSpec
from limbeck.data.sources import REFERENCE
from limbeck.distributed.comm import Comm
from limbeck.losses.chunk_policy import BEHAVIOR
from limbeck.losses.contract import Teacher
from limbeck.models.generate import Sample, Sampler
from limbeck.utils.metrics import Metrics, Pair

Heard: TypeAlias = Callable[[Sequence[Continuation]], None]
WRITTEN = "written_mask"
"""Batch key: 1 for every token `[B, T]` that the student wrote, whatever of it is compared with teachers."""
NGRAM = 4
"""Tokens of the runs that repetition is counted by."""


def is_prompt(seed: int, idx: int, fraction: float) -> bool:
    """Whether a record is sampled from; the same on every rank, in every epoch and for every order of the records."""
    if fraction in (0.0, 1.0):
        return fraction == 1.0
    return float(np.random.default_rng([seed, idx]).random()) < fraction


def sample_seed(seed: int, step: int, idx: int, turn: int = 0) -> int:
    """Seed of the text behind a record's prompt in a step, of several prompts by their numbers; 31 bits, which every
    engine takes."""
    entropy = [seed, step, idx, turn] if turn else [seed, step, idx]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0]) >> 1


@dataclass
class StepData:
    """The records of one step on one rank: prompts, and the rows of those that are learnt from as they are stored.
    ``records``: those that episodes begin with, in place of prompts."""

    prompts: list[Prompt]
    stored: BatchedDataDict | None
    skipped: Counter[str]
    records: list[DatumSpec] = field(default_factory=list)


class StepCollate:
    """Records to prompts and stored rows; runs in loader processes. ``plays``: an environment makes the prompts."""

    def __init__(
        self,
        rows: ContinuationCollator,
        stored: CrossTokenizerCollator,
        *,
        seed: int,
        fraction: float,
        plays: bool = False,
    ) -> None:
        self.rows, self.stored, self.seed, self.fraction = rows, stored, seed, fraction
        self.plays = plays

    def __call__(self, records: list[DatumSpec]) -> StepData:
        chosen = [is_prompt(self.seed, int(record["idx"]), self.fraction) for record in records]
        played, prompts, skipped = list[DatumSpec](), list[Prompt](), Counter[str]()
        if self.plays:
            played = [self.stored.in_our_form(r, skipped) for r, own in zip(records, chosen, strict=True) if own]
        else:
            prompts, skipped = self.rows.prompts([r for r, own in zip(records, chosen, strict=True) if own])
        if self.fraction == 1:
            return StepData(prompts, None, skipped, played)
        stored = self.stored([r for r, own in zip(records, chosen, strict=True) if not own])
        for counts in stored["skipped"]:
            skipped.update(counts)
        return StepData(prompts, stored, skipped, played)


@dataclass
class Written:
    """Text that was written in a step behind a rank's prompts: samples by number of the prompt, their rewards where
    there are any, and figures of this rank. traces: of episodes that are to be stored. skipped: what was left out, by
    reason. rollout: its rows, where they are collated already."""

    prompts: list[Prompt]
    samples: list[Sample]
    rewards: list[float]
    metrics: Metrics
    traces: list[dict[str, Any]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    rollout: Rollout | None = None

    def packed(self) -> bytes:
        """For another process that reads the same rows; see `unpacked`."""
        entries = [_packed(self, number, group) for number, group in enumerate(_groups(self))]
        rest = {"metrics": self.metrics.pairs(), "traces": self.traces, "skipped": self.skipped}
        return json.dumps({"entries": entries, **rest}).encode()

    @classmethod
    def unpacked(cls, raw: bytes) -> Written:
        """What `packed` gave."""
        value = json.loads(raw)
        return _of_entries(value["entries"], Metrics(value["metrics"]), value["traces"], value["skipped"])


@dataclass
class Rollout:
    """Material that a rank learns from in a step: rows for the losses, the samples behind them, and figures of what it
    wrote. skipped: what was left out before there were rows, by reason."""

    batch: BatchedDataDict
    samples: list[Sample]
    metrics: Metrics
    skipped: Counter[str] = field(default_factory=Counter)


class Rollouts:
    """Draws continuations of a step's prompts.

    Args:
        n: continuations of each prompt.
        seed: of the run.
        reward: scores what was written; the batch then has what the policy channel needs.
    """

    def __init__(
        self, sampler: Sampler, rows: ContinuationCollator, *, n: int, seed: int, reward: Reward | None = None
    ) -> None:
        self.sampler, self.rows, self.n, self.seed, self.reward = sampler, rows, n, seed, reward

    def write(self, batch: StepData, step: int, heard: Heard | None = None) -> Written:
        """What the student writes in a step. heard: called with answers as soon as an engine has written them."""
        return self.draw(batch.prompts, step, heard)

    def draw(self, prompts: Sequence[Prompt], step: int, heard: Heard | None = None) -> Written:
        """Continuations of these prompts. All ranks of a sharded model must make the same call."""
        start = time.perf_counter()
        seeds = [sample_seed(self.seed, step, prompt.idx, prompt.turn) for prompt in prompts]
        samples = self.sample(prompts, self.n, seeds, heard)
        seconds = time.perf_counter() - start
        metrics = measure(samples)
        metrics.add({"sample/tokens_per_s": (float(sum(len(s.ids_T) for s in samples)), seconds)})
        metrics.add(self._of_text(prompts, samples))
        rewards: list[float] = []
        if self.reward is not None:
            asked = [_asked(prompt) for prompt in prompts]
            records = [prompt.record.get(REFERENCE, {}) for prompt in prompts]
            rewards, figures = self.reward.of_all(
                [asked[s.prompt] for s in samples],
                [self.rows.said(_continuation(prompts, s)) for s in samples],
                [records[s.prompt] for s in samples],
            )
            metrics.add({"sample/reward": (sum(rewards), float(len(rewards))), **figures})
        return Written(list(prompts), samples, rewards, metrics)

    def sample(
        self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], heard: Heard | None = None
    ) -> list[Sample]:
        ids = [torch.from_numpy(prompt.student.ids) for prompt in prompts]
        if heard is None:
            return self.sampler.sample(ids, n=n, seed=seeds)
        assert isinstance(self.sampler, EngineSampler)

        def hear(some: list[Sample]) -> None:
            heard([_continuation(prompts, one) for one in some])

        return self.sampler.sample(ids, n=n, seed=seeds, heard=hear)

    def _of_text(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> dict[str, Pair]:
        """Share of white space in the bytes that were written; of conversations, the number of the turn."""
        data = b"".join(self.rows.vocab.join(sample.ids_T.tolist()) for sample in samples)
        metrics: dict[str, Pair] = {"sample/white_space": (float(sum(map(data.count, _SPACES))), float(len(data)))}
        turns = [1 + _answers(prompts[s.prompt]) for s in samples if prompts[s.prompt].messages]
        return {**metrics, "sample/turn": (float(sum(turns)), float(len(turns)))} if turns else metrics

    def collate(self, written: Written) -> Rollout:
        """Rows of what was written."""
        rows = [_continuation(written.prompts, sample) for sample in written.samples]
        batch = self.rows.batch(rows)
        said, is_written = torch.zeros(batch["input_ids"].shape), torch.zeros_like(batch["token_mask"])
        for row, (one, sample) in enumerate(zip(rows, written.samples, strict=True)):
            start, end = len(one.prompt.student), int(batch["input_lengths"][row])
            size = max(0, min(len(sample.log_probs_T), end - start))
            said[row, start : start + size] = sample.log_probs_T[:size]
            is_written[row, start : start + size] = 1
        batch[BEHAVIOR] = said
        batch[WRITTEN] = is_written
        if self.reward is not None:
            batch["rewards"] = torch.tensor(written.rewards, dtype=torch.float32)
            batch["group_index"] = torch.tensor([s.prompt for s in written.samples], dtype=torch.int64)
            batch["behavior_valid"] = batch[WRITTEN] > 0
        return Rollout(batch, written.samples, written.metrics, written.skipped)

    def close(self) -> None:
        """Let go of whatever takes part in the writing."""


_SPACES = b" \t\n\r"


def _answers(prompt: Prompt) -> int:
    return sum(message["role"] == "assistant" for message in prompt.messages)


def _continuation(prompts: Sequence[Prompt], sample: Sample) -> Continuation:
    return Continuation(prompts[sample.prompt], sample.ids_T.numpy(), sample.ended)


def _asked(prompt: Prompt) -> Asked:
    return list(prompt.messages) if prompt.messages else prompt.data.decode("utf-8", "replace")


# -- ranks with more and with less ------------------------------------------------------------------------------------


SLACK = 0.1
"""Share of the mean load that the most and the least loaded rank may be apart."""


def balanced(
    written: Written, ranks: Comm, collator: ContinuationCollator | None = None, teachers: Sequence[Teacher] = ()
) -> Written:
    """Material that this rank learns from once every rank has about as many tokens: those with more hand whole prompts,
    with all that was written behind them, to those with less. Collective.

    Args:
        teachers: that were asked about it ahead; their answers move along, found by the rows of ``collator``.
    """
    if ranks.size == 1:
        return written
    # whole prompts: an advantage is against the samples of the same one, which must lie on one rank
    groups = _groups(written)
    sizes = [
        sum(len(prompt.student) + len(written.samples[i].ids_T) for i in group)
        for prompt, group in zip(written.prompts, groups, strict=True)
    ]
    # data-parallel ranks, once per step: the tokens behind each prompt
    loads = [json.loads(raw) for raw in ranks.exchange([json.dumps(sizes).encode()] * ranks.size)]
    target = deal(loads)[ranks.rank]
    packed = [_packed(written, number, group) for number, group in enumerate(groups)]
    parts = [[one for one, to in zip(packed, target, strict=True) if to == rank] for rank in range(ranks.size)]
    entries = [one for raw in ranks.exchange([json.dumps(part).encode() for part in parts]) for one in json.loads(raw)]
    for teacher in teachers:
        _move_answers(teacher, collator, written, target, ranks)
    return _of_entries(entries, written.metrics, skipped=written.skipped)


def _move_answers(
    teacher: Teacher, collator: ContinuationCollator | None, written: Written, target: Sequence[int], ranks: Comm
) -> None:
    """Have a teacher's answers to rows go to the ranks that the rows go to. Collective."""
    assert collator is not None
    moving: list[list[Continuation]] = [[] for _ in range(ranks.size)]
    for sample in written.samples:
        if target[sample.prompt] != ranks.rank:
            moving[target[sample.prompt]].append(_continuation(written.prompts, sample))
    with ranks.fail_together():
        parts = [teacher.asked(collator.batch(rows)) if rows else b"" for rows in moving]
    # data-parallel ranks, once per step and teacher: scores of the few rows that change hands
    for raw in ranks.exchange(parts):
        teacher.take_asked(raw)


def _groups(written: Written) -> list[list[int]]:
    """Numbers of the samples behind each prompt."""
    groups: list[list[int]] = [[] for _ in written.prompts]
    for number, sample in enumerate(written.samples):
        groups[sample.prompt].append(number)
    return groups


def _of_entries(
    entries: Sequence[Mapping[str, Any]],
    metrics: Metrics,
    traces: Sequence[dict[str, Any]] = (),
    skipped: Mapping[str, int] = MappingProxyType({}),
) -> Written:
    """Prompts with what was written behind them, from what `_packed` gave."""
    samples = [
        Sample(number, torch.tensor(ids, dtype=torch.int64), torch.tensor(log_probs, dtype=torch.float32), ended)
        for number, one in enumerate(entries)
        for ids, log_probs, ended in one["samples"]
    ]
    rewards = [reward for one in entries for reward in one["rewards"]]
    prompts = [Prompt.from_json(one["prompt"]) for one in entries]
    return Written(prompts, samples, rewards, metrics, list(traces), Counter(skipped))


def _packed(written: Written, number: int, group: Sequence[int]) -> dict[str, Any]:
    samples = [written.samples[i] for i in group]
    return {
        "prompt": written.prompts[number].as_json(),
        "samples": [(s.ids_T.tolist(), s.log_probs_T.tolist(), s.ended) for s in samples],
        "rewards": [written.rewards[i] for i in group] if written.rewards else [],
    }


def deal(loads: Sequence[Sequence[int]]) -> list[list[int]]:
    """The rank that each part of each rank goes to, given their sizes; few parts move.

    >>> deal([[5, 4, 3], [2]])
    [[1, 0, 0], [1]]
    """
    home = [[rank] * len(parts) for rank, parts in enumerate(loads)]
    total = [sum(parts) for parts in loads]
    while True:
        most, least = total.index(max(total)), total.index(min(total))
        gap = total[most] - total[least]
        movable = [
            # a move changes the gap by twice its size; ties go by numbers, so that every rank deals alike
            (abs(gap - 2 * size), rank, part)
            for rank, parts in enumerate(loads)
            for part, size in enumerate(parts)
            # one as large as the gap would only turn it round, without end
            if home[rank][part] == most and 0 < size < gap
        ]
        if gap <= SLACK * sum(total) / len(total) or not movable:
            return home
        _, rank, part = min(movable)
        home[rank][part] = least
        total[most] -= loads[rank][part]
        total[least] += loads[rank][part]


# -- going astray ------------------------------------------------------------------------------------------------------


def measure(samples: Sequence[Sample]) -> Metrics:
    """Figures of samples as (sum, count): ``length`` in tokens; ``ended`` and ``cut``: share that the student ended
    itself, or the limit did; ``log_prob`` per token under the student; ``repeated``: share of runs of tokens that were
    there before in the same sample."""
    count, tokens = float(len(samples)), float(sum(len(s.ids_T) for s in samples))
    ended = float(sum(s.ended for s in samples))
    # (0, 0): without samples zip would give nothing to unpack
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
