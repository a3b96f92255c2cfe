"""Held-out quality of a student and its teachers: KL, CE, accuracy, bits per byte, alignment coverage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.models.teachers import TeacherSource, key_prefix
from limbeck.utils.logger import merge_sums
from limbeck.utils.timer import Timer

Sums = dict[str, tuple[float, float]]


def evaluate(
    student: Any, teachers: Sequence[TeacherSource], batches: Iterable[BatchedDataDict], loss_fn: Any, timer: Timer
) -> Sums:
    """Metrics of a whole validation set as (sum, count), reduced over ranks."""
    parts: list[Sums] = []
    for batch in batches:
        result = student.train(batch, loss_fn, teachers=teachers, eval_mode=True, timer=timer)
        parts.append({**result["metrics"], **_reduced(byte_sums(batch, result), student)})
    metrics = merge_sums(parts)
    if "ce_loss" in metrics:
        metrics["bpb"] = (metrics["ce_loss"][0] / math.log(2), metrics.pop("target_bytes")[0])
    return metrics


def byte_sums(batch: BatchedDataDict, result: dict[str, Any]) -> Sums:
    """Bytes behind the batch's cross-entropy, and the share of student tokens that lie in exact chunks."""
    counted = batch["sample_mask"] > 0
    sums: Sums = {"target_bytes": (float(batch["target_bytes"][counted].sum()), 0.0)}
    if "alignment_student_chunk_id" in batch:
        chunk = batch["alignment_student_chunk_id"]
        correct = batch["alignment_pair_is_correct"] & batch["alignment_pair_valid"]
        inside = (chunk >= 0) & correct.gather(1, chunk.clamp(min=0))
        target = (batch["token_mask"] > 0) & counted[:, None]
        sums["coverage"] = (float((inside & target).sum()), float(target.sum()))
    return sums


def teacher_bits(student: Any, teachers: Sequence[TeacherSource], batches: Iterable[BatchedDataDict]) -> Sums:
    """Bits per byte of every teacher over its own tokens of the same texts; the first also without its number."""
    parts: list[Sums] = []
    for batch in batches:
        sums: Sums = {}
        counted = (batch["sample_mask"] > 0)[:, None]
        for i, teacher in enumerate(teachers):
            prefix = key_prefix(batch, i)
            mask = ((batch[f"{prefix}token_mask"] > 0) & counted)[:, 1:]
            nats = -float(teacher.logprobs(batch, i)[:, 1:][mask].double().sum())
            size = float(batch[f"{prefix}target_bytes"][counted[:, 0]].sum())
            sums[f"teacher_{i}_bpb"] = (nats / math.log(2), size)
        parts.append(_reduced(sums, student))
    metrics = merge_sums(parts)
    if "teacher_0_bpb" in metrics:
        metrics["teacher_bpb"] = metrics["teacher_0_bpb"] if len(teachers) > 1 else metrics.pop("teacher_0_bpb")
    return metrics


def _reduced(sums: Sums, student: Any) -> Sums:
    """Sums over data-parallel ranks; every rank has the same names."""
    group = student.dp_group
    if group is None or not dist.is_initialized():
        return sums
    values = torch.tensor([v for pair in sums.values() for v in pair], dtype=torch.float64, device=student.device)
    dist.all_reduce(values, group=group.get_group() if hasattr(group, "get_group") else group)
    numbers = values.tolist()
    return {name: (numbers[2 * i], numbers[2 * i + 1]) for i, name in enumerate(sums)}
