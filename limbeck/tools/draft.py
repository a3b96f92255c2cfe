"""A first run file from a student, a teacher and data: what a look at them shows, with comments."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from pydantic import BaseModel
from safetensors import safe_open

from limbeck.algorithms.build import BYTES_PER_TOKEN, tokenizer_of
from limbeck.algorithms.config import MasterConfig, OffPolicyDistillationConfig
from limbeck.config import resolve
from limbeck.data.readers import data_size, expand, is_plain_text
from limbeck.data.sources import DataConfig, build_dataset, detect_mode
from limbeck.errors import ConfigError, LimbeckError
from limbeck.models.loading import ModelBuilder, ModelConfig, positions
from limbeck.models.optim import OptimizerConfig
from limbeck.models.rates import TRAINED, learning_rate, scratch_rate, warmup
from limbeck.tokens import ByteTokenizer, ByteVocab, read_tokenizer
from limbeck.utils.hub import HubId, locate, model_files, model_sizes

_COUNT_BYTES = 256 << 20
_USUAL_CONTEXT = {"text": 2048, "chat": 4096}
_CPU_CONTEXT = 512
_TOKENS_PER_STEP = 24_000
_CPU_TOKENS_PER_STEP = 4_000
_LEAST_STEPS = 50
_LEAST_RECORDS = 4
"""Records of a step, where there are so many: with fewer a step is mostly the noise of its texts."""
_MOST_PASSES = 3
_MOST_STEPS = 10_000
_SAMPLED = 64
_HELD_OUT, _MOST_HELD_OUT = 0.1, 500
_VALIDATION_SHARE = 0.15
_MOST_VALIDATIONS = 9
_UNKNOWN_SIZE = 1e9


@dataclass
class Model:
    """Facts about a model before it is loaded.

    Attributes:
        name: as given; empty where it has none.
        unknown: why it could not be looked at, here or on the hub; empty where it could.
        positions: the longest sequence it was made for, where its configuration says.
        parameters: numbers in its weights' files.
        drawn: of a model of random weights, those of its body: embedding and head left out.
    """

    name: str
    unknown: str = ""
    tokenizer: ByteTokenizer | None = None
    positions: int | None = None
    parameters: int | None = None
    drawn: int | None = None


@dataclass
class Draft:
    """The text of a run file, and what the user should know about it."""

    text: str
    notes: list[str] = field(default_factory=list)


def look_at_section(section: Mapping[str, Any], *, tokenizer: ByteTokenizer | None = None) -> Model:
    """A model by its section of a run file; one that would be loaded and is not there is an error.

    ``tokenizer``: the model's, where it is in memory already.
    """
    name, named = section.get("model_name"), (section.get("tokenizer") or {}).get("name")
    if tokenizer is None and named is not None:
        tokenizer = read_tokenizer(named)
    if name and not any(section.get(key) for key in ("source", "cache", "server")):
        model = look_at_model(str(name), needed=True, tokenizer=tokenizer)
    else:
        # drawn anew, or its signals come from elsewhere
        model = Model(str(name or ""), "", tokenizer, positions(section.get("model_overrides") or {}))
    return replace(model, drawn=drawn_body(section, model.tokenizer))


def drawn_body(section: Mapping[str, Any], tokenizer: ByteTokenizer | None) -> int | None:
    """Parameters of a model of random weights, without embedding and head; None where it has others, or cannot be
    made."""
    if section.get("init") != "random":
        return None
    keys = ("init", "model_name", "model_overrides", "trust_remote_code")
    try:
        config = resolve(ModelConfig, {key: section[key] for key in keys if section.get(key) is not None})
        size = None if tokenizer is None else tokenizer.vocab.size
        return body_size(ModelBuilder(config, trained=False, size=size, seed=0, weights=None).outline())
    except LimbeckError:
        return None  # the run says it better


def body_size(model: Any) -> int:
    """Parameters of a transformers model without its embedding and its head."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    outside = {id(p) for module in ends if module is not None for p in module.parameters()}
    return sum(p.numel() for p in model.parameters() if id(p) not in outside)


def look_at_model(name: str, *, needed: bool = False, tokenizer: ByteTokenizer | None = None) -> Model:
    """A model folder, GGUF file or hub id; a path that does not exist and a folder without a tokenizer are errors.

    Args:
        needed: so is a model that the hub does not give.
        tokenizer: in place of the model's own.
    """
    path = locate(name)
    if isinstance(path, HubId):
        try:
            return _look_at_hub(name, path, tokenizer)
        except LimbeckError as error:
            if needed:
                raise
            return Model(name, str(error))
    positions = None
    if (path / "config.json").is_file():
        try:
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
            positions = config.get("max_position_embeddings")
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{path / 'config.json'} is no model's configuration: {error}") from None
    elif path.is_dir() and not list(path.glob("*.gguf")):
        raise ConfigError(f"{name!r} holds neither config.json nor a .gguf file; give a model folder or a hub id")
    known = positions if isinstance(positions, int) else None
    return Model(name, "", tokenizer or read_tokenizer(name), known, _parameters(path))


def _look_at_hub(name: str, repo: HubId, tokenizer: ByteTokenizer | None) -> Model:
    """Facts in the small files of a repository; its weights stay where they are."""
    sizes = model_sizes(repo)
    if repo.file is not None or "config.json" not in sizes:
        return Model(name, "its weights alone would tell, and are not fetched for that")
    config = json.loads((model_files(name, "config") / "config.json").read_text(encoding="utf-8"))
    positions, dtype = config.get("max_position_embeddings"), str(config.get("dtype") or config.get("torch_dtype"))
    # transformers reads the weights at the top of a repository alone
    size = sum(size or 0 for file, size in sizes.items() if file.endswith(".safetensors") and "/" not in file)
    parameters = size // (2 if dtype.endswith("16") else 4)
    known = positions if isinstance(positions, int) else None
    return Model(name, "", tokenizer or read_tokenizer(name), known, parameters or None)


def _parameters(path: Path) -> int | None:
    """Numbers in a model's weights, by the headers of its files; None where there are none."""
    if path.is_file() or not list(path.glob("*.safetensors")):
        files = [path] if path.is_file() else sorted(path.glob("*.gguf"))[:1]
        if not files:
            return None
        from gguf import GGUFReader

        return sum(int(tensor.n_elements) for tensor in GGUFReader(files[0]).tensors)
    total = 0
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="np") as tensors:
            # get_slice reads the header alone; the file object itself cannot be iterated over
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def look_at_data(files: Sequence[str], section: Mapping[str, Any] | None = None) -> str:
    """``text`` or ``chat``, as the settled ``section`` ``data`` says or by the first record; files that do not exist
    or are ambiguous are errors."""
    config = resolve(DataConfig, {**(section or {}), "train": list(files), "validation": None, "holdout": 0.0})
    return detect_mode(expand(list(files))[0], config)


@dataclass(frozen=True)
class _Text:
    """Facts about the training data, as far as looking at some of them tells.

    Attributes:
        records: how many there are; None where counting would take long.
        target_bytes: of an average record, those that the student learns to write.
    """

    records: int | None
    target_bytes: float
    bytes_per_token: float

    @property
    def tokens(self) -> float:
        """Tokens of an average record."""
        return max(self.target_bytes / self.bytes_per_token, 1.0)


Rows = list[tuple[str, Any, str]]
"""Keys of a section with their values and why they are so."""


def draft_run(
    student: Model,
    teachers: Sequence[Model],
    train: Sequence[str],
    validation: Sequence[str],
    log_dir: str,
    *,
    settled: Mapping[str, Any] | None = None,
) -> Draft:
    """A run file for these, with every choice explained beside it.

    Args:
        teachers: of several, ``settled`` has the sections.
        train, validation: the files that are looked at.
        settled: sections of a run file that are settled, whose values other choices go by.
    """
    settled = check_sections(settled or {})
    validation = validation or _listed(settled.get("data", {}).get("validation"))
    mode, on_gpu = look_at_data(train, settled.get("data")), torch.cuda.is_available()
    limits = [model.positions for model in (student, *teachers) if model.positions]
    context = min([_USUAL_CONTEXT[mode] if on_gpu else _CPU_CONTEXT, *limits])
    notes = _unknowns(student, teachers, mode, settled)
    data = _data_keys(train, mode, settled.get("data", {}))
    text = _look_at_text(data, student, context)
    if student.drawn is not None and not TRAINED[0] <= student.drawn <= TRAINED[1]:
        notes.append(
            f"the learning rate is a guess: models of {_many(TRAINED[0])} to {_many(TRAINED[1])} weights beside "
            f"embedding and head were trained from scratch with Limbeck, and this one has {_many(student.drawn)}; "
            "sweep it"
        )
    share = 0.0 if validation else data.get("holdout", _share(text))
    if not validation and not share:
        notes.append("without validation data nothing tells whether the run helps; give data.validation or holdout")
    plan = _plan(text, share, settled.get("distillation", {}), on_gpu)
    teacher_rows: Rows = []
    if len(teachers) == 1 and teachers[0].name:
        teacher_rows = [
            ("model_name", teachers[0].name, _vocabularies(student, teachers[0])),
            ("max_total_sequence_length", context, ""),
        ]
    elif len(teachers) > 1:
        length = {"max_total_sequence_length": context}
        sections = [{**length, **section} if section.get("model_name") else section for section in settled["teachers"]]
        settled = {**settled, "teachers": sections}
    rows: dict[str, Rows] = {
        "policy": _policy_rows(student, text, plan, mode, (context, _why(limits, on_gpu))),
        "teacher": teacher_rows,
        "data": _data_rows(data, mode, validation, share),
        "distillation": plan.rows(),
        "checkpointing": [("save_period", max(1, plan.steps // 5), "")],
        "logger": [("log_dir", log_dir, "the run folder; the same command goes on from its last checkpoint")],
    }
    validated = round((text.records or 0) * share) or (_count(validation, data) if validation else None)
    period = _val_period(student, teachers, plan.steps, plan.batch, validated) if validation or share else 0
    if period:
        rows["distillation"].append(("val_period", period, "validations between start and end cost at most 15%"))
    return Draft(_written(rows, settled, log_dir), notes)


class _Length(BaseModel):
    distillation: OffPolicyDistillationConfig = OffPolicyDistillationConfig()


def check_sections(settled: Mapping[str, Any]) -> dict[str, Any]:
    """The settled sections, but for empty ones; refused before anything goes by them."""
    sections = {name: section for name, section in settled.items() if section is not None}
    for name in ("policy", "teacher", "data", "distillation"):
        if not isinstance(sections.get(name, {}), Mapping):
            raise ConfigError(f"{name!r} is {sections[name]!r}; expected its keys, as in {name}.KEY=VALUE")
    resolve(_Length, {"distillation": sections.get("distillation", {})})
    return sections


def _unknowns(student: Model, teachers: Sequence[Model], mode: str, settled: Mapping[str, Any]) -> list[str]:
    """Keys for what the models do not tell, or lack for such data."""
    notes = []
    sections = _listed(settled.get("teachers")) or [settled.get("teacher", {})]
    sides = [("student", "policy", student, settled.get("policy", {}))]
    for number, (model, section) in enumerate(zip(teachers, sections, strict=False)):
        sides.append(("teacher", f"teachers.{number}" if len(teachers) > 1 else "teacher", model, section))
    for side, key, model, section in sides:
        if model.unknown:
            notes.append(f"the {side} {model.name!r} was not looked at: {model.unknown}")
        templates = model.tokenizer is None or model.tokenizer.templates
        if mode == "chat" and not templates and "chat_template" not in (section.get("tokenizer") or {}):
            notes.append(f"the {side}'s tokenizer has no chat template: set {key}.tokenizer.chat_template")
    return notes


def _data_keys(train: Sequence[str], mode: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``data`` by which records are read; of plain text a paragraph is a document."""
    paragraphs = all(is_plain_text(path) for path in expand(list(train)))
    return {
        "train": train[0] if len(train) == 1 else list(train),
        "mode": mode,
        **({"split_documents": "blank_lines"} if paragraphs else {}),
        **{key: value for key, value in section.items() if key != "train"},
    }


@dataclass(frozen=True)
class _Plan:
    """How long the run is.

    Attributes:
        count: records that are trained on; None where nobody has counted them.
        batch: records of a step.
    """

    text: _Text
    count: int | None
    batch: int
    passes: int
    steps: int

    @property
    def read(self) -> int:
        """Records read, those of later passes included."""
        if self.count is None:
            return self.steps * self.batch
        # the run ends with its last pass, however many steps it may take
        return min(self.steps, max(self.count // self.batch, 1) * self.passes) * self.batch

    @property
    def fresh(self) -> int:
        """Records read for the first time."""
        return min(self.count or self.read, self.read)

    def rows(self) -> Rows:
        """The section ``distillation``."""
        passes: Rows = [("max_num_epochs", self.passes, "little text is read again")] if self.passes > 1 else []
        tokens = _round(self.batch * self.text.tokens)
        return [
            ("num_prompts_per_step", self.batch, f"records per step, about {tokens:,} tokens"),
            *passes,
            ("max_num_steps", self.steps, _pace(self.count, self.batch, self.passes)),
        ]


def _plan(text: _Text, share: float, loop: Mapping[str, Any], on_gpu: bool) -> _Plan:
    """The run's length. share: of the records that are held out."""
    # as the data does it: a share that is not 0 holds out one document at least
    count = None if text.records is None else max(text.records - (round(text.records * share) or bool(share)), 1)
    batch = loop.get("num_prompts_per_step") or _batch(text, count, on_gpu)
    return _Plan(text, count, batch, *_length(count, batch, loop))


def _policy_rows(student: Model, text: _Text, plan: _Plan, mode: str, context: tuple[int, str]) -> Rows:
    """The section ``policy``. context: tokens of a sequence, and why so many."""
    size, megabytes = student.parameters or _UNKNOWN_SIZE, _megabytes(text, plan)
    rate = _rate(student, text, plan, mode)
    seen = f"{'about a billion' if student.parameters is None else _many(size)} parameters, {megabytes:.2g} MB of text"
    if student.drawn is not None:
        seen = f"{_many(student.drawn)} random weights beside embedding and head"
    named: Rows = [("model_name", student.name, "")] if student.name else []
    return [
        *named,
        ("max_total_sequence_length", context[0], f"tokens; {context[1]}"),
        ("lr", rate, f"{seen}: limbeck docs choose_a_loss"),
        ("scheduler", "cosine", ""),
        ("warmup_steps", warmup(plan.steps), "share of the steps in which the rate rises"),
    ]


def _megabytes(text: _Text, plan: _Plan) -> float:
    """Megabytes of text that the student learns from, each byte counted once."""
    return text.target_bytes * plan.fresh / 1e6


def _rate(student: Model, text: _Text, plan: _Plan, mode: str) -> float:
    if student.drawn is not None:
        return scratch_rate(student.drawn)
    passes = round(plan.read / plan.fresh)
    size = student.parameters or _UNKNOWN_SIZE
    return learning_rate(size, _megabytes(text, plan), passes, conversations=mode == "chat")


def usual_rate(config: MasterConfig) -> float | None:
    """The learning rate that a draft would have for a run of this student, these data and this length.

    None where there is no telling: a student that is not on this machine or trains adapters, or another optimizer.
    """
    policy, loop = config.policy, config.distillation
    if policy.adapters is not None or policy.optimizer.name != OptimizerConfig().name:
        return None
    if policy.init == "random":
        body = drawn_body(policy.model_dump(), ByteTokenizer.of(tokenizer_of(policy)))
        return None if body is None else scratch_rate(body)
    if not policy.model_name or isinstance(locate(policy.model_name), HubId):
        return None
    student = look_at_model(policy.model_name, tokenizer=ByteTokenizer.of(tokenizer_of(policy)))
    data = {**config.data.model_dump(exclude_unset=True), "mode": config.data.detected_mode()}
    text = _look_at_text(data, student, policy.max_total_sequence_length)
    loop_keys = {"num_prompts_per_step": loop.num_prompts_per_step, "max_num_epochs": loop.max_num_epochs}
    plan = _plan(text, config.data.holdout, loop_keys, torch.cuda.is_available())
    return _rate(student, text, replace(plan, steps=min(plan.steps, loop.max_num_steps)), data["mode"])


def _data_rows(data: Mapping[str, Any], mode: str, validation: Sequence[str], share: float) -> Rows:
    """The section ``data``. share: of the documents that are held out, where there is no validation data."""
    rows: Rows = [("train", data["train"], ""), ("mode", mode, "by the first record")]
    if all(is_plain_text(path) for path in expand(_listed(data["train"]))):
        rows.append(("split_documents", "blank_lines", "a document per paragraph; file: the whole file"))
    if validation:
        rows.append(("validation", validation[0] if len(validation) == 1 else list(validation), ""))
    elif share:
        rows.append(("holdout", share, "share of the documents that is validated on, or give validation: FILE"))
    return rows


def _written(rows: Mapping[str, Rows], settled: Mapping[str, Any], log_dir: str) -> str:
    """The text of the file; ``settled`` in place of what would be chosen, and beside it."""
    parts = [
        "# Written by limbeck; every key with its meaning: limbeck docs configuration\n"
        f"#   limbeck train THIS_FILE             # then: limbeck report {log_dir}\n"
    ]
    for section in [*rows, *(name for name in settled if name not in rows)]:
        left = dict(settled[section]) if isinstance(settled.get(section), Mapping) else {}
        chosen = rows.get(section, [])
        if section in settled and not isinstance(settled[section], Mapping):
            parts.append(f"{section}: {json.dumps(settled[section], ensure_ascii=False)}\n")
            continue
        if not chosen and not left:
            continue
        parts.append(f"{'policy:':<40}# the student\n" if section == "policy" else f"{section}:\n")
        # a file that gives a short form beside its long one is refused
        rated = "lr" in left.get("optimizer", {}).get("kwargs", {}) or "name" in left.get("optimizer", {})
        for key, value, why in chosen:
            if (key == "lr" and rated) or (key == "warmup_steps" and isinstance(left.get("scheduler"), dict | list)):
                continue
            parts.append(_line(key, left.pop(key), "as given") if key in left else _line(key, value, why))
        parts += [_line(key, value, "as given") for key, value in left.items()]
        parts.append(_HINTS.get(section, ""))
    return "".join(parts)


_HINTS = {
    "policy": "  # lora: {r: 16, alpha: 32}            # train adapters alone: little memory, ten times the lr\n",
    "teacher": "  # cache: cache/teacher                # limbeck cache stores its signals once, for many runs\n",
}


def _line(key: str, value: Any, why: str = "") -> str:
    # JSON is YAML with every text in quotes: none becomes a date, a number or a boolean
    line = f"  {key}: {json.dumps(value, ensure_ascii=False)}"
    return f"{line:<39} # {why}\n" if why else f"{line}\n"


def _listed(files: Any) -> list[str]:
    return [] if files is None else [files] if isinstance(files, str) else list(files)


def _why(limits: list[int], on_gpu: bool) -> str:
    known = f"the models take {min(limits):,}" if limits else "the models' limits are not known here"
    return known if on_gpu else f"{known}; short, for there is no GPU"


def _many(parameters: float) -> str:
    return f"{parameters / 1e9:.2g} billion" if parameters >= 1e9 else f"{parameters / 1e6:.3g} million"


def _round(number: float) -> int:
    """To two digits."""
    return int(float(f"{number:.2g}"))


def _vocabularies(student: Model, teacher: Model) -> str:
    if student.tokenizer is None or teacher.tokenizer is None:
        return ""
    mine, theirs = (ByteVocab.from_tokenizer(side) for side in (student.tokenizer, teacher.tokenizer))
    same = mine.fingerprint == theirs.fingerprint
    return "one tokenizer: compared token by token" if same else "two tokenizers: compared by the bytes of tokens"


def _look_at_text(data: Mapping[str, Any], student: Model, context: int) -> _Text:
    """Count the records, and look at some of them. Texts longer than the context are split."""
    longest = BYTES_PER_TOKEN * context if data["mode"] == "text" else None
    usual = _Text(None, 4.0 * context / 2, 4.0)
    if _too_large(data["train"], data):
        return usual
    training = {key: value for key, value in data.items() if key not in ("validation", "holdout")}
    try:
        config = resolve(DataConfig, {"on_bad_record": "skip", "max_document_bytes": longest, **training})
        records = build_dataset(config)
        count = len(records)
        some = [records[i * count // min(count, _SAMPLED)] for i in range(min(count, _SAMPLED))]
    except LimbeckError as error:
        raise ConfigError(f"the data cannot be used: {_first_fault(training) or error}") from error
    texts = [text for record in some for text in [_target(record)] if text]
    if not texts:
        return _Text(count, usual.target_bytes, usual.bytes_per_token)
    size = mean(len(text.encode()) for text in texts)
    if student.tokenizer is None:
        return _Text(count, size, usual.bytes_per_token)
    tokens = mean(len(student.tokenizer.encode(text).ids) for text in texts)
    return _Text(count, size, max(size / max(tokens, 1), 0.1))


def _too_large(files: str | Sequence[str], data: Mapping[str, Any]) -> bool:
    """Whether counting the records of files would take long."""
    where = DataConfig.model_fields
    subset, split = (data.get(key, where[key].default) for key in ("hub_subset", "hub_split"))
    return sum(data_size(path, subset, split) for path in expand(_listed(files))) > _COUNT_BYTES


def _first_fault(data: Mapping[str, Any]) -> LimbeckError | None:
    """The error at the first record that cannot be used; None where none is found at the beginning."""
    try:
        build_dataset(resolve(DataConfig, {**data, "on_bad_record": "error"}))[0]
    except LimbeckError as error:
        return error
    return None


def _target(record: Mapping[str, Any]) -> str:
    """Part of a record that is learnt: its text, or what its assistant says."""
    if record.get("documents"):
        return "".join(_target(document) for document in record["documents"])
    said = (turn.get("content") for turn in record.get("messages") or [] if turn["role"] == "assistant")
    return record.get("text") or "".join(text for text in said if isinstance(text, str))


def _share(text: _Text) -> float:
    """Share of the documents that is held out: a tenth, and no more than it takes to compare two students."""
    if text.records is None or text.records < 2:
        return 0.0
    return float(f"{min(_HELD_OUT, _MOST_HELD_OUT / text.records):.1g}")


def _batch(text: _Text, count: int | None, on_gpu: bool) -> int:
    """Records of a step: enough tokens, and few enough records for fifty steps."""
    wanted = max(round((_TOKENS_PER_STEP if on_gpu else _CPU_TOKENS_PER_STEP) / text.tokens), 1)
    if count is not None:
        wanted = min(wanted, max(count // _LEAST_STEPS, _LEAST_RECORDS), count)
    return wanted - wanted % 8 if wanted > 16 else wanted


def _length(count: int | None, batch: int, loop: Mapping[str, Any]) -> tuple[int, int]:
    """Passes over the data, and steps."""
    if count is None:
        return loop.get("max_num_epochs", 1), loop.get("max_num_steps", 1000)
    once = max(count // batch, 1)
    passes = loop.get("max_num_epochs") or min(-(-_LEAST_STEPS // once), _MOST_PASSES)
    return passes, loop.get("max_num_steps") or min(once * passes, _MOST_STEPS)


def _pace(count: int | None, batch: int, passes: int) -> str:
    if count is None:
        return "or one pass over the data, whichever comes first"
    return f"one pass over {count:,} records is {max(count // batch, 1):,}"


def _count(files: Sequence[str], data: Mapping[str, Any]) -> int | None:
    """Records to validate on; None where nobody has counted them."""
    training = {key: value for key, value in data.items() if key not in ("validation", "holdout")}
    training["hub_split"] = data.get("hub_validation_split", DataConfig.model_fields["hub_validation_split"].default)
    if _too_large(files, training):
        return None
    return len(build_dataset(resolve(DataConfig, {**training, "train": list(files), "on_bad_record": "skip"})))


def _val_period(student: Model, teachers: Sequence[Model], steps: int, batch: int, validated: int | None) -> int:
    """Steps between validations, so that all between start and end take at most 15% of the run's work; 0: none."""
    if validated is None:
        return max(1, steps // 4)
    # a forward pass of both, where a step has a backward pass of the student, too, which is twice its forward
    student_size = student.parameters or _UNKNOWN_SIZE
    teacher_size = sum(teacher.parameters or 4 * student_size for teacher in teachers)
    cost = validated * (student_size + teacher_size) / (batch * (3 * student_size + teacher_size))
    number = min(int(_VALIDATION_SHARE * steps / cost), _MOST_VALIDATIONS) if cost else _MOST_VALIDATIONS
    return -(-steps // (number + 1)) if number else 0
