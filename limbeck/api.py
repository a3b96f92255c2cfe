"""A run from Python: what ``limbeck train`` does with a run file, with models and data that need not be files.

import limbeck

result = limbeck.distil("./student", "./teacher", ["a text", "another"], max_num_steps=100, log_dir="runs/first")
result.student.generate(**result.tokenizer("The capital of", return_tensors="pt"))
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from os import PathLike
from pathlib import Path
from typing import Any

import datasets
from torch import nn

from limbeck.algorithms.build import tokenizer_of
from limbeck.algorithms.config import MasterConfig
from limbeck.algorithms.dispatch import DEFAULT
from limbeck.algorithms.loop import whole_run
from limbeck.algorithms.xtoken_off_policy_distillation import train_student
from limbeck.config import merge, near_name, resolve
from limbeck.data.readers import HUB_PREFIX
from limbeck.errors import ConfigError, DataError
from limbeck.export import export_run
from limbeck.models.causal import is_lora
from limbeck.models.loading import ModelConfig
from limbeck.report.run_page import write_report
from limbeck.tokens.begin import set_begin
from limbeck.utils.files import write_atomic
from limbeck.utils.logger import read_metrics
from limbeck.utils.progress import Bars, current, showing

__all__ = ["Distilled", "distil"]

_DEFAULT_FOLDER = Path("runs/distil")


@dataclass(frozen=True)
class Distilled:
    """What a run leaves.

    Attributes:
        student: the transformers model, trained, in evaluation mode; with ``lora`` inside peft's wrapper.
        tokenizer: the student's transformers tokenizer.
        run_dir: the run folder: run file, metrics, checkpoints, report.
        metrics: one row per logged step: ``step``, ``train/loss``, ``val/bpb``, ...
        report: the page about the run.
    """

    student: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    run_dir: Path
    metrics: list[dict[str, Any]] = field(repr=False)
    report: Path = field(repr=False)

    def export(self, out: str | Path, *, license: str | None = None) -> Path:
        """Write the best checkpoint as a folder for others, with a model card; see `limbeck.export.export_run`."""
        return export_run(self.run_dir, out, license=license)

    def values(self, name: str) -> list[float]:
        """Everything that was measured under one name, such as ``val/bpb``, in the order of the steps."""
        return [row[name] for row in self.metrics if row.get(name) is not None]


def distil(
    student: Any,
    teacher: Any,
    data: Any,
    *,
    validation: Any = None,
    student_tokenizer: Any = None,
    teacher_tokenizer: Any = None,
    **settings: Any,
) -> Distilled:
    """Train ``student`` on ``data`` with the opinions of ``teacher``, as ``limbeck train`` would.

    Args:
        student: a model folder, hub id or GGUF file; a transformers causal model, which is trained in place; or a
            mapping with the keys of a run file's ``policy`` section.
        teacher: the same; a list for several teachers; None for cross-entropy alone. A model in memory is frozen.
        data: file, glob, folder or ``hf:owner/name``; a list of those, of texts, or of records; a ``datasets.Dataset``;
            or a mapping with the keys of a ``data`` section: ``{"train": records, "mode": "chat"}``.
        validation: held-out data of the same kinds; without it nothing is measured but the loss.
        student_tokenizer, teacher_tokenizer: name or transformers tokenizer (one per teacher); default: the model's.
        settings: keys of a run file: sections (``loss_fn={"mode": "tree_kl"}``), dotted names
            (``**{"policy.optimizer.kwargs.lr": 1e-4}``), or the name alone where only one section has it
            (``max_num_steps=100``, ``log_dir="runs/first"``). Without ``log_dir`` every call gets a new folder; with
            it a run that has a checkpoint there goes on.

    Returns:
        The trained student with its tokenizer, metrics and run folder.

    Raises:
        StoppedEarly: the run was interrupted and has saved its state; the same call with its ``log_dir`` goes on.
    """
    models = _Models(student, teacher, student_tokenizer, teacher_tokenizer)
    section = dict(data) if isinstance(data, Mapping) else {"train": data}
    records = {"train": section.pop("train", None), "validation": section.pop("validation", validation)}
    values = merge({**models.sections(), "data": section}, _placed(settings))
    folder = Path(values.setdefault("logger", {}).setdefault("log_dir", str(_new_folder())))
    stored = {split: folder / "data" / f"{split}.jsonl" for split, given in records.items() if _in_memory(given)}
    paths = {split: str(stored[split]) if split in stored else _paths(given) for split, given in records.items()}
    values["data"] |= {split: path for split, path in paths.items() if path is not None}
    config = resolve(MasterConfig, values)
    if config.cluster.launcher != "local":
        raise ConfigError(
            f"cluster.launcher is {config.cluster.launcher!r}: limbeck.distil runs here; use limbeck train"
        )
    with _shown(), whole_run(config):
        for split, path in stored.items():
            _store(path, records[split], split)
        policy = train_student(config, *models.tokenizers(config), **models.in_memory(config))
    return Distilled(
        student=policy.model.eval(),
        tokenizer=policy.tokenizer,
        run_dir=folder,
        metrics=read_metrics(folder / "metrics.jsonl"),
        report=write_report(folder),
    )


def _new_folder() -> Path:
    number = 1
    while (found := _DEFAULT_FOLDER if number == 1 else Path(f"{_DEFAULT_FOLDER}-{number}")).exists():
        number += 1
    return found


@contextmanager
def _shown() -> Iterator[None]:
    """Bars where somebody looks, in a notebook or on a terminal; plain lines elsewhere."""
    watched = "ipykernel" in sys.modules or sys.stderr.isatty()
    if current() is not None or not watched:
        yield
        return
    with showing(Bars()):
        yield


# -- models ------------------------------------------------------------------------------------------------------------


class _Models:
    """Student and teachers as they were given: names, sections of a run file, or models in memory."""

    def __init__(self, student: Any, teacher: Any, student_tokenizer: Any, teacher_tokenizer: Any) -> None:
        teachers = [] if teacher is None else list(teacher) if isinstance(teacher, list | tuple) else [teacher]
        listed = isinstance(teacher_tokenizer, list | tuple)
        spoken = list(teacher_tokenizer) if listed else [teacher_tokenizer] * len(teachers)
        if len(spoken) != len(teachers):
            raise ConfigError(f"{len(teachers)} teachers but {len(spoken)} teacher_tokenizer; give one each")
        self.given = [student_tokenizer, *spoken]
        self.models = [
            _checked_model(model, "teacher" if number else "student", tokenizer)
            for number, (model, tokenizer) in enumerate(zip((student, *teachers), self.given, strict=True))
        ]
        if any(model is student for model in teachers if isinstance(student, nn.Module)):
            raise ConfigError("student and teacher are the same object; load the model twice, or give names")
        if isinstance(student, nn.Module) and not any(p.requires_grad for p in student.parameters()):
            raise ConfigError("the student has no parameter that requires a gradient; call requires_grad_(True) on it")

    def sections(self) -> dict[str, Any]:
        """``policy`` and ``teacher`` or ``teachers`` of a run file."""
        student, *teachers = [_section(model, name) for model, name in zip(self.models, self.given, strict=True)]
        one = {"teacher": teachers[0]} if len(teachers) == 1 else {"teachers": teachers}
        return {"policy": student, **(one if teachers else {})}

    def tokenizers(self, config: MasterConfig) -> tuple[Any, list[Any]]:
        """The student's, and one per teacher."""
        sections = (config.policy, *config.named_teachers)
        student, *teachers = (_tokenizer(own, given) for own, given in zip(sections, self.given, strict=True))
        return student, teachers[: len(config.all_teachers)]

    def in_memory(self, config: MasterConfig) -> dict[str, Any]:
        """Models that are not loaded again, as ``setup`` takes them."""
        student, *teachers = (model if isinstance(model, nn.Module) else None for model in self.models)
        return {"student_model": student, "teacher_models": teachers[: len(config.all_teachers)]}


def _checked_model(model: Any, role: str, tokenizer: Any) -> Any:
    if isinstance(model, nn.Module) and is_lora(model):
        raise ConfigError(f"the {role} carries adapters; give the model below them, and policy={{'lora': {{...}}}}")
    if not isinstance(model, str | PathLike | Mapping | nn.Module):
        raise ConfigError(
            f"the {role} is a {type(model).__name__}; give a model folder, a hub id, a GGUF file, a transformers model "
            "or a mapping with the keys of its section"
        )
    if isinstance(model, nn.Module) and tokenizer is None and not _source(model):
        raise ConfigError(
            f"the {role} was not loaded from a folder, so its tokenizer is unknown; give {role}_tokenizer"
        )
    return model


def _section(model: Any, tokenizer: Any) -> dict[str, Any]:
    """The section of a run file for one model."""
    if isinstance(model, Mapping):
        section = dict(model)
    elif isinstance(model, nn.Module):
        section = {"model_name": _source(model) or type(model).__name__}
    else:
        section = {"model_name": str(model)}
    named = isinstance(tokenizer, str | PathLike)
    return merge(section, {"tokenizer": {"name": str(tokenizer)}}) if named else section


def _source(model: nn.Module) -> str:
    """Where a model in memory was loaded from; empty where it was not."""
    config: Any = model.config
    return str(config.name_or_path or "")


def _tokenizer(section: ModelConfig, given: Any) -> Any:
    if given is None or isinstance(given, str | PathLike):
        return tokenizer_of(section)
    if section.tokenizer.bos != "auto":
        set_begin(given, section.tokenizer.bos)
    return given


# -- settings ----------------------------------------------------------------------------------------------------------


def _placed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as nested sections of a run file."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        parts = key.split(".")
        if len(parts) == 1 and key not in MasterConfig.model_fields:
            parts = [_section_of(key), key]
        values = merge(values, reduce(lambda inner, name: {name: inner}, reversed(parts), value))
    return values


def _section_of(key: str) -> str:
    """The one section that has a setting of this name; models have theirs under ``policy``."""
    if key == "algorithm":
        raise ConfigError(f"limbeck.distil runs {DEFAULT}; start other algorithms with limbeck train")
    sections = {
        name: (
            part.annotation if isinstance(part.annotation, type) else type(part.get_default(call_default_factory=True))
        )
        for name, part in MasterConfig.model_fields.items()
        if name not in ("teacher", "teachers")
    }
    fields = {name: set(part.model_fields) for name, part in sections.items()}
    found = [name for name, names in fields.items() if key in names]
    if len(found) == 1:
        return found[0]
    if found:
        places = " or ".join(f"{name}={{{key!r}: ...}}" for name in found)
        raise ConfigError(f"{key!r} is a setting of several sections; give {places}")
    near = near_name(key, {name for names in fields.values() for name in names} | set(sections))
    hint = f"did you mean {near!r}?" if near else "see docs/config.md for all of them"
    raise ConfigError(f"{key!r} is no setting of a run file; {hint}")


# -- data --------------------------------------------------------------------------------------------------------------


def _in_memory(given: Any) -> bool:
    """Whether data are records rather than the names of files."""
    if given is None or isinstance(given, str | PathLike):
        return False
    if isinstance(given, datasets.Dataset):
        return True
    if not isinstance(given, Sequence):
        raise DataError(
            f"the data are a {type(given).__name__}; give files, a list of texts or records, or a datasets.Dataset"
        )
    if not given:
        raise DataError("the data are an empty list; give texts, records or files")
    if all(isinstance(item, PathLike) for item in given):
        return False
    kinds = {type(item).__name__ for item in given}
    if not (all(isinstance(item, str) for item in given) or all(isinstance(item, Mapping) for item in given)):
        raise DataError(f"the data are a list of {', '.join(sorted(kinds))}; give texts, records or paths alone")
    files = [item for item in given if isinstance(item, str) and _is_file(item)]
    if files and len(files) < len(given):
        raise DataError(
            f"{len(files)} of the {len(given)} strings are files ({files[0]!r}); give texts alone, or files alone"
        )
    return not files


def _is_file(text: str) -> bool:
    # longer than any path: a text, which the system would refuse to look for
    return text.startswith(HUB_PREFIX) or (
        len(text) < 4096 and "\n" not in text and "\0" not in text and Path(text).exists()
    )


def _paths(given: Any) -> str | list[str] | None:
    if given is None:
        return None
    return str(given) if isinstance(given, str | PathLike) else [str(path) for path in given]


def _store(path: Path, records: Iterable[Any], split: str) -> None:
    """Keep records in the run folder, which then holds all that the run needs; left alone where they lie there."""
    try:
        lines = [json.dumps({"text": r} if isinstance(r, str) else dict(r)) for r in records]
    except (TypeError, ValueError) as error:
        raise DataError(
            f"a record of data.{split} holds what JSON cannot hold ({error}); give text and messages"
        ) from error
    content = "".join(line + "\n" for line in lines).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_bytes() != content:
        write_atomic(path, content)
