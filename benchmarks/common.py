"""What all benchmarks share: where a figure comes from, and its file.

A result is a JSON object whose first keys say on what it was measured:
``{"device": ..., "versions": {...}, "date": ..., ...}``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def device() -> str:
    """The GPU where one is used, else the processor with the number of its cores that this process may use."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.processor() or platform.machine()}, {platform.system()}, {cores} cores"


def versions(*more: str) -> dict[str, str]:
    """Of Python, limbeck and what it computes with, as far as it is installed; ``more`` names further packages."""
    found = {"python": platform.python_version()}
    for name in ("limbeck", "numpy", "tokenizers", "torch", "triton", "transformers", *more):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def origin(*more: str) -> dict[str, Any]:
    """Device, versions and date, as they stand in front of every result."""
    return {"device": device(), "versions": versions(*more), "date": datetime.date.today().isoformat()}


def command() -> str:
    """The command of this process, of paths their last part alone: where files lie is nobody else's business."""
    script = Path(sys.argv[0]).resolve()
    root = Path(__file__).parents[1].resolve()
    shown = script.relative_to(root).as_posix() if script.is_relative_to(root) else script.name
    return shlex.join([shown, *(Path(own).name if "/" in own else own for own in sys.argv[1:])])


def parser(script: str, doc: str | None) -> argparse.ArgumentParser:
    """Arguments of a script: ``--out``, by default the JSON file beside it."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path(script).with_suffix(".json"), help="where the result goes")
    return made


def record(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result: where the figures come from, then the figures."""
    path.write_text(json.dumps({**origin(), **result}, indent=1) + "\n", encoding="utf-8")


def load_tokenizer(name: str) -> Any:
    """A tokenizer by path, or one of the tests' zoo by its name."""
    if Path(name).exists():
        from limbeck.tokens.loading import load_tokenizer as load

        return load(name)
    from tests import zoo

    return zoo.tokenizer(name)
