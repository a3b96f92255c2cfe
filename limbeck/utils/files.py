"""Files and folders: paths that stay inside, outputs that are whole or absent, caches that a kill cannot damage."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

from limbeck.errors import ConfigError


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
    # by parents, not by text: /data-2 begins with /data
    if resolved != base and base not in resolved.parents:
        raise ConfigError(f"path {'/'.join(str(p) for p in parts)!r} leads out of {str(base)!r}; keep it inside")
    return resolved


_WEIGHTS = (".safetensors", ".gguf")


def refuse_links(folder: str | Path) -> None:
    """``ConfigError`` where a text file of a model folder is a link to elsewhere: what it holds goes into checkpoints.

    A folder of the hub client's cache consists of links to the files of its repository. Weights may be links: they
    are numbers whatever they are read from.
    """
    root = Path(folder).resolve()
    homes = {root, root.parent.parent / "blobs"} if root.parent.name == "snapshots" else {root}
    for path in (*root.glob("*"), *root.glob("additional_chat_templates/*")):
        if path.suffix not in _WEIGHTS and path.is_file() and homes.isdisjoint((target := path.resolve()).parents):
            raise ConfigError(
                f"{str(path)!r} is a link to {str(target)!r}, outside of its folder; put the file itself there"
            )


def package_file(spec: str | Path) -> str:
    """``package:NAME/FILE`` -> the path of that file in an installed Python package; anything else unchanged."""
    text = str(spec)
    if not text.startswith("package:"):
        return text
    name, _, inner = text.removeprefix("package:").partition("/")
    package = importlib.util.find_spec(name) if name.isidentifier() else None
    if package is None or not package.submodule_search_locations:
        raise ConfigError(f"{text!r} needs the Python package {name!r}, which is not installed; pip install it")
    path = safe_join(package.submodule_search_locations[0], inner)
    if not path.exists():
        raise ConfigError(f"{text!r}: the package {name!r} holds no {inner!r}")
    return str(path)


def model_path(spec: str | Path) -> str:
    """Where the model that ``spec`` names lies: of a run folder the weights of its newest checkpoint, of a folder with
    a GGUF file and no ``config.json`` that file; see also ``package_file``. All else stays as it is.
    """
    text = package_file(spec)
    folder = Path(text).expanduser()
    if (folder / "config.json").is_file():
        return text
    if not (folder / "config.yaml").is_file():
        packed = list(folder.glob("*.gguf"))
        return str(packed[0]) if len(packed) == 1 else text
    steps = [path for path in (folder / "checkpoints").glob("step_*") if path.name.removeprefix("step_").isdigit()]
    if not steps:
        raise ConfigError(f"{text!r} is a run folder without a checkpoint, so there is no model in it yet")
    newest = max(steps, key=lambda path: int(path.name.removeprefix("step_")))
    return str(newest / "policy" / "weights")


def short_names(specs: Iterable[str]) -> dict[str, str]:
    """Last part of each path; with as many parents as it takes to tell them apart."""
    names = list(specs)
    for depth in range(1, 8):
        short = ["/".join(Path(name).parts[-depth:]) or name for name in names]
        if len(set(short)) == len(names):
            return dict(zip(names, short, strict=True))
    return {name: name for name in names}


def fsync_path(path: str | Path) -> None:
    """Flush one file or directory to the disk; a rename is only durable once its directory has been flushed."""
    # a directory can be opened for reading only, and fsync takes that
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


def follow_umask(root: str | Path) -> None:
    """Give a folder and all that is below it the modes of new files: libraries write some with modes of their own, and
    a copy has those of what it was copied from."""
    folder = Path(root)
    probe = Path(tempfile.mkdtemp(dir=folder)) / "x"
    try:
        # asking for the umask itself would change it, for all threads, for a moment
        probe.mkdir()
        mode = probe.stat().st_mode & 0o777
    finally:
        shutil.rmtree(probe.parent)
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(mode if path.is_dir() else mode & 0o666)


def cache_dir(kind: str) -> Path:
    """The folder of one kind of things that can be made again: ``$LIMBECK_CACHE`` or ``~/.cache/limbeck``, then it."""
    base = os.environ.get("LIMBECK_CACHE")
    if base:
        return Path(base).expanduser() / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "limbeck" / kind


def kept_conversion(
    kind: str, path: Path, version: str, convert: Callable[[Path], None], *, needs: int = 0
) -> Path | None:
    """The folder of ``cache_dir(kind)`` that holds what a file was converted to; made now where it is not there yet.

    It belongs to the file's path, size and time of the last write. ``version``: of whatever decides the result.
    ``convert``: fills an empty folder, with ``needs`` bytes at most. None where the disk has no room for it.
    """
    state = path.stat()
    text = f"{version}\0{path.resolve()}\0{state.st_size}\0{state.st_mtime_ns}"
    folder = cache_dir(kind) / hashlib.sha256(text.encode()).hexdigest()[:20]
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder.parent).free < 2 * needs:
            return None
        # beside its place: a rename stays within one file system
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError:
        return None
    try:
        convert(scratch)
        scratch.rename(folder)
    except OSError:  # another process was first, or there is no room
        return folder if folder.is_dir() else None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


_FULL = {errno.ENOSPC: "No space left on device", errno.EDQUOT: "Disk quota exceeded", errno.EFBIG: "File too large"}


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error is one of a full disk; libraries wrap the system's, or keep only its text."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(text in str(error) for text in _FULL.values()):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def _naming(target: Path) -> Iterator[None]:
    """A block whose errors of a full disk name what is written."""
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        number = getattr(error, "errno", None) or errno.ENOSPC
        raise OSError(number, os.strerror(number), str(target)) from error


def write_atomic(path: str | Path, data: bytes | str) -> None:
    """Replace the file at ``path`` by ``data``; a reader sees the old content or the new one, never a part."""
    target = Path(path)
    partial = _partial(target)
    try:
        with _naming(target), partial.open("xb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
            _publish(stream, partial, target)
    except BaseException:
        # Ctrl-C leaves nothing behind either
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """``with`` block that fills a folder, which becomes ``path`` only if the block succeeds; nothing stays otherwise.

    What is at ``path`` may be an empty folder.
    """
    target = Path(path).absolute()
    partial = _partial(target)
    try:
        with _naming(target):
            partial.mkdir(parents=True)
            yield partial
            if target.exists():
                # perhaps the folder that somebody works in: it stays the same one
                for part in partial.iterdir():
                    part.rename(target / part.name)
            else:
                partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _partial(target: Path) -> Path:
    """A name beside ``target`` that nobody else has: threads and processes may write the same target at once."""
    return target.with_name(f".{target.name}.{os.getpid()}.{_host()}.{secrets.token_hex(4)}.tmp")


def _sweep(target: Path) -> None:
    """Remove what killed processes of this machine have left beside ``target``."""
    name = re.compile(rf"\.{re.escape(target.name)}\.(\d+)\.{_host()}\.[0-9a-f]{{8}}\.tmp")
    try:
        with os.scandir(target.parent) as entries:
            left = [entry for entry in entries if (match := name.fullmatch(entry.name)) and not _runs(int(match[1]))]
        for entry in left:
            shutil.rmtree(entry.path, ignore_errors=True) if entry.is_dir() else os.unlink(entry.path)
    except OSError:
        return  # another process sweeps too, or the folder cannot be read; what follows says so


@cache
def _host() -> str:
    """Tells machines apart that share a folder: a process number says nothing about another machine's."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        # not ours to signal, so it is there
        return True
    return True


def _publish(stream: IO[bytes], partial: Path, target: Path) -> None:
    # content before the name: a rename may reach the disk before what it names
    stream.flush()
    os.fsync(stream.fileno())
    os.replace(partial, target)
    fsync_path(target.parent)


class Stamp(NamedTuple):
    """Stamp that tells a file from another one of its name.

    ``written``: when it was last written, in nanoseconds; ``sample``: hash of evenly spaced blocks of it, of all of it
    where it is small.
    """

    name: str
    size: int
    written: int
    sample: str


_SAMPLE_BLOCK = 1 << 16


def stamp_files(paths: Sequence[str | Path]) -> list[Stamp]:
    """A stamp of each file; some thousand blocks of 64 KiB are read of all of them together, 2 to 64 of each."""
    blocks = min(64, max(2, 4096 // max(len(paths), 1)))
    return [_stamp(Path(path), blocks) for path in paths]


def _stamp(path: Path, blocks: int) -> Stamp:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        status = os.fstat(stream.fileno())
        last = max(status.st_size - _SAMPLE_BLOCK, 0)
        starts = range(0, last + 1, _SAMPLE_BLOCK) if last < blocks * _SAMPLE_BLOCK else _spread(last, blocks)
        for start in (*starts, last):
            stream.seek(start)
            digest.update(stream.read(_SAMPLE_BLOCK))
    return Stamp(path.name, status.st_size, status.st_mtime_ns, digest.hexdigest())


def _spread(last: int, blocks: int) -> list[int]:
    return [last * number // (blocks - 1) for number in range(blocks)]


_ORPHANS_SECONDS = 10.0


def lock_file(path: str | Path) -> IO[str]:
    """Lock the file at ``path`` until the stream that comes back is closed or its process ends.

    The file says who holds it. Processes that a killed holder had forked keep the lock until they notice; they are
    waited for.

    Raises:
        BlockingIOError: somebody else holds it; the text says who.
    """
    # not w, which would empty the holder's name before the lock is had
    stream = open(path, "a+", encoding="utf-8")  # noqa: SIM115
    deadline = time.monotonic() + _ORPHANS_SECONDS
    try:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                stream.seek(0)
                holder = stream.read(200).strip()
                if time.monotonic() > deadline or not _has_ended(holder):
                    raise BlockingIOError(holder or "a process that has not said its name") from error
                time.sleep(0.1)
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        stream.flush()
    except BaseException:
        stream.close()
        raise
    return stream


def _has_ended(holder: str) -> bool:
    """Whether a process that held a lock is known to be gone, as only its own machine can tell."""
    words = holder.split()
    if len(words) != 4 or not words[1].isdigit() or words[3] != socket.gethostname():
        return False
    try:
        os.kill(int(words[1]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


class Output:
    """A text file that appears only when all of it is written, and that is none of the files it is made from.

    ::

        with Output(path, inputs=files) as out:
            out.line(text)

    ``path`` None writes nothing, for commands whose output file is optional. An error inside the block leaves what was
    at ``path`` before.

    Raises:
        ConfigError: ``path`` is one of ``inputs`` (under any name), a folder, or in a folder that does not exist.
    """

    def __init__(self, path: str | Path | None, inputs: Iterable[str | Path] = ()) -> None:
        self.path = None if path is None else Path(path)
        self._stream: IO[bytes] | None = None
        if self.path is None:
            return
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise ConfigError(f"cannot write {str(self.path)!r}: give a file in an existing folder")
        refuse_inputs(self.path, inputs)

    def __enter__(self) -> Output:
        if self.path is not None:
            try:
                _sweep(self.path)
                self._partial = _partial(self.path)
                self._stream = self._partial.open("xb")
            except OSError as error:
                raise ConfigError(f"cannot write {str(self.path)!r}: {error.strerror}") from error
        return self

    def line(self, text: str) -> None:
        """Write ``text`` and a line end."""
        if self._stream is not None and self.path is not None:
            with _naming(self.path):
                self._stream.write(text.encode() + b"\n")

    def __exit__(self, kind: object, *rest: object) -> None:
        if self._stream is None or self.path is None:
            return
        try:
            with _naming(self.path), self._stream:
                if kind is None:
                    _publish(self._stream, self._partial, self.path)
        finally:
            self._stream = None
            self._partial.unlink(missing_ok=True)


def refuse_inputs(path: str | Path, inputs: Iterable[str | Path]) -> None:
    """``ConfigError`` where an output is one of the files it is made from, under any of its names."""
    for source in inputs:
        if _same_file(Path(path), Path(source)):
            raise ConfigError(
                f"cannot write {str(path)!r}: it is also the input {str(source)!r}, which would be lost; "
                "give another file"
            )


def _same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return one.resolve() == other.resolve()


def content_hash(value: Any) -> str:
    """A sha256 of a JSON value; equal values have equal hashes whatever their key order."""
    # ASCII: a lone surrogate stays an escape, which encode() below can take
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class JsonCache:
    """One JSON file per key, written atomically, so an interrupted run never leaves half an answer.

    Args:
        clean: What is done to an object before it is stored.

    Attributes:
        damaged: Entries that could not be read and were treated as absent.
    """

    def __init__(self, folder: str | Path, clean: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> None:
        self.folder = Path(folder)
        self.damaged = 0
        self._clean = clean

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"

    def get(self, key: str) -> dict[str, Any] | None:
        """The stored object; None where there is none."""
        try:
            value = json.loads(self._path(key).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            self.damaged += 1
            return None
        if not isinstance(value, dict):
            self.damaged += 1
            return None
        return value

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Store an object under a key made by ``content_hash``."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(value if self._clean is None else self._clean(value), ensure_ascii=True))
