"""``distillation.record_bits``: bits of every validation record, in ``records.jsonl`` of the run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping

from limbeck.algorithms.records import record_bits
from limbeck.algorithms.run import Observer, ObserverConfig, Run


class RecordBitsConfig(ObserverConfig):
    """Bits of single validation records, so that two runs can be compared record by record."""

    enabled: bool | None = None
    """Store them with every validation, which takes one more forward pass of the student. Default: where the run has a
    baseline, and in the baseline."""

    def observer(self) -> Observer:
        return RecordScores(self)


class RecordScores(Observer):
    """Scores every validation record."""

    name = "record_bits"

    def __init__(self, config: RecordBitsConfig) -> None:
        self.config = config

    def on_validation(self, run: Run, step: int, means: Mapping[str, float]) -> None:
        loop = run.config.distillation
        if not (loop.baseline if self.config.enabled is None else self.config.enabled) or run.val_loader is None:
            return
        mine, ranks = record_bits(run.student, run.val_loader), run.student.dims.data
        # data-parallel ranks, per validation: their records' bits
        payload = json.dumps([list(table.items()) for table in (mine.bits, mine.bytes)]).encode()
        parts = [json.loads(raw) for raw in ranks.exchange([payload] * ranks.size)]
        bits, sizes = ({int(i): v for part in parts for i, v in part[n]} for n in (0, 1))
        run.logger.log_records(bits, sizes, step)
