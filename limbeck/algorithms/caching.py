"""``limbeck cache``: store the signals of a run file's teachers once, for every text that the run will read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from limbeck.algorithms.build import load_datasets, load_tokenizers, make_collator, teacher_lengths
from limbeck.algorithms.config import MasterConfig
from limbeck.algorithms.xtoken_off_policy_distillation import foreign_tokenizers, live_teacher
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.distributed.comm import Comm, init_distributed
from limbeck.distributed.launch import connected, number_of_workers, worker_resources
from limbeck.errors import CacheError, ConfigError, LimbeckError
from limbeck.models.loading import check_length, weight_files
from limbeck.models.policy import Policy
from limbeck.teachers.cache import CacheReader, CacheWriter, estimate_bytes
from limbeck.teachers.cache.fill import server_spec, spec_for, write_cache
from limbeck.teachers.cache.format import read_index
from limbeck.teachers.cache.origin import store_origin
from limbeck.teachers.cached import CacheSource
from limbeck.teachers.kinds import TeacherSetup
from limbeck.teachers.server.teacher import ServerSource, ServerTeacher
from limbeck.tokens import ByteVocab
from limbeck.utils.progress import stage

Say = Callable[[str], None]
WHY_FEWER = "equal texts are stored once, and those without a token to predict not at all"
WHY_MORE = "a text that is longer than a context is stored in pieces"


def cache_teachers(config: MasterConfig, *, say: Say = print) -> list[dict[str, Any]]:
    """Fill the cache of every teacher that names one; returns a summary per cache.

    Texts that are stored already are not computed again, so a killed run goes on where it stopped.
    """
    if config.loss_fn.kl_loss_weight == 0:
        # a cache is filled for other runs too, whether or not this one would read it
        config = config.model_copy(update={"loss_fn": config.loss_fn.model_copy(update={"kl_loss_weight": 1.0})})
    if config.cluster.launcher == "ray":
        return cache_on_ray(config, say=say)
    world = init_distributed(config.cluster.backend, config.cluster.timeout)
    job = CacheJob(config)
    out = []
    for index in job.wanted:
        if world.rank == 0:
            say(job.describe(index))

        # the number as a default: a closure would see the loop's last one
        def on_batch(records: int, writer: CacheWriter, index: int = index) -> None:
            if world.rank == 0:
                done = min(records * world.size, job.records)
                say(f"teacher {index}: {done} of {job.records} records read, {writer.documents} texts stored")

        writer = job.write(index, world.rank, world.size, on_batch)
        if world.size == 1 and writer.documents != job.records:
            why = WHY_FEWER if writer.documents < job.records else WHY_MORE
            say(f"teacher {index}: {writer.documents} texts serve {job.records} records: {why}")
        out.append(job.summary(index, writer.documents, job.failures(index)))
        if failed := out[-1]["failed"]:
            say(f"teacher {index}: {describe_failures(failed)}")
    return out


def describe_failures(failed: Mapping[str, int]) -> str:
    """One line about documents that a server could not score."""
    reasons = ", ".join(f"{reason}: {number}" for reason, number in sorted(failed.items()))
    return (
        f"{sum(failed.values())} documents could not be scored ({reasons}), so the cache is not complete; "
        "run the same command again to ask for them once more"
    )


class CacheJob:
    """The work of one caching: texts, collator and, once they are needed, the teachers.

    The records of all data sets are dealt out to ``world`` parts; part ``rank`` has every ``world``-th of each set.
    """

    def __init__(self, config: MasterConfig) -> None:
        self.config = config
        self.sources = {i: t.source for i, t in enumerate(config.all_teachers) if isinstance(t.source, CacheSource)}
        self.wanted = list(self.sources)
        if not self.wanted:
            raise ConfigError("no teacher has a cache folder; set teacher.cache to where its signals shall be stored")
        lengths = teacher_lengths(config)
        for index, source in self.sources.items():
            if source.filled_by.kind == "live":
                check_length(config.all_teachers[index], lengths[index], name=f"teacher_{index}")
            elif source.holds != "topk":
                raise ConfigError(f"teacher {index}: a server gives no hidden states; set cache_kind to topk")
        with stage("tokenizers"):
            student_tokenizer, self.tokenizers = load_tokenizers(config)
        vocab = ByteVocab.from_tokenizer(student_tokenizer)
        self.collator = make_collator(config, student_tokenizer, foreign_tokenizers(student_tokenizer, self.tokenizers))
        with stage("data"):
            self.datasets = [d for d in load_datasets(config) if d is not None]
        self.records = sum(len(d) for d in self.datasets)
        self._servers: dict[int, ServerTeacher] = {}
        for index, source in self.sources.items():
            if isinstance(source.filled_by, ServerSource):
                # each process asks for documents of its own
                setup = TeacherSetup(
                    config.all_teachers[index],
                    self.tokenizers[index],
                    vocab,
                    index,
                    longest=lengths[index],
                    readers=Comm.alone(),
                )
                with Comm.world().fail_together():
                    self._servers[index] = ServerTeacher.make(source.filled_by, setup)
                self._servers[index].verify()
        self._policies: dict[int, Policy] = {}
        self._tokens: dict[int, int] = {}

    def folder(self, index: int) -> Path:
        """Where the cache of a teacher lies."""
        return Path(self.sources[index].folder)

    def teacher(self, index: int) -> Policy | ServerTeacher:
        """The teacher itself; a model is loaded when it is first asked for."""
        if index in self._servers:
            return self._servers[index]
        if index not in self._policies:
            with stage(f"loading the teacher {self.config.all_teachers[index].shown_name}"):
                self._policies[index] = live_teacher(self.config, index, self.tokenizers[index])
        return self._policies[index]

    def failures(self, index: int) -> Counter[str]:
        """Documents that a teacher's server could not score so far, by reason."""
        return Counter(self._servers[index].failures) if index in self._servers else Counter()

    def summary(self, index: int, documents: int, failed: Mapping[str, int]) -> dict[str, Any]:
        """Report on one cache; ``failed``: documents that are missing, by reason."""
        size, folder = self.estimated_bytes(index), str(self.folder(index))
        row = {"teacher": index, "folder": folder, "documents": documents, "estimated_bytes": size}
        return {**row, "failed": dict(failed)}

    def estimated_bytes(self, index: int) -> int | None:
        """Size of the whole cache; None for hidden states of a teacher that is not loaded."""
        source, vocab = self.sources[index], ByteVocab.from_tokenizer(self.tokenizers[index])
        if source.holds == "topk":
            k = source.filled_by.k if isinstance(source.filled_by, ServerSource) else source.k
            return estimate_bytes(self.tokens(index), k=min(k, vocab.size), vocab_size=vocab.size)
        if index not in self._policies:
            return None
        width = int(self._policies[index].body.config.get_text_config().hidden_size)
        return estimate_bytes(self.tokens(index), hidden_size=width)

    def describe(self, index: int) -> str:
        """One line about what is to be done."""
        size = self.estimated_bytes(index)
        bytes_text = "" if size is None else f", about {size / 2**20:,.0f} MiB"
        amount = f"{self.records} records, about {self.tokens(index):,} tokens{bytes_text}"
        return f"teacher {index}: {amount} in {self.folder(index)}"

    def write(
        self, index: int, rank: int, world: int, on_batch: Callable[[int, CacheWriter], None] | None = None
    ) -> CacheWriter:
        """Store one part; ``on_batch(records of this part so far, writer)`` is called after every batch."""
        source, teacher = self.sources[index], self.teacher(index)
        hidden = source.holds == "hidden"
        if isinstance(teacher, Policy):
            spec = spec_for(teacher, k=None if hidden else source.k, hidden=hidden)
            size = self.config.distillation.val_rows
        else:
            spec = server_spec(teacher)
            # as many as the server is asked for at once
            size = teacher.config.concurrency * teacher.config.prompts_per_request
        done = 0

        def after(writer: CacheWriter) -> None:
            nonlocal done
            done += size
            if on_batch is not None:
                on_batch(done, writer)

        writer = write_cache(
            teacher,
            self._batches(size, rank, world),
            self.folder(index),
            spec,
            teacher_index=index,
            rank=rank,
            world_size=world,
            on_batch=after,
        )
        if rank == 0 and isinstance(teacher, Policy):
            store_origin(self.folder(index), weight_files(self.config.all_teachers[index]))
        return writer

    def _batches(self, size: int, rank: int, world: int) -> Iterator[BatchedDataDict]:
        for dataset in self.datasets:
            mine = list(range(rank, len(dataset), world))
            if mine:
                yield from DataLoader(dataset, batch_size=size, sampler=mine, collate_fn=self.collator)

    def tokens(self, index: int, sample: int = 16) -> int:
        """Teacher tokens of all records, estimated from the first few of each set."""
        if index not in self._tokens:
            total = 0.0
            key = f"teacher_{index}_input_lengths"
            for dataset in self.datasets:
                some = [dataset[i] for i in range(min(sample, len(dataset)))]
                batch = self.collator(some)
                lengths = batch[key] if key in batch else batch["input_lengths"]
                total += float(lengths.float().sum()) / max(len(some), 1) * len(dataset)
            self._tokens[index] = int(total)
        return self._tokens[index]


# -- on Ray ------------------------------------------------------------------------------------------------------------
#
# The records are cut into `cluster.cache_parts` parts. A part is one call of a worker and one writer of the cache
# with its own files, so it does not matter which worker takes it, or how often: a part that is complete is passed over,
# and one whose worker died goes on after its last whole document.


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
    arguments = (config.model_dump(mode="json"), index, total, os.getcwd())
    results = _results(arguments, parts, min(workers, len(parts)), needs, config.cluster.max_restarts)
    failed: Counter[str] = Counter()
    for done, row in enumerate(results, 1):
        if row["error"]:
            raise CacheError(str(row["error"]))
        lost = row["failed"]
        failed.update(lost)
        state = "left with" if lost else "complete with"
        say(f"teacher {index}: part {row['part']} {state} {row['documents']} documents ({done}/{len(parts)})")
    return failed


def _results(
    arguments: tuple[Any, ...], parts: list[int], workers: int, needs: dict[str, float], restarts: int
) -> Iterator[dict[str, Any]]:
    """What became of each part, in the order in which they end; a worker that fails, or dies too often, is one
    sentence."""
    import ray

    # actors of Ray's core: those of Ray Data start a dying worker again without end, which only arguments that are
    # deprecated there can change
    cacher = ray.remote(PartCacher).options(
        num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0), max_restarts=restarts, max_task_retries=restarts
    )
    actors: list[Any] = [cacher.remote(*arguments) for _ in range(workers)]
    waiting = parts[::-1]
    running = {actor.store.remote(waiting.pop()): actor for actor in actors}
    try:
        while running:
            (ended, *_), _ = ray.wait(list(running))
            actor = running.pop(ended)
            if waiting:
                running[actor.store.remote(waiting.pop())] = actor
            yield ray.get(ended)
    except ray.exceptions.RayError as error:
        # a traceback of the worker's process, whose last line is what it failed by
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise CacheError(
            f"a worker of the Ray cluster failed, and cluster.max_restarts={restarts} allows no other start: "
            f"{lines[-1][:300]}; what is stored is kept, run the same command again"
        ) from error
    finally:
        for actor in actors:
            ray.kill(actor)


class PartCacher:
    """A worker: holds the teacher and stores one part after the other."""

    def __init__(self, config: dict[str, Any], index: int, total: int, folder: str) -> None:
        # relative paths of a run file mean the folder in which the command was given
        if os.path.isdir(folder):
            os.chdir(folder)
        self.index, self.total = index, total
        self.job: CacheJob | None = None
        self.config = MasterConfig.model_validate(config)

    def store(self, part: int) -> dict[str, Any]:
        """Store one part: its number, its documents, those that could not be scored by reason, and an error or ""."""
        try:
            # not in __init__: an error there would be a worker that died, which Ray starts again
            self.job = self.job or CacheJob(self.config)
            # a worker's server counts the failures of all parts that it has stored
            before = self.job.failures(self.index)
            documents = self.job.write(self.index, part, self.total).documents
            failed = self.job.failures(self.index) - before
        except LimbeckError as error:
            # given back and not raised: an error on purpose is no worker that died
            return {"part": part, "documents": 0, "failed": {}, "error": str(error)}
        return {"part": part, "documents": documents, "failed": dict(failed), "error": ""}
