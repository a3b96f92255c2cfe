"""``limbeck cache``: store the signals of a run file's teachers once, for every text that the run will read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from limbeck.algorithms.master_config import MasterConfig, TeacherConfig
from limbeck.algorithms.run_inputs import load_datasets, load_tokenizers, make_collator
from limbeck.algorithms.xtoken_off_policy_distillation import live_teacher
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.distributed.process import join_peers, rank_and_world
from limbeck.models.cache import CacheWriter, estimate_bytes
from limbeck.models.cache_build import spec_for, write_cache
from limbeck.tokens import ByteVocab
from limbeck.utils.errors import ConfigError

Say = Callable[[str], None]


def cache_teachers(config: MasterConfig, *, say: Say = print) -> list[dict[str, Any]]:
    """Fill the cache of every teacher that names one; returns a summary per cache.

    Texts that are stored already are not computed again, so a killed run goes on where it stopped.
    """
    wanted = [i for i, t in enumerate(config.all_teachers) if t.cache is not None]
    if not wanted:
        raise ConfigError("no teacher has a cache folder; set teacher.cache to where its signals shall be stored")
    join_peers(config.cluster.backend)
    student_tokenizer, tokenizers = load_tokenizers(config)
    vocab = ByteVocab.from_tokenizer(student_tokenizer)
    foreign = [None if ByteVocab.from_tokenizer(t).same_tokens(vocab) else t for t in tokenizers]
    collator = make_collator(config, student_tokenizer, foreign)
    datasets = [d for d in load_datasets(config) if d is not None]
    return [_cache_one(config, i, tokenizers[i], collator, datasets, say) for i in wanted]


def _cache_one(
    config: MasterConfig, index: int, tokenizer: Any, collator: Any, datasets: list[Any], say: Say
) -> dict[str, Any]:
    own = config.all_teachers[index]
    policy = live_teacher(config, index, tokenizer)
    hidden = own.cache_kind == "hidden"
    spec = spec_for(policy, k=None if hidden else own.cache_k, hidden=hidden)
    rank, world = rank_and_world()
    records = sum(len(d) for d in datasets)
    tokens = _estimate_tokens(datasets, collator, index)
    size = estimate_bytes(tokens, k=spec.k or None, hidden_size=spec.hidden_size or None, vocab_size=spec.vocab_size)
    if rank == 0:
        say(
            f"teacher {index}: {records} records, about {tokens:,} tokens, about {size / 2**20:,.0f} MiB in {own.cache}"
        )
    done = 0

    def on_batch(writer: CacheWriter) -> None:
        nonlocal done
        done += config.distillation.val_batch_size
        if rank == 0:
            say(f"teacher {index}: {min(done * world, records)}/{records} records, {writer.documents} stored")

    writer = write_cache(
        policy,
        _batches(datasets, collator, config.distillation.val_batch_size, rank, world),
        _folder(own),
        spec,
        teacher_index=index,
        rank=rank,
        world_size=world,
        on_batch=on_batch,
    )
    return {"teacher": index, "folder": str(_folder(own)), "documents": writer.documents, "estimated_bytes": size}


def _folder(teacher: TeacherConfig) -> Path:
    assert teacher.cache is not None
    return Path(teacher.cache)


def _batches(datasets: list[Any], collator: Any, size: int, rank: int, world: int) -> Iterator[BatchedDataDict]:
    for dataset in datasets:
        indices = range(rank, len(dataset), world)
        yield from DataLoader(dataset, batch_size=size, sampler=list(indices), collate_fn=collator)


def _estimate_tokens(datasets: list[Any], collator: Any, index: int, sample: int = 16) -> int:
    """Teacher tokens of all records, from the first few of each set."""
    total = 0.0
    key = f"teacher_{index}_input_lengths"
    for dataset in datasets:
        some = [dataset[i] for i in range(min(sample, len(dataset)))]
        batch = collator(some)
        lengths = batch[key] if key in batch else batch["input_lengths"]
        total += float(lengths.float().sum()) / max(len(some), 1) * len(dataset)
    return int(total)
