"""Models on files of any kind: texts, conversations, multiple choice, preference pairs, questions to be answered.

>>> from limbeck.evaluation.files import EvalOptions, evaluate
>>> result = evaluate(["./student", "./teacher"], ["val.jsonl"], EvalOptions(max_documents=100))   # doctest: +SKIP
>>> result["models"]["./student"]["val.jsonl"]["bpb"]                                              # doctest: +SKIP
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from limbeck.data.readers import HUB_PREFIX, BadRecord, JsonlReader, expand, format_of
from limbeck.errors import DataError
from limbeck.evaluation.answers import is_answered, score_answers
from limbeck.evaluation.bits import Begin, EvalModel, EvalOptions, score_documents, unwatched
from limbeck.evaluation.bos import bos_bits
from limbeck.evaluation.choices import ChoiceFile, layout_of, score_choices
from limbeck.evaluation.models import find_model
from limbeck.evaluation.pairs import is_pair, score_pairs
from limbeck.tokens import ByteTokenizer

__all__ = ["EvalOptions", "detect_mode", "evaluate", "evaluate_file"]


def evaluate(
    models: Sequence[str], files: Sequence[str], options: EvalOptions | None = None, begin: Begin | None = None
) -> dict[str, Any]:
    """Score every file (path, glob, folder or ``hf:`` id) by every model, one model in memory at a time.

    Returns ``{"models": {spec: {file: {"bpb", "bytes", "documents", "tokens", ...}}}, "files": {file: mode},
    "loaded": {spec: {"context", "stride", "step", "bos"}}, "settings": {...}}``. Multiple choice adds ``acc`` and
    ``acc_norm``; preference pairs add ``accuracy``, ``chosen_logprob``, ``rejected_logprob`` and ``margin``; answers
    add ``exact`` and ``ended``. ``bos``: see :func:`unlike_tokenizer`.
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
        if set(modes.values()) != {"chat"}:  # a chat template writes its own beginning
            details[source.spec]["bos"] = unlike_tokenizer(model, options.bos == "expected")
        results[source.spec] = {path: evaluate_file(model, path, modes[path], options, begin) for path in paths}
        del model
        # a model may be part of a cycle, and the next one needs its memory now
        gc.collect()
    return {"models": results, "files": modes, "loaded": details, "settings": asdict(options)}


def unlike_tokenizer(model: EvalModel, follow: bool) -> dict[str, Any] | None:
    """How the weights expect texts to begin, where the tokenizer does otherwise; ``follow``: score them that way."""
    tokenizer = ByteTokenizer.of(model.tokenizer)
    bits = bos_bits(model.policy, tokenizer)
    if bits is None or bits.expected in (None, tokenizer.adds_bos):
        return None
    if follow:
        model.begin_texts(bits.expected)
    return {"expected": bits.expected, "followed": follow, "bits": str(bits)}


def detect_mode(path: str, options: EvalOptions) -> str:
    """The mode of one file: as asked, or by its first record."""
    if options.mode != "auto":
        return options.mode
    if path.startswith(HUB_PREFIX) or format_of(path) != "jsonl":
        return "text"
    reader = JsonlReader(path, cache_dir=None)
    if not len(reader):
        raise DataError(f"{path} has no record; give a file with documents.")
    try:
        row = reader.row(0)
    except BadRecord as error:
        raise DataError(f"{reader.location(0)}: {error}; correct the file.") from None
    if is_pair(row):
        return "pairs"
    if options.messages_key in row and options.text_key not in row:
        return "chat"
    if options.text_key not in row and layout_of(row) is not None:
        return "choice"
    if options.text_key not in row and is_answered(row):
        return "answers"
    return "text"


def evaluate_file(
    model: EvalModel, path: str, mode: str, options: EvalOptions, begin: Begin | None = None
) -> dict[str, Any]:
    """Summary of one file by one model."""
    if mode not in ("choice", "pairs", "answers"):
        return score_documents(model, path, mode, options, begin)
    records = ChoiceFile(path, options.max_documents)
    advance = begin(model.name, path, len(records)) if begin else unwatched
    if mode == "answers":
        return score_answers(model, records, model.batch_tokens, options.max_new_tokens, advance)
    score = score_choices if mode == "choice" else score_pairs
    return score(model, records, model.batch_tokens, advance)
