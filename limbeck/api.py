"""A run from Python: what ``limbeck train`` does with a run file, with models and data that need not be files.

import limbeck

result = limbeck.distil("./student", "./teacher", ["a text", "another"], max_num_steps=100, log_dir="runs/first")
result.student.generate(**result.tokenizer("The capital of", return_tensors="pt"))
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import datasets
from torch import nn

from limbeck.algorithms.build import tokenizer_of
from limbeck.algorithms.config import MasterConfig
from limbeck.algorithms.dispatch import DEFAULT, resolve_run
from limbeck.algorithms.run_folder import CONFIG_NAME
from limbeck.algorithms.start import whole_run
from limbeck.algorithms.xtoken_off_policy_distillation import train_student
from limbeck.config import keys_of, merge, parse_yaml, with_settings
from limbeck.data.readers import HUB_PREFIX
from limbeck.errors import ConfigError, DataError
from limbeck.export import export_run
from limbeck.models.causal import is_lora
from limbeck.models.loading import ModelConfig, positions
from limbeck.report.run_page import write_report
from limbeck.tokens import ByteTokenizer, read_tokenizer
from limbeck.tokens.bos import set_bos
from limbeck.tools.draft import Model, body_size, draft_run, look_at_section
from limbeck.tools.pair import RUN_FILE
from limbeck.utils.files import write_atomic
from limbeck.utils.logger import read_metrics
from limbeck.utils.progress import Bars, current, say, showing

__all__ = ["Distilled", "distil"]

_DEFAULT_FOLDER = Path("runs/distil")


@dataclass(frozen=True)
class Distilled:
    """Result of a run.

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
    """Train ``student`` on ``data`` with the opinions of ``teacher``, as ``limbeck train --student ...`` would.

    What no setting names is chosen as there: learning rate and schedule, records of a step, steps, validation. The
    choices lie in ``run.yaml`` in the run folder, each with its reason.

    Args:
        student: a model folder, hub id or GGUF file; a transformers causal model, which is trained in place; or a
            mapping with the keys of a run file's ``policy`` section.
        teacher: the same; a list for several teachers; None for cross-entropy alone. A model in memory is frozen.
        data: file, glob, folder or ``hf:owner/name``; a list of those, of texts, or of records; a ``datasets.Dataset``;
            or a mapping with the keys of a ``data`` section: ``{"train": records, "mode": "chat"}``.
        validation: held-out data of the same kinds; without it a tenth of ``data`` is held out (``holdout=0``: none).
        student_tokenizer, teacher_tokenizer: name or transformers tokenizer (one per teacher); default: the model's.
        settings: keys of a run file, as the command takes them: short forms (``lr=1e-4``, ``steps=100``,
            ``batch_size=8``), dotted names (``**{"data.mode": "chat"}``), the name alone where one section has it
            (``max_num_steps=100``, ``log_dir="runs/first"``), or sections (``loss_fn={"mode": "tree_kl"}``).
            Without ``log_dir`` every call gets a new folder; with it a run that has begun there goes on with what was
            chosen for it.

    Returns:
        The trained student with its tokenizer, metrics and run folder.

    Raises:
        StoppedEarly: the run was interrupted and has saved its state; the same call with its ``log_dir`` goes on.
    """
    models = _Models(student, teacher, student_tokenizer, teacher_tokenizer)
    section = dict(data) if isinstance(data, Mapping) else {"train": data}
    records = {"train": section.pop("train", None), "validation": section.pop("validation", validation)}
    if "algorithm" in settings:
        raise ConfigError(f"limbeck.distil runs {DEFAULT}; start other algorithms with limbeck train")
    values = with_settings(keys_of(MasterConfig), {**models.sections(), "data": section}, settings)
    folder = Path(values.setdefault("logger", {}).setdefault("log_dir", str(_new_folder())))
    stored = {split: folder / "data" / f"{split}.jsonl" for split, source in records.items() if _in_memory(source)}
    paths = {split: str(stored[split]) if split in stored else _paths(source) for split, source in records.items()}
    values["data"] |= {split: path for split, path in paths.items() if path is not None}
    with _shown():
        if (folder / CONFIG_NAME).is_file():
            config = _resolved(_as_begun(folder, values))
        else:
            with _removed_where_refused(folder):
                # before the draft, which looks at the files
                for split, path in stored.items():
                    _store(path, records[split], split)
                text = models.draft(values, folder)
                config = _resolved(parse_yaml(text, "what was chosen"))
                _leave(folder, text)
        with whole_run(config):
            # a run that goes on has stored nothing yet, and only now is the folder this call's alone
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


_FIRST_LINE = "# limbeck.distil\n"
"""First line of a run file that a call has left in its folder."""


def _resolved(values: Mapping[str, Any]) -> MasterConfig:
    config, _ = resolve_run(values)
    assert isinstance(config, MasterConfig)
    if config.cluster.launcher != "local":
        raise ConfigError(
            f"cluster.launcher is {config.cluster.launcher!r}: limbeck.distil runs here; use limbeck train"
        )
    return config


def _as_begun(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The settings of a call over what an earlier one has chosen for the run in this folder."""
    file = folder / RUN_FILE
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    if not text.startswith((_FIRST_LINE, "# limbeck train --student")):
        return values  # of a run file, or of a version that chose nothing
    return merge(with_settings(keys_of(MasterConfig), parse_yaml(text, str(file)), {}), values)


def _leave(folder: Path, text: str) -> None:
    """Leave what was chosen in the run folder, unless somebody's own file is in its place."""
    file = folder / RUN_FILE
    if not file.is_file() or file.read_text(encoding="utf-8").startswith(_FIRST_LINE):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(file, _FIRST_LINE + text)


@contextmanager
def _removed_where_refused(folder: Path) -> Iterator[None]:
    """A block that may make a folder, which is gone again where the block fails."""
    there = folder.exists()
    try:
        yield
    # BaseException: Ctrl-C is to leave no folder behind either
    except BaseException:
        if not there:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _new_folder() -> Path:
    number = 1
    while (folder := _DEFAULT_FOLDER if number == 1 else Path(f"{_DEFAULT_FOLDER}-{number}")).exists():
        number += 1
    return folder


@contextmanager
def _shown() -> Iterator[None]:
    """Bars where somebody looks, in a notebook or on a terminal; plain lines elsewhere."""
    # standard error of a notebook is no terminal
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

    def draft(self, values: dict[str, Any], folder: Path) -> str:
        """The text of a run file for these, with everything chosen that ``values`` leave open."""
        listed = values.get("teachers") or [section for section in [values.get("teacher")] if section]
        sections = [values["policy"], *listed]
        student, *teachers = (
            _facts(model, section, tokenizer)
            for model, section, tokenizer in zip(self.models, sections, self.given, strict=True)
        )
        train, validation = (_listed(values["data"].get(split)) for split in ("train", "validation"))
        draft = draft_run(student, teachers, train, validation, str(folder), settled=_plain(values))
        for line in draft.notes:
            say(f"note: {line}")
        return draft.text

    def tokenizers(self, config: MasterConfig) -> tuple[Any, list[Any]]:
        """The student's, and one per teacher."""
        sections = (config.policy, *config.named_teachers)
        pairs = zip(sections, self.given, strict=True)
        student, *teachers = (_tokenizer(section, tokenizer) for section, tokenizer in pairs)
        # with loss_fn.kl_loss_weight 0 no teacher is asked
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


def _facts(model: Any, section: Mapping[str, Any], tokenizer: Any) -> Model:
    """What is known of a model before the run. ``tokenizer``: as it was given with the model."""
    named = tokenizer is None or isinstance(tokenizer, str | PathLike)
    known = None if named else ByteTokenizer.of(tokenizer)
    if not isinstance(model, nn.Module):
        return look_at_section(section, tokenizer=known)
    known = known or read_tokenizer(str(tokenizer or _source(model)))
    drawn = body_size(model) if section.get("init") == "random" else None
    return Model(
        section["model_name"], "", known, positions(model.config), sum(p.numel() for p in model.parameters()), drawn
    )


def _plain(value: Any) -> Any:
    """Settings as a run file can hold them."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, PathLike) else value


def _source(model: nn.Module) -> str:
    """Where a model in memory was loaded from; empty where it was not."""
    config: Any = model.config
    return str(config.name_or_path or "")


def _tokenizer(section: ModelConfig, tokenizer: Any) -> Any:
    if tokenizer is None or isinstance(tokenizer, str | PathLike):
        return tokenizer_of(section)
    if section.tokenizer.bos != "auto":
        set_bos(tokenizer, section.tokenizer.bos)
    return tokenizer


# -- data --------------------------------------------------------------------------------------------------------------


def _in_memory(data: Any) -> bool:
    """Whether data are records rather than the names of files."""
    if data is None or isinstance(data, str | PathLike):
        return False
    if isinstance(data, datasets.Dataset):
        return True
    if not isinstance(data, Sequence):
        raise DataError(
            f"the data are a {type(data).__name__}; give files, a list of texts or records, or a datasets.Dataset"
        )
    if not data:
        raise DataError("the data are an empty list; give texts, records or files")
    if all(isinstance(item, PathLike) for item in data):
        return False
    kinds = {type(item).__name__ for item in data}
    if not (all(isinstance(item, str) for item in data) or all(isinstance(item, Mapping) for item in data)):
        raise DataError(f"the data are a list of {', '.join(sorted(kinds))}; give texts, records or paths alone")
    files = [item for item in data if isinstance(item, str) and _is_file(item)]
    if files and len(files) < len(data):
        raise DataError(
            f"{len(files)} of the {len(data)} strings are files ({files[0]!r}); give texts alone, or files alone"
        )
    return not files


def _is_file(text: str) -> bool:
    # longer than any path: a text, which the system would refuse to look for
    return text.startswith(HUB_PREFIX) or (
        len(text) < 4096 and "\n" not in text and "\0" not in text and Path(text).exists()
    )


def _listed(paths: Any) -> list[str]:
    return [] if paths is None else [str(paths)] if isinstance(paths, str | PathLike) else [str(p) for p in paths]


def _paths(data: Any) -> str | list[str] | None:
    if data is None:
        return None
    return str(data) if isinstance(data, str | PathLike) else [str(path) for path in data]


def _store(path: Path, records: Iterable[Any], split: str) -> None:
    """Keep records in the run folder, which then holds all that the run needs; left alone where they lie there."""
    try:
        # as ASCII: a lone surrogate can be stored escaped, which UTF-8 refuses
        lines = [json.dumps({"text": r} if isinstance(r, str) else dict(r)) for r in records]
    except (TypeError, ValueError) as error:
        raise DataError(
            f"a record of data.{split} holds what JSON cannot hold ({error}); give text and messages"
        ) from error
    content = "".join(line + "\n" for line in lines).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    # a new time of change would make the file's stored index useless
    if not path.is_file() or path.read_bytes() != content:
        write_atomic(path, content)
