"""From `limbeck train` to the end of step 1 on a GPU, stage by stage: Llama-3.2-1B's shape from Qwen3-4B's.

    PYTHONPATH=. python benchmarks/gpu/first_step.py --student-tokenizer S --teacher-tokenizer T
    PYTHONPATH=. python benchmarks/gpu/first_step.py ... --tiny      # two small layers each, also without a GPU

Both models are folders with random weights in bfloat16, made here before the clock starts. Two starts, each in a
process of its own: the first finds empty caches (limbeck's and the compiler's), the second what the first has left.
Layers are compiled. Writes the row `first_step` into results.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.first_step import start
from benchmarks.gpu.common import save_row
from benchmarks.gpu.step import SHAPES, TINY

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def prepare(args: argparse.Namespace, folder: Path) -> Path:
    """Both models, the data and the run file."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from limbeck.demo import standard_library_texts
    from limbeck.tokens.loading import load_tokenizer

    for side, source in (("student", args.student_tokenizer), ("teacher", args.teacher_tokenizer)):
        shape = SHAPES[side] | (TINY | {"vocab_size": len(load_tokenizer(source))} if args.tiny else {})
        config = AutoConfig.for_model(**shape, tie_word_embeddings=True, max_position_embeddings=8192)
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder / side)
        del model
        given = Path(source)
        if given.is_dir():
            for name in TOKENIZER_FILES:
                if (given / name).is_file():
                    shutil.copy(given / name, folder / side / name)
        else:
            shutil.copy(given, folder / side / "tokenizer.json")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    texts = dict.fromkeys(standard_library_texts(400))
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    length, precision = (128, "float32") if args.tiny else (2048, "bfloat16")
    compiled = str(not args.tiny).lower()
    model = f"precision: {precision}, max_total_sequence_length: {length}, compile: {{enabled: {compiled}}}"
    run_file = folder / "run.yaml"
    run_file.write_text(
        f"policy: {{model_name: {folder / 'student'}, {model}}}\n"
        f"teacher: {{model_name: {folder / 'teacher'}, {model}}}\n"
        f"data: {{mode: text, train: {folder / 'train.jsonl'}}}\n"
        "distillation: {num_prompts_per_step: 8, max_num_steps: 1}\n"
        "checkpointing: {enabled: false}\n"
        f"logger: {{log_dir: {folder / 'run'}}}\n",
        encoding="utf-8",
    )
    return run_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student-tokenizer", required=True, help="folder or tokenizer.json")
    parser.add_argument("--teacher-tokenizer", required=True)
    parser.add_argument("--tiny", action="store_true", help="stores nothing")
    args = parser.parse_args()
    tree = Path(__file__).resolve().parent.parent.parent
    row: dict[str, object] = {"goal": {"first_s": 60, "second_to_first": 0.5}}
    with tempfile.TemporaryDirectory() as scratch:
        begun = time.perf_counter()
        run_file = prepare(args, Path(scratch))
        print(f"models made in {time.perf_counter() - begun:.0f} s", flush=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(scratch, "inductor"))
        os.environ["TRITON_CACHE_DIR"] = str(Path(scratch, "triton"))
        for name in ("first", "second"):
            row[name] = found = start(tree, run_file, Path(scratch, "caches"))
            print(f"{name} start: step 1 begins {found['step_1_begins']}, ends {found['step_1_ends']}", flush=True)
            for stage, spent in found["stages"].items():
                print(f"  {stage:40s} {spent['wall_s']:7.2f} s, {spent['cpu_s']:7.2f} s of CPU", flush=True)
    if not args.tiny:
        save_row("first_step", row)


if __name__ == "__main__":
    main()
