"""A teacher in fp8: how fast its products are, how far its answers are from bfloat16's, and what a student makes of it.

    PYTHONPATH=. python benchmarks/gpu/fp8.py --model SmolLM2.gguf --text english.txt [--only products cost curve]
    PYTHONPATH=. python benchmarks/gpu/fp8.py --plot        # only draws the picture
    PYTHONPATH=. python benchmarks/gpu/fp8.py --tiny        # everything small, also without a GPU

- products: the linear maps of a Qwen3-4B layer over 16,384 tokens, with sums of full and of reduced width, and the
  rounding of their inputs. Row `fp8_products`, milliseconds of 36 layers.
- cost: KL to the same model in bfloat16 and agreement of the most likely token, of a real model on real text (with
  bfloat16's own distance from float32 beside it) and of random weights of Qwen3-4B's shape. Rows `fp8_cost_*`.
- curve: 200 steps of a small random student from the real model in bfloat16, in fp8, and in float32, which shows what
  bfloat16's own rounding does to a run. `fp8_curve.csv`, `fp8_curve.json` and a picture.
"""

from __future__ import annotations

import argparse
import copy
import csv
import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import command, record
from benchmarks.gpu.common import save_row
from benchmarks.gpu.step import SHAPES, TINY, timed
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.models import fp8
from limbeck.models.policy import Policy
from limbeck.teachers.live import LiveTeacher
from limbeck.tokens import load_tokenizer

CSV = Path(__file__).with_name("fp8_curve.csv")
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "fp8_curve.png"
ROWS = 16_384
MAPS = {"q": (2560, 4096), "k": (2560, 1024), "v": (2560, 1024), "o": (4096, 2560), "gate": (2560, 9728),
        "up": (2560, 9728), "down": (9728, 2560)}  # fmt: skip
"""In and out of the linear maps of a Qwen3-4B layer."""
READ_ONCE = ("q", "o", "gate", "down")
"""Maps whose inputs are rounded: k, v and up read the same as q and gate."""
STUDENT = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
           "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
HELD_OUT = 16
"""Rows at the end of the text that no student sees."""


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


# -- products ----------------------------------------------------------------------------------------------------------


def products(args: argparse.Namespace) -> None:
    """Milliseconds of one layer's linear maps, all 36 layers together, by the way they are computed."""
    rows, layers = (32, 1) if args.tiny else (ROWS, 36)
    maps = {name: (64, 32) if args.tiny else sizes for name, sizes in MAPS.items()}
    quantize = torch.compile(fp8.quantize_rows, disable=args.tiny)
    total = dict.fromkeys(("bfloat16", "fp8", "fp8_full_sums", "rounding"), 0.0)
    for name, (inside, out) in maps.items():
        x, w = (torch.randn(n, inside, device=device(), dtype=torch.bfloat16) for n in (rows, out))
        (a, a_scale), (b, b_scale) = fp8.quantize_rows(x), fp8.quantize_rows(w)
        product: Callable[..., Tensor] = fp8.scaled_product if device() == "cuda" else fp8.reference_product
        ways: dict[str, Callable[[int], Any]] = {
            "bfloat16": lambda _, x=x, w=w: x @ w.t(),
            "fp8": lambda _, f=(a, a_scale, b, b_scale), p=product: p(*f, torch.bfloat16),
        }
        if device() == "cuda":
            exact = functools.partial(fp8.scaled_product, fast_sums=False)
            ways["fp8_full_sums"] = lambda _, f=(a, a_scale, b, b_scale), p=exact: p(*f, torch.bfloat16)
        if name in READ_ONCE:
            ways["rounding"] = lambda _, x=x: quantize(x)
        for way, run in ways.items():
            total[way] += timed(run, 1 if args.tiny else 10, 1 if args.tiny else 3) * 1e3 * layers
    report("fp8_products", {name: round(ms, 2) for name, ms in total.items()}, args)


# -- distance ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def distance(wanted: Policy, found: Policy, batch: BatchedDataDict) -> dict[str, float]:
    """Over all real tokens: KL(wanted || found) in nats, its largest value, and the share with the same first token."""
    kl = agreed = count = worst = 0.0
    heads = wanted.head(), found.head()
    for row in range(batch.size):
        one = batch.select_indices([row])
        hidden = [policy.get_hidden(one)[0, : int(one["input_lengths"][0])] for policy in (wanted, found)]
        for part in range(0, hidden[0].shape[0], 256):
            p, q = (head.logits(h[part : part + 256]).float() for head, h in zip(heads, hidden, strict=True))
            p, q = p.log_softmax(-1), q.log_softmax(-1)
            each = (p.exp() * (p - q)).sum(-1)
            kl, count, worst = kl + float(each.sum()), count + each.numel(), max(worst, float(each.max()))
            agreed += float((p.argmax(-1) == q.argmax(-1)).sum())
    return {"kl_nats": kl / count, "largest_kl": worst, "top1_agreement": agreed / count, "tokens": int(count)}


def nats(policy: Policy, batch: BatchedDataDict) -> float:
    """Cross-entropy per predicted token."""
    logprobs = policy.get_logprobs(batch)["logprobs"]
    return -float(logprobs.double().sum()) / int((batch["input_lengths"] - 1).sum())


def frozen(precision: str, model: Any = None, **more: Any) -> Policy:
    settings = {"precision": precision, "logprob_batch_size": 1, **more}
    return Policy(settings, None, device=device(), init_optimizer=False, seed=2, model=model)


def of_random_weights(args: argparse.Namespace) -> None:
    shape = SHAPES["teacher"] | (TINY if args.tiny else {})
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device()):
        torch.manual_seed(0)
        config = AutoConfig.for_model(**shape, tie_word_embeddings=False, max_position_embeddings=8192)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # logits with the spread of a trained model's
    model.get_output_embeddings().weight.data.mul_(3)
    few = frozen("fp8", copy.deepcopy(model))
    ids = torch.randint(0, shape["vocab_size"], (4, 24 if args.tiny else 2048))
    batch: BatchedDataDict = BatchedDataDict(input_ids=ids, input_lengths=torch.full((4,), ids.shape[1]))
    report("fp8_cost_random_4b", distance(frozen("bfloat16", model), few, batch), args)


def of_real_model(args: argparse.Namespace, batch: BatchedDataDict) -> None:
    plain, few = (frozen(name, model_name=args.model) for name in ("bfloat16", "fp8"))
    wide = frozen("float32", model_name=args.model)
    row: dict[str, Any] = {"fp8_from_bfloat16": distance(plain, few, batch)}
    if device() == "cuda":
        fast, fp8.scaled_product = fp8.scaled_product, functools.partial(fp8.scaled_product, fast_sums=False)
        row["fp8_full_sums_from_bfloat16"] = distance(plain, few, batch)
        fp8.scaled_product = fast
    row |= {"bfloat16_from_float32": distance(wide, plain, batch), "fp8_from_float32": distance(wide, few, batch)}
    row["nats_per_token"] = {p.cfg.precision: round(nats(p, batch), 5) for p in (wide, plain, few)}
    report("fp8_cost_real", row, args)


# -- a student ---------------------------------------------------------------------------------------------------------


def curves(args: argparse.Namespace, batches: list[BatchedDataDict], held_out: BatchedDataDict, size: int) -> None:
    """Loss of a student at every step, by the teacher's precision."""
    found: dict[str, list[float]] = {}
    ends: dict[str, dict[str, float]] = {}
    for name in ("bfloat16", "fp8", "float32"):
        student = Policy(
            {"init": "random", "model_overrides": {**STUDENT, **(TINY if args.tiny else {}), "vocab_size": size},
             "precision": "bfloat16" if device() == "cuda" else "float32", "train_micro_batch_size": args.documents,
             "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3, "weight_decay": 0.0}}},
            None, device=device(), seed=1,
        )  # fmt: skip
        teacher = LiveTeacher(frozen(name, **real_or_tiny(args)))
        loss_fn = CrossTokenizerDistillationLossFn({"mode": "boundary_kl"}, projections=[None])
        found[name] = [
            float(student.train(batches[i % len(batches)], loss_fn, teachers=[teacher])["loss"])
            for i in range(args.steps)
        ]
        ends[name] = {"loss": round(found[name][-1], 4), "held_out_nats": round(nats(student, held_out), 5)}
        print(f"{name}: {ends[name]}", flush=True)
    if args.tiny:
        return
    told = {"command": command(), "model": Path(args.model).name}
    record(CSV.with_suffix(".json"), {**told, "after_the_last_step": ends})
    with CSV.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *found])
        writer.writerows(zip(range(args.steps), *found.values(), strict=True))


def draw() -> None:
    """The picture of the stored curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with CSV.open() as file:
        rows = list(csv.DictReader(file))
    steps = [int(r["step"]) for r in rows]
    plain, few, wide = ([float(r[name]) for r in rows] for name in ("bfloat16", "fp8", "float32"))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    left.plot(steps, plain, label="teacher in bfloat16", linewidth=3, alpha=0.4)
    left.plot(steps, few, label="teacher in fp8", linewidth=1)
    left.set(xlabel="step", ylabel="loss")
    left.legend()
    for curve, label in ((wide, "float32"), (few, "fp8")):
        right.plot(steps, [abs(f - p) / p for f, p in zip(curve, plain, strict=True)], linewidth=1, label=label)
    right.set(xlabel="step", ylabel="difference from bfloat16", yscale="log")
    right.legend()
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=120)


# -- data --------------------------------------------------------------------------------------------------------------


def real_or_tiny(args: argparse.Namespace) -> dict[str, Any]:
    if args.model is not None:
        return {"model_name": args.model}
    return {"init": "random", "model_overrides": SHAPES["teacher"] | TINY}


def rows_of_text(args: argparse.Namespace) -> tuple[Tensor, int]:
    """Ids [rows, length] and the number of different ids: of the text, or random ones."""
    if args.model is None:
        return torch.randint(0, TINY["vocab_size"], (2 * args.documents + HELD_OUT, 24)), TINY["vocab_size"]
    tokenizer = load_tokenizer(args.model)
    text = args.text.read_text(encoding="utf-8", errors="ignore")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    return ids[: ids.numel() // args.length * args.length].reshape(-1, args.length), len(tokenizer)


def as_batch(ids: Tensor) -> BatchedDataDict:
    """Whole rows with loss everywhere, for models of one vocabulary."""
    count, length = ids.shape
    return BatchedDataDict(
        input_ids=ids,
        input_lengths=torch.full((count,), length),
        token_mask=torch.ones_like(ids),
        sample_mask=torch.ones(count),
        idx=list(range(count)),
    )


def report(name: str, row: dict[str, Any], args: argparse.Namespace) -> None:
    print(f"{name}: {row}", flush=True)
    if device() == "cuda" and not args.tiny:
        save_row(name, row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a real model: folder or GGUF file")
    parser.add_argument("--text", type=Path, help="text for it")
    parser.add_argument("--only", nargs="*", default=["products", "cost", "curve"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=512, help="tokens of a document")
    parser.add_argument("--documents", type=int, default=16, help="documents of a step")
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.plot:
        draw()
        return
    if args.tiny:
        args.steps = min(args.steps, 3)
    torch.manual_seed(0)
    if "products" in args.only:
        products(args)
    if args.model is None and not args.tiny:
        parser.error("cost and curve need --model and --text")
    ids, size = rows_of_text(args)
    held_out = as_batch(ids[-HELD_OUT:])
    batches = [as_batch(rows) for rows in ids[:-HELD_OUT].split(args.documents) if len(rows) == args.documents]
    parts: dict[str, Callable[[], None]] = {
        "random": lambda: of_random_weights(args),
        "real": lambda: of_real_model(args, held_out),
        "curve": lambda: curves(args, batches, held_out, size),
    }
    wanted = [*(["random", "real"] if "cost" in args.only else []), *(["curve"] if "curve" in args.only else [])]
    for name in wanted:
        if name == "real" and args.model is None:
            continue
        try:
            parts[name]()
        except Exception:  # one failing part must not lose the others
            traceback.print_exc()


if __name__ == "__main__":
    main()
