"""Traces of a run: read, paired, given their advantages, and collated batch by batch."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from limbeck.config import FREE
from limbeck.errors import ConfigError, LossError, TraceError
from limbeck.losses.policy_gradient import PolicyLossConfig, group_advantages
from limbeck.models.loading import ModelConfig
from limbeck.tokens.chat import Placement
from limbeck.traces import CollatorConfig, ComposerDataCollator, TokenizerLike
from limbeck.traces.collate.batch import ComposerBatch
from limbeck.traces.collate.examples import to_example
from limbeck.traces.failed_calls import FailedCall
from limbeck.traces.files import (
    IngestOptions,
    IngestStats,
    LogReadingConfig,
    attach_pairs,
    find_files,
    ingest,
    read_failed_calls,
    read_pairs,
)
from limbeck.traces.hints import HintSource, layered_hints
from limbeck.traces.schema import Trace


class ChannelSwitches(BaseModel):
    """Which channels are collated and trained at all; their weights are in ``loss``."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    policy: bool = True
    """Rewards of whole traces (policy gradient)."""
    hint: bool = True
    """Failed messages, followed with a hint."""
    preference: bool = True
    """Pairs of a better and a worse message."""

    @model_validator(mode="after")
    def _some(self) -> ChannelSwitches:
        if not (self.policy or self.hint or self.preference):
            raise ValueError("all three channels are off; switch one of them on")
        return self


class TracesConfig(LogReadingConfig):
    """Settings of what is read, and of how traces become rows of the three channels."""

    train: str | list[str]
    """Agent logs or canonical traces; files or globs."""
    validation: str | list[str] | None = None
    """Traces to validate on; default: those of ``train``."""
    sites: str | None = None
    """File of ``limbeck traces errors`` (with hooks or judges of your own); default: failed calls are found here."""
    pairs: str | list[str] = Field(default=[])
    """Files of ``limbeck traces pairs``, besides the pairs that traces carry themselves."""
    hints: list[HintSource] = Field(default=["template", "raw"], min_length=1)
    """Where hints come from, first to last, when there is no file of failed calls."""
    failed_weight: float = Field(default=1.0, ge=0)
    """Factor, in the policy channel, of messages whose tool call failed; 0 leaves them to hints and pairs."""
    recovery_weight: float = Field(default=0.0, ge=0)
    """Weight of the message that put an error right, as a second target."""
    hint_placement: Placement | None = None
    """Default: what the chat template carries out, found by a probe."""
    channels: ChannelSwitches = ChannelSwitches()
    """Which channels are trained."""
    groups: Literal["group_id", "none"] = "group_id"
    """Which traces share an advantage: those with one group id, over the whole data set; or none."""
    min_group_size: int = Field(default=1, ge=1)
    """Smaller groups take no part in the policy channel (a group of one has advantage 0)."""
    reward_key: str = "final_reward"
    """Where a trace's own data keeps its reward."""
    max_seq_length: int = Field(default=4096, ge=1)
    """Longest sequence of the policy and hint channels; at most ``policy.max_total_sequence_length``."""
    policy_cut: Literal["right", "left"] = "right"
    """Which end of a longer trace its policy row leaves out; ``left`` goes without behaviour log-probs."""
    max_pair_seq_length: int = Field(default=2048, ge=1)
    """Longest sequence of the preference channel."""
    max_teacher_seq_length: int | None = Field(default=None, ge=1)
    """Longest hinted sequence; default: ``max_seq_length``, and never more than the hinted model's
    ``max_total_sequence_length``."""
    on_bad_trace: Literal["error", "skip"] = "error"
    """A trace that the chat template refuses: stop, or leave it out and count it."""
    shuffle: bool = True
    """Draw a new order of traces in every epoch."""
    num_workers: int | None = Field(default=None, ge=0, json_schema_extra=FREE)
    """As ``data.num_workers``."""


Record = tuple[int, Trace]


class TraceDataset:
    """Canonical traces by number.

    Attributes:
        skipped: what reading left out, by reason.
        fingerprint: of all traces; a checkpoint of other traces is not continued.
    """

    def __init__(self, traces: Sequence[Trace], skipped: Counter[str] | None = None) -> None:
        self.traces = list(traces)
        self.skipped: Counter[str] = Counter() if skipped is None else skipped
        digest = hashlib.sha256()
        for trace in self.traces:
            digest.update(trace.to_json().encode())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.traces)

    def __getitem__(self, index: int) -> Record:
        return index, self.traces[index]


def load_traces(config: TracesConfig, which: str = "train") -> TraceDataset:
    """The traces of ``traces.train`` or ``traces.validation``, with the pairs of ``traces.pairs`` put in."""
    stats = IngestStats()
    files = find_files(getattr(config, which), f"traces.{which}")
    options = IngestOptions(config)
    # read to the end first: `stats` fills while the traces are drawn
    traces = list(ingest(files, options, stats))
    skipped = Counter(stats.log.skipped)
    if config.pairs:
        pairs = read_pairs(find_files(config.pairs, "traces.pairs"), stats.log)
        traces = list(attach_pairs(traces, pairs, skipped))
        # the log counts on from before: only what reading the pairs has added
        skipped.update(stats.log.skipped - skipped)
    if not traces:
        places = "; ".join(stats.log.places[:3]) or "the files are empty"
        raise TraceError(f"traces.{which} holds no usable trace ({places})")
    return TraceDataset(traces, skipped)


# -- advantages --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Advantages:
    """Plan of the policy channel for each trace, settled once for the whole data set.

    Attributes:
        cfg: settings with the mode that the data allows.
        values: ``[traces]`` float32; group means are taken over the data set, so they do not depend on batches.
        counted: ``[traces]`` bool; False for traces that take no part.
        skip_reason: reason of those.
    """

    cfg: PolicyLossConfig
    values: Tensor
    counted: Tensor
    skip_reason: str = "group_too_small"


def compute_advantages(traces: Sequence[Trace], cfg: PolicyLossConfig, config: TracesConfig) -> Advantages:
    """Advantages of all traces, and the mode: GRPO needs groups and behaviour log-probs of every rewarded trace."""
    rewards = [to_example(trace, config.reward_key).reward for trace in traces]
    valid = torch.tensor([reward is not None for reward in rewards], dtype=torch.bool)
    names = [trace.group_id if config.groups == "group_id" else None for trace in traces]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(n for n in names if n is not None))}
    groups = torch.tensor([-1 if name is None else numbers[name] for name in names], dtype=torch.int64)
    sizes = Counter(int(g) for g, ok in zip(groups, valid, strict=True) if ok and g >= 0)
    enough = torch.tensor([g < 0 or sizes[int(g)] >= config.min_group_size for g in groups], dtype=torch.bool)
    counted = valid & enough
    scored = torch.tensor([_is_scored(trace) for trace in traces], dtype=torch.bool)
    try:
        settled = cfg.resolved(
            {
                "sample_mask": counted.float(),
                "group_index": groups,
                "token_mask": torch.ones(len(traces), 1),
                "behavior_valid": scored[:, None],
            }
        )
    except LossError as error:
        raise ConfigError(f"loss.policy.mode: {error}") from error
    # the 0 of a missing reward is kept out of group means by `counted`
    known = torch.tensor([reward or 0.0 for reward in rewards], dtype=torch.float32)
    values = group_advantages(known, groups, valid=counted, std=settled.mode == "grpo", eps=cfg.std_eps)
    return Advantages(settled, values, counted)


def _is_scored(trace: Trace) -> bool:
    """Whether every supervised message keeps the ids and log-probs that it was sampled with."""
    messages = [m for _, m in trace.new_messages() if m.role == "assistant" and m.weight > 0]
    return bool(messages) and all(m.sampled_ids is not None and m.logprobs is not None for m in messages)


# -- collating ---------------------------------------------------------------------------------------------------------


class TraceCollate:
    """Records ``(number, trace)`` -> :class:`ComposerBatch` with ``trace_index``, ``advantages`` and ``idx`` besides.

    Without advantages (validation) every rewarded trace counts with advantage 0.
    """

    def __init__(self, collator: ComposerDataCollator, advantages: Advantages | None = None) -> None:
        self.collator, self.advantages = collator, advantages

    def __call__(self, records: Sequence[Record]) -> ComposerBatch:
        batch = self.collator([trace for _, trace in records])
        index = torch.tensor([number for number, _ in records], dtype=torch.int64)
        batch["trace_index"], batch["idx"] = index, index.tolist()
        batch["advantages"] = torch.zeros(len(records))
        if self.advantages is not None:
            self._apply(self.advantages, batch, index)
        return batch

    def _apply(self, advantages: Advantages, batch: ComposerBatch, index: Tensor) -> None:
        skipped = Counter(batch["skipped"])
        out = (batch["sample_mask"] > 0) & ~advantages.counted[index]
        # counted before the mask below hides them
        skipped[advantages.skip_reason] += int(out.sum())
        batch["sample_mask"] = batch["sample_mask"] * advantages.counted[index]
        batch["advantages"] = advantages.values[index]
        if advantages.cfg.mode != "reward_weighted":
            # A ratio needs both policies' probabilities: tokens that the log has no value for cannot take part.
            unknown = (batch["response_mask"] > 0) & ~batch["behavior_valid"] & (batch["sample_mask"] > 0)[:, None]
            skipped["tokens_without_behavior_logprob"] += int(unknown.sum())
            batch["response_mask"] = batch["response_mask"] * batch["behavior_valid"]
        batch["skipped"] = {reason: count for reason, count in sorted(skipped.items()) if count}


@dataclass(frozen=True)
class RowLengths:
    """Tokens of the longest rows: of the student, of its preference pairs, and of the hinted teacher."""

    student: int
    pair: int
    teacher: int


def row_lengths(traces: TracesConfig, policy: ModelConfig, teacher: ModelConfig | None) -> RowLengths:
    """How long rows may be: as ``traces`` says, and never longer than the model that reads them may have them."""
    max_length = policy.max_total_sequence_length
    theirs = max_length if teacher is None else teacher.max_total_sequence_length
    student = min(traces.max_seq_length, max_length)
    return RowLengths(
        student, min(traces.max_pair_seq_length, max_length), min(traces.max_teacher_seq_length or student, theirs)
    )


def make_collator(
    traces: TracesConfig,
    policy: ModelConfig,
    teacher: ModelConfig | None,
    tokenizer: TokenizerLike,
    teacher_tokenizer: TokenizerLike | None,
    *,
    hint: bool,
    preference: bool,
) -> ComposerDataCollator:
    """The collator of a run. ``teacher_tokenizer``: of a hinted teacher with another tokenizer, else None."""
    lengths = row_lengths(traces, policy, teacher)
    settings = CollatorConfig(
        max_seq_len=lengths.student,
        max_dpo_seq_len=lengths.pair,
        enable_sdpo=hint,
        enable_replay_dpo=preference,
        hint_generator=layered_hints(traces.hints),
        rlvr_reward_key=traces.reward_key,
        failed_weight=traces.failed_weight,
        recovery_weight=traces.recovery_weight,
        hint_placement=traces.hint_placement,
        template_kwargs=dict(policy.tokenizer.chat_template_kwargs),
        policy_cut=traces.policy_cut,
        on_error="skip" if traces.on_bad_trace == "skip" else "raise",
        teacher_max_seq_len=lengths.teacher,
        teacher_template_kwargs={} if teacher is None else dict(teacher.tokenizer.chat_template_kwargs),
        pad_to_multiple_of=policy.make_sequence_length_divisible_by,
    )
    return ComposerDataCollator(
        tokenizer, settings, teacher_tokenizer=teacher_tokenizer, failed_calls=_failed_calls(traces)
    )


def _failed_calls(traces: TracesConfig) -> dict[str, list[FailedCall]] | None:
    if traces.sites is None:
        return None
    by_trace: dict[str, list[FailedCall]] = defaultdict(list)
    for failed_call in read_failed_calls(Path(traces.sites)):
        by_trace[failed_call.trace_id].append(failed_call)
    return dict(by_trace)
