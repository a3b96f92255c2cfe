"""What a run reads: tokenizers, records, batches, and the order in which they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torchdata.stateful_dataloader import StatefulDataLoader

from limbeck.algorithms.config import MasterConfig
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.data.loader import make_loader, make_validation_loader
from limbeck.data.readers import is_plain_text
from limbeck.data.sources import RecordDataset, build_dataset
from limbeck.distributed.device import default_device
from limbeck.errors import ConfigError, DataError
from limbeck.models.loading import ModelConfig, fit_to_device
from limbeck.projection.events import Conditions
from limbeck.tokens import load_tokenizer
from limbeck.tokens.begin import set_begin
from limbeck.tokens.tokenizer import read_template
from limbeck.utils.progress import say

PolicyT = TypeVar("PolicyT", bound=ModelConfig)
TeacherT = TypeVar("TeacherT", bound=ModelConfig)


def fitted(policy: PolicyT, teachers: Sequence[TeacherT] = ()) -> tuple[PolicyT, list[TeacherT]]:
    """The models' settings as this process's device can follow them; one line says what is replaced."""
    device = default_device()
    own, told = fit_to_device(policy, device)
    others = [fit_to_device(teacher, device) for teacher in teachers]
    told = list(dict.fromkeys([*told, *(line for _, lines in others for line in lines)]))
    if told:
        say(f"on the {device.type.upper()}: {', '.join(told)}")
    return own, [teacher for teacher, _ in others]


Collate = Callable[[list[Any]], Any]
"""Records to what a step takes."""


def tokenizer_of(policy: ModelConfig) -> Any:
    """The tokenizer that a model's section names, or the model's own."""
    name = policy.tokenizer.name or policy.model_name
    if name is None:
        raise ConfigError("a model without model_name needs tokenizer.name")
    tokenizer = load_tokenizer(name, trust_remote_code=policy.trust_remote_code)
    if policy.tokenizer.bos != "auto":
        set_begin(tokenizer, policy.tokenizer.bos)
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


def load_tokenizers(config: MasterConfig) -> tuple[Any, list[Any]]:
    """The student's tokenizer and one per teacher."""
    return tokenizer_of(config.policy), [tokenizer_of(t) for t in config.all_teachers]


def load_datasets(config: MasterConfig) -> tuple[Any, Any | None]:
    """Training and validation data; an empty set is an error."""
    train = build_dataset(config.data).prepare()
    val = build_dataset(config.data, "validation").prepare() if config.data.validation else None
    for name, dataset in (("train", train), ("validation", val)):
        if dataset is not None and not len(dataset):
            raise DataError(f"data.{name} holds no usable record; left out: {dict(dataset.skipped) or 'nothing'}")
    return train, val


def make_collator(
    config: MasterConfig,
    student_tokenizer: object,
    foreign: list[Any],
    conditions: Sequence[Conditions | None] | None = None,
) -> CrossTokenizerCollator:
    """The collator of a run; ``foreign`` holds None for teachers that share the student's tokenizer, ``conditions`` the
    loss's, one per teacher."""
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
        on_error="skip" if data.on_bad_record == "skip" else "raise",
        student_template=_template(config.policy),
        teacher_template=[_template(t) for t in teachers],
        template_kwargs=config.policy.tokenizer.chat_template_kwargs,
        teacher_template_kwargs=[t.tokenizer.chat_template_kwargs for t in teachers],
        chunks_as="layout",
        conditions=conditions,
    )


def _template(policy: ModelConfig) -> str | None:
    given = policy.tokenizer.chat_template
    return None if given is None else read_template(given)


def student_length(config: MasterConfig) -> int:
    """Tokens of the longest row of the student."""
    own = config.policy.max_total_sequence_length
    return min(config.data.max_input_seq_length or own, own)


def teacher_lengths(config: MasterConfig) -> list[int]:
    """Tokens of the longest row of each teacher."""
    teachers, given = config.all_teachers, config.data.max_teacher_seq_length
    if not teachers:
        return []
    limits = given if isinstance(given, list) else [given or config.data.max_input_seq_length] * len(teachers)
    if len(limits) != len(teachers):
        raise ConfigError(f"data.max_teacher_seq_length has {len(limits)} entries for {len(teachers)} teachers")
    own = [teacher.max_total_sequence_length for teacher in teachers]
    return [min(limit or most, most) for limit, most in zip(limits, own, strict=True)]


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
        val, val_collator, rows=loop.val_batch_size, layout=layout, seed=loop.seed, num_workers=workers
    )
