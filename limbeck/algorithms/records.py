"""Held-out bits of single records, by which two models are compared with a standard error."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.losses.contract import Teacher
from limbeck.models.policy import Policy
from limbeck.teachers.live import key_prefix
from limbeck.utils.paired import paired_rates


@dataclass
class RecordBits:
    """Held-out bits of single records by one model, and the bytes that they stand for, by the records' numbers."""

    bits: dict[int, float] = field(default_factory=dict)
    bytes: dict[int, float] = field(default_factory=dict)

    @property
    def per_byte(self) -> float | None:
        """Bits per byte of all records; None where none has any."""
        size = sum(self.bytes.values())
        return sum(self.bits.values()) / size if size else None

    def against(self, other: RecordBits) -> tuple[float, float] | None:
        """Bits per byte more than another model's on the same records, with the standard error over the records."""
        return paired_rates(other.bits, self.bits, self.bytes)


def record_bits(model: Policy | Teacher, batches: Iterable[BatchedDataDict]) -> RecordBits:
    """Bits of each record of this rank by a student, or by a teacher, which is attached, over its own tokens."""
    bits = RecordBits()
    for batch in batches:
        prefix = key_prefix(batch, model.number) if isinstance(model, Teacher) else ""
        logprobs = model.log_probs(batch) if isinstance(model, Teacher) else model.get_logprobs(batch)["logprobs"].cpu()
        # NaN marks rows that a remote teacher could not score
        counted = (batch["sample_mask"] > 0) & ~logprobs.isnan().any(1)
        mask = (batch[f"{prefix}token_mask"] > 0)[:, 1:] & counted[:, None]
        # chosen, not multiplied: 0 x NaN is NaN
        nats = torch.where(mask, -logprobs[:, 1:].double(), 0.0).sum(1)
        for row in counted.nonzero()[:, 0].tolist():
            record = int(batch["idx"][row])
            # a record may be several rows
            bits.bits[record] = bits.bits.get(record, 0.0) + float(nats[row]) / math.log(2)
            size = float(batch[f"{prefix}target_bytes"][row])
            bits.bytes[record] = bits.bytes.get(record, 0.0) + size
    return bits
