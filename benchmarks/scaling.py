"""A simulation of more devices from what one device measured: Llama-3.2-1B from Qwen3-4B, 16,384 tokens per device.

    python -m benchmarks.scaling          # reads gpu/results.json, writes scaling.json beside it

Arithmetic is what one H200 measured (rows `step_live` and `step_cached` where they are there; otherwise the planner's
figure for the bodies plus the measured head and loss). Transfers are the planner's formulas. A step waits for its
slowest device: each device's time is drawn with the measured spread. No run of several devices was made.
"""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

from benchmarks.common import parser, record
from limbeck.distributed.mesh import MeshShape
from limbeck.distributed.planner import Layout, Machine, ModelShape, TeacherMemory, Workload, seconds_of

STUDENT = ModelShape(1_235_814_400, 16, 2048, 8192, 32, 8, 64, 128_256, tied=True)
TEACHER = ModelShape(4_022_468_096, 36, 2560, 9728, 32, 8, 128, 151_936, tied=True)
TOKENS = 16_384
DEVICES = (1, 2, 4, 8, 16, 64, 256, 1024)
DRAWS = 200


def arithmetic(results: dict[str, Any], kind: str) -> tuple[float, str]:
    """Seconds per step of one device, and where the figure comes from."""
    row = results.get(f"step_{kind}")
    if row:
        return TOKENS / float(row["tokens_per_s"]), "measured step"
    teachers = (TeacherMemory("live", TEACHER),) if kind == "live" else (TeacherMemory("cache", signal_bytes=396),)
    work = Workload(STUDENT, teachers, 8, 2048, TOKENS, compute_bytes=2)
    parts = seconds_of(work, Layout(MeshShape(), False), Machine())
    return parts["student"] + parts["teachers"] + results["boundary_kl"]["ms"] / 1e3, "formula + measured head and loss"


def simulate(devices: int, seconds: float, spread: float, sharded: bool, machine: Machine, seed: int = 0) -> float:
    """Mean seconds per step over ``DRAWS`` steps."""
    work = Workload(STUDENT, (), 8 * devices, 2048, TOKENS, compute_bytes=2)
    parts = seconds_of(work, Layout(MeshShape(devices), sharded), machine)
    # hidden transfers are hidden behind the measured time, not behind the formula's
    hidden = max(0.0, parts["sharding"] + parts["student"] - seconds) if sharded and parts["sharding"] else 0.0
    waiting = hidden if sharded else parts["sharding"]
    source = random.Random(seed)
    slowest = [max(source.gauss(seconds, spread) for _ in range(devices)) for _ in range(DRAWS)]
    return statistics.fmean(slowest) + waiting + parts["latency"]


def main() -> None:
    args = parser(__file__, __doc__).parse_args()
    results = json.loads((Path(__file__).parent / "gpu" / "results.json").read_text())
    machine = Machine()
    # the range of the repeated head-and-loss measurement as four standard deviations
    row = results["boundary_kl"]
    spread = (row["high_ms"] - row["low_ms"]) / 1e3 / 4
    measured = {key: results[key] for key in ("device", "versions", "date")}
    out: dict[str, Any] = {**measured, "tokens_per_device": TOKENS, "rows": []}
    for kind in ("live", "cached"):
        seconds, origin = arithmetic(results, kind)
        for sharded in (False, True):
            for devices in DEVICES:
                if sharded and devices == 1:
                    continue
                step = simulate(devices, seconds, spread, sharded, machine)
                out["rows"].append(
                    {
                        "teacher": kind,
                        "layout": "FSDP" if sharded else "DP",
                        "devices": devices,
                        "step_s": round(step, 4),
                        "tokens_per_s": round(devices * TOKENS / step),
                        "efficiency": round(seconds / step, 3),
                        "origin": origin,
                    }
                )
    record(args.out, out)
    for row in out["rows"]:
        print(
            "{teacher:7s} {layout:5s} {devices:5d} {step_s:8.4f} s {tokens_per_s:12,d} tok/s {efficiency:.3f}".format(
                **row
            )
        )


if __name__ == "__main__":
    main()
