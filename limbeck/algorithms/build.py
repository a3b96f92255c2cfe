"""What a run reads: tokenizers, records, batches, and the order in which they come."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from limbeck.algorithms.config import MasterConfig
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.data.loader import ShardSampler
from limbeck.data.sources import build_dataset
from limbeck.distributed.mesh import data_rank_and_world
from limbeck.models.loading import read_template
from limbeck.tokens import load_tokenizer
from limbeck.utils.errors import ConfigError, DataError


def load_tokenizers(config: MasterConfig) -> tuple[Any, list[Any]]:
    """The student's tokenizer and one per teacher."""

    def load(policy: Any) -> Any:
        name = policy.tokenizer.name or policy.model_name
        if name is None:
            raise ConfigError("a model without model_name needs tokenizer.name")
        return load_tokenizer(name, trust_remote_code=policy.trust_remote_code)

    return load(config.policy), [load(t) for t in config.all_teachers]


def load_datasets(config: MasterConfig) -> tuple[Any, Any | None]:
    """Training and validation data; an empty set is an error."""
    train = build_dataset(config.data).prepare()
    val = build_dataset(config.data, "validation").prepare() if config.data.validation else None
    for name, dataset in (("train", train), ("validation", val)):
        if dataset is not None and not len(dataset):
            raise DataError(f"data.{name} holds no usable record; left out: {dict(dataset.skipped) or 'nothing'}")
    return train, val


def make_collator(config: MasterConfig, student_tokenizer: Any, foreign: list[Any]) -> CrossTokenizerCollator:
    """The collator of a run; ``foreign`` holds None for teachers that share the student's tokenizer."""
    data, teachers = config.data, config.all_teachers
    lengths = data.max_teacher_seq_length
    per_teacher = lengths if isinstance(lengths, list) else [lengths or data.max_input_seq_length] * len(teachers)
    return CrossTokenizerCollator(
        student_tokenizer=student_tokenizer,
        teacher_tokenizer=foreign,
        ctx_length_student=min(data.max_input_seq_length, config.policy.max_total_sequence_length),
        ctx_length_teacher=per_teacher,
        make_seq_div_by_student=config.policy.make_sequence_length_divisible_by,
        make_seq_div_by_teacher=[t.make_sequence_length_divisible_by for t in teachers],
        mode=data.mode,
        append_eos=data.append_eos,
        on_error="skip" if data.on_bad_record == "skip" else "raise",
        student_template=read_template(config.policy.tokenizer.chat_template),
        teacher_template=[read_template(t.tokenizer.chat_template) for t in teachers],
        template_kwargs=config.policy.tokenizer.chat_template_kwargs,
        teacher_template_kwargs=[t.tokenizer.chat_template_kwargs for t in teachers],
    )


def loader_processes(wanted: int | None) -> int:
    """Number of loader processes for a ``num_workers`` setting."""
    return wanted if wanted is not None else 2 * torch.cuda.is_available()


def make_loaders(
    config: MasterConfig, collator: CrossTokenizerCollator, train: Any, val: Any | None
) -> tuple[StatefulDataLoader, StatefulDataLoader | None]:
    """Loaders of this rank's share of the training and validation records; both can be resumed."""
    # processes that split one model's layers or sequences read the same records
    rank, world = data_rank_and_world(config.policy.dtensor_cfg)
    prompts = config.distillation.num_prompts_per_step
    if prompts % world:
        raise ConfigError(
            f"distillation.num_prompts_per_step is {prompts}, which {world} processes cannot share evenly"
        )

    workers = loader_processes(config.data.num_workers)

    def loader(dataset: Any, batch: int, *, shuffle: bool, even: Any) -> StatefulDataLoader:
        sampler = ShardSampler(
            len(dataset),
            rank=rank,
            world=world,
            seed=config.distillation.seed,
            shuffle=shuffle,
            even=even,
            multiple=batch if even == "drop" else 1,
            fingerprint=getattr(dataset, "fingerprint", ""),
        )
        with warnings.catch_warnings():
            # the loader marks its use in a way that torch has deprecated; nothing that a user could act on
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            return StatefulDataLoader(
                dataset,
                batch_size=batch,
                sampler=sampler,
                num_workers=workers,
                persistent_workers=workers > 0,
                collate_fn=collator,
                drop_last=False,
                # A new iterator draws a seed; from the global generator that would shift a resumed run's numbers.
                generator=torch.Generator().manual_seed(config.distillation.seed),
            )

    train_loader = loader(train, prompts // world, shuffle=config.data.shuffle, even="drop")
    if val is None:
        return train_loader, None
    return train_loader, loader(val, config.distillation.val_batch_size, shuffle=False, even="pad")
