"""A step from a cached teacher beside plain cross-entropy on the same rows, on the CPU.

    python -m benchmarks.cached_step

The student has SmolLM2-135M's shape and tokenizer; the cache holds 128 tokens per position over Llama-3.2's vocabulary
(of a small random model: its body plays no part here). Both kinds of step are taken turn by turn with one student in
one process, so only their ratio counts. ``collate``: tokenizing with both tokenizers, aligning, laying out chunks,
padding. Medians; ``step`` and ``collate`` in seconds of CPU time, the trainer's sections ``loss`` and ``layout`` by the
clock, which a busy machine stretches. Writes ``cached_step.json``.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import load_tokenizer, parser, record
from benchmarks.first_step import SHAPE, TOKENIZERS

KINDS = ("cross_entropy", "cached")


def settings(folder: Path, rows: int, length: int, kind: str) -> dict[str, Any]:
    """The run file of one kind of step."""
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}

    def model(name: str, shape: dict[str, Any]) -> dict[str, Any]:
        overrides = {**SHAPE, **shape, "model_type": "llama"}
        return {"init": "random", "tokenizer": {"name": str(folder / name)}, "model_overrides": overrides}

    return {
        "policy": {**model("student", {}), "train_micro_batch_size": rows},
        "teacher": {**model("teacher", {**small, "num_key_value_heads": 2}), "cache": str(folder / "cache")},
        "data": {"train": str(folder / "train.jsonl"), "max_input_seq_length": length},
        "loss_fn": {"kl_loss_weight": 1.0 if kind == "cached" else 0.0},
        "distillation": {"num_prompts_per_step": rows},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(folder / "run"), "tensorboard_enabled": False},
    }


def prepare(folder: Path, rows: int, length: int) -> None:
    """Tokenizers, documents that fill a row, and the cache."""
    from limbeck.algorithms.caching import cache_teachers
    from limbeck.algorithms.config import MasterConfig
    from limbeck.config import resolve
    from limbeck.demo import standard_library_texts

    for name, source in TOKENIZERS.items():
        load_tokenizer(source).save_pretrained(folder / name)
    text, size = "\n\n".join(dict.fromkeys(standard_library_texts(200))), 6 * length
    parts = [text[i * size : (i + 1) * size] for i in range(rows)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": p}) + "\n" for p in parts), encoding="utf-8")
    cache_teachers(resolve(MasterConfig, settings(folder, rows, length, "cached")))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of a call, and what it gave."""
    begun = time.process_time()
    found = call()
    return time.process_time() - begun, found


def main() -> None:
    """Measure both kinds turn by turn."""
    from limbeck.algorithms.build import load_datasets, load_tokenizers, make_collator
    from limbeck.algorithms.config import MasterConfig
    from limbeck.algorithms.xtoken_off_policy_distillation import make_loss
    from limbeck.config import resolve
    from limbeck.models.policy import Policy
    from limbeck.teachers.build import make_teacher
    from limbeck.tokens import ByteVocab
    from limbeck.utils.timer import Timer

    arguments = parser(__file__, __doc__)
    arguments.add_argument("--rows", type=int, default=2)
    arguments.add_argument("--length", type=int, default=256)
    arguments.add_argument("--rounds", type=int, default=5)
    args = arguments.parse_args()
    measured: dict[str, dict[str, list[float]]] = {
        kind: {"step": [], "collate": [], "loss": [], "layout": []} for kind in KINDS
    }
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch), args.rows, args.length)
        kinds: dict[str, Any] = {}
        for kind in KINDS:
            config = resolve(MasterConfig, settings(Path(scratch), args.rows, args.length, kind))
            tokenizer, others = load_tokenizers(config)
            loss_fn = make_loss(config.loss_fn, tokenizer, others)
            conditions = [objective.conditions for objective in loss_fn.objectives]
            vocab = ByteVocab.from_tokenizer(tokenizer)
            teachers = [make_teacher(config.all_teachers[0], 0, others[0], vocab, seed=1)] if others else []
            kinds[kind] = (make_collator(config, tokenizer, others, conditions), loss_fn, teachers)
        student = Policy(config.policy, tokenizer, name="student", seed=0)
        records = [load_datasets(config)[0][i] for i in range(args.rows)]
        for number in range(args.rounds + 1):
            for kind, (collate, loss_fn, teachers) in kinds.items():
                timer = Timer()
                collating, batch = timed(lambda: collate(records))  # noqa: B023
                stepping, result = timed(lambda: student.train(batch, loss_fn, teachers=teachers, timer=timer))  # noqa: B023
                if number:  # the first steps also allocate
                    parts = timer.get_timing_metrics("sum")
                    found = (stepping + collating, collating, parts["loss"], parts["layout"])
                    for name, value in zip(measured[kind], found, strict=True):
                        measured[kind][name].append(value)
    medians = {kind: {n: statistics.median(v) for n, v in own.items()} for kind, own in measured.items()}
    cached, plain = medians["cached"], medians["cross_entropy"]
    result = {
        "rows": args.rows,
        "length": args.length,
        "rounds": args.rounds,
        "seconds": {kind: {n: round(v, 4) for n, v in own.items()} for kind, own in medians.items()},
        "cached_to_cross_entropy": round(cached["step"] / plain["step"], 3),
        "alignment_and_layout_of_a_step": round((cached["collate"] + cached["layout"]) / cached["step"], 4),
    }
    record(args.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
