"""``limbeck cache`` on Ray Data: many workers over the parts of a corpus, restartable, each record exactly once.

The records are cut into ``cluster.cache_parts`` parts. A part is one row of a Ray data set and one writer of the cache
with its own files, so it does not matter which worker takes it, or how often: a part that is complete is passed over,
and one whose worker died goes on after its last whole document.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from limbeck.algorithms.caching import CacheJob, describe_failures
from limbeck.algorithms.master_config import MasterConfig
from limbeck.distributed.launch import connected, number_of_workers, worker_resources
from limbeck.teachers.cache import CacheReader
from limbeck.teachers.cache.format import read_index
from limbeck.utils.errors import CacheError, LimbeckError

Say = Callable[[str], None]


def cache_on_ray(config: MasterConfig, *, say: Say = print) -> list[dict[str, Any]]:
    """Fill the caches of a run file's teachers with the workers of a Ray cluster; a summary per cache."""
    job = CacheJob(config)
    out = []
    with connected(config.cluster) as ray:
        workers = number_of_workers(config.cluster)
        needs = worker_resources(ray, config.cluster, workers)
        for index in job.wanted:
            parts = parts_of(job, index)
            open_parts = [part for part in range(parts) if not part_is_complete(job, index, part)]
            say(f"{job.describe(index)}; {len(open_parts)} of {parts} parts are to be done by {workers} workers")
            failed: Counter[str] = Counter()
            if open_parts:
                failed = _run(config, index, open_parts, parts, workers, needs, say)
            reader = CacheReader(job.folder(index), allow_incomplete=bool(failed))
            out.append(job.summary(index, len(reader), failed))
            if failed:
                say(f"teacher {index}: {describe_failures(failed)}")
    return out


def parts_of(job: CacheJob, index: int) -> int:
    """Parts of a cache: those that it was begun with, otherwise what the run file says (at most one per record)."""
    begun = sorted(job.folder(index).glob("index_*.json"))
    if begun:
        return int(read_index(begun[0])["world_size"])
    return min(job.config.cluster.cache_parts, max(job.records, 1))


def part_is_complete(job: CacheJob, index: int, part: int) -> bool:
    """Whether all records of a part are stored."""
    path = job.folder(index) / f"index_{part:03d}.json"
    return path.exists() and bool(read_index(path)["complete"])


def _run(
    config: MasterConfig, index: int, parts: list[int], total: int, workers: int, needs: dict[str, float], say: Say
) -> Counter[str]:
    """Have the parts stored; documents that could not be scored, by reason."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    rows = ray.data.from_items([{"part": part} for part in parts], override_num_blocks=len(parts))
    results = rows.map_batches(
        PartCacher,
        fn_constructor_args=(config.model_dump(mode="json"), index, total, os.getcwd()),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(workers, len(parts))),
        num_cpus=needs["CPU"],
        num_gpus=needs.get("GPU", 0),
    )
    failed: Counter[str] = Counter()
    for done, row in enumerate(results.iter_rows(), 1):
        if row["error"]:
            raise CacheError(str(row["error"]))
        lost = json.loads(row["failed"])
        failed.update(lost)
        state = "left with" if lost else "complete with"
        say(f"teacher {index}: part {row['part']} {state} {row['documents']} documents ({done}/{len(parts)})")
    return failed


class PartCacher:
    """A worker: holds the teacher and stores one part after the other."""

    def __init__(self, config: dict[str, Any], index: int, total: int, folder: str) -> None:
        # relative paths of a run file mean the folder in which the command was given
        if os.path.isdir(folder):
            os.chdir(folder)
        self.index, self.total = index, total
        self.job: CacheJob | None = None
        self.config = MasterConfig.model_validate(config)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        parts = [int(part) for part in batch["part"]]
        documents, errors, failed = [], [], []
        for part in parts:
            lost: Counter[str] = Counter()
            try:
                self.job = self.job or CacheJob(self.config)
                before = self.job.failures(self.index)
                documents.append(self.job.write(self.index, part, self.total).documents)
                lost = self.job.failures(self.index) - before
                errors.append("")
            except LimbeckError as error:
                # given back and not raised: Ray would try the same part again and again
                documents.append(0)
                errors.append(str(error))
            failed.append(json.dumps(lost))
        return {"part": parts, "documents": documents, "error": errors, "failed": failed}
