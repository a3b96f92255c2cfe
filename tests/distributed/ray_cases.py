"""What workers of Ray run in tests: the real thing, but it waits at a gate to be killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from limbeck.algorithms.caching import PartCacher
from limbeck.algorithms.config import MasterConfig
from limbeck.algorithms.xtoken_off_policy_distillation import run
from limbeck.teachers.cache import CacheWriter
from tests.gates import Gate, hold_run


def gate_beside(folder: Path) -> Gate:
    """The gate of the work that goes into a folder."""
    return Gate(folder.parent / f"gate_{folder.name}")


def held_run(config: MasterConfig) -> Path:
    """A run whose processes all wait once the checkpoint of step 2 is there."""
    hold_run(gate_beside(Path(config.logger.log_dir)), "saved", 2)
    return run(config)


class HeldPartCacher(PartCacher):
    """A worker that waits after half of its first part: two documents are stored for good, two are not computed."""

    def __init__(self, config: dict[str, Any], index: int, total: int, folder: str) -> None:
        super().__init__(config, index, total, folder)
        gate = gate_beside(Path(str(self.config.all_teachers[index].source.folder)))
        add = CacheWriter.add

        def waiting(writer: CacheWriter, *args: Any, **arrays: Any) -> bool:
            added = add(writer, *args, **arrays)
            if writer.documents == 2:
                writer.commit()
                gate.wait()
            return added

        CacheWriter.add = waiting  # type: ignore[method-assign]
