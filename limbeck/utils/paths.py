"""Paths from run files that cannot leave their folder, and files that a kill cannot leave half written."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from limbeck.utils.errors import ConfigError


def safe_join(root: str | Path, *parts: str | Path) -> Path:
    """Join ``parts`` under ``root`` and refuse a result outside of it.

    Absolute parts, ``..`` and symbolic links that lead out of ``root`` are a ``ConfigError``. The path need not exist.
    """
    base = Path(root).resolve()
    target = base
    for part in parts:
        text = str(part)
        if "\0" in text:
            raise ConfigError(f"path {text!r} contains a NUL byte; give a plain relative path")
        if Path(text).is_absolute():
            raise ConfigError(f"path {text!r} is absolute; give one relative to {str(base)!r}")
        target = target / text
    resolved = target.resolve()
    if resolved != base and base not in resolved.parents:
        raise ConfigError(f"path {'/'.join(str(p) for p in parts)!r} leads out of {str(base)!r}; keep it inside")
    return resolved


def package_file(spec: str | Path) -> str:
    """``package:NAME/FILE`` -> the path of that file in an installed Python package; anything else unchanged."""
    text = str(spec)
    if not text.startswith("package:"):
        return text
    name, _, inner = text.removeprefix("package:").partition("/")
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise ConfigError(f"{text!r} needs the Python package {name!r}, which is not installed; pip install it")
    path = safe_join(found.submodule_search_locations[0], inner)
    if not path.exists():
        raise ConfigError(f"{text!r}: the package {name!r} holds no {inner!r}")
    return str(path)


def fsync_path(path: str | Path) -> None:
    """Flush one file or directory to the disk; a rename is only durable once its directory has been flushed."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(root: str | Path) -> None:
    """Flush every file and directory below ``root``, deepest first, then ``root`` itself."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            full = os.path.join(folder, name)
            if not os.path.islink(full):
                fsync_path(full)
        fsync_path(folder)


def write_atomic(path: str | Path, data: bytes | str) -> None:
    """Replace the file at ``path`` by ``data``; a reader sees the old content or the new one, never a part."""
    target = Path(path)
    tmp = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    raw = data.encode() if isinstance(data, str) else data
    try:
        with open(tmp, "wb") as f:
            f.write(raw)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, target)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
    fsync_path(target.parent)
