"""Multiple choice by `limbeck eval` against the lm-eval harness, on the same questions and models.

    python -m benchmarks.multiple_choice MODEL ... --data FOLDER       # writes benchmarks/multiple_choice.json

FOLDER holds hellaswag*.jsonl, arc_easy*.jsonl and piqa*.jsonl in their published columns. The harness (limbeck[eval])
reads them with its own tasks, no network: only where the data lies is changed. Every answer's log-likelihood is
compared, and the two figures of each set. A MODEL is whatever `limbeck eval` takes; `random` is a small model of random
weights with the tokenizer of the first.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
import torch
import yaml
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import origin, parser
from limbeck.evaluation.bits import EvalModel, EvalOptions, Window, score_windows
from limbeck.evaluation.choices import ChoiceFile, Question, choice_window, question_of
from limbeck.evaluation.models import find_model
from limbeck.tokens import load_tokenizer

TASKS = ("hellaswag", "arc_easy", "piqa")


def main() -> None:
    """Figures of all models and sets."""
    arguments = parser(__file__, __doc__)
    arguments.add_argument("models", nargs="+")
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--questions", type=int, default=30, help="of each set")
    given = arguments.parse_args()
    result: dict[str, Any] = {**origin("lm_eval"), "questions": given.questions, "models": {}}
    with tempfile.TemporaryDirectory() as folder:
        files = {task: _copy(given.data, task, Path(folder), given.questions) for task in TASKS}
        for name in given.models:
            where = str(_random(given.models[0], Path(folder))) if name == "random" else name
            model = EvalModel(find_model(where), EvalOptions(device="cpu", batch_tokens=2048))
            shown = name if name == "random" else Path(name).name
            result["models"][shown] = compare(model, files)
            print(shown, json.dumps(result["models"][shown], indent=1), flush=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def compare(model: EvalModel, files: dict[str, Path]) -> dict[str, Any]:
    """Both ways' figures by set, the largest difference of an answer, and seconds of all sets."""
    start = time.perf_counter()
    mine = {task: ours(model, path) for task, path in files.items()}
    middle = time.perf_counter()
    theirs, figures = harness(model, files)
    end = time.perf_counter()
    out: dict[str, Any] = {"seconds": {"limbeck": round(middle - start, 1), "lm_eval": round(end - middle, 1)}}
    for task, (questions, scores) in mine.items():
        pairs = [(a, b) for q in questions for a, b in zip(scores[q], theirs[task][q], strict=True)]
        chosen = [(_best(scores[q]), _best(theirs[task][q])) for q in questions]
        per_byte = {q: [x / question.size(a) for a, x in enumerate(scores[q])] for q, question in questions.items()}
        out[task] = {
            "limbeck": {
                "acc": sum(_best(scores[q]) == question.gold for q, question in questions.items()) / len(questions),
                "acc_norm": sum(_best(per_byte[q]) == question.gold for q, question in questions.items())
                / len(questions),
            },
            "lm_eval": {name: figures[task][f"{name},none"] for name in ("acc", "acc_norm")},
            "answers": len(pairs),
            "questions with another choice": sum(a != b for a, b in chosen),
            "largest difference, nats": max(abs(a - b) for a, b in pairs),
        }
    return out


def ours(model: EvalModel, path: Path) -> tuple[dict[int, Question], dict[int, list[float]]]:
    """The questions of a file, and the log-likelihood of every answer."""
    questions: dict[int, Question] = {}
    dropped: Counter[str] = Counter()

    def windows() -> Iterator[Window]:
        for number, question in ChoiceFile(str(path)).parsed(question_of):
            questions[number] = question
            for answer in range(len(question)):
                yield choice_window(model, question, answer, (number, answer), dropped)

    found = {window.key: nats for window, nats in score_windows(model.policy, windows(), 2048)}
    assert not dropped, dropped
    return questions, {q: [found[q, a] for a in range(len(question))] for q, question in questions.items()}


def harness(model: EvalModel, files: dict[str, Path]) -> tuple[dict[str, dict[int, list[float]]], dict[str, Any]]:
    """The same by the harness: log-likelihoods by set and question, and its figures."""
    wrapped = HFLM(
        pretrained=model.policy.model,
        tokenizer=model.tokenizer,
        batch_size=8,
        device="cpu",
        add_bos_token=model.bos_id is not None,
    )
    with tempfile.TemporaryDirectory() as folder:
        for task, path in files.items():
            (Path(folder) / f"local_{task}.yaml").write_text(_local(task, path), encoding="utf-8")
        found: Any = lm_eval.simple_evaluate(
            model=wrapped,
            tasks=[f"local_{task}" for task in files],
            num_fewshot=0,
            log_samples=True,
            bootstrap_iters=0,
            task_manager=TaskManager(include_path=folder),
        )
    samples = {task: found["samples"][f"local_{task}"] for task in files}
    scores = {
        task: {sample["doc_id"]: [float(answer[0]) for answer in sample["filtered_resps"]] for sample in own}
        for task, own in samples.items()
    }
    return scores, {task: found["results"][f"local_{task}"] for task in files}


def _local(task: str, path: Path) -> str:
    """The harness' own task on a local file."""
    own = next(Path(lm_eval.__file__).parent.glob(f"tasks/*/{task}.yaml"))
    changed = {
        "include": str(own),
        "task": f"local_{task}",
        "tag": None,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"validation": str(path)}},
        "training_split": None,
        "validation_split": "validation",
        "test_split": None,
    }
    return yaml.safe_dump(changed)


def _best(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _copy(data: Path, task: str, folder: Path, count: int) -> Path:
    """The first questions of a set. The harness joins two columns to HellaSwag's context; here the first has it all."""
    source = next(iter(sorted(data.glob(f"{task}*.jsonl"))))
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()[:count]]
    if task == "hellaswag":
        rows = [{**row, "ctx_a": row["ctx"], "ctx_b": ""} for row in rows]
    out = folder / f"{task}.jsonl"
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return out


def _random(first: str, folder: Path) -> Path:
    """A small model of random weights."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer(find_model(first).tokenizer)
    out = folder / "random"
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            initializer_range=0.2,
        )
    ).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


if __name__ == "__main__":
    main()
