"""Cost of collating agent traces of 8 to 512 turns: tokens tokenized, and time.

    python -m benchmarks.traces --tokenizer FOLDER         # of Qwen3, for the stored figures; writes traces.json

Every eighth call fails, so the number of error sites grows with the trace, and each of them has a teacher sequence of
its own. `tokenized_per_token` is what went through the tokenizer, hints included, divided by the tokens of the trace;
tokenizing every sequence would cost `sequences_per_token`. Times are CPU seconds of one thread.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from benchmarks.common import parser, record
from limbeck.tokens import load_tokenizer
from limbeck.traces import CollatorConfig, ComposerDataCollator
from limbeck.traces.schema import Message, ToolCall, Trace

TURNS = (8, 16, 32, 64, 128, 256, 512)
REPEATS = 5
LISTING = "\n".join(
    f"-rw-r--r-- 1 user user {1000 + 37 * i} Nov {1 + i % 28} 10:{10 + i} part_{i}.txt" for i in range(8)
)


def trace(turns: int) -> Trace:
    """Half of the turns are calls, half are results."""
    messages = [
        Message(role="system", content="You are a careful assistant with a shell."),
        Message(role="user", content="Go through the folders one by one and say what you find."),
    ]
    for i in range(turns // 2):
        call = ToolCall(id=f"call{i:05d}", name="bash", arguments={"command": f"ls -l /data/folder_{i}"})
        failed = {"is_error": True, "error_kind": "file_not_found"} if i % 8 == 3 else {}
        text = f"ls: cannot access '/data/folder_{i}': No such file or directory" if failed else f"total {i}\n{LISTING}"
        messages.append(Message(role="assistant", content=f"Folder {i} is next.", tool_calls=[call]))
        messages.append(Message(role="tool", content=text, tool_call_id=call.id, name="bash", **failed))
    messages.append(Message(role="assistant", content="That was all."))
    return Trace(id=f"turns-{turns}", messages=messages, final_reward=1.0)


def measure(tokenizer: Any, turns: int) -> dict[str, Any]:
    example = trace(turns)
    # Long enough for the whole trace, so that its tokens are the policy row's; hint windows are cut as in training.
    whole = ComposerDataCollator(tokenizer, CollatorConfig(max_seq_len=1 << 20, enable_sdpo=False))
    length = int(whole([example])["input_lengths"][0])
    collator = ComposerDataCollator(tokenizer, CollatorConfig(max_seq_len=4096))
    collator([example])
    seconds, tokens = [], 0
    for _ in range(REPEATS):
        before = collator.tokens_tokenized
        start = time.process_time()
        batch = collator([example])
        seconds.append(time.process_time() - start)
        tokens = collator.tokens_tokenized - before
    emitted = int(
        batch["input_lengths"].sum() + batch["ctx_teacher_lengths"].sum() + batch["sdpo_student_lengths"].sum()
    )
    best = min(seconds)
    return {
        "turns": turns,
        "trace_tokens": length,
        "sites": len(batch["site_target"]),
        "dropped_sites": sum(v for k, v in batch["dropped"].items() if not k.startswith("policy_")),
        "tokenized": tokens,
        "tokenized_per_token": round(tokens / length, 4),
        "sequences_per_token": round(emitted / length, 2),
        "ms": round(1000 * statistics.median(seconds), 2),
        "best_ms": round(1000 * best, 2),
        "best_us_per_token": round(1e6 * best / length, 3),
    }


def main() -> None:
    arguments = parser(__file__, __doc__)
    arguments.add_argument("--tokenizer", required=True, help="folder, file or hub id; its template must know tools")
    args = arguments.parse_args()
    tokenizer = load_tokenizer(args.tokenizer)
    rows = [measure(tokenizer, turns) for turns in TURNS]
    result = {"tokenizer": args.tokenizer, "max_seq_len": 4096, "repeats": REPEATS, "rows": rows}
    record(args.out, result)
    print(f"{'turns':>6} {'tokens':>8} {'sites':>6} {'tokenized/token':>16} {'ms':>8} {'us/token':>9}")
    for row in rows:
        print(
            f"{row['turns']:>6} {row['trace_tokens']:>8} {row['sites']:>6} {row['tokenized_per_token']:>16.3f} "
            f"{row['best_ms']:>8.1f} {row['best_us_per_token']:>9.2f}"
        )


if __name__ == "__main__":
    main()
