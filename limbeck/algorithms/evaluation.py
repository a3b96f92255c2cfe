"""Bits per byte of models on files: one figure that models with different tokenizers share.

For every file: the sum of -log2 p over all supervised text tokens that have a predictor, divided by the bytes of the
same tokens. A document's first token has no predictor (unless the tokenizer puts a begin token in front by default) and
is left out of both sums.

>>> from limbeck.algorithms.evaluation import EvalOptions, evaluate
>>> result = evaluate(["./student", "./teacher"], ["val.jsonl"], EvalOptions(max_documents=100))   # doctest: +SKIP
>>> result["models"]["./student"]["val.jsonl"]["bpb"]                                              # doctest: +SKIP
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from limbeck.algorithms.evaluation_choices import ChoiceFile, layout_of, score_choices
from limbeck.algorithms.evaluation_models import ModelSource, find_model
from limbeck.algorithms.evaluation_pairs import is_pair, score_pairs
from limbeck.algorithms.evaluation_windows import check_window, make_windows, score_windows
from limbeck.data.files import HUB_PREFIX, expand, format_of
from limbeck.data.readers import BadRecord, open_reader
from limbeck.data.sources import RecordDataset, SourceOptions
from limbeck.models.policy import Policy
from limbeck.tokens import Rendering, TextEncoder, load_tokenizer
from limbeck.tokens.chat import render_chat
from limbeck.utils.errors import ConfigError, DataError

MODES = ("auto", "text", "chat", "choice", "pairs")
DEFAULT_CONTEXT = 2048

Advance = Callable[[float], None]
Begin = Callable[[str, str, int], Advance]
"""Called as ``begin(model, file, documents)``; what it returns is called with the documents done since then."""


@dataclass(frozen=True)
class EvalOptions:
    """How files are read and scored.

    Attributes:
        mode: ``text``, ``chat``, ``choice`` (multiple choice), ``pairs`` (preference pairs), or ``auto``: by each
            file's first record.
        text_key, messages_key: keys of the records.
        split_documents: of plain text files: one document per ``file``, or parted by ``blank_lines``.
        context: longest window in tokens; default: the model's own limit, at most 2,048.
        stride: tokens by which windows of a longer document move on; default: half the context.
        batch_tokens: most tokens of one forward pass, padding included.
        max_documents, max_bytes: read no more than this of every file; the last document is cut to fit.
        checkpoint: of a run folder: ``best``, ``latest`` or a step.
        precision: ``float32``, ``bfloat16`` or ``float16``; default: float32 on a CPU, bfloat16 on an accelerator.
        device: default: the accelerator if there is one.
    """

    mode: str = "auto"
    text_key: str = "text"
    messages_key: str = "messages"
    split_documents: Literal["file", "blank_lines"] = "file"
    context: int | None = None
    stride: int | None = None
    batch_tokens: int = 8192
    max_documents: int | None = None
    max_bytes: int | None = None
    checkpoint: str = "best"
    precision: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode {self.mode!r} is unknown; use one of {', '.join(MODES)}.")
        for name in ("batch_tokens", "max_documents", "max_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; give a positive number.")


@dataclass
class FileResult:
    """Sums over one file by one model; ``dropped`` counts what was left out or touched, by reason."""

    nats: float = 0.0
    bytes: int = 0
    tokens: int = 0
    documents: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, Any]:
        """``bpb``, ``bytes``, ``tokens``, ``documents`` and, where there is any, ``dropped``."""
        out: dict[str, Any] = {
            "bpb": bits_per_byte(self.nats, self.bytes),
            "bytes": self.bytes,
            "documents": self.documents,
            "tokens": self.tokens,
        }
        if self.dropped:
            out["dropped"] = dict(self.dropped)
        return out


def bits_per_byte(nats: float, size: int) -> float | None:
    """-log2 of a likelihood given as its natural logarithm, per byte; None without bytes."""
    return -nats / math.log(2) / size if size else None


class EvalModel:
    """A model ready to score: policy, tokenizer, and the window its context allows."""

    def __init__(self, source: ModelSource, options: EvalOptions) -> None:
        self.source, self.name = source, source.spec
        device = pick_device(options.device)
        precision = options.precision or ("float32" if device.type == "cpu" else "bfloat16")
        self.tokenizer = load_tokenizer(source.tokenizer)
        self.encoder = TextEncoder.for_tokenizer(self.tokenizer)
        # one forward pass per batch that is handed over: batches are formed here, by length
        settings = {"model_name": source.weights, "precision": precision, "logprob_batch_size": options.batch_tokens}
        self.policy = Policy(settings, self.tokenizer, name=source.spec, device=device, init_optimizer=False)
        self.context = options.context or min(self._limit(), DEFAULT_CONTEXT)
        self.stride = options.stride or self.context // 2
        check_window(self.context, self.stride)
        if self.context > self._limit():
            raise ConfigError(
                f"a context of {self.context} tokens is more than {source.spec!r} was made for; "
                f"give at most {self._limit()}."
            )
        self.bos_id = self.encoder.bos_id if self.encoder.adds_bos else None

    def _limit(self) -> int:
        config = self.policy.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        return int(limit) if isinstance(limit, int) and limit > 0 else 1 << 30

    def text(self, text: str) -> Rendering:
        """A document behind the begin token, where the tokenizer sets one by default."""
        return self.encoder.encode(text, bos=self.encoder.adds_bos)


def pick_device(name: str | None) -> torch.device:
    """The device of that name, or the accelerator if there is one; refused where it cannot be used."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used here ({str(error).splitlines()[0]}); give cpu.") from error
    return device


def evaluate(
    models: Sequence[str], files: Sequence[str], options: EvalOptions | None = None, begin: Begin | None = None
) -> dict[str, Any]:
    """Score every file (path, glob, folder or ``hf:`` id) by every model, one model in memory at a time.

    Returns ``{"models": {spec: {file: {"bpb", "bytes", "documents", "tokens", ...}}}, "files": {file: mode},
    "settings": {...}}``. Multiple choice adds ``acc`` and ``acc_norm``; preference pairs add ``accuracy``,
    ``chosen_logprob``, ``rejected_logprob`` and ``margin``.
    """
    options = options or EvalOptions()
    paths = expand(list(files))
    modes = {path: detect_mode(path, options) for path in paths}
    sources = [find_model(spec, options.checkpoint) for spec in dict.fromkeys(models)]
    results: dict[str, dict[str, Any]] = {}
    details: dict[str, Any] = {}
    for source in sources:
        model = EvalModel(source, options)
        details[source.spec] = {"context": model.context, "stride": model.stride, "step": source.step}
        results[source.spec] = {path: evaluate_file(model, path, modes[path], options, begin) for path in paths}
        del model
        gc.collect()
    return {"models": results, "files": modes, "loaded": details, "settings": asdict(options)}


def detect_mode(path: str, options: EvalOptions) -> str:
    """The mode of one file: as asked, or by its first record."""
    if options.mode != "auto":
        return options.mode
    if path.startswith(HUB_PREFIX) or format_of(path) != "jsonl":
        return "text"
    reader = open_reader(path, format="jsonl", key=options.text_key, optional=[], cache_dir=None)
    if not len(reader):
        raise DataError(f"{path} has no record; give a file with documents.")
    try:
        row = reader.row(0)
    except BadRecord as error:
        raise DataError(f"{reader.location(0)}: {error}; mend the file.") from None
    if is_pair(row):
        return "pairs"
    if options.messages_key in row and options.text_key not in row:
        return "chat"
    if options.text_key not in row and layout_of(row) is not None:
        return "choice"
    return "text"


def evaluate_file(
    model: EvalModel, path: str, mode: str, options: EvalOptions, begin: Begin | None = None
) -> dict[str, Any]:
    """Summary of one file by one model."""
    if mode in ("choice", "pairs"):
        records = ChoiceFile(path, options.max_documents)
        advance = begin(model.name, path, len(records)) if begin else _ignore
        score = score_choices if mode == "choice" else score_pairs
        return score(model, records, options.batch_tokens, advance)
    kind: Literal["text", "chat"] = "chat" if mode == "chat" else "text"
    reading = SourceOptions(
        mode=kind,
        text_key=options.text_key,
        messages_key=options.messages_key,
        split_documents=options.split_documents,
    )
    data = RecordDataset([path], reading).prepare()
    limit = min(len(data), options.max_documents or len(data))
    advance = begin(model.name, path, limit) if begin else _ignore
    result = FileResult(dropped=Counter(data.skipped))
    windows = (
        window
        for rendering in _renderings(model, data, limit, options.max_bytes, result)
        for window in make_windows(rendering, model.context, model.stride, bos_id=model.bos_id)
    )
    for window, nats in score_windows(model.policy, windows, options.batch_tokens):
        result.nats += nats
        result.bytes += window.size
        result.tokens += window.tokens
        advance(window.share)
    if not result.bytes:
        raise DataError(f"{path} has no byte that {model.name!r} could be scored on; check the file and the mode.")
    return result.summary()


def _renderings(
    model: EvalModel, data: RecordDataset, limit: int, max_bytes: int | None, result: FileResult
) -> Iterator[Rendering]:
    left = max_bytes if max_bytes is not None else 1 << 62
    for position in range(limit):
        record = data[position]
        if left <= 0 or not record["loss_multiplier"]:
            continue
        if record["messages"] is not None:
            name = f"{model.name} ({record['source']})"
            rendering = render_chat(model.tokenizer, record["messages"], tools=record["tools"], name=name)
            left -= len(rendering.source)
        else:
            text = _first_bytes(record["text"], left)
            rendering = model.text(text)
            left -= len(rendering.source)
        result.documents += 1
        result.dropped.update(rendering.dropped)
        if not rendering.target.any():
            result.dropped["no_target"] += 1
        yield rendering


def _first_bytes(text: str, limit: int) -> str:
    """At most ``limit`` bytes of a text, whole characters only; the same cut for every model."""
    if len(text) * 4 <= limit:
        return text
    return text.encode("utf-8")[:limit].decode("utf-8", "ignore")


def _ignore(documents: float) -> None:
    """Progress nobody watches."""
