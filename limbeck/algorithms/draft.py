"""A first run file from a student, a teacher and data: what can be told of them by looking, with comments."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from limbeck.algorithms.build import BYTES_PER_TOKEN
from limbeck.data.readers import HUB_PREFIX, expand, is_plain_text
from limbeck.data.sources import DataConfig, build_dataset, detect_mode
from limbeck.errors import ConfigError, LimbeckError
from limbeck.losses.distillation import CrossTokenizerDistillationLossConfig
from limbeck.tokens import ByteVocab, Tokenizer, read_tokenizer
from limbeck.utils.files import package_file

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_COUNT_BYTES = 256 << 20
_USUAL_CONTEXT = {"text": 2048, "chat": 4096}
_CPU_CONTEXT = 512


@dataclass
class Model:
    """What can be told of a model before it is loaded.

    Attributes:
        name: as given.
        local: whether it lies on this machine; of a model on the hub nothing more is known here.
        positions: the longest sequence it was made for, where its configuration says.
    """

    name: str
    local: bool
    tokenizer: Tokenizer | None = None
    positions: int | None = None


@dataclass
class Draft:
    """The text of a run file, and what the user should know about it."""

    text: str
    notes: list[str] = field(default_factory=list)


def look_at_model(name: str) -> Model:
    """A model folder, GGUF file or hub id; a path that does not exist and a folder without a tokenizer are errors."""
    path = Path(package_file(name)).expanduser()
    if not path.exists():
        if _HUB_ID.fullmatch(name) and not name.startswith("."):
            return Model(name, local=False)
        raise ConfigError(f"there is no model at {name!r}; give a model folder, a GGUF file or a hub id (owner/name)")
    positions = None
    if (path / "config.json").is_file():
        try:
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
            positions = config.get("max_position_embeddings")
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{path / 'config.json'} is no model's configuration: {error}") from None
    elif path.is_dir() and not list(path.glob("*.gguf")):
        raise ConfigError(f"{name!r} holds neither config.json nor a .gguf file; give a model folder or a hub id")
    return Model(name, True, read_tokenizer(name), positions if isinstance(positions, int) else None)


def look_at_data(files: Sequence[str]) -> str:
    """``text`` or ``chat``, by the first record; files that do not exist or are ambiguous are errors."""
    return detect_mode(expand(list(files))[0], DataConfig(train=list(files)))


def draft_run(
    student: Model, teacher: Model | None, train: Sequence[str], validation: Sequence[str], log_dir: str
) -> Draft:
    """A run file for these, with every choice explained beside it."""
    mode, on_gpu = look_at_data(train), torch.cuda.is_available()
    notes: list[str] = []
    limits = [model.positions for model in (student, teacher) if model is not None and model.positions]
    context = min([_USUAL_CONTEXT[mode] if on_gpu else _CPU_CONTEXT, *limits])
    paragraphs = all(is_plain_text(path) for path in expand(list(train)))
    loss = CrossTokenizerDistillationLossConfig.model_validate({}).for_pretrained()
    longest = BYTES_PER_TOKEN * context if mode == "text" else None
    batch, steps, records = _pace(train, 32 if on_gpu else 8, paragraphs, longest)
    for side, model in (("student", student), ("teacher", teacher)):
        if model is not None and not model.local:
            notes.append(f"the {side} {model.name!r} is taken for a hub id and was not looked at")
        if mode == "chat" and model is not None and model.tokenizer is not None and not model.tokenizer.templates:
            notes.append(f"the {side}'s tokenizer has no chat template: set {_key(side)}.tokenizer.chat_template")
    if not validation:
        notes.append("without data.validation nothing tells whether the run helps; hold some records out for it")
    parts = [
        _head(log_dir),
        "policy:                                 # the student\n",
        _line("model_name", student.name),
        _line("precision", "auto", "bfloat16 on a GPU that has it, else float32"),
        _line("max_total_sequence_length", context, f"tokens; {_why(limits, on_gpu)}"),
        _line("train_micro_batch_size", 4 if on_gpu else 1, "rows per forward pass: more is faster, and takes memory"),
        _line("lr", 1e-5, "small: the student can already speak; adapters (lora) want 1e-4"),
        _line("scheduler", "cosine"),
        _line("warmup_steps", steps // 20),
        "  # lora: {r: 16, alpha: 32}            # train adapters only: a fraction of the memory\n",
    ]
    if teacher is not None:
        parts += [
            "teacher:\n",
            _line("model_name", teacher.name),
            _line("max_total_sequence_length", context),
            "  # cache: cache/teacher                # limbeck cache stores its signals once, for many runs\n",
            "loss_fn:\n",
            _line("mode", loss.mode, _loss(student, teacher)),
            _line("kl_loss_weight", loss.kl_loss_weight, "the teacher's word"),
            _line("ce_loss_scale", loss.ce_loss_scale, "the text's"),
            _line("gate", loss.gate, "the teacher speaks where it is ahead of the student"),
        ]
    parts += [
        "data:\n",
        _line("mode", mode, "by the first record"),
        _line("train", train[0] if len(train) == 1 else list(train)),
        _line("split_documents", "blank_lines", "a document per paragraph; file: the whole file") if paragraphs else "",
        _line("validation", validation[0] if len(validation) == 1 else list(validation))
        if validation
        else "  # validation: held_out.jsonl          # bits per byte of both models, before and after\n",
        "distillation:\n",
        _line("num_prompts_per_step", batch, "records per step"),
        _line("max_num_steps", steps, records),
        _line("val_period", max(1, steps // 5)),
        "checkpointing:\n",
        _line("save_period", max(1, steps // 5)),
        "logger:\n",
        _line("log_dir", log_dir, "the run folder; the same command goes on from its last checkpoint"),
    ]
    return Draft("".join(parts), notes)


def _head(log_dir: str) -> str:
    return (
        "# Written by limbeck init; every key with its meaning: limbeck docs configuration\n"
        f"#   limbeck train THIS_FILE             # then: limbeck report {log_dir}\n"
    )


def _line(key: str, value: Any, why: str = "") -> str:
    shown = f"  {key}: {json.dumps(value, ensure_ascii=False)}"
    return f"{shown:<40}# {why}\n" if why else f"{shown}\n"


def _key(side: str) -> str:
    return "policy" if side == "student" else side


def _why(limits: list[int], on_gpu: bool) -> str:
    known = f"the models take {min(limits):,}" if limits else "the models' limits are not known here"
    return known if on_gpu else f"{known}; short, for there is no GPU"


def _loss(student: Model, teacher: Model) -> str:
    if student.tokenizer is None or teacher.tokenizer is None:
        return "the default, for any pair of tokenizers"
    mine, theirs = (ByteVocab.from_tokenizer(side) for side in (student.tokenizer, teacher.tokenizer))
    same = mine.fingerprint == theirs.fingerprint
    return "one tokenizer: compared token by token" if same else "two tokenizers: the default, for any pair"


def _pace(train: Sequence[str], batch: int, paragraphs: bool, longest: int | None) -> tuple[int, int, str]:
    """Records per step, at most those that there are; how many steps to take; and why, in words. ``longest``: bytes of
    a record, longer texts are split."""
    paths = expand(list(train))
    local = [Path(path) for path in paths if not path.startswith(HUB_PREFIX)]
    if len(local) < len(paths) or sum(path.stat().st_size for path in local) > _COUNT_BYTES:
        return batch, 1000, "or one pass over the data, whichever comes first"
    try:
        split: Literal["blank_lines", "file"] = "blank_lines" if paragraphs else "file"
        data = DataConfig(train=list(train), on_bad_record="skip", split_documents=split, max_document_bytes=longest)
        count = len(build_dataset(data))
    except LimbeckError as error:
        raise ConfigError(f"the data cannot be used: {error}") from error
    batch = min(batch, count)
    steps = count // batch
    return batch, min(steps, 10_000), f"one pass over {count:,} records is {steps:,}"
