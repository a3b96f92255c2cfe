"""TRL's own GOLD trainer on a run of `real.py`: what the project's arms are compared with.

    PYTHONPATH=. python -m benchmarks.quality.trl_gold RUN.yaml ARM

RUN.yaml is a run file of `real.py` (`policy`, `teacher`, `data`, `distillation`, `logger`), from which come student,
teacher, documents, steps, documents per step, seed, optimizer and schedule; ARM is one of `ARMS`. The student lies in
`checkpoints/student` of the run's folder at the end, a model folder of transformers. Tried with trl 1.16 on
transformers 5.17 and 5.22; the trainer is experimental there and may move.

Nothing of TRL's loss, alignment or loop is replaced. What differs from a `limbeck train` run of the same file:

- TRL wants a prompt and a completion. Of a conversation the completion is its last answer; both models read it as the
  student's template writes it. A document is the completion, byte for byte, and the student's BOS token (its
  end token where it has none) the prompt: a student that is used to a BOS token reads the same tokens as elsewhere.
  TRL shows the prompt to the teacher, too, where other arms begin the teacher's side as its own tokenizer does.
- A document longer than the context is cut behind its last token that fits, as elsewhere, but TRL then puts an end
  token behind it, and cuts the teacher's side at the same byte.
- Documents are shuffled by TRL's sampler, which leaves out the last ones of an epoch that do not fill a step.
- Losses are means over the documents of a step of means over each document's groups of tokens; cross-entropy, where an
  arm has it, is a mean over the step's tokens.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.quality import corpus
from limbeck.models.loading import load_model
from limbeck.models.optim import build_optimizer, build_scheduler
from limbeck.tokens.loading import load_tokenizer

DOCUMENTED = {
    "use_uld_loss": True,
    "use_extended_uld": True,
    "uld_use_hybrid_loss": True,
    "uld_hybrid_matched_weight": 0.6,
    "uld_hybrid_unmatched_weight": 0.4,
}
ARMS: dict[str, dict[str, Any]] = {
    "trl_gold": DOCUMENTED,
    "trl_gold_ce": DOCUMENTED | {"uld_crossentropy_weight": 1.0},
    "trl_gold_ce_bayesian": DOCUMENTED | {"uld_crossentropy_weight": 1.0, "uld_token_merge_strategy": "bayesian"},
}
"""Settings of `GOLDConfig`. `trl_gold` is the example of TRL's documentation (no cross-entropy, which is its default);
`_ce` adds cross-entropy with the weight that the project's arms give it; `_bayesian` compares distributions at the
tokens that they predict, where TRL's default takes those of the tokens behind them."""


def missing() -> str | None:
    """What keeps the arms from running here, in a sentence."""
    if importlib.util.find_spec("trl") is None:
        return "arms of TRL need its package, which is not installed: pip install trl"
    return None


def student_folder(run: Path) -> Path:
    """Where the student of a run's folder lies."""
    return run / "checkpoints" / "student"


def cut(texts: Iterable[str], tokenizer: Any, limit: int) -> list[str]:
    """Texts, each up to its last token that fits into so many tokens."""
    found = []
    for text in texts:
        spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        found.append(text if len(spans) <= limit else text[: spans[limit - 1][1]])
    return found


def read_texts(files: Iterable[str]) -> list[str]:
    """Documents of a run's files."""
    return [text for path in files for text in corpus.read_texts(Path(path))]


def conversations(files: Iterable[str], tokenizer: Any) -> list[dict[str, str]]:
    """Conversations as the student's template writes them, their last answer as the completion, less the end token,
    which TRL appends."""
    rows = []
    for path in files:
        for line in Path(path).read_text(encoding="utf-8").split("\n")[:-1]:
            record = json.loads(line)
            options = {"tools": record.get("tools"), "tokenize": False}
            whole = tokenizer.apply_chat_template(record["messages"], **options)
            prompt = tokenizer.apply_chat_template(record["messages"][:-1], add_generation_prompt=True, **options)
            if not whole.startswith(prompt):
                raise SystemExit(f"{path}: a prompt is not the beginning of its conversation")
            completion = whole[len(prompt) :].rstrip().removesuffix(tokenizer.eos_token)
            rows.append({"prompt": prompt, "completion": completion})
    return rows


def gold_config(run: Mapping[str, Any], arm: str, out: Path) -> Any:
    """TRL's configuration of a run."""
    from trl.experimental.gold import GOLDConfig

    batch = run["distillation"]["num_prompts_per_step"]
    # whole logits of long conversations: eight at a time
    at_once = math.gcd(batch, 8) if run["data"].get("mode") == "chat" else batch
    return GOLDConfig(
        output_dir=str(out),
        lmbda=0.0,
        max_length=None,
        max_steps=run["distillation"]["max_num_steps"],
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=batch // at_once,
        seed=run["distillation"]["seed"],
        max_grad_norm=run["policy"]["max_grad_norm"],
        dataloader_drop_last=True,
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=False,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        teacher_tokenizer_name_or_path=str(out / "teacher_tokenizer"),
        **ARMS[arm],
    )


def train(run: Mapping[str, Any], arm: str) -> None:
    """Trains a run's student with TRL."""
    from datasets import Dataset
    from trl.experimental.gold import GOLDTrainer

    if torch.cuda.is_available():
        # as in a run of limbeck
        torch.set_float32_matmul_precision("high")
    folder, policy = Path(run["logger"]["log_dir"]), run["policy"]
    tokenizer, teacher_tokenizer = load_tokenizer(policy["model_name"]), load_tokenizer(run["teacher"]["model_name"])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    config = gold_config(run, arm, folder / "trl")
    teacher_tokenizer.save_pretrained(config.teacher_tokenizer_name_or_path)
    if run["data"].get("mode") == "chat":
        rows = conversations([run["data"]["train"]], tokenizer)
    else:
        texts = cut(read_texts(run["data"]["train"]), tokenizer, run["data"]["max_input_seq_length"] - 2)
        rows = [{"prompt": tokenizer.bos_token or tokenizer.eos_token, "completion": text} for text in texts]
    student = load_model({"model_name": policy["model_name"]}, device=config.device)
    optimizer = build_optimizer(student.parameters(), policy["optimizer"])
    trainer = GOLDTrainer(
        student,
        load_model({"model_name": run["teacher"]["model_name"]}, device=config.device),
        config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        optimizers=(optimizer, build_scheduler(optimizer, policy["scheduler"])),
    )
    trainer.train()
    out = student_folder(folder)
    trainer.model.save_pretrained(out)
    load_tokenizer(policy["model_name"]).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("arm", choices=ARMS)
    args = parser.parse_args()
    train(yaml.safe_load(args.run.read_text()), args.arm)


if __name__ == "__main__":
    main()
