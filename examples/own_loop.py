"""Distil in a loop of your own: any teacher, any student, full logits.

python examples/own_loop.py STUDENT TEACHER TEXTS.txt OUT     # model folders or hub ids; one text per line
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from limbeck.align import TokenAligner
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.projection import load_or_build
from limbeck.tokens import load_tokenizer

student_name, teacher_name, texts, out = sys.argv[1:5]
s_tok, t_tok = load_tokenizer(student_name), load_tokenizer(teacher_name)
student = AutoModelForCausalLM.from_pretrained(student_name)
teacher = AutoModelForCausalLM.from_pretrained(teacher_name).eval()
collate = CrossTokenizerCollator(
    student_tokenizer=s_tok, teacher_tokenizer=t_tok, aligner=TokenAligner(s_tok, t_tok),
    ctx_length_student=512, ctx_length_teacher=512,
)  # fmt: skip
loss_fn = CrossTokenizerDistillationLossFn({}, projections=[load_or_build(s_tok, t_tok, trees=True)])
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)

records = [{"text": line} for line in Path(texts).read_text(encoding="utf-8").splitlines() if line.strip()]
for start in range(0, len(records), 8):
    batch = collate(records[start : start + 8])
    with torch.no_grad():
        target = teacher(batch["teacher_input_ids"]).logits
    loss, metrics = loss_fn(batch, None, None, student(batch["input_ids"]).logits, target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    chunks, count = metrics["kl_loss"]
    print(f"records {start}-{start + len(batch['idx']) - 1}: loss {loss.item():.4f}, KL {float(chunks / count):.4f}")
student.save_pretrained(out)
