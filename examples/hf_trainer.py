"""Distil with transformers' own Trainer: its logging, checkpoints, accelerate set-up and gradient accumulation.

python examples/hf_trainer.py STUDENT TEACHER TEXTS.txt OUT   # model folders or hub ids; one text per line
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, TrainingArguments

from limbeck.integrations import DistillationTrainer
from limbeck.tokens import load_tokenizer

student, teacher, texts, out = sys.argv[1:5]
lines = Path(texts).read_text(encoding="utf-8").splitlines()
DistillationTrainer(
    AutoModelForCausalLM.from_pretrained(student),
    TrainingArguments(out, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=1,
                      logging_steps=1, report_to=[]),
    teacher=AutoModelForCausalLM.from_pretrained(teacher),
    processing_class=load_tokenizer(student),
    teacher_tokenizer=load_tokenizer(teacher),
    train_dataset=[{"text": line, "idx": i} for i, line in enumerate(lines) if line.strip()],
    loss_fn="boundary_kl",
    max_length=512,
).train()  # fmt: skip
