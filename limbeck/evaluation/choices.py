"""Multiple choice by likelihood: which of a question's answers the model finds most probable.

Two figures: ``acc`` compares the log-likelihoods of the answers, ``acc_norm`` those per byte, so that a long answer is
not punished for its length. Prompts are those in common use for each data set.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from limbeck.data.readers import BadRecord, JsonlReader, Reader, format_of
from limbeck.errors import DataError
from limbeck.evaluation.bits import BoolArray, EvalModel, FileResult, IntArray, Window, score_windows

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """Prompts and continuations, one per answer (most layouts repeat the prompt), and the right one's place."""

    prompts: tuple[str, ...]
    continuations: tuple[str, ...]
    gold: int

    def __len__(self) -> int:
        return len(self.continuations)

    def size(self, answer: int) -> int:
        """Bytes of an answer, without the space that parts it from the prompt."""
        return len(self.continuations[answer].removeprefix(" ").encode("utf-8"))


def _same(prompt: str, answers: list[str], gold: int) -> Question:
    return Question((prompt,) * len(answers), tuple(f" {a}" for a in answers), gold)


def _plain(text: str) -> str:
    """HellaSwag's how-to texts carry headings in brackets; as everywhere, they become sentence ends."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _hellaswag(row: Row) -> Question:
    context = _plain(f"{row['activity_label']}: {row['ctx']}" if row.get("activity_label") else row["ctx"])
    return _same(context, [_plain(e) for e in row["endings"]], int(row["label"]))


def _arc(row: Row) -> Question:
    labels = list(row["choices"]["label"])
    prompt = f"Question: {row['question']}\nAnswer:"
    return _same(prompt, list(row["choices"]["text"]), labels.index(row["answerKey"]))


def _piqa(row: Row) -> Question:
    return _same(f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], int(row["label"]))


def _winogrande(row: Row) -> Question:
    """The answers stand in the sentence; what is scored is the rest of it, given each answer."""
    before, _, after = row["sentence"].partition("_")
    options = (row["option1"], row["option2"])
    return Question(tuple(before + o for o in options), (after, after), int(row["answer"]) - 1)


def _mmlu(row: Row) -> Question:
    letters = "ABCDEFGHIJ"[: len(row["choices"])]
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(letters, row["choices"], strict=True))
    subject = str(row["subject"]).replace("_", " ")
    prompt = (
        f"The following are multiple choice questions (with answers) about {subject}.\n\n"
        f"{row['question'].strip()}\n{listed}\nAnswer:"
    )
    return _same(prompt, list(letters), int(row["answer"]))


def _listed(row: Row) -> Question:
    return _same(f"Question: {row['question']}\nAnswer:", list(row["choices"]), int(row["answer"]))


LAYOUTS: dict[str, tuple[tuple[str, ...], Callable[[Row], Question]]] = {
    "hellaswag": (("ctx", "endings", "label"), _hellaswag),
    "arc": (("question", "choices", "answerKey"), _arc),
    "piqa": (("goal", "sol1", "sol2", "label"), _piqa),
    "winogrande": (("sentence", "option1", "option2", "answer"), _winogrande),
    "mmlu": (("subject", "question", "choices", "answer"), _mmlu),
    "choices": (("question", "choices", "answer"), _listed),
}
"""Layout name -> keys that mark it, and how a record is asked; the first that fits is used."""


def layout_of(row: Row) -> str | None:
    """Name of the layout of a record, or None."""
    return next((name for name, (keys, _) in LAYOUTS.items() if all(key in row for key in keys)), None)


def question_of(row: Row) -> Question:
    """The question in a record of any known layout; raises BadRecord."""
    name = layout_of(row)
    if name is None:
        known = "; ".join(f"{name}: {', '.join(keys)}" for name, (keys, _) in LAYOUTS.items())
        raise BadRecord("unknown_layout", f"the keys {', '.join(sorted(row))} fit no layout ({known})")
    try:
        question = LAYOUTS[name][1](row)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadRecord(
            "bad_question", f"the {name} record is not complete ({type(error).__name__}: {error})"
        ) from None
    texts = (*question.prompts, *question.continuations)
    if not all(isinstance(t, str) for t in texts) or not all(question.prompts) or not all(question.continuations):
        raise BadRecord("bad_question", f"a prompt or an answer of the {name} record is empty or no text")
    if not 0 <= question.gold < len(question) or len(question) < 2:
        raise BadRecord("bad_question", f"answer {question.gold} of {len(question)} does not exist")
    return question


class ChoiceFile:
    """Records of a jsonl file by number, at most ``limit`` of them; every error names file and line."""

    def __init__(self, path: str, limit: int | None = None) -> None:
        if format_of(path) != "jsonl":
            raise DataError(f"{path} is no .jsonl file; multiple choice and pairs are read from one object per line.")
        self.path = path
        self._reader: Reader = JsonlReader(path, cache_dir=None)
        self._count = min(len(self._reader), limit or len(self._reader))
        if not self._count:
            raise DataError(f"{path} has no record; give a file with questions.")

    def __len__(self) -> int:
        return self._count

    def parsed(self, parse: Callable[[Row], Any]) -> Iterator[tuple[int, Any]]:
        """(number, parsed record) of all; a bad record stops with its place."""
        for number in range(self._count):
            try:
                yield number, parse(self._reader.row(number))
            except BadRecord as error:
                raise DataError(f"{self._reader.location(number)}: {error}; correct or remove the line.") from None


def score_choices(
    model: EvalModel, records: ChoiceFile, batch_tokens: int, advance: Callable[[float], None]
) -> dict[str, Any]:
    """``acc``, ``acc_norm``, ``documents``, and ``bpb``, ``bytes``, ``tokens`` of the right answers."""
    questions: dict[int, Question] = {}
    skipped: Counter[str] = Counter()

    def windows() -> Iterator[Window]:
        for number, question in records.parsed(question_of):
            questions[number] = question
            for answer in range(len(question)):
                yield choice_window(model, question, answer, (number, answer), skipped)

    scores: dict[int, dict[int, tuple[float, Window]]] = defaultdict(dict)
    for window, nats in score_windows(model.policy, windows(), batch_tokens):
        number, answer = window.key
        scores[number][answer] = (nats, window)
        advance(window.share)
    return _summary(questions, scores, skipped)


def choice_window(model: EvalModel, question: Question, answer: int, key: Any, skipped: Counter[str]) -> Window:
    """One answer behind its prompt; tokens that reach into the answer's bytes are scored.

    Prompt and answer are tokenized together, as text is in training. A prompt too long for the context loses its front.
    """
    prompt = question.prompts[answer]
    rendering = model.text(prompt + question.continuations[answer])
    # by bytes and by ends: a token that straddles the border belongs to the answer
    scored = (rendering.byte_ends > len(prompt.encode("utf-8"))) & (~rendering.special)
    scored[:1] = False
    ids, scored = last_tokens(model, rendering.ids, scored, skipped)
    size = len(question.continuations[answer].encode("utf-8"))
    return Window(ids, scored, size, 1 / len(question), key)


def last_tokens(
    model: EvalModel, ids: IntArray, scored: BoolArray, skipped: Counter[str]
) -> tuple[IntArray, BoolArray]:
    """The tokens that the model's context has room for, behind its BOS token; what is lost is the front."""
    if len(ids) <= model.context:
        return ids, scored
    front = np.zeros(0, np.int64) if model.bos_id is None else np.array([model.bos_id], np.int64)
    keep = model.context - len(front)
    skipped["truncated_prompts"] += 1
    scored = np.concatenate([np.zeros(len(front), bool), scored[-keep:]])
    # an answer may fill the context by itself; its first token then has no predictor
    scored[:1] = False
    return np.concatenate([front, ids[-keep:]]), scored


def _summary(
    questions: dict[int, Question], scores: dict[int, dict[int, tuple[float, Window]]], skipped: Counter[str]
) -> dict[str, Any]:
    right = FileResult(documents=len(questions), skipped=skipped)
    hits = norm_hits = 0
    for number, question in questions.items():
        nats = [scores[number][a][0] for a in range(len(question))]
        # an answer may be empty but for the space in front of it, which does not count
        per_byte = [n / max(question.size(a), 1) for a, n in enumerate(nats)]
        hits += int(np.argmax(nats)) == question.gold
        norm_hits += int(np.argmax(per_byte)) == question.gold
        gold_nats, window = scores[number][question.gold]
        right.nats += gold_nats
        right.bytes += window.size
        right.tokens += window.tokens
    n = len(questions)
    return {"acc": hits / n, "acc_norm": norm_hits / n, **right.summary()}
