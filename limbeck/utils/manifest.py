"""Files of a folder bound together: a manifest with their sizes and checksums, and the step they belong to."""

from __future__ import annotations

import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from limbeck.errors import CheckpointError, one_line
from limbeck.utils.files import write_atomic

MANIFEST_NAME = "manifest.json"


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def _checksums(folder: Path, names: list[str]) -> dict[str, int]:
    """CRC32 of files below ``folder``; several at once, for the checksum lets go of the interpreter."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda name: _crc32(folder / name), names), strict=True))


def write_manifest(folder: Path, step: int) -> None:
    """Bind the files of a checkpoint together: their sizes and checksums, and the step they belong to."""
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    sums = _checksums(folder, names)
    files = {name: {"bytes": (folder / name).stat().st_size, "crc32": sums[name]} for name in names}
    write_atomic(folder / MANIFEST_NAME, json.dumps({"format": 1, "step": step, "files": files}, indent=1))


def check_manifest(folder: Path, step: int) -> None:
    """Refuse a checkpoint whose files do not agree with its manifest.

    Raises:
        CheckpointError: a file is missing or another one than was written, or the checkpoint is of another step.
    """
    path = folder / MANIFEST_NAME
    try:
        manifest = json.loads(path.read_bytes())
        files = {str(name): (int(v["bytes"]), int(v["crc32"])) for name, v in manifest["files"].items()}
        saved = int(manifest["step"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as e:
        raise CheckpointError(f"{str(path)!r} is damaged ({type(e).__name__}: {one_line(e)})") from e
    if saved != step:
        raise CheckpointError(f"the checkpoint {str(folder)!r} was saved as step {saved}")
    # sizes first, for they cost no reading
    for name, (size, _) in files.items():
        size_now = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size_now != size:
            have = "is missing" if size_now is None else f"has {size_now:,} bytes instead of {size:,}"
            raise CheckpointError(f"{name!r} of the checkpoint {str(folder)!r} {have}")
    sums = _checksums(folder, list(files))
    changed = [name for name, (_, expected) in files.items() if sums[name] != expected]
    if changed:
        raise CheckpointError(
            f"{changed[0]!r} of the checkpoint {str(folder)!r} is not what was saved (its checksum differs)"
        )
