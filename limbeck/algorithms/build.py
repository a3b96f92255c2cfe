"""Input of a run: tokenizers, records, batches, and the order in which they come."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from torchdata.stateful_dataloader import StatefulDataLoader

from limbeck.algorithms.config import MasterConfig
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.data.layout import ChunkLayout
from limbeck.data.loader import make_loader, make_validation_loader
from limbeck.data.readers import is_plain_text
from limbeck.data.sources import CONTEXT, DataConfig, RecordDataset, build_dataset, flatten_documents
from limbeck.distributed.device import default_device
from limbeck.errors import ConfigError, DataError
from limbeck.losses.distillation import CrossTokenizerDistillationLossFn
from limbeck.models.loading import ModelConfig, fit_to_device
from limbeck.tokens import load_tokenizer
from limbeck.tokens.bos import set_bos
from limbeck.tokens.chat.ends import ends_of_answers
from limbeck.tokens.tokenizer import read_template
from limbeck.utils.collector import rare_collections
from limbeck.utils.progress import say

PolicyT = TypeVar("PolicyT", bound=ModelConfig)
TeacherT = TypeVar("TeacherT", bound=ModelConfig)


def fit_models(policy: PolicyT, teachers: Sequence[TeacherT] = ()) -> tuple[PolicyT, list[TeacherT]]:
    """The models' settings as this process's device can follow them; one line says what is replaced."""
    device = default_device()
    student, changes = fit_to_device(policy, device)
    others = [fit_to_device(teacher, device) for teacher in teachers]
    changes = list(dict.fromkeys([*changes, *(line for _, lines in others for line in lines)]))
    if changes:
        say(f"on the {device.type.upper()}: {', '.join(changes)}")
    return student, [teacher for teacher, _ in others]


Collate = Callable[[list[Any]], Any]
"""Records to what a step takes."""


def tokenizer_of(policy: ModelConfig) -> Any:
    """The tokenizer that a model's section names, or the model's own."""
    name = policy.tokenizer.name or policy.model_name
    if name is None:
        raise ConfigError("a model without model_name needs tokenizer.name")
    tokenizer = load_tokenizer(name, trust_remote_code=policy.trust_remote_code)
    if policy.tokenizer.bos != "auto":
        set_bos(tokenizer, policy.tokenizer.bos)
    return tokenizer


def chat_tokenizer_of(policy: ModelConfig) -> Any:
    """The same with the chat template that the section names (text, or a ``.jinja`` file); it must have one."""
    tokenizer, template = tokenizer_of(policy), policy.tokenizer.chat_template
    if template is not None:
        tokenizer.chat_template = read_template(template)
    if not tokenizer.chat_template:
        name = policy.tokenizer.name or policy.model_name
        raise ConfigError(f"the tokenizer {name!r} has no chat template; give one as tokenizer.chat_template")
    return tokenizer


@rare_collections()
def load_tokenizers(config: MasterConfig) -> tuple[Any, list[Any]]:
    """The student's tokenizer and one per teacher."""
    return tokenizer_of(config.policy), [tokenizer_of(t) for t in config.all_teachers]


BYTES_PER_TOKEN = 8
"""Text that is split has records of so many bytes per token of context: too long for it, so that no document which fits
is ever split, and short enough that a record is two rows or three, whatever the document."""


def reading_of(config: MasterConfig) -> DataConfig:
    """The data section with the length of records that the contexts ask for, where it says nothing about it."""
    data = config.data
    if data.max_document_bytes is not None or data.long_documents != "split" or data.detected_mode() == "chat":
        return data
    shortest = min([student_length(config), *teacher_lengths(config)])
    return data.model_copy(update={"max_document_bytes": max(BYTES_PER_TOKEN * shortest, 16)})


def load_datasets(config: MasterConfig, reference: Collection[str] | None = ()) -> tuple[Any, Any | None]:
    """Training and validation data; an empty set is an error. ``reference``: keys that training records keep."""
    data = reading_of(config)
    train = build_dataset(data, reference=reference).prepare()
    val = build_dataset(data, "validation").prepare() if data.validates else None
    for name, dataset in (("train", train), ("validation", val)):
        if dataset is not None and not len(dataset):
            raise DataError(f"data.{name} holds no usable record; left out: {dict(dataset.skipped) or 'nothing'}")
    return train, val


def make_collator(config: MasterConfig, student_tokenizer: object, foreign: list[Any]) -> CrossTokenizerCollator:
    """The collator of a run; ``foreign`` holds None for teachers that share the student's tokenizer."""
    data, teachers = config.data, config.all_teachers
    return CrossTokenizerCollator(
        student_tokenizer=student_tokenizer,
        teacher_tokenizer=foreign,
        ctx_length_student=student_length(config),
        ctx_length_teacher=teacher_lengths(config),
        make_seq_div_by_student=config.policy.make_sequence_length_divisible_by,
        make_seq_div_by_teacher=[t.make_sequence_length_divisible_by for t in teachers],
        mode=data.detected_mode(),
        append_eos=data.append_eos,
        long_documents=data.long_documents,
        on_error="skip" if data.on_bad_record == "skip" else "raise",
        student_template=_template(config.policy),
        teacher_template=[_template(t) for t in teachers],
        template_kwargs=config.policy.tokenizer.chat_template_kwargs,
        teacher_template_kwargs=[t.tokenizer.chat_template_kwargs for t in teachers],
        chunks_as="layout",
        context_as=data.teacher_context_as,
        teacher_names=[t.name for t in teachers],
    )


def common_ends(
    config: MasterConfig, student_tokenizer: object, tokenizers: Sequence[Any], foreign: Sequence[Any]
) -> list[tuple[int, ...]]:
    """Per teacher the tokens that are one event, the end of an answer: those of the student and of a teacher that has
    its tokenizer, but ends answers with other tokens of it. Without any where both end alike, and for texts.

    ``foreign``: None for teachers that share the student's tokenizer.
    """
    if config.data.detected_mode() != "chat" or None not in foreign:
        return [()] * len(foreign)

    def of(section: ModelConfig, tokenizer: object, name: str) -> frozenset[int]:
        return ends_of_answers(tokenizer, _template(section), section.tokenizer.chat_template_kwargs, name)

    students_ends, common = of(config.policy, student_tokenizer, "student"), list[tuple[int, ...]]()
    for number, (section, tokenizer, other) in enumerate(zip(config.all_teachers, tokenizers, foreign, strict=True)):
        theirs = students_ends if other is not None else of(section, tokenizer, f"teacher {number}")
        common.append(() if theirs == students_ends else tuple(sorted(students_ends | theirs)))
    return common


RECORDS_OF_NAMES = 20_000
"""So many records are asked for their teachers before the first step; behind them a wrong name stops the run."""


def check_names_of_teachers(config: MasterConfig, collator: CrossTokenizerCollator, records: Any) -> None:
    """Refuse records that name a teacher which the run does not have."""
    if not any(collator.teacher_names):
        return
    for number in range(min(len(records), RECORDS_OF_NAMES)):
        for record in flatten_documents([records[number]]):
            collator.asked(record)


def count_truncated(
    config: MasterConfig, student_tokenizer: object, foreign: list[Any], records: Any, most: int = 16
) -> str | None:
    """One line about the text that the contexts will cost, by the first records; None where they cost nothing."""
    data = config.data
    if data.long_documents == "error":
        return None
    number = min(most, len(records))
    some = [records[i] for i in range(number)]
    if data.long_documents == "split" and data.detected_mode() == "text":
        # nothing of a text is lost but behind a context that leaves no room for it
        some = [record for record in flatten_documents(some) if record.get(CONTEXT)]
    batch = make_collator(config, student_tokenizer, foreign)(some)
    lost, left_out, crowded_out = (
        sum(counts.get(reason, 0) for counts in batch["skipped"])
        for reason in ("truncated_tokens", "too_long", "context_too_long")
    )
    if crowded_out:
        return (
            f"{crowded_out} of the first {number} records are left out: their {data.teacher_context_key or CONTEXT} "
            f"leaves no room for them in a teacher's {min(teacher_lengths(config))} tokens; raise "
            "teacher.max_total_sequence_length, or give shorter context"
        )
    if left_out:
        return f"{left_out} of the first {number} records are longer than the context and are left out"
    share = lost / max(lost + int(batch["input_lengths"].sum()), 1)
    remedy = "raise it" if data.detected_mode() == "chat" else "raise it, or set data.long_documents: split"
    return f"the context cuts off {share:.0%} of the first {number} records; {remedy}" if lost else None


COUNTED_RECORDS, COUNTED_TOKENS = 256, 200_000
"""How much of the training data `count_token_ends` reads: so many records, or fewer where they hold so many tokens."""


def count_token_ends(
    config: MasterConfig,
    loss_fn: CrossTokenizerDistillationLossFn,
    student_tokenizer: object,
    foreign: list[Any],
    records: Any,
) -> None:
    """Show some of the records to a loss that goes by them; every rank shows it the same ones."""
    if not loss_fn.counts_ends:
        return
    collate, texts, tokens = make_collator(config, student_tokenizer, foreign), list[list[ChunkLayout]](), 0
    # a generator of its own: the run's draws stay what they are without this look
    for i in random.Random(0).sample(range(len(records)), min(COUNTED_RECORDS, len(records))):
        try:
            batch = collate([records[i]])
        except DataError:
            continue  # said where the record is trained on
        texts.append(loss_fn.select_chunks(batch))
        tokens += int(batch["input_lengths"].sum())
        if tokens >= COUNTED_TOKENS:
            break
    loss_fn.count_token_ends(texts)


def _template(policy: ModelConfig) -> str | None:
    template = policy.tokenizer.chat_template
    return None if template is None else read_template(template)


def student_length(config: MasterConfig) -> int:
    """Tokens of the longest row of the student."""
    limit = config.policy.max_total_sequence_length
    return min(config.data.max_input_seq_length or limit, limit)


def teacher_lengths(config: MasterConfig) -> list[int]:
    """Tokens of the longest row of each teacher."""
    teachers, wanted = config.all_teachers, config.data.max_teacher_seq_length
    if not teachers:
        return []
    limits = wanted if isinstance(wanted, list) else [wanted or config.data.max_input_seq_length] * len(teachers)
    if len(limits) != len(teachers):
        raise ConfigError(f"data.max_teacher_seq_length has {len(limits)} entries for {len(teachers)} teachers")
    limits_of_models = [teacher.max_total_sequence_length for teacher in teachers]
    return [min(limit or most, most) for limit, most in zip(limits, limits_of_models, strict=True)]


def make_loaders(
    config: MasterConfig, collate: Collate, train: Any, val: Any | None, *, val_collator: CrossTokenizerCollator
) -> tuple[StatefulDataLoader, StatefulDataLoader | None]:
    """Loaders of this rank's share of the training and validation records; both can be resumed."""
    prompts = config.distillation.num_prompts_per_step
    files = train.paths if isinstance(train, RecordDataset) else []
    if files and len(train) < prompts and all(is_plain_text(path, config.data.format) for path in files):
        raise DataError(
            f"a data set of {len(train)} records is smaller than one global batch of {prompts}: a text file is one "
            "document; set data.split_documents: blank_lines to make one of each paragraph, or lower "
            "distillation.num_prompts_per_step"
        )
    loop, layout, workers = config.distillation, config.policy.dtensor_cfg, config.data.num_workers
    train_loader = make_loader(
        train,
        collate,
        records=loop.num_prompts_per_step,
        layout=layout,
        seed=loop.seed,
        shuffle=config.data.shuffle,
        num_workers=workers,
    )
    if val is None:
        return train_loader, None
    return train_loader, make_validation_loader(
        val, val_collator, rows=loop.val_rows, layout=layout, seed=loop.seed, num_workers=workers
    )
