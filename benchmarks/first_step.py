"""From ``limbeck train`` to the end of step 1, stage by stage: two models of SmolLM2-135M's shape on the CPU.

    python -m benchmarks.first_step                          # this tree
    python -m benchmarks.first_step --before OTHER_CHECKOUT  # and another one, turn by turn in one run

The student has SmolLM2's tokenizer (49,152 ids), the teacher Llama-3.2's (128,256); both have random weights, stored
as any model is. The run file is what ``limbeck init`` would write: rows of at most 512 tokens, eight records a step. A
start is the command in a process of its own: ``first`` finds an empty ``$LIMBECK_CACHE``, ``second`` what the first has
left. The time of a stage is read where its line appears; ``cpu_s`` is user and system time of the process, which a busy
machine stretches less than the clock. Medians of all rounds. Writes ``first_step.json`` beside this file.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import load_tokenizer, parser, record

TOKENIZERS = {"student": "smollm2", "teacher": "llama3_2"}
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
TICKS = os.sysconf("SC_CLK_TCK")


def prepare(folder: Path) -> Path:
    """Both models and the data in ``folder``; the run file."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from limbeck.demo import standard_library_texts

    for name, source in TOKENIZERS.items():
        tokenizer = load_tokenizer(source)
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SHAPE)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    texts = dict.fromkeys(standard_library_texts(400))
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    run_file = folder / "run.yaml"
    run_file.write_text(
        f"policy: {{model_name: {folder / 'student'}, max_total_sequence_length: 512}}\n"
        f"teacher: {{model_name: {folder / 'teacher'}, max_total_sequence_length: 512}}\n"
        f"data: {{mode: text, train: {folder / 'train.jsonl'}}}\n"
        "distillation: {num_prompts_per_step: 8, max_num_steps: 1}\n"
        "checkpointing: {enabled: false}\n"
        f"logger: {{log_dir: {folder / 'run'}}}\n",
        encoding="utf-8",
    )
    return run_file


def cpu_seconds(pid: int) -> float:
    """User and system time of a living process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def start(tree: Path, run_file: Path, caches: Path) -> dict[str, Any]:
    """One run of a single step with the code of ``tree``: seconds when step 1 begins and ends, and by stage; ``until:``
    is what comes before a stage and belongs to none."""
    shutil.rmtree(run_file.parent / "run", ignore_errors=True)
    env = {**os.environ, "PYTHONPATH": str(tree), "LIMBECK_CACHE": str(caches), "COLUMNS": "200"}
    begun = time.perf_counter()
    command = [sys.executable, "-m", "limbeck", "train", str(run_file)]
    process = subprocess.Popen(command, cwd=tree, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stderr is not None
    stages: dict[str, dict[str, float]] = {}
    told, line, running, last = "", "", "", (0.0, 0.0)
    while piece := os.read(process.stderr.fileno(), 65536).decode():
        now = (time.perf_counter() - begun, cpu_seconds(process.pid))
        told += piece
        for part in re.findall(r"\n|[^\n]+", piece):
            line = "" if part == "\n" else line + part
            # what no stage claims lies between them
            if running and not line:
                _add(stages, running, now, last)
                running, last = "", now
            elif line.endswith(" ..."):
                running = re.sub(r"/\S+/", "", line.removesuffix(" ..."))
                _add(stages, f"until: {running}" if stages else "python and the command", now, last)
                last = now
                if running.startswith("the first step"):
                    begins = now
    if process.wait() != 0:
        raise SystemExit(f"the run failed:\n{told}")
    return {
        "step_1_begins": _seconds(begins),
        "step_1_ends": _seconds(last),
        "stages": {name: {key: round(value, 2) for key, value in spent.items()} for name, spent in stages.items()},
    }


def _add(stages: dict[str, dict[str, float]], name: str, now: tuple[float, float], before: tuple[float, float]) -> None:
    spent = stages.setdefault(name, {"wall_s": 0.0, "cpu_s": 0.0})
    spent["wall_s"] += now[0] - before[0]
    spent["cpu_s"] += now[1] - before[1]


def _seconds(moment: tuple[float, float]) -> dict[str, float]:
    return {"wall_s": round(moment[0], 2), "cpu_s": round(moment[1], 2)}


def middle(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of starts, figure by figure."""

    def of(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: of([value[key] for value in values if key in value]) for key in values[0]}
        return round(statistics.median(values), 2)

    return of(starts)  # type: ignore[no-any-return]


def main() -> None:
    """Measure the trees turn by turn."""
    arguments = parser(__file__, __doc__)
    arguments.add_argument("--before", type=Path, help="another checkout to measure beside this one")
    arguments.add_argument("--rounds", type=int, default=3)
    args = arguments.parse_args()
    here = Path(__file__).resolve().parent.parent
    trees = {"before": args.before.resolve(), "after": here} if args.before else {"after": here}
    measured: dict[str, dict[str, list[dict[str, Any]]]] = {n: {"first": [], "second": []} for n in trees}
    with tempfile.TemporaryDirectory() as scratch:
        run_file = prepare(Path(scratch))
        for number in range(args.rounds):
            for name, tree in trees.items():
                caches = Path(scratch, "caches", f"{name}_{number}")
                for which in ("first", "second"):
                    measured[name][which].append(start(tree, run_file, caches))
    result: dict[str, Any] = {"rounds": args.rounds, "threads": int(os.environ.get("OMP_NUM_THREADS", "0")) or "all"}
    result["load"] = round(os.getloadavg()[0], 1)
    for name, by_kind in measured.items():
        result[name] = {which: middle(starts) for which, starts in by_kind.items()}
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    result["peak_mib"] = round(peak / 2**10)
    record(args.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
