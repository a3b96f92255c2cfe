"""How large the page of a long run is, and how soon a browser has drawn it.

    python benchmarks/report_page.py             # a run of 100,000 steps
    python benchmarks/report_page.py --steps 1000

Writes ``benchmarks/report_page.json``. The run is synthetic, with the metrics that a run with one teacher logs.
``drawn_ms``: from the start of loading until all charts are there, as the page itself measures it in Chromium.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from limbeck.config import dump_yaml
from limbeck.report.run_page import write_report

RESULT = Path(__file__).with_suffix(".json")
TEACHER = ("boundary_kl", "chunk_kl", "kl_loss", "proj_accuracy", "unreached_mass")
TIMES = ("data", "teacher", "forward", "loss", "backward", "optimizer", "wait")


def write_run(folder: Path, steps: int) -> Path:
    """A run folder with ``steps`` steps, validated 100 times."""
    source = random.Random(0)
    folder.mkdir(parents=True)
    config = {
        "policy": {"model_name": "student"},
        "teacher": {"model_name": "teacher"},
        "loss_fn": {"mode": "boundary_kl"},
        "distillation": {"max_num_steps": steps},
    }
    (folder / "config.yaml").write_text(dump_yaml(config))
    with (folder / "metrics.jsonl").open("w") as metrics:
        for step in range(steps + 1):
            metrics.write(json.dumps(row(step, steps, source)) + "\n")
    prompts = [
        {"step": s, "writer": "student", "number": 0, "prompt": "Once", "text": " upon" * 40} for s in range(101)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    return folder


def row(step: int, steps: int, source: random.Random) -> dict[str, Any]:
    """One line of metrics."""
    level = 2.0 + 3.0 * math.exp(-5 * step / steps)
    found: dict[str, Any] = {"step": step}
    if step:
        found |= {f"train/{name}": level + source.gauss(0, 0.2) for name in ("loss", "ce_loss", "kl_loss", "grad_norm")}
        found |= {f"train/teacher_0/{name}": source.random() for name in TEACHER}
        found |= {f"train/time/{name}": 0.1 + 0.01 * source.random() for name in TIMES}
        found |= {"train/accuracy": source.random(), "train/tokens": 65536.0, "train/chunks": 50000.0, "train/lr": 1e-4}
        found |= {"train/tokens_per_s": 9e4 * source.random(), "train/seconds": 0.8, "gpu/memory_gib": 40.0}
    if step % max(1, steps // 100) == 0:
        found |= {f"val/{name}": level / 2 for name in ("bpb", "loss", "ce_loss", "kl_loss", "accuracy", "coverage")}
        found |= {"val/teacher_bpb": 0.9, **{f"val/teacher_0/{name}": 0.1 for name in TEACHER}}
    return found


def drawn(page: Path, chromium: str) -> int:
    """Milliseconds until the charts of a page are there."""
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        command = [
            chromium,
            *options,
            f"--user-data-dir={profile}",
            "--window-size=1280,900",
            "--dump-dom",
            page.as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r'data-drawn="(\d+)"', done.stdout)
    if found is None:
        raise SystemExit("the page was not drawn")
    return int(found[1])


def measure(steps: int, repeats: int = 3) -> dict[str, Any]:
    """Size, time to write and time to draw of the page of a run."""
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder) / "run", steps)
        start = time.perf_counter()
        page = write_report(run)
        seconds = time.perf_counter() - start
        size = page.stat().st_size
        chromium = next(
            (found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))), None
        )
        times = [drawn(page, chromium) for _ in range(repeats)] if chromium else []
        metrics = (run / "metrics.jsonl").stat().st_size
    return {
        "steps": steps,
        "metrics_mb": round(metrics / 1e6, 1),
        "page_mb": round(size / 1e6, 2),
        "write_s": round(seconds, 1),
        "drawn_ms": round(statistics.median(times)) if times else None,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    found = measure(parser.parse_args().steps)
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
