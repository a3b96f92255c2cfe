"""Figures on pages are those of the stored results."""

from __future__ import annotations

import json

from tests.docs.blocks import ROOT


def test_what_few_bits_cost_a_teacher() -> None:
    kinds = json.loads((ROOT / "benchmarks" / "quantized.json").read_text(encoding="utf-8"))["kinds"]
    page = (ROOT / "docs" / "quantized.md").read_text(encoding="utf-8")
    names = {
        "none": "full, float32",
        "bfloat16": "full, bfloat16",
        "fp8": "`precision: fp8`",
        "fp8_head": "head alone in fp8 (no setting)",
    }
    for kind, found in kinds.items():
        name, kl = names.get(kind, f"`{kind}`"), "0" if kind == "none" else f"{found['kl_from_full']:.3f} nats"
        row = f"{name} | {found['weight_mb']:.0f} MB | {found['nats_per_token']:.3f} | {kl} | {found['same_top_1']:.0%}"
        assert f"| {row} |" in page
