"""How much of what failed messages say is compared when student and hinted teacher come from different families.

    python -m benchmarks.families --logs FOLDER --family qwen3=FOLDER --family llama3_2=FOLDER ...    # families.json

``--logs`` holds agent logs of any known format; a family is a tokenizer folder, optionally with a chat template of its
own (``smollm2=FOLDER,limbeck/recipes/data/chatml_tools.jinja``). Every failed call of the logs is a site. ``compared``
is the share of the bytes of the students' texts, names, argument keys and values that lie in exact chunks; ``of_all``
the same with the templates' own markup in the denominator; ``rows`` of ``sites`` became rows.
"""

from __future__ import annotations

import os
from collections import Counter
from itertools import permutations
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np

from benchmarks.common import parser, record
from limbeck.tokens import load_tokenizer
from limbeck.traces import CollatorConfig, ComposerDataCollator
from limbeck.traces.files import IngestOptions, IngestStats, ingest
from limbeck.traces.schema import Trace

MAX_SEQ_LEN = 16384


def load_family(spec: str) -> tuple[str, Any]:
    name, _, place = spec.partition("=")
    folder, _, template = place.partition(",")
    tokenizer = load_tokenizer(folder)
    if template:
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    return name, tokenizer


def read_logs(folder: Path) -> list[Trace]:
    """Traces with at least one failed call."""
    stats = IngestStats()
    traces = ingest(sorted(folder.glob("*.jsonl")), IngestOptions(), stats)
    return [trace for trace in traces if any(message.is_error for message in trace.messages)]


def measure(student: Any, teacher: Any, traces: list[Trace]) -> dict[str, Any]:
    settings = CollatorConfig(max_seq_len=MAX_SEQ_LEN, enable_replay_dpo=False, on_error="skip")
    collator = ComposerDataCollator(student, settings, teacher_tokenizer=teacher)
    compared = said = exact = written = rows = 0
    for trace in traces:
        batch = collator([trace])
        here = batch["site_compared"].sum(0).tolist()
        compared, said, rows = compared + here[0], said + here[1], rows + len(batch["site_target"])
        vocab = collator.student.tokenizer.vocab
        sizes = np.where(vocab.special, 0, vocab.byte_len)
        ids, chunk = batch["sdpo_student_input_ids"].numpy(), batch["sdpo_alignment_student_chunk_id"].numpy()
        correct = batch["sdpo_alignment_pair_is_correct"].numpy()
        index, valid = batch["student_response_idx"].numpy(), batch["student_response_valid"].numpy()
        for row in range(len(ids)):
            places = index[row][valid[row]]
            size, where = sizes[ids[row][places]], chunk[row][places]
            written += int(size.sum())
            exact += int(size[(where >= 0) & correct[row][np.maximum(where, 0)]].sum())
    left_out = Counter({k: v for k, v in collator.dropped.items() if not k.startswith(("policy_", "written_"))})
    return {
        "rows": rows,
        "compared": round(compared / max(said, 1), 4),
        "of_all": round(exact / max(written, 1), 4),
        "bytes": said,
        "left_out": dict(sorted(left_out.items())),
    }


def main() -> None:
    arguments = parser(__file__, __doc__)
    arguments.add_argument("--logs", type=Path, required=True, help="folder with agent logs (*.jsonl)")
    arguments.add_argument("--family", action="append", required=True, help="NAME=FOLDER[,TEMPLATE]; at least two")
    arguments.add_argument("--longest", type=int, default=120, help="leave out traces of more messages")
    args = arguments.parse_args()
    families = dict(map(load_family, args.family))
    traces = [trace for trace in read_logs(args.logs) if len(trace.messages) <= args.longest]
    sites = sum(message.is_error for trace in traces for _, message in trace.new_messages())
    rows = []
    for student, teacher in permutations(families, 2):
        rows.append({"student": student, "teacher": teacher, **measure(families[student], families[teacher], traces)})
        print(f"{student:>14} {teacher:>14} {rows[-1]['rows']:>5} {rows[-1]['compared']:.4f} {rows[-1]['of_all']:.4f}")
    record(args.out, {"traces": len(traces), "failed_results": sites, "max_seq_len": MAX_SEQ_LEN, "pairs": rows})


if __name__ == "__main__":
    main()
