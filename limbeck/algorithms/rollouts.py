"""What the student writes in a step: seeds, continuations, and the figures that show when it goes astray."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from limbeck.algorithms.rewards import Asked, Reward
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.continuations import Continuation, ContinuationCollator, Prompt
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator, DatumSpec
from limbeck.distributed.comm import Comm
from limbeck.errors import LossError
from limbeck.losses.chunk_policy import BEHAVIOR
from limbeck.models.generate import Sample, Sampler
from limbeck.utils.metrics import Metrics, Pair

WRITTEN = "written_mask"
"""Batch key: 1 for every token `[B, T]` that the student wrote, whatever of it is compared with teachers."""
NGRAM = 4
"""Tokens of the runs that repetition is counted by."""
OFTEN = 0.2
"""Share of samples that must have ended by themselves at the start, for a falling share to be a sign."""


def is_prompt(seed: int, idx: int, fraction: float) -> bool:
    """Whether a record is sampled from; the same on every rank, in every epoch and for every order of the records."""
    if fraction in (0.0, 1.0):
        return fraction == 1.0
    return float(np.random.default_rng([seed, idx]).random()) < fraction


def sample_seed(seed: int, step: int, idx: int, turn: int = 0) -> int:
    """Of what is written after a record's prompt in a step, of several prompts by their numbers; 31 bits, which every
    engine takes."""
    entropy = [seed, step, idx, turn] if turn else [seed, step, idx]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0]) >> 1


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
class Written:
    """What was written in a step behind a rank's prompts: samples by number of the prompt, their rewards where there
    are any, and figures of this rank."""

    prompts: list[Prompt]
    samples: list[Sample]
    rewards: list[float]
    metrics: Metrics


@dataclass
class Rollout:
    """What a rank learns from in a step: rows for the losses, the samples behind them, and figures of what it wrote."""

    batch: BatchedDataDict
    samples: list[Sample]
    metrics: Metrics


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

    def draw(self, prompts: Sequence[Prompt], step: int) -> Written:
        """Continuations of these prompts. All ranks of a sharded model must make the same call."""
        start = time.perf_counter()
        ids = [torch.from_numpy(prompt.student.ids) for prompt in prompts]
        seeds = [sample_seed(self.seed, step, prompt.idx, prompt.turn) for prompt in prompts]
        samples = self.sampler.sample(ids, n=self.n, seed=seeds)
        seconds = time.perf_counter() - start
        metrics = measure(samples)
        metrics.add({"sample/tokens_per_s": (float(sum(len(s.ids_T) for s in samples)), seconds)})
        metrics.add(self._of_text(prompts, samples))
        rewards = []
        if self.reward is not None:
            asked = [_asked(prompt) for prompt in prompts]
            rewards = [self.reward(asked[s.prompt], self.rows.said(_continuation(prompts, s))) for s in samples]
            metrics.add({"sample/reward": (sum(rewards), float(len(rewards)))})
        return Written(list(prompts), samples, rewards, metrics)

    def _of_text(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> dict[str, Pair]:
        """Share of white space in the bytes that were written; of conversations, the number of the turn."""
        data = b"".join(self.rows.vocab.join(sample.ids_T.tolist()) for sample in samples)
        found: dict[str, Pair] = {"sample/white_space": (float(sum(map(data.count, _SPACES))), float(len(data)))}
        turns = [1 + _answers(prompts[s.prompt]) for s in samples if prompts[s.prompt].messages]
        return {**found, "sample/turn": (float(sum(turns)), float(len(turns)))} if turns else found

    def collate(self, written: Written) -> Rollout:
        """Rows of what was written."""
        rows = [_continuation(written.prompts, sample) for sample in written.samples]
        batch = self.rows.batch(rows)
        said, own = torch.zeros(batch["input_ids"].shape), torch.zeros_like(batch["token_mask"])
        for row, (one, sample) in enumerate(zip(rows, written.samples, strict=True)):
            start, end = len(one.prompt.student), int(batch["input_lengths"][row])
            size = max(0, min(len(sample.log_probs_T), end - start))
            said[row, start : start + size] = sample.log_probs_T[:size]
            own[row, start : start + size] = 1
        batch[BEHAVIOR] = said
        batch[WRITTEN] = own
        if self.reward is not None:
            batch["rewards"] = torch.tensor(written.rewards, dtype=torch.float32)
            batch["group_index"] = torch.tensor([s.prompt for s in written.samples], dtype=torch.int64)
            batch["behavior_valid"] = batch[WRITTEN] > 0
        return Rollout(batch, written.samples, written.metrics)


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


def balanced(written: Written, ranks: Comm) -> Written:
    """What this rank learns from once every rank has about as many tokens: those with more hand whole prompts, with
    all that was written behind them, to those with less. Collective."""
    if ranks.size == 1:
        return written
    groups: list[list[int]] = [[] for _ in written.prompts]
    for number, sample in enumerate(written.samples):
        groups[sample.prompt].append(number)
    sizes = [
        sum(len(prompt.student) + len(written.samples[i].ids_T) for i in group)
        for prompt, group in zip(written.prompts, groups, strict=True)
    ]
    # data-parallel ranks, once per step: the tokens behind each prompt
    loads = [json.loads(raw) for raw in ranks.exchange([json.dumps(sizes).encode()] * ranks.size)]
    target = deal(loads)[ranks.rank]
    packed = [_packed(written, number, group) for number, group in enumerate(groups)]
    parts = [[one for one, to in zip(packed, target, strict=True) if to == rank] for rank in range(ranks.size)]
    found = [one for raw in ranks.exchange([json.dumps(part).encode() for part in parts]) for one in json.loads(raw)]
    samples = [
        Sample(number, torch.tensor(ids, dtype=torch.int64), torch.tensor(log_probs, dtype=torch.float32), ended)
        for number, one in enumerate(found)
        for ids, log_probs, ended in one["samples"]
    ]
    rewards = [reward for one in found for reward in one["rewards"]]
    return Written([Prompt.from_json(one["prompt"]) for one in found], samples, rewards, written.metrics)


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
            (abs(gap - 2 * size), rank, part)
            for rank, parts in enumerate(loads)
            for part, size in enumerate(parts)
            if home[rank][part] == most and 0 < size < gap
        ]
        if gap <= SLACK * sum(total) / len(total) or not movable:
            return home
        _, rank, part = min(movable)
        home[rank][part] = least
        total[most] -= loads[rank][part]
        total[least] += loads[rank][part]


# -- going astray ------------------------------------------------------------------------------------------------------


class GuardConfig(BaseModel):
    """Signs that the student runs away with its own text, which end a run that would only get worse.

    What is compared with the start is compared with the mean of the first ``window`` steps.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    window: int = Field(default=10, ge=1)
    """Steps at the start whose mean the later ones are compared with."""
    patience: int = Field(default=10, ge=1)
    """Steps in a row with the same sign before the run is stopped."""
    max_length_growth: float | None = Field(default=4.0, gt=1)
    """Mean length of samples against that of the start."""
    min_ended_ratio: float | None = Field(default=0.25, gt=0, lt=1)
    """Share of samples that the student ends itself, against that of the start."""
    max_repeated: float | None = Field(default=0.8, gt=0, lt=1)
    """Share of runs of tokens that were in the same sample before."""


class RunawayGuard:
    """Looks at the figures of each step's samples; the same on every rank."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.start = {"length": 0.0, "ended": 0.0}
        self.steps = 0
        self.strikes = {"length_growth": 0, "ended_ratio": 0, "repeated": 0}

    def observe(self, means: Mapping[str, float]) -> dict[str, float]:
        """Ratios to the start, once it is known.

        Raises:
            LossError: a sign has been there for ``patience`` steps.
        """
        if "sample/length" not in means:
            return {}
        length, ended = means["sample/length"], means["sample/ended"]
        config, seen = self.config, {"repeated": means.get("sample/repeated", 0.0)}
        if self.steps < config.window:
            self.steps += 1
            self.start = {
                "length": self.start["length"] + (length - self.start["length"]) / self.steps,
                "ended": self.start["ended"] + (ended - self.start["ended"]) / self.steps,
            }
        else:
            seen["length_growth"] = length / max(self.start["length"], 1e-9)
            if self.start["ended"] >= OFTEN:
                seen["ended_ratio"] = ended / self.start["ended"]
        self._judge("length_growth", seen, config.max_length_growth, "samples are {value:.1f} times as long as first")
        self._judge(
            "ended_ratio",
            seen,
            config.min_ended_ratio,
            "{value:.0%} of the samples that ended by themselves at first still do",
            below=True,
        )
        self._judge("repeated", seen, config.max_repeated, "{value:.0%} of the samples' runs of tokens are repetitions")
        return {f"guard/{name}": value for name, value in seen.items() if name != "repeated"}

    def _judge(
        self, name: str, seen: Mapping[str, float], limit: float | None, sign: str, *, below: bool = False
    ) -> None:
        value = seen.get(name)
        bad = limit is not None and value is not None and (value < limit if below else value > limit)
        self.strikes[name] = self.strikes[name] + 1 if bad else 0
        if self.strikes[name] >= self.config.patience:
            raise LossError(
                f"{sign.format(value=value)}, in {self.strikes[name]} steps in a row (on_policy.guard allows {limit}); "
                "take a checkpoint from before, lower the learning rate, or set on_policy.anchor"
            )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"start": dict(self.start), "steps": self.steps, "strikes": dict(self.strikes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a stored state."""
        self.start = {name: float(value) for name, value in state["start"].items()}
        self.steps = int(state["steps"])
        self.strikes = {name: int(value) for name, value in state["strikes"].items()}


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
