"""Figures on pages are those of the stored results."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

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


def curves(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / name).read_text(encoding="utf-8"))["records"]["64"]["arms"]


def cells(shares: Iterable[float]) -> str:
    return " | ".join(f"{share:.0%}" for share in shares) + " |"


def test_own_text_against_stored_text() -> None:
    page = (ROOT / "docs" / "on_policy.md").read_text(encoding="utf-8")
    for arm in curves("on_policy_curve.json").values():
        for seed, run in (*arm["runs"].items(), ("mean", {"curve": arm["mean"]})):
            assert f"| {seed} | {cells(point['right'] for point in run['curve'])}" in page
    for arm in (*curves("on_policy_curve_directions.json").values(), *curves("on_policy_curve_warm_up.json").values()):
        mean = [point["right"] for point in arm["mean"]]
        shares = [*(run["curve"][-1]["right"] for run in arm["runs"].values()), mean[-1], sum(mean) / len(mean)]
        assert f"| {arm['rate']:g} | {cells(shares)}".replace("| 0.", "| .") in page
