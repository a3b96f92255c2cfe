"""What an on-policy step costs: tokens per second that a student writes, and that it is trained on.

    PYTHONPATH=. python benchmarks/gpu/sampling.py [--prompts 384] [--new 256] [--batch 64 256] [--tiny]

*Writing.* A model of Llama-3.2-1B's shape with random bfloat16 weights (float32 on a CPU). Its next token is close to
uniform, so that a share of the vocabulary as ends makes answers as ragged as real ones: geometric, 64 tokens on
average. Three ways write the same answers from the same seeds, but for what the last bits of sums change: one prompt at
a time (measured on a few); a plain loop of `generate`, `batch` rows at a time, each batch until its last answer ends;
and continuous batching with as many rows in work, and a cache for as many rows of the greatest length. Where the GPU
has a flash kernel, continuous batching through a mask (`masked`) is measured on a few prompts, too.

*Training.* Policy and teacher of that shape on two tokenizers that are trained on this project's pages: an update on
texts as off-policy distillation takes it (its default loss, on all tokens), and on the same texts as if the
student had continued their beginnings (reverse KL, on what follows). Rows and student tokens are the same.

*Engines*, only where asked for: see `engines.py`.

`--tiny` runs everything small. Writes rows `sampling_*` and `on_policy_training_*` into results.json.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from benchmarks.gpu.common import RESULTS, random_weights_on_the_device, save_row
from benchmarks.gpu.engines import STAGES, engines, stage
from benchmarks.gpu.step import ROPE, SHAPES, TINY, timed
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.continuations import Continuation, ContinuationCollator
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.models.continuous import ContinuousSampler, attention_for
from limbeck.models.generate import LocalSampler, SamplingConfig
from limbeck.models.language_model import LanguageModel
from limbeck.models.policy import Policy
from limbeck.projection import load_or_build
from limbeck.teachers.live import LiveTeacher
from limbeck.tokens import load_tokenizer

MEAN = 64
"""Tokens of an answer on average, where the limit does not cut it off."""
ALONE, FEW = 2, 128
"""Prompts that are continued one at a time, and through a mask."""
PAGES = Path(__file__).resolve().parents[2] / "docs"
END = "<eos>"


def settings(shape: dict[str, Any], *, narrow: bool, tiny: bool, **more: Any) -> dict[str, Any]:
    """Of a model with random weights; narrow: bfloat16 on a GPU."""
    cuda = torch.cuda.is_available()
    rope = {} if tiny else {"rope_parameters": ROPE}
    return {
        "init": "random",
        "precision": "bfloat16" if cuda else "float32",
        **({"param_dtype": "bfloat16"} if narrow and cuda else {}),
        "model_overrides": {**shape, **rope, "tie_word_embeddings": True, "max_position_embeddings": 8192},
        **more,
    }


# ---- writing ---------------------------------------------------------------------------------------------------------


def tokens_per_s(sampler: LocalSampler, prompts: list[torch.Tensor], warm_up: list[torch.Tensor]) -> tuple[float, int]:
    """Tokens per second of continuing the prompts, once some others are; and the tokens that were written."""
    sampler.sample(warm_up, seed=0)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    found = sampler.sample(prompts, seed=1)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    written = sum(len(s.ids_T) for s in found)
    return written / (time.perf_counter() - start), written


def writing(args: argparse.Namespace, shape: str) -> None:
    """Rows `sampling_*`."""
    own = {**SHAPES["student"], **(TINY | {"vocab_size": 4096} if args.tiny else {})}
    model = LanguageModel(settings(own, narrow=True, tiny=args.tiny), None, seed=0)
    dice = torch.Generator().manual_seed(0)
    sizes = torch.randint(16, 128, (args.prompts,), generator=dice).tolist()
    prompts = [torch.randint(0, model.vocab_size, (size,), generator=dice) for size in sizes]
    ends = torch.randperm(model.vocab_size, generator=dice)[: model.vocab_size // MEAN].tolist()

    def row(make: Callable[..., LocalSampler], batch: int, number: int, warm_up: int, **options: Any) -> dict[str, Any]:
        config = SamplingConfig(max_new_tokens=args.new, batch_size=batch)
        sampler = make(model, config, ends, **options)
        try:
            speed, written = tokens_per_s(sampler, prompts[:number], prompts[:warm_up])
        except Exception as error:  # the other rows are worth having
            return {"failed": f"{type(error).__name__}: {error}"[:300]}
        found = {"tokens_per_s": round(speed, 1), "tokens": written, "prompts": number, "batch_size": batch}
        return found | ({"attention": sampler.attention} if isinstance(sampler, ContinuousSampler) else {})

    alone = row(LocalSampler, 1, ALONE, 1)
    print("one at a time", alone, flush=True)
    flash = attention_for(model) != "sdpa"
    for batch in args.batch:
        found = {"alone": alone, "generate": row(LocalSampler, batch, args.prompts, 8)}
        print(f"batch {batch} generate", found["generate"], flush=True)
        # all of them twice: graphs of every size that occurs are made in the first round
        found["continuous"] = row(ContinuousSampler, batch, args.prompts, args.prompts)
        print(f"batch {batch} continuous", found["continuous"], flush=True)
        if flash:
            found["masked"] = row(ContinuousSampler, batch, min(FEW, args.prompts), 8, attention="sdpa")
            print(f"batch {batch} masked", found["masked"], flush=True)
        speed = {name: own["tokens_per_s"] for name, own in found.items() if "tokens_per_s" in own}
        over = {
            f"continuous_over_{name}": round(speed["continuous"] / speed[name], 2)
            for name in ("alone", "generate")
            if {name, "continuous"} <= set(speed)
        }
        print(f"batch {batch}", over, flush=True)
        save_row(f"sampling_{shape}_{batch}", {**found, **over}, args.out)


# ---- training --------------------------------------------------------------------------------------------------------


def tokenizer(texts: Sequence[str], size: int) -> Any:
    """A byte-level BPE trained on texts."""
    made = Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=letters, show_progress=False, special_tokens=[END])
    made.train_from_iterator(texts, trainer)
    with tempfile.TemporaryDirectory() as folder:
        PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END).save_pretrained(folder)
        return load_tokenizer(folder)


def training(args: argparse.Namespace, shape: str) -> None:
    """Rows `on_policy_training_*`: updates on the same text, stored and continued."""
    pages = [path.read_text(encoding="utf-8") for path in sorted(PAGES.glob("*.md"))]
    rows, length, begin = (4, 48, 12) if args.tiny else (64, 256, 64)
    student_tokenizer, teacher_tokenizer = (tokenizer(pages, 400 if args.tiny else n) for n in (6000, 10_000))
    policies = [
        Policy(
            settings(
                {**SHAPES[side], **(TINY if args.tiny else {}), "vocab_size": len(own), "num_hidden_layers": layers},
                narrow=side == "teacher",
                tiny=args.tiny,
                train_micro_batch_size=min(rows, 16),
                optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-5, "weight_decay": 0.0}},
            ),
            own,
            name=side,
            init_optimizer=side == "student",
            seed=0,
        )
        for side, own, layers in (
            ("student", student_tokenizer, 2 if args.tiny else 16),
            ("teacher", teacher_tokenizer, 2 if args.tiny else 16),
        )
    ]
    student, teacher = policies
    collator = CrossTokenizerCollator(
        student_tokenizer=student_tokenizer,
        teacher_tokenizer=teacher_tokenizer,
        ctx_length_student=length,
        ctx_length_teacher=2 * length,
        chunks_as="layout",
    )
    continued = ContinuationCollator(collator, prompt_tokens=begin, max_new_tokens=length - begin)
    # as many student tokens in every row, whichever way it is read
    whole = "\n".join(pages)
    ids = torch.tensor(student_tokenizer(whole, add_special_tokens=False)["input_ids"])[: rows * length]
    texts = [student_tokenizer.decode(own) for own in ids.view(rows, length).tolist()]
    records: list[Any] = [{"text": text, "idx": i, "loss_multiplier": 1.0} for i, text in enumerate(texts)]
    prompts, _ = continued.prompts(records)
    answers = [torch.tensor(student_tokenizer(t, add_special_tokens=False)["input_ids"]) for t in texts]
    written = [
        Continuation(p, a[len(p.student) : length].numpy(), False) for p, a in zip(prompts, answers, strict=True)
    ]
    projection = load_or_build(student_tokenizer, teacher_tokenizer, trees=True)
    source = [LiveTeacher(teacher)]
    steps = 2 if args.tiny else 6

    def row(collate: Callable[[], BatchedDataDict], loss: dict[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        batch = collate()
        collated = time.perf_counter() - start
        own = CrossTokenizerDistillationLossFn(loss, projections=[projection]).to(student.device)
        seconds = timed(lambda _: student.train(batch, own, teachers=source), steps, 2)
        tokens = int(batch["input_lengths"].sum())
        found = {"tokens_per_s": tokens / seconds, "tokens": tokens, "update_s": seconds, "collate_s": collated}
        return {name: round(value, 4) for name, value in found.items()}

    found: dict[str, Any] = {
        "off_policy": row(lambda: collator(records), {}),
        "on_policy": row(lambda: continued.batch(written), {"direction": "reverse", "ce_loss_scale": 0.0}),
    }
    speed = {name: own["tokens_per_s"] for name, own in found.items()}
    found["on_over_off"] = round(speed["on_policy"] / speed["off_policy"], 3)
    print("training", found, flush=True)
    save_row(f"on_policy_training_{shape}", found, args.out)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--prompts", type=int, default=384)
    arguments.add_argument("--new", type=int, default=256)
    arguments.add_argument("--batch", type=int, nargs="+", default=[64, 256])
    arguments.add_argument(
        "--parts", nargs="+", choices=["writing", "training", "engines"], default=["writing", "training"]
    )
    arguments.add_argument("--tiny", action="store_true")
    arguments.add_argument("--out", type=Path, default=RESULTS)
    own = arguments.add_argument_group("engines")
    own.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    own.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir(), "limbeck-engines"))
    own.add_argument("--start", type=float, default=110.0, help="seconds until a stage must be ready")
    own.add_argument("--limit", type=float, default=50.0, help="seconds that a stage measures")
    own.add_argument("--seconds", type=float, default=235.0, help="seconds of everything")
    own.add_argument("--stage", nargs=2, help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.stage:
        return stage(args)
    if "engines" in args.parts:
        engines(args)
    random_weights_on_the_device()
    shape = "tiny" if args.tiny else "llama_1b"
    if "writing" in args.parts:
        writing(args, shape)
    if "training" in args.parts:
        training(args, shape)


if __name__ == "__main__":
    main()
