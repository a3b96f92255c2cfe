"""Answers that a model writes: greedy continuations of prompts, held against what should stand there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from limbeck.data.readers import BadRecord
from limbeck.errors import ConfigError
from limbeck.evaluation.bits import Advance, EvalModel, FileResult, Window, score_windows
from limbeck.evaluation.choices import ChoiceFile, Question, Row, choice_window
from limbeck.models.generate import LocalSampler, SamplingConfig

WRITTEN_AT_A_TIME = 256
LINE_END = "\n"


def is_answered(row: Row) -> bool:
    """Whether a record is a prompt with the one right answer to it."""
    return isinstance(row.get("prompt"), str) and isinstance(row.get("answer"), str)


def answered(row: Row) -> Question:
    """Prompt and answer of a record as a question with one continuation; raises BadRecord."""
    if not is_answered(row):
        keys = ", ".join(sorted(row))
        raise BadRecord("no_answer", f"a record must have the texts prompt and answer; this one has the keys {keys}")
    if not row["prompt"] or not row["answer"].strip():
        raise BadRecord("no_answer", "the prompt or the answer is empty")
    return Question((row["prompt"],), (row["answer"],), 0)


def is_right(written: str, answer: str) -> bool:
    """Whether the first line of what was written is the answer, blanks around it aside.

    >>> is_right(" 19\\n3 + 4", "19"), is_right(" 191\\n", "19"), is_right("\\n19", "19")
    (True, False, False)
    """
    return written.split(LINE_END, 1)[0].strip() == answer.strip()


def score_answers(
    model: EvalModel, records: ChoiceFile, batch_tokens: int, max_new_tokens: int, advance: Advance
) -> dict[str, Any]:
    """``exact``: share of prompts behind which the model writes the answer, then a line end or the text's end;
    ``ended``: share of what it writes that ends in time; and the bits per byte of the right answers."""
    questions: dict[int, Question] = dict(records.parsed(answered))
    room = min(model.context, model.limit() - max_new_tokens)
    if room < 2:
        raise ConfigError(f"answers of {max_new_tokens} tokens leave no room in the context of {model.name!r}")
    result = FileResult(documents=len(questions))

    def windows() -> Iterator[Window]:
        for number, question in questions.items():
            yield choice_window(model, question, 0, number, result.skipped)

    for window, nats in score_windows(model.policy, windows(), batch_tokens):
        result.nats += nats
        result.bytes += window.size
        result.tokens += window.tokens
        advance(0.5)
    vocab = model.encoder.vocab
    config = SamplingConfig(max_new_tokens=max_new_tokens, temperature=0, batch_size=WRITTEN_AT_A_TIME, stop=[LINE_END])
    prompts = [_prompt(model, question.prompts[0], room, result.skipped) for question in questions.values()]
    samples = LocalSampler(model.policy, config, vocab.end_ids(), vocab).sample(prompts)
    right = 0
    for question, sample in zip(questions.values(), samples, strict=True):
        written = vocab.join(sample.ids_T.tolist()).decode("utf-8", "replace")
        # one that the length cut off may go on: 19 may be the beginning of 191
        right += sample.ended and is_right(written, question.continuations[0])
        advance(0.5)
    n = len(questions)
    return {"exact": right / n, "ended": sum(sample.ended for sample in samples) / n, **result.summary()}


def _prompt(model: EvalModel, text: str, room: int, skipped: Counter[str]) -> torch.Tensor:
    """Ids of a prompt; one too long for the context loses its front, as a choice's does."""
    ids = model.text(text).ids
    if len(ids) > room:
        skipped["truncated_prompts"] += 1
        front = ids[:1] if model.bos_id is not None else ids[:0]
        return torch.cat([torch.from_numpy(front), torch.from_numpy(ids[-(room - len(front)) :])])
    return torch.from_numpy(ids)
