"""Real batches for `loss.py`: the projection of two tokenizers with its trees, and the ids and chunks of a text.

    python benchmarks/gpu/prepare.py llama3_2 qwen3 --text english.txt -o .carry/english
    python benchmarks/gpu/prepare.py smollm2 gemma3 --text japanese.txt -o .carry/japanese

Tokenizers are folders or files, or names of the tests' zoo. Each folder takes some 15 MB.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.common import load_tokenizer
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.projection import load_or_build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("student")
    parser.add_argument("teacher")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=16_384, help="rows of the student that predict a token")
    parser.add_argument("--samples", type=int, default=8)
    args = parser.parse_args()
    student, teacher = load_tokenizer(args.student), load_tokenizer(args.teacher)
    projection = load_or_build(student, teacher, trees=True)
    args.out.mkdir(parents=True, exist_ok=True)
    stored = projection.save(args.out / "projection.safetensors")
    (args.out / "projection.safetensors.gz").write_bytes(gzip.compress(stored.read_bytes()))
    stored.unlink()
    width = args.rows // args.samples + 1
    text = args.text.read_text(encoding="utf-8", errors="ignore")
    step = len(text) // args.samples
    collator = CrossTokenizerCollator(
        student_tokenizer=student, teacher_tokenizer=teacher, ctx_length_student=width, ctx_length_teacher=width
    )
    # eight bytes a token are more than any row needs
    rows = [{"text": text[i * step :][: 8 * width], "idx": i, "loss_multiplier": 1.0} for i in range(args.samples)]
    batch = collator(rows)
    tensors = {name: value.clone() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    save_file(tensors, args.out / "batch.safetensors")
    chunks = int(batch["alignment_pair_valid"].sum())
    tokens = [int((batch[f"alignment_{side}_chunk_id"] >= 0).sum()) for side in ("student", "teacher")]
    print(f"{chunks} chunks of {tokens[0]} student and {tokens[1]} teacher tokens")


if __name__ == "__main__":
    main()
