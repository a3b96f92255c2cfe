"""Bits per byte of models on files: one figure that models with different tokenizers share.

For every file: the sum of -log2 p over all supervised text tokens that have a predictor, divided by the bytes of the
same tokens. A document's first token has no predictor (unless a BOS token stands in front) and is left out of both
sums.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.rows import first_bytes
from limbeck.data.sources import ReadingConfig, RecordDataset
from limbeck.errors import ConfigError, DataError, LossError
from limbeck.evaluation.models import ModelSpec
from limbeck.models.causal import setting
from limbeck.models.policy import Policy
from limbeck.tokens import ByteTokenizer, ByteVocab, TokenizedText, load_tokenizer
from limbeck.tokens.chat import render_chat
from limbeck.tokens.classes import TEXT_CLASSES, class_table

MODES = ("auto", "text", "chat", "choice", "pairs", "answers")
DEFAULT_CONTEXT = 2048

Advance = Callable[[float], None]
Begin = Callable[[str, str, int], Advance]
"""Called as ``begin(model, file, documents)``; what it returns is called with the documents done since then."""


@dataclass(frozen=True)
class EvalOptions:
    """How files are read and scored.

    Attributes:
        mode: ``text``, ``chat``, ``choice`` (multiple choice), ``pairs`` (preference pairs), ``answers`` (prompts with
            one right answer, to be written), or ``auto``: by each file's first record.
        text_key, messages_key: keys of the records.
        split_documents: of plain text files: one document per ``file``, or parted by ``blank_lines``.
        context: longest window in tokens; default: the model's own limit, at most 2,048.
        stride: tokens by which windows of a longer document move on; default: half the context.
        batch_tokens: most tokens of one forward pass, padding included; default: as many as the memory takes.
        max_documents, max_bytes: read no more than this of every file; the last document is cut to fit.
        checkpoint: of a run folder: ``best``, ``latest`` or a step.
        precision: ``float32``, ``bfloat16`` or ``float16``; default: float32 on a CPU, bfloat16 on an accelerator.
        device: default: the accelerator if there is one.
        allow_missing: score a model whose folder lacks weights, with random numbers in their place.
        bos: ``auto``: texts begin as the tokenizer makes them; ``expected``: as the weights are clearly better with.
        max_new_tokens: longest answer that is written.
    """

    mode: str = "auto"
    text_key: str = "text"
    messages_key: str = "messages"
    split_documents: Literal["file", "blank_lines"] = "file"
    context: int | None = None
    stride: int | None = None
    batch_tokens: int | None = None
    max_documents: int | None = None
    max_bytes: int | None = None
    checkpoint: str = "best"
    precision: str | None = None
    device: str | None = None
    allow_missing: bool = False
    bos: Literal["auto", "expected"] = "auto"
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode {self.mode!r} is unknown; use one of {', '.join(MODES)}.")
        for name in ("batch_tokens", "max_documents", "max_bytes", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; give a positive number.")


@dataclass
class FileResult:
    """Sums over one file by one model; ``skipped`` counts what was left out or touched, by reason."""

    nats: float = 0.0
    bytes: int = 0
    tokens: int = 0
    documents: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    classes: dict[str, list[float]] = field(default_factory=dict)
    """Nats, bytes, tokens and the mass on the class by class of token."""

    def add_classes(
        self, vocab: ByteVocab, numbers: npt.NDArray[np.uint8], ids: IntArray, logprobs: FloatArray, masses: FloatArray
    ) -> None:
        """Count scored tokens by class; ``numbers``: class of every id; ``masses``: probability of a token's class."""
        for number in np.unique(numbers[ids]):
            mask = numbers[ids] == number
            sums = (logprobs[mask].sum(), vocab.byte_len[ids[mask]].sum(), mask.sum(), masses[mask].sum())
            have = self.classes.setdefault(TEXT_CLASSES[number], [0.0, 0.0, 0.0, 0.0])
            have[:] = [a + float(b) for a, b in zip(have, sums, strict=True)]

    def summary(self) -> dict[str, Any]:
        """``bpb``, ``bytes``, ``tokens``, ``documents`` and, where there are any, ``classes`` and ``skipped``."""
        out: dict[str, Any] = {
            "bpb": bits_per_byte(self.nats, self.bytes),
            "bytes": self.bytes,
            "documents": self.documents,
            "tokens": self.tokens,
        }
        if self.classes:
            out["classes"] = {
                name: {
                    "bpb": bits_per_byte(nats, int(size)),
                    "bytes": int(size),
                    "tokens": int(tokens),
                    "mass": mass / tokens,
                }
                for name in TEXT_CLASSES
                if name in self.classes
                for nats, size, tokens, mass in [self.classes[name]]
            }
        if self.skipped:
            out["skipped"] = dict(self.skipped)
        return out


def bits_per_byte(nats: float, size: int) -> float | None:
    """-log2 of a likelihood given as its natural logarithm, per byte; None without bytes."""
    return -nats / math.log(2) / size if size else None


class EvalModel:
    """A model ready to score: policy, tokenizer, and the window its context allows."""

    def __init__(self, source: ModelSpec, options: EvalOptions) -> None:
        self.source, self.name = source, source.spec
        device = pick_device(options.device)
        precision = options.precision or ("float32" if device.type == "cpu" else "bfloat16")
        self.tokenizer = load_tokenizer(source.tokenizer)
        self.encoder = ByteTokenizer.of(self.tokenizer)
        self.classes = class_table(self.encoder.vocab)
        # where tokens are named, one forward pass per batch that is handed over, formed here by length
        settings = {
            "model_name": source.weights,
            "precision": precision,
            "logprob_batch_size": options.batch_tokens,
            "allow_missing": options.allow_missing,
        }
        self._batch_tokens = options.batch_tokens
        self.policy = Policy(settings, self.tokenizer, name=source.spec, device=device, init_optimizer=False)
        self.context = options.context or min(self.limit(), DEFAULT_CONTEXT)
        self.stride = options.stride or self.context // 2
        check_window(self.context, self.stride)
        if self.context > self.limit():
            raise ConfigError(
                f"a context of {self.context} tokens is more than {source.spec!r} was made for; "
                f"give at most {self.limit()}."
            )
        self.begin_texts(self.encoder.adds_bos)

    @property
    def batch_tokens(self) -> int:
        """Most tokens that are handed over at a time."""
        return self._batch_tokens or self.policy.budget.tokens(False)

    def begin_texts(self, bos: bool) -> None:
        """Whether texts stand behind the BOS token from now on; at first as the tokenizer makes them."""
        self.bos_id = self.encoder.bos_id if bos else None

    def limit(self) -> int:
        """Positions that the model was made for."""
        config = self.policy.model.config.get_text_config()
        limit = setting(config, "max_position_embeddings")
        return int(limit) if isinstance(limit, int) and limit > 0 else 1 << 30

    def head_classes(self) -> torch.Tensor:
        """Class of every id of the head, int64 ``[vocab_size]``; ids that are no tokens have one of their own."""
        class_of_row = torch.full((self.policy.vocab_size,), len(TEXT_CLASSES))
        # a head may be wider than its tokenizer (padded rows), and narrower
        known = torch.from_numpy(self.classes[: len(class_of_row)].astype(np.int64))
        class_of_row[: len(known)] = known
        return class_of_row

    def text(self, text: str) -> TokenizedText:
        """A document, behind the BOS token or not."""
        return self.encoder.encode(text, bos=self.bos_id is not None)


def pick_device(name: str | None) -> torch.device:
    """The device of that name, or the accelerator if there is one; refused where it cannot be used."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        # torch.device accepts devices that are not there; to allocate on one does not
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used here ({str(error).splitlines()[0]}); give cpu.") from error
    return device


def score_documents(
    model: EvalModel, path: str, mode: str, options: EvalOptions, begin: Begin | None = None
) -> dict[str, Any]:
    """Summary of one file of texts or conversations by one model."""
    kind: Literal["text", "chat"] = "chat" if mode == "chat" else "text"
    reading = ReadingConfig(
        mode=kind,
        text_key=options.text_key,
        messages_key=options.messages_key,
        split_documents=options.split_documents,
    )
    data = RecordDataset([path], reading).prepare()
    limit = min(len(data), options.max_documents or len(data))
    advance = begin(model.name, path, limit) if begin else unwatched
    result = FileResult(skipped=Counter(data.skipped))
    windows = (
        window
        for rendering in _renderings(model, data, limit, options.max_bytes, result)
        for window in make_windows(rendering, model.context, model.stride, bos_id=model.bos_id)
    )
    for window, logprobs, masses in score_tokens(model.policy, windows, model.batch_tokens, model.head_classes()):
        result.nats += float(logprobs.sum())
        result.add_classes(model.encoder.vocab, model.classes, window.ids[window.scored], logprobs, masses)
        # bytes of scored tokens alone, as the nats are: one without a predictor counts in neither
        result.bytes += window.size
        result.tokens += window.tokens
        advance(window.share)
    if not result.bytes:
        raise DataError(f"{path} has no byte that {model.name!r} could be scored on; check the file and the mode.")
    return result.summary()


def _renderings(
    model: EvalModel, data: RecordDataset, limit: int, max_bytes: int | None, result: FileResult
) -> Iterator[TokenizedText]:
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
            text = first_bytes(record["text"], left)
            rendering = model.text(text)
            left -= len(rendering.source)
        result.documents += 1
        result.skipped.update(rendering.skipped)
        if not rendering.loss_mask.any():
            result.skipped["no_target"] += 1
        yield rendering


def unwatched(documents: float) -> None:
    """Progress nobody watches."""


# -- windows -----------------------------------------------------------------------------------------------------------


BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# Windows are sorted by length within this many batches, so that rows of a batch need little padding.
_BATCHES_TO_SORT = 16


class Scorer(Protocol):
    """Part of a model that scoring needs; :class:`limbeck.models.policy.Policy` has it."""

    vocab_size: int
    name: str

    def get_logprobs(self, data: BatchedDataDict, *, classes: torch.Tensor | None = None) -> BatchedDataDict:
        """``logprobs`` [B, T] of the token at t given those before it; with classes ``class_logprobs`` of its class."""
        ...


@dataclass(frozen=True, eq=False)
class Window:
    """One row for the model.

    Attributes:
        ids: ``[n]`` token ids, the BOS token included.
        scored: ``[n]`` bool; tokens whose probability counts. Never the first: it has no predictor.
        size: bytes of the source that the scored tokens stand for.
        share: part of its document that this window completes, for progress; a document's shares add up to 1.
        key: whatever the caller wants back with the score.
    """

    ids: IntArray
    scored: BoolArray
    size: int
    share: float = 1.0
    key: Any = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> int:
        """Number of scored tokens."""
        return int(self.scored.sum())


def counted_tokens(rendering: TokenizedText) -> BoolArray:
    """``[n]`` tokens that take part in bits per byte: supervised text with a predictor.

    Special tokens stand for no bytes, so they are context only; an unknown token stands for text that it lost.
    """
    lengths = np.diff(rendering.byte_ends, prepend=0)
    counted = rendering.loss_mask & (~rendering.special | (lengths > 0))
    # also where it is supervised: nothing predicts it
    counted[:1] = False
    return counted


def make_windows(
    rendering: TokenizedText,
    context: int,
    stride: int,
    *,
    bos_id: int | None = None,
    key: Any = None,
) -> list[Window]:
    """Windows of at most ``context`` tokens over a rendering; every counted token is scored in exactly one.

    The first window scores all it holds. Each later one moves on by ``stride`` tokens and reads the tokens before them
    again as context, behind a BOS token of its own where ``bos_id`` is given (some models need one). Windows without
    a counted token are left out.
    """
    counted = counted_tokens(rendering)
    check_window(context, stride)
    n = len(rendering)
    lengths = np.diff(rendering.byte_ends, prepend=0)
    front = np.zeros(0, np.int64) if bos_id is None else np.array([bos_id], np.int64)
    windows = []
    done = 0
    while done < n:
        end = min(context if done == 0 else done + stride, n)
        start = 0 if done == 0 else max(end - (context - len(front)), 0)
        fresh = counted[start:end].copy()
        # what an earlier window has scored is context here
        fresh[: done - start] = False
        ids = rendering.ids[start:end]
        if start > 0:
            ids, fresh = np.concatenate([front, ids]), np.concatenate([np.zeros(len(front), bool), fresh])
        share = (end - done) / n
        if fresh.any():
            size = int(lengths[done:end][counted[done:end]].sum())
            windows.append(Window(ids, fresh, size, share, key))
        done = end
    return windows


def check_window(context: int, stride: int) -> None:
    """Refuse a context and stride that would leave a token without anything before it."""
    if context < 4:
        raise ConfigError(f"a context of {context} tokens is too short to score text; give at least 4.")
    # two places are not for fresh tokens: a BOS token's, and one of context
    if not 1 <= stride <= context - 2:
        raise ConfigError(
            f"a stride of {stride} tokens does not fit a context of {context}; give 1 to {context - 2}, so that every "
            "window reads something before what it scores."
        )


def score_windows(model: Scorer, windows: Iterable[Window], batch_tokens: int) -> Iterator[tuple[Window, float]]:
    """Each window with the log-likelihood (natural logarithm) of its scored tokens; otherwise as `score_tokens`."""
    for window, logprobs, _ in score_tokens(model, windows, batch_tokens):
        yield window, float(logprobs.sum())


TokenScores = tuple[Window, FloatArray, FloatArray]
"""A window, and of each of its scored tokens the log-probability and the probability of its class."""


def score_tokens(
    model: Scorer, windows: Iterable[Window], batch_tokens: int, classes: torch.Tensor | None = None
) -> Iterator[TokenScores]:
    """Each window with the scores of its scored tokens; the order may differ.

    ``batch_tokens``: most tokens of one forward pass, padding included (a single longer window goes alone).
    ``classes``: class of every id of the head; without it all tokens are one class.
    """
    waiting: list[Window] = []
    room = 0
    for window in windows:
        waiting.append(window)
        room += len(window)
        if room >= _BATCHES_TO_SORT * batch_tokens:
            yield from _score_sorted(model, waiting, batch_tokens, classes)
            waiting, room = [], 0
    yield from _score_sorted(model, waiting, batch_tokens, classes)


def _score_sorted(
    model: Scorer, windows: list[Window], batch_tokens: int, classes: torch.Tensor | None
) -> Iterator[TokenScores]:
    # longest first: a batch that does not fit in memory shows at once
    ordered = sorted(windows, key=len, reverse=True)
    start = 0
    while start < len(ordered):
        rows = max(batch_tokens // len(ordered[start]), 1)
        batch = ordered[start : start + rows]
        yield from _score_batch(model, batch, classes)
        start += rows


def _score_batch(model: Scorer, batch: list[Window], classes: torch.Tensor | None) -> Iterator[TokenScores]:
    width = len(batch[0])
    ids = np.zeros((len(batch), width), dtype=np.int64)
    scored = np.zeros((len(batch), width), dtype=bool)
    for row, window in enumerate(batch):
        ids[row, : len(window)] = window.ids
        scored[row, : len(window)] = window.scored
    outside = ids[ids >= model.vocab_size]
    if outside.size:
        raise DataError(
            f"token id {int(outside[0])} lies outside the head of {model.name} ({model.vocab_size} rows), so it has no "
            "probability; give the tokenizer that belongs to the model."
        )
    lengths = torch.tensor([len(window) for window in batch], dtype=torch.int64)
    data: BatchedDataDict = BatchedDataDict({"input_ids": torch.from_numpy(ids), "input_lengths": lengths})
    scores = model.get_logprobs(data) if classes is None else model.get_logprobs(data, classes=classes)
    # first what is scored, then the check: what else the model says, behind a row's end for one, does not matter
    values = np.where(scored, scores["logprobs"].cpu().double().numpy(), 0.0)
    if not np.isfinite(values).all():
        raise LossError(f"{model.name} gives a probability that is not finite; its weights are damaged.")
    masses = np.ones_like(values) if classes is None else scores["class_logprobs"].cpu().double().exp().numpy()
    for window, logprobs, mass, mask in zip(batch, values, masses, scored, strict=True):
        yield window, logprobs[mask], mass[mask]
