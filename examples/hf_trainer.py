"""Distil with transformers' own Trainer: its logging, checkpoints and accelerate setup stay as they are.

python examples/hf_trainer.py STUDENT TEACHER TEXTS.txt OUT   # model folders or hub ids; one text per line
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from limbeck.align import TokenAligner
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.projection import load_or_build
from limbeck.tokens import load_tokenizer


class DistillationTrainer(Trainer):
    """A Trainer whose loss compares the student with a frozen teacher of any vocabulary."""

    def __init__(self, *args: Any, teacher: torch.nn.Module, loss_fn: torch.nn.Module, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher, self.loss_fn = teacher.eval().to(self.args.device), loss_fn

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        with torch.no_grad():
            target = self.teacher(inputs["teacher_input_ids"]).logits
        outputs = model(input_ids=inputs["input_ids"])
        loss, _ = self.loss_fn(inputs, None, None, outputs.logits, target)
        return (loss, outputs) if return_outputs else loss


student_name, teacher_name, texts, out = sys.argv[1:5]
s_tok, t_tok = load_tokenizer(student_name), load_tokenizer(teacher_name)
collate = CrossTokenizerCollator(
    student_tokenizer=s_tok, teacher_tokenizer=t_tok, aligner=TokenAligner(s_tok, t_tok),
    ctx_length_student=512, ctx_length_teacher=512,
)  # fmt: skip
lines = Path(texts).read_text(encoding="utf-8").splitlines()
DistillationTrainer(
    model=AutoModelForCausalLM.from_pretrained(student_name),
    teacher=AutoModelForCausalLM.from_pretrained(teacher_name),
    loss_fn=CrossTokenizerDistillationLossFn({}, projections=[load_or_build(s_tok, t_tok, trees=True)]),
    args=TrainingArguments(out, per_device_train_batch_size=8, num_train_epochs=1, logging_steps=1,
                           remove_unused_columns=False, report_to=[]),
    train_dataset=[{"text": line, "idx": i} for i, line in enumerate(lines) if line.strip()],
    data_collator=collate,
).train()  # fmt: skip
