"""Loss curves of the fast and the plain path: the same student, data and seed, 200 steps each.

Training in bfloat16 multiplies any rounding difference. How fast shows a third run: the plain path again, with blocks
of another size, which computes the same sums in another order.

    PYTHONPATH=. python benchmarks/gpu/curve.py            # trains both, writes curve.csv and the picture
    PYTHONPATH=. python benchmarks/gpu/curve.py --plot     # only draws the picture

A four-layer student with Llama-3.2's vocabulary learns 16 fixed documents from a small teacher with Qwen3's, by
boundary_kl with the chunk term plus cross-entropy, in bfloat16 over float32 parameters.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import V_S, V_T, aligned_batch, load_projection
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.models.policy import Policy
from limbeck.teachers.live import LiveTeacher

CSV = Path(__file__).with_name("curve.csv")
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "gpu_curve.png"
SHAPE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip


def policy(kind: str, vocab: int, *, trained: bool, seed: int) -> Policy:
    cfg = {
        "init": "random", "model_overrides": {"model_type": kind, "vocab_size": vocab, **SHAPE},
        "precision": "bfloat16", "train_micro_batch_size": 8,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3, "weight_decay": 0.0}},
    }  # fmt: skip
    return Policy(cfg, None, device="cuda", init_optimizer=trained, seed=seed)


def train(steps: int, projection: Any, **options: Any) -> list[float]:
    student = policy("llama", V_S, trained=True, seed=1)
    teacher = policy("qwen3", V_T, trained=False, seed=2)
    # a head this much larger than at the start of training makes the teacher sure of something
    teacher.model.get_output_embeddings().weight.data.mul_(8)
    loss_fn = CrossTokenizerDistillationLossFn(
        {"mode": "boundary_kl", "teacher_vocab_size": V_T, **options}, projections=[projection]
    )
    batches: list[BatchedDataDict] = [BatchedDataDict(aligned_batch(8, 511, seed=seed)) for seed in range(2)]
    source = LiveTeacher(teacher)
    return [float(student.train(batches[i % 2], loss_fn, teachers=[source])["loss"]) for i in range(steps)]


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with CSV.open() as file:
        rows = list(csv.DictReader(file))
    steps = [int(r["step"]) for r in rows]
    fast, plain, again = ([float(r[name]) for r in rows] for name in ("fast", "plain", "plain_again"))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    left.plot(steps, plain, label="plain torch", linewidth=3, alpha=0.4)
    left.plot(steps, fast, label="kernels", linewidth=1)
    left.set(xlabel="step", ylabel="loss")
    left.legend()
    for curve, label in ((again, "plain torch, other blocks"), (fast, "kernels")):
        right.plot(steps, [abs(f - p) / p for f, p in zip(curve, plain, strict=True)], linewidth=1, label=label)
    right.set(xlabel="step", ylabel="difference from plain torch", yscale="log")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--projection", help="stored projection of Llama-3.2 -> Qwen3; default: a random one")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plot", action="store_true")
    args = parser.parse_args()
    if not args.plot:
        projection = load_projection(args.projection)
        curves = {
            "fast": train(args.steps, projection, fast_path="auto"),
            "plain": train(args.steps, projection, fast_path="off"),
            "plain_again": train(args.steps, projection, fast_path="off", block_rows=1536),
        }
        with CSV.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["step", *curves])
            writer.writerows(zip(range(args.steps), *curves.values(), strict=True))
        for name, curve in curves.items():
            worst = max(abs(f - p) / p for f, p in zip(curve, curves["plain"], strict=True))
            print(f"{name}: loss after {args.steps} steps {curve[-1]:.4f}; largest difference from plain {worst:.2%}")
    try:
        draw(PICTURE)
    except ImportError:
        print("matplotlib is not installed; run again with --plot where it is")


if __name__ == "__main__":
    main()
