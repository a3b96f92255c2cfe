"""Files of a folder bound together: a manifest with their sizes and checksums, and the step they belong to."""

from __future__ import annotations

import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError, safe_open

from limbeck.errors import CheckpointError, one_line
from limbeck.utils.files import write_atomic

MANIFEST_NAME = "manifest.json"


def _crc32(path: Path) -> int:
    found = 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            found = zlib.crc32(block, found)
    return found


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


def check_manifest(folder: Path, step: int) -> bool:
    """Whether a checkpoint has a manifest, with which its files then agree.

    Raises:
        CheckpointError: a file is missing or another one than was written, or the checkpoint is of another step.
    """
    path = folder / MANIFEST_NAME
    try:
        manifest = json.loads(path.read_bytes())
        files = {str(name): (int(v["bytes"]), int(v["crc32"])) for name, v in manifest["files"].items()}
        saved = int(manifest["step"])
    except FileNotFoundError:
        return False
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as e:
        raise CheckpointError(f"{str(path)!r} is damaged ({type(e).__name__}: {one_line(e)})") from e
    if saved != step:
        raise CheckpointError(f"the checkpoint {str(folder)!r} was saved as step {saved}")
    for name, (size, _) in files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            have = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
            raise CheckpointError(f"{name!r} of the checkpoint {str(folder)!r} {have}")
    sums = _checksums(folder, list(files))
    changed = [name for name, (_, expected) in files.items() if sums[name] != expected]
    if changed:
        raise CheckpointError(
            f"{changed[0]!r} of the checkpoint {str(folder)!r} is not what was saved (its checksum differs)"
        )
    return True


def check_readable(folder: Path) -> None:
    """What can be said of files without a manifest: JSON is whole, and so is every safetensors file by its header.

    Raises:
        CheckpointError: one of them is not.
    """
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="numpy"):
                    pass
            elif path.suffix == ".json":
                json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError, SafetensorError) as e:
            raise CheckpointError(f"{str(path)!r} is damaged ({one_line(e)})") from e
