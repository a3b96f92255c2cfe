"""`benchmarks/quality/probes.py` averages what runs have measured of themselves."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.quality.probes import collect, table


def test_means_over_seeds_of_both_halves(tmp_path: Path) -> None:
    for seed, shift in (("1", 0.0), ("2", 0.2)):
        folder = tmp_path / f"coarse_tree_kl_.3_{seed}"
        folder.mkdir()
        rows = [
            {"step": 0, "val/teacher_0/kl_loss": 1.0},
            {"step": 1, "train/teacher_0/strict_chunks": 0.5, "train/teacher_0/cosine_ce": 0.1 + shift},
            {"step": 2, "train/teacher_0/kl_loss": 1.0},
            {"step": 3, "train/teacher_0/strict_chunks": 0.7, "train/teacher_0/cosine_ce": 0.3 + shift},
            {"step": 5, "train/teacher_0/strict_chunks": 0.9, "train/teacher_0/strict_kl": 3.0},
        ]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "coarse_ce_1").mkdir()
    (tmp_path / "coarse_ce_1" / "metrics.jsonl").write_text(json.dumps({"step": 1, "train/ce_loss": 2.0}))
    found = collect(tmp_path)
    assert found == {"coarse_tree_kl_.3": {"teacher_0/cosine_ce": [0.3], "teacher_0/strict_chunks": [0.6, 0.9]}}
    assert table(found).splitlines()[-1] == "| coarse_tree_kl_.3 | 0.300 | 0.900 |"
