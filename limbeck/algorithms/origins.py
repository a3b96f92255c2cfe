"""What a run reads besides its run file, told apart from other things of the same names when the run goes on.

The tokenizers' fingerprints and the number and sizes of records are compared elsewhere; this is about content: data
files, weights that are read again on every start, and which teacher a cache was filled by.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from limbeck.errors import DataError
from limbeck.models.loading import ModelConfig, weight_files
from limbeck.utils.files import Stamp, stamp_files, write_atomic
from limbeck.utils.progress import Lines, current

NAME = "origins.json"
_ADVICE = "put the old one back, or give another logger.log_dir"


def model_origins(models: Mapping[str, ModelConfig]) -> dict[str, list[Stamp]]:
    """Stamps of the weights of models, by what messages call them."""
    return {name: stamp_files(weight_files(config)) for name, config in models.items()}


def check_origins(
    run_dir: str | Path,
    files: Mapping[str, Sequence[Stamp]],
    facts: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    has_checkpoint: bool,
) -> None:
    """Store what a run reads, and refuse to continue one that read something else. For one rank.

    ``files``: stamps by name (``data.train``, ``teacher_0``); one that only was written to again is told.
    ``facts``: JSON objects that must be equal, such as the description of a cache.

    Raises:
        DataError: a file has another size or content, or a fact has changed.
    """
    path = Path(run_dir) / NAME
    stored = _stored(path) if has_checkpoint else {}
    for name, now in files.items():
        before = {row[0]: row for row in stored.get("files", {}).get(name, [])}
        for stamp in now if before else ():
            _compare(name, before.get(stamp.name), stamp)
    for name, fact in (facts or {}).items():
        known = stored.get("facts", {}).get(name)
        if known is not None and known != json.loads(json.dumps(fact)):
            raise DataError(f"{name} is no longer the one that this run began with; {_ADVICE}")
    found = {"files": {name: list(rows) for name, rows in files.items()}, "facts": dict(facts or {})}
    write_atomic(path, json.dumps(found, indent=1, sort_keys=True) + "\n")


def _stored(path: Path) -> dict[str, Any]:
    """What an earlier start stored; nothing where none did, as in runs of earlier versions."""
    try:
        found = json.loads(path.read_bytes())
        rows = [row for rows in found["files"].values() for row in rows]
        good = isinstance(found["facts"], dict) and all(isinstance(row, list) and len(row) == 4 for row in rows)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        good = False
    if not good:
        raise DataError(f"{str(path)!r} is damaged; delete it to go on without comparing what the run reads")
    return dict(found)


def _compare(name: str, before: Sequence[Any] | None, now: Stamp) -> None:
    if before is None:
        raise DataError(f"{name}: {now.name!r} was not there when this run began; {_ADVICE}")
    if before[1] != now.size:
        sizes = f"{now.size:,} bytes and had {before[1]:,}"
        raise DataError(f"{name}: {now.name!r} has {sizes} when this run began; {_ADVICE}")
    if before[3] != now.sample:
        raise DataError(f"{name}: {now.name!r} holds something else than when this run began; {_ADVICE}")
    if before[2] != now.written:
        (current() or Lines()).say(
            f"{name}: {now.name} was written again since this run began; its size and samples of it are the same"
        )
