"""A new user's first run: what `limbeck init` writes, unchanged, beside runs tuned by hand and the floor.

    PYTHONPATH=. python benchmarks/gpu/first_run.py WORK --tokenizers FOLDER --text FILE --chats FILE [--seconds 30]
    PYTHONPATH=. python benchmarks/gpu/first_run.py WORK ... --tiny      # toy models, also without a GPU

Two pairs of random weights and real tokenizers: 135M (SmolLM2's shape) from 1.5B (Qwen2.5's), 1B (Llama-3.2's) from 4B
(Qwen3's). Three kinds of data: paragraphs, conversations, documents of 2,048 tokens. FOLDER holds `smollm2`, `qwen2_5`,
`llama3_2` and `qwen3`, each with tokenizer.json; texts are repeated until a run lasts minutes.

Every run is a process of its own, ended `--seconds` behind its third step, from which on its speed is taken: by then it
has compiled what it compiles.
`init` is the unchanged file, the others set batches, compilation or both by hand, with the same records per step. The
floor is what bodies (compiled, packed) and the heads' matrix products take alone, at the same share of compared tokens.
Writes the row `first_run` into results.json, after every run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.common import save_row

PAIRS = {"small": ("smollm2", "qwen2_5"), "large": ("llama3_2", "qwen3")}
KINDS = ("paragraphs", "conversations", "documents")
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": {"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
                "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
    "qwen2_5": {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960,
                "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2},
    "llama3_2": {"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
                 "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
    "qwen3": {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
              "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
}  # fmt: skip
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
WARMUP = 3
"""Steps that are not timed."""
LIMIT = 110.0
"""Seconds within which a run must have come so far."""
DOCUMENT = 9500
"""Characters that give more than 2,048 tokens of either tokenizer."""


def packed(tokens: int) -> list[str]:
    """Settings of micro-batches chosen by hand."""
    sides = ("policy", "teacher")
    return [f"{side}.sequence_packing.{key}" for side in sides
            for key in ("enabled=true", f"train_mb_tokens={tokens}", "sequence_length_round=512")]  # fmt: skip


COMPILED = [f"{side}.compile.{key}=true" for side in ("policy", "teacher") for key in ("enabled", "dynamic")]
TUNED = {
    "packed_16k": packed(16_384),
    "packed_16k_compiled": packed(16_384) + COMPILED,
    "packed_32k_compiled": packed(32_768) + COMPILED,
}


def make_models(work: Path, tokenizers: Path, names: Sequence[str], tiny: bool) -> None:
    """Folders of random weights with real tokenizers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for name in names:
        folder = work / name
        if folder.exists():
            continue
        shape = SHAPES[name] | (TINY if tiny else {})
        config = AutoConfig.for_model(**shape, tie_word_embeddings=True, max_position_embeddings=8192)
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        del model
        for file in (tokenizers / name).iterdir():
            shutil.copy(file, folder)


def make_data(work: Path, text: Path, chats: Path, megabytes: float) -> dict[str, Path]:
    """One file for each kind of data, of about so many megabytes."""
    content, size = text.read_text(encoding="utf-8"), int(megabytes * 1e6)
    long = "\n\n".join(content[k:] + content[:k] for k in range(0, 977 * (1 + size // len(content)), 977))[:size]
    paths = {"paragraphs": work / "paragraphs.txt", "documents": work / "documents.jsonl",
             "conversations": work / "conversations.jsonl"}  # fmt: skip
    paths["paragraphs"].write_text(long, encoding="utf-8")
    documents = [json.dumps({"text": long[k : k + DOCUMENT]}) for k in range(0, len(long) - DOCUMENT, DOCUMENT)]
    paths["documents"].write_text("\n".join(documents), encoding="utf-8")
    lines = chats.read_text(encoding="utf-8")
    paths["conversations"].write_text(lines * (1 + size // len(lines)), encoding="utf-8")
    return paths


def train(run_file: Path, folder: Path, seconds: float, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Run the command for so many seconds behind its first step, and what it measured."""
    command = [sys.executable, "-m", "limbeck", "train", str(run_file), f"log_dir={folder}", *overrides]
    started = time.perf_counter()
    log, metrics = folder.with_suffix(".log"), folder / "metrics.jsonl"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        first = warm = 0.0
        while process.poll() is None and time.perf_counter() < (warm + seconds if warm else started + LIMIT):
            time.sleep(0.25)
            taken = metrics.read_text().count('"train/seconds"') if metrics.exists() else 0
            first = first or (time.perf_counter() - started if taken else 0.0)
            warm = warm or (time.perf_counter() if taken >= WARMUP else 0.0)
        process.kill()  # a checkpoint of billions of numbers is no part of this
        process.wait()
    return {**speed(metrics, log), "first_step_s": round(first, 1)}


def speed(metrics: Path, log: Path) -> dict[str, Any]:
    """Tokens per second of a run's steps behind those that warm up."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    steps = [row for row in rows if "train/seconds" in row]
    kept = steps[WARMUP:]
    if not kept:
        return {"failed": log.read_text()[-1500:]}
    tokens = sum(row["train/tokens_per_s"] * row["train/seconds"] for row in kept)
    took = sum(row["train/seconds"] for row in kept)
    batches = [line for line in log.read_text().splitlines() if line.startswith(("batch", "compil"))]
    return {
        "tokens_per_s": round(tokens / took),
        "ms": round(1e3 * took / len(kept), 1),
        "tokens": round(tokens / len(kept)),
        "steps": len(steps),
        "peak_gib": round(max(row.get("train/memory/device_gib", 0.0) for row in steps), 1),
        "said": batches,
    }


def floor(pair: tuple[str, str], lengths: Sequence[int], tiny: bool, repeat: int = 5) -> dict[str, float]:
    """Milliseconds per 1,000 student tokens of bodies and heads by themselves, with documents of these lengths."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from limbeck.data.batched_data_dict import BatchedDataDict
    from limbeck.data.microbatch import process_microbatch
    from limbeck.models.language_model import LanguageModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, found = sum(lengths), {}
    ids = torch.randint(0, 1000, (len(lengths), max(lengths)))
    batch: BatchedDataDict = BatchedDataDict(input_ids=ids, input_lengths=torch.tensor(lengths))
    for side, name in zip(("student", "teacher"), pair, strict=True):
        trained = side == "student"
        config = AutoConfig.for_model(**(SHAPES[name] | (TINY if tiny else {})), tie_word_embeddings=True)
        with torch.device(device):
            network = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if trained else torch.bfloat16)
        cfg = {"model_name": name, "precision": "float32" if tiny else "bfloat16",
               "sequence_packing": {"enabled": True, "train_mb_tokens": tokens},
               "compile": {"enabled": not tiny, "dynamic": True}}  # fmt: skip
        model = LanguageModel(cfg, None, trained=trained, model=network, device=device)
        inputs = process_microbatch(batch, None, True, model.cfg, 1, device=device)
        width, head = config.hidden_size, model.head().weight
        assert head is not None
        head = head.detach()
        hidden = torch.randn(tokens, width, device=device, dtype=head.dtype)
        block = torch.randn(4096, head.shape[0], device=device, dtype=head.dtype)

        def body(model: Any = model, inputs: Any = inputs, trained: bool = trained) -> None:
            with torch.set_grad_enabled(trained):
                out = model.forward_hidden(inputs)
                if trained:
                    out.backward(torch.ones_like(out))

        def products(hidden: Any = hidden, head: Any = head, block: Any = block, trained: bool = trained) -> None:
            for start in range(0, tokens, 4096):
                rows = hidden[start : start + 4096]
                torch.mm(rows, head.T, out=block[: len(rows)])
                if trained:
                    block[: len(rows)] @ head
                    block[: len(rows)].T @ rows

        found[f"{side}_body"] = _ms(body, repeat) / tokens * 1e3
        found[f"{side}_head"] = _ms(products, repeat) / tokens * 1e3
        del model, network, hidden, head, block
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


def _ms(run: Any, repeat: int) -> float:
    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    for _ in range(2):
        run()
    wait()
    started = time.perf_counter()
    for _ in range(repeat):
        run()
    wait()
    return (time.perf_counter() - started) / repeat * 1e3


LENGTHS = {"paragraphs": [64] * 512, "conversations": [366] * 89, "documents": [2048] * 16}
"""Documents of 32,768 tokens together, of about the lengths of each kind."""
COMPARED = {"paragraphs": 1.0, "conversations": 0.55, "documents": 1.0}
"""Share of tokens that pass through the heads."""


def table(found: dict[str, Any]) -> str:
    """The rows as lines."""
    lines = []
    for name, row in found.items():
        runs = {kind: run for kind, run in row.items() if isinstance(run, dict) and "tokens_per_s" in run}
        best = max((run["tokens_per_s"] for kind, run in runs.items() if kind != "init"), default=0)
        for kind, run in runs.items():
            share = f"{run['tokens_per_s'] / best:.0%} of tuned, " if best and kind == "init" else ""
            limit = row.get("floor_tokens_per_s")
            share += f"{run['tokens_per_s'] / limit:.0%} of the floor ({limit:,})" if limit else ""
            parts = (
                f"{name:<22}{kind:<22}{run['tokens_per_s']:>9,} tokens/s {run['ms']:>8,.1f} ms",
                f"{run['tokens']:>7,} tokens {run['peak_gib']:>6} GiB, first step {run['first_step_s']} s; {share}",
            )
            lines.append(" ".join(parts))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--tokenizers", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--chats", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--megabytes", type=float, default=40)
    every = [f"{pair}_{kind}" for pair in PAIRS for kind in KINDS]
    parser.add_argument("--rows", nargs="*", choices=every, default=every, help="pairs and kinds of data, in order")
    parser.add_argument("--tuned", nargs="*", choices=TUNED, default=list(TUNED))
    parser.add_argument("--results", type=Path, help="where rows go; default: results.json beside this script")
    parser.add_argument("--tiny", action="store_true", help="toy models, to try the script")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    rows = [tuple(row.split("_")) for row in args.rows]
    make_models(
        args.work, args.tokenizers, [name for pair in {row[0]: 0 for row in rows} for name in PAIRS[pair]], args.tiny
    )
    data = make_data(args.work, args.text, args.chats, args.megabytes)
    found: dict[str, Any] = {}
    for pair, kind in rows:
        name = f"{pair} {kind}"
        student, teacher = (args.work / side for side in PAIRS[pair])
        run_file = args.work / f"{pair}_{kind}.yaml"
        command = [sys.executable, "-m", "limbeck", "init", str(run_file), "-y", "--student", str(student)]
        subprocess.run([*command, "--teacher", str(teacher), "--data", str(data[kind])], check=True)
        row = found[name] = {}
        for how in ("init", *args.tuned):
            folder = args.work / f"{pair}_{kind}_{how}"
            quick = [] if how == "init" else ["val_at_start=false"]
            row[how] = train(run_file, folder, args.seconds, [*TUNED.get(how, ()), *quick])
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            print(name, how, json.dumps(row[how]), flush=True)
            _save(args, found)
    for pair, kind in rows:
        row = found[f"{pair} {kind}"]
        parts = floor(PAIRS[pair], [n // 16 for n in LENGTHS[kind]] if args.tiny else LENGTHS[kind], args.tiny)
        heads = COMPARED[kind] * (parts["student_head"] + parts["teacher_head"])
        row["floor_ms_per_1000"] = {key: round(value, 3) for key, value in parts.items()}
        row["floor_tokens_per_s"] = round(1e6 / (parts["student_body"] + parts["teacher_body"] + heads))
        print(f"{pair} {kind}: {row['floor_tokens_per_s']:,}", flush=True)
        _save(args, found)
    print(table(found))


def _save(args: argparse.Namespace, found: dict[str, Any]) -> None:
    if args.results is not None:
        save_row("first_run", found, args.results)
    elif not args.tiny:
        save_row("first_run", found)


if __name__ == "__main__":
    main()
