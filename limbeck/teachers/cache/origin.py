"""The weights that a cache was filled by, distinguished from others of the same name and tokenizer.

The identity in a cache's specification is a hash of loaded weights, and a run that reads a cache loads none. So a cache
also keeps samples of the files that they came from, which a run compares with those that its run file names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from limbeck.errors import CacheError
from limbeck.utils.files import stamp_files, write_atomic

NAME = "weights.json"

Sample = list[tuple[int, str]]
"""Size and hash of each file's samples, whatever the files are called."""


def _sample(files: Sequence[Path]) -> Sample:
    """Stamps of the weights alone: every version of a library writes another ``config.json``."""
    return sorted((stamp.size, stamp.sample) for stamp in stamp_files([f for f in files if f.suffix != ".json"]))


def store_origin(folder: str | Path, files: Sequence[Path]) -> None:
    """Add the files of the weights that a cache was filled by; the same weights may lie in files of several formats."""
    sample, known = _sample(files), _stored(folder)
    if sample and sample not in known:
        write_atomic(Path(folder) / NAME, json.dumps([*known, sample]) + "\n")


def check_origin(folder: str | Path, files: Sequence[Path], model: str) -> bool:
    """Whether the weights could be compared: not where the cache says nothing, or the files are not here.

    Raises:
        CacheError: the cache was filled by other weights.
    """
    sample, known = _sample(files), _stored(folder)
    if sample and known and sample not in known:
        raise CacheError(
            f"the cache {str(folder)!r} was filled by other weights than those of {model!r}; name the model that "
            "filled it, or fill another cache"
        )
    return bool(sample and known)


def _stored(folder: str | Path) -> list[Sample]:
    path = Path(folder) / NAME
    try:
        return [[(int(size), str(sample)) for size, sample in files] for files in json.loads(path.read_bytes())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, RecursionError):
        raise CacheError(
            f"{str(path)!r} is damaged; delete it to go on without comparing the weights that filled the cache"
        ) from None
