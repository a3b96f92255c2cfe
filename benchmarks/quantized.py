"""What a teacher loses in few bits: bytes of its weights, its cross-entropy, its divergence from full precision.

    python -m benchmarks.quantized [MODEL] [--text FILE]

MODEL is a folder, a GGUF file or a hub id, by default the demo's teacher; the text is by default the documentation of
the standard library. Its first 1,024 tokens count, in rows of 256. Needs limbeck[quantized].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.common import command, parser, record, versions
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.demo import TEACHER, standard_library_texts
from limbeck.models.fp8 import quantize_rows, reference_product
from limbeck.models.policy import Policy
from limbeck.tokens import load_tokenizer

ROWS, WIDTH = 4, 256
KINDS: dict[str, dict[str, str]] = {
    "none": {"precision": "float32"},
    "bfloat16": {"precision": "bfloat16"},
    "fp8": {"precision": "fp8"},
    "fp8_head": {"precision": "bfloat16"},
    "8bit": {"precision": "float32", "quantization": "8bit"},
    "4bit": {"precision": "float32", "quantization": "4bit"},
}
"""Settings by name; on a CPU fp8 is computed by its reference. fp8_head: only the head's product is in fp8, which no
setting offers: this is what it would cost."""


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of all tensors, tied ones once."""
    tensors = {v.data_ptr(): v.numel() * v.element_size() for v in model.state_dict(keep_vars=True).values()}
    return sum(tensors.values())


def log_probs(policy: Policy, data: BatchedDataDict, *, fp8_head: bool = False) -> torch.Tensor:
    """``[ROWS, WIDTH, V]``, float32."""
    hidden, head = policy.get_hidden(data).reshape(ROWS * WIDTH, -1), policy.head()
    if fp8_head:
        assert head.weight is not None
        logits = reference_product(*quantize_rows(hidden), *quantize_rows(head.weight.detach()), torch.bfloat16)
    else:
        logits = head.logits(hidden)
    return logits.float().log_softmax(-1).reshape(ROWS, WIDTH, -1)


def main() -> None:
    arguments = parser(__file__, __doc__)
    arguments.add_argument("model", nargs="?", default=TEACHER)
    arguments.add_argument("--text", type=Path)
    given = arguments.parse_args()
    tokenizer = load_tokenizer(given.model)
    text = given.text.read_text(encoding="utf-8") if given.text else "\n\n".join(standard_library_texts())
    ids = tokenizer(text[: ROWS * WIDTH * 20])["input_ids"][: ROWS * WIDTH]
    rows = torch.tensor(ids).reshape(ROWS, WIDTH)
    data: BatchedDataDict = BatchedDataDict(input_ids=rows, input_lengths=torch.full((ROWS,), WIDTH))
    whole: torch.Tensor | None = None
    found: dict[str, dict[str, Any]] = {}
    for kind, settings in KINDS.items():
        policy = Policy({"model_name": given.model, **settings}, tokenizer, name=kind, init_optimizer=False)
        log_p = log_probs(policy, data, fp8_head=kind == "fp8_head")
        whole = log_p if whole is None else whole
        found[kind] = {
            "weight_mb": round(weight_bytes(policy.model) / 1e6, 1),
            "nats_per_token": round(-float(log_p[:, :-1].gather(-1, rows[:, 1:, None]).mean()), 4),
            "kl_from_full": round(float((whole.exp() * (whole - log_p)).sum(-1).mean()), 5),
            "same_top_1": round(float((log_p.argmax(-1) == whole.argmax(-1)).float().mean()), 4),
        }
        print(kind, found[kind], flush=True)
    name = given.text.name if given.text else "documentation of the standard library"
    record(
        given.out,
        {
            "versions": versions("bitsandbytes", "gguf"),
            "command": command(),
            "model": Path(given.model).name,
            "text": name,
            "tokens": len(ids),
            "kinds": found,
        },
    )


if __name__ == "__main__":
    main()
