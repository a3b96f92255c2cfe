"""From a played case to numbers that can be stored, and from stored numbers to what differs."""

from __future__ import annotations

import functools
import platform
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

Record = dict[str, tuple[float, ...]]
"""``1/loss`` and so on: a figure, or the sum and count of a metric. ``gradient/...``, ``moved/...``: a digest."""

# On other machines, relative to the size of what is compared. Digests add up many roundings, most of all those of
# weights that moved little; a factor of 1 + 1e-4 anywhere is far outside of all this.
# A preference loss alone is -log sigmoid(beta (a - b)), where a and b are sums of some 250 nats over whole responses:
# what float32 rounds off of their tokens weighs ten times as much as in other losses (other CPUs: 7e-7 against 1e-7).
# A divergence of a few positions of one class of token is .01, the difference of log-probabilities of about 6: float32
# leaves it 5e-5 of its size.
TOLERANCES = {
    "float32": {"loss": 1e-6, "preference": 3e-6, "figure": 1e-5, "class": 5e-5, "gradient": 1e-5, "moved": 2e-5},
    "float64": dict.fromkeys(("loss", "preference", "figure", "class", "gradient", "moved"), 1e-12),
}


# ---- digests ---------------------------------------------------------------------------------------------------------


@functools.cache
def _directions() -> np.ndarray:
    return np.random.default_rng(11).uniform(-1, 1, 1 << 18)


def digest(tensor: Tensor) -> tuple[float, float, float]:
    """(sum, sum of absolute values, product with a fixed pseudo-random vector in [-1, 1]), all in float64."""
    flat = tensor.detach().double().reshape(-1).numpy()
    return float(flat.sum()), float(np.abs(flat).sum()), float((flat * _directions()[: flat.size]).sum())


class Watch:
    """Gradients at the first step, and the weights that it found.

    ``names``: of the parameters, by id; the others are known by their place in the optimizer and their shape.
    """

    def __init__(self, names: dict[int, str]) -> None:
        self.names = names
        self.gradients: dict[str, tuple[float, float, float]] = {}
        self.start: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.start:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for place, p in enumerate(parameters):
            name = self.names.get(id(p), f"{place}: {'x'.join(map(str, p.shape))}")
            self.start[name] = p, p.detach().clone()
            if p.grad is not None:
                self.gradients[name] = digest(p.grad)

    def moved(self) -> dict[str, tuple[float, float, float]]:
        """What all steps so far added to the weights."""
        return {name: digest(p.detach().double() - old.double()) for name, (p, old) in self.start.items()}


@contextmanager
def watching(names: dict[int, str] | None = None) -> Iterator[Watch]:
    """Watch the next optimizer that takes a step."""
    watch = Watch(names or {})
    handle = register_optimizer_step_pre_hook(watch)
    try:
        yield watch
    finally:
        handle.remove()


def record_of(steps: list[dict[str, Any]], watch: Watch) -> Record:
    """Figures of all steps and digests of all parameters under one name each."""
    out: Record = {}
    for number, figures in enumerate(steps):
        for name, value in figures.items():
            if value is not None:
                out[f"{number}/{name}"] = tuple(float(v) for v in (value if isinstance(value, tuple) else (value,)))
    out |= {f"gradient/{name}": value for name, value in watch.gradients.items()}
    return out | {f"moved/{name}": value for name, value in watch.moved().items()}


# ---- comparing -----------------------------------------------------------------------------------------------------


def setup() -> dict[str, Any]:
    """All that the last bits of a number depend on, besides the code."""
    return {
        "cpu": _cpu(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
    }


def _cpu() -> str:
    """The processor's name, family and model, and a checksum of what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    known = [facts.get(key, "?") for key in ("model name", "cpu family", "model", "stepping")]
    return "/".join((*known, f"{zlib.crc32(facts.get('flags', '').encode()):08x}"))


def differences(found: Record, stored: Record, dtype: str, *, exact: bool) -> list[str]:
    """What of a record is missing, new or another number than the stored one."""
    out = [f"{name} is gone" for name in stored if name not in found]
    out += [f"{name} is new: {found[name]}" for name in found if name not in stored]
    for name, expected in stored.items():
        values = found.get(name, expected)
        if values == expected or all(np.isnan(a) and np.isnan(b) for a, b in zip(values, expected, strict=True)):
            continue
        error = relative_error(values, expected, _scale(name, stored))
        limit = 0.0 if exact else TOLERANCES[dtype]["preference" if _of_pairs(name, stored) else kind_of(name)]
        if not error <= limit:
            out.append(f"{name} is {values}, was {expected} (relative {error:.2g}, allowed {limit:.2g})")
    return out


def kind_of(name: str) -> str:
    """``loss``, another ``figure``, the divergence of a ``class`` of token, ``gradient`` or ``moved``."""
    first, _, rest = name.partition("/")
    if first in ("gradient", "moved"):
        return first
    if "/kl_loss/" in rest:
        return "class"
    return "loss" if rest in ("loss", "train/loss") else "figure"


def _of_pairs(name: str, stored: Record) -> bool:
    """Whether a loss is that of preference pairs and nothing else."""
    return kind_of(name) == "loss" and stored.get(name.replace("/loss", "/preference/loss")) == stored[name]


def relative_error(values: tuple[float, ...], expected: tuple[float, ...], scale: float) -> float:
    """The largest difference, relative to ``scale``; infinite where one side has a number and the other has none."""
    if len(values) != len(expected) or not np.isfinite([*values, *expected]).all():
        return np.inf
    return max(abs(a - b) for a, b in zip(values, expected, strict=True)) / scale


def _scale(name: str, stored: Record) -> float:
    """What a difference is measured by: a figure's own size, or a tensor's. A tensor that is next to nothing beside the
    others (all of it cancels) is measured by a hundredth of the largest."""
    kind = kind_of(name)
    if kind in ("loss", "figure", "class"):
        return max(abs(stored[name][0]), 1e-300)
    largest = max(values[1] for other, values in stored.items() if kind_of(other) == kind)
    return max(stored[name][1], largest / 100)
