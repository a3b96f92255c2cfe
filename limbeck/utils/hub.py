"""Names of models and what they stand for: a model on this machine, or a repository of the hub, which is fetched.

A repository becomes a folder of the hub client's own cache, of the commit that its revision names when a process first
asks for it. All else reads that folder, so nothing but this module speaks to the hub, and only it knows how long to
wait.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

from limbeck.errors import ConfigError, one_line
from limbeck.utils.files import model_path, refuse_links
from limbeck.utils.progress import Bar, Silent, current, say

T = TypeVar("T")
Part = Literal["config", "tokenizer", "weights"]
Kind = Literal["model", "dataset"]

_FILE_SUFFIXES = (".json", ".gguf", ".model", ".safetensors", ".jinja", ".yaml", ".yml", ".txt", ".bin", ".jsonl")
_TOKENIZER_FILES = (
    # the last one is what a reader begins with: it is fetched last, so that one that is there is complete
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "config.json",
    "tokenizer_config.json",
    "tokenizer.json",
)
_OLD_TOKENIZER_FILES = ("*.model", "tekken.json", "vocab.json", "vocab.txt", "merges.txt")
_INDEX = "model.safetensors.index.json"
_ONE_FILE = "model.safetensors"

ASK_SECONDS = 4.5
"""How long the hub may take to answer a question; the client's own ``HF_HUB_ETAG_TIMEOUT`` goes before it."""
LARGE_STALL_SECONDS = 60.0
"""How long nothing of a file of weights may arrive: the client itself goes on after a pause of the network. Of a small
file it is ``ASK_SECONDS``."""
_LARGE = 64 << 20
_THREAD = "limbeck-hub"


class HubId(NamedTuple):
    """A repository of the hub: ``owner/name``, ``owner/name@revision`` or, of a GGUF file, ``owner/name/FILE.gguf``."""

    repo: str
    revision: str | None = None
    file: str | None = None
    kind: Kind = "model"

    def __str__(self) -> str:
        inner = "" if self.file is None else f"/{self.file}"
        return f"{self.repo}{inner}" + ("" if self.revision is None else f"@{self.revision}")


class _Listing(NamedTuple):
    """A commit of a repository: its files with their sizes; ``folder``: where the hub was not asked."""

    commit: str
    files: Mapping[str, int | None]
    folder: Path | None = None


def parse_id(spec: str, kind: Kind = "model") -> HubId | None:
    """The repository that a text may name; None for what the hub's client would not take."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    name, sign, revision = spec.partition("@")
    if (sign and not revision) or name.startswith(("/", ".", "~", "package:")):
        return None
    parts = name.split("/")
    file = None
    if kind == "model" and len(parts) > 2 and name.endswith(".gguf"):
        name, file = "/".join(parts[:2]), "/".join(parts[2:])
    elif kind == "model" and name.endswith(_FILE_SUFFIXES) and Path(name).parent.is_dir():
        # a file that is not there, not a repository that is called like one
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return HubId(name, revision or None, file, kind)


def locate(spec: str | Path) -> Path | HubId:
    """The one decision whether a model, tokenizer or GGUF file lies on this machine or on the hub.

    What exists here goes before a repository of the same name. Run folders and ``package:`` files: see ``model_path``.

    Raises:
        ConfigError: it is neither here nor a name that the hub knows.
    """
    place_or_id = _find(spec)
    if place_or_id is None:
        raise ConfigError(
            f"there is no model at {model_path(spec)!r}: the path does not exist; give a model folder, a GGUF file or "
            "a hub id (owner/name)"
        )
    return place_or_id


def _find(spec: str | Path) -> Path | HubId | None:
    text = model_path(spec)
    path = Path(text).expanduser()
    if path.exists():
        if text == str(spec):
            _say_local(text)
        return path
    return parse_id(text)


@functools.cache
def _say_local(text: str) -> None:
    """One line where a folder here has the name of what may also be on the hub."""
    if text.count("/") == 1 and parse_id(text) is not None and Path(text).is_dir():
        say(f"{text}: the folder here is used, not the hub's repository of that name")


def model_files(spec: str | Path, part: Part, *, code: bool = False) -> Path:
    """The folder or GGUF file on this machine with a part of a model, fetched where it is on the hub.

    ``code``: with the Python files of a model of its own making.
    """
    located = locate(spec)
    path = located if isinstance(located, Path) else _fetched(located, part, code)
    if path.is_dir():
        refuse_links(path)
    return path


def kept_files(spec: str | Path) -> Path | None:
    """The same without asking the hub: None where nothing of it is on this machine."""
    located = _find(spec)
    if located is None or isinstance(located, Path):
        return located
    folder = _kept(located)
    if folder is None:
        return None
    if located.file is not None:
        return folder / located.file if (folder / located.file).is_file() else None
    packed = list(folder.glob("*.gguf"))
    return packed[0] if len(packed) == 1 and not (folder / "config.json").is_file() else folder


def tokenizer_files(spec: str | Path) -> list[Path]:
    """Files on this machine that a tokenizer and its chat template come from, without asking the hub."""
    path = kept_files(spec)
    if path is None or path.is_file():
        return [] if path is None else [path]
    patterns = (*_TOKENIZER_FILES, *_OLD_TOKENIZER_FILES)
    files = {file for pattern in patterns if pattern != "config.json" for file in path.glob(pattern)}
    return sorted(files)


def data_commit(repo: HubId) -> tuple[str, bool]:
    """The commit that a data set's revision names, and whether the hub said so (it is in the cache otherwise)."""
    listing = _listing(repo)
    if listing.folder is None and listing.files and not _is_known(repo, listing):
        _download(repo, listing, [min(listing.files, key=lambda name: listing.files[name] or 0)])
    return listing.commit, listing.folder is None


def model_commit(spec: str | Path) -> tuple[HubId, str] | None:
    """The repository of a model on the hub and the commit that its revision names; None for one on this machine."""
    repo = _find(spec)
    return (repo, _listing(repo).commit) if isinstance(repo, HubId) else None


def model_sizes(repo: HubId) -> Mapping[str, int | None]:
    """The files of a model on the hub with their sizes, where the hub says them."""
    return _listing(repo).files


def forget() -> None:
    """Ask the hub anew for what this process knows already."""
    for known in (_fetched, _listing, _say_local):
        known.cache_clear()


# -- fetching ----------------------------------------------------------------------------------------------------------


@functools.cache
def _fetched(repo: HubId, part: Part, code: bool) -> Path:
    there = _listing(repo)
    gguf = repo.file or _gguf_of(repo, there)
    if gguf is not None:
        if gguf not in there.files:
            raise _lacking(repo, there, repr(gguf))
        return _get(repo, there, [gguf]) / gguf
    names = _wanted(repo, there, part)
    folder = _get(repo, there, names)
    if part == "weights":
        index = folder / _INDEX
        shards = _shards(index) if _INDEX in names else [_ONE_FILE]
        _get(repo, there, shards)
    if code:
        _get(repo, there, [name for name in there.files if name.endswith(".py")])
    return folder


def _wanted(repo: HubId, there: _Listing, part: Part) -> list[str]:
    """Names of files, in the order in which they are fetched."""
    if part == "tokenizer":
        names = [name for pattern in _TOKENIZER_FILES for name in there.files if fnmatch(name, pattern)]
        if "tokenizer.json" not in names:
            old = [name for name in there.files if any(fnmatch(name, one) for one in _OLD_TOKENIZER_FILES)]
            if not old:
                raise _lacking(repo, there, "tokenizer")
            names += old
        return names
    if "config.json" not in there.files:
        raise _lacking(repo, there, "config.json")
    names = ["config.json"]
    if part == "weights":
        weights = next((name for name in (_INDEX, _ONE_FILE) if name in there.files), None)
        if weights is None:
            raise _lacking(repo, there, f"{_ONE_FILE} or {_INDEX}")
        names += [name for name in ("generation_config.json",) if name in there.files]
        names += [weights] if weights == _INDEX else []
    return names


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index.name} names no files of weights: {one_line(error)}") from error


def _gguf_of(repo: HubId, there: _Listing) -> str | None:
    """The GGUF file of a repository that holds nothing else."""
    packed = [name for name in there.files if name.endswith(".gguf")]
    if "config.json" in there.files or "tokenizer.json" in there.files or not packed:
        return None
    if len(packed) > 1:
        raise ConfigError(
            f"{str(repo)!r} holds {len(packed)} GGUF files; name one of them, such as "
            f"{str(repo._replace(file=packed[0]))!r}"
        )
    return packed[0]


def _lacking(repo: HubId, there: _Listing, what: str) -> ConfigError:
    if there.folder is not None:
        return ConfigError(f"{str(repo)!r} was fetched without {what}, and {_unasked()}")
    others = ", ".join(sorted(there.files)[:4]) or "nothing"
    return ConfigError(f"{str(repo)!r} on the hub holds no {what} (but {others}); give another repository")


def _get(repo: HubId, there: _Listing, names: list[str]) -> Path:
    """The repository's folder with these files in it."""
    for name in names:
        # an index may name anything
        if name not in there.files:
            raise _lacking(repo, there, repr(name))
    if there.folder is not None:
        return there.folder
    folder = _storage(repo) / "snapshots" / there.commit
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        _download(repo, there, missing)
    return folder


def _download(repo: HubId, there: _Listing, names: list[str]) -> None:
    sizes = [there.files[name] or 0 for name in names]
    total = sum(sizes) / 1e6
    bar = (current() or Silent()).begin(f"fetching {repo} (MB)", total) if total > 1 else Silent()
    done = 0.0
    try:
        for name, size in zip(names, sizes, strict=True):
            patience = LARGE_STALL_SECONDS if size >= _LARGE else _ask_seconds()
            show = partial(_show, bar, done)
            try:
                with _quiet():
                    _watched(partial(_download_one, repo, there, name), _storage(repo) / "blobs", patience, show)
            except Exception as error:
                raise _refusal(repo, error, name) from error
            done += size / 1e6
            bar.update(done)
    finally:
        bar.close()


def _show(bar: Bar, done: float, more: int) -> None:
    bar.update(done + more / 1e6)


def _download_one(repo: HubId, there: _Listing, name: str) -> None:
    from huggingface_hub import hf_hub_download

    get = partial(hf_hub_download, repo.repo, name, repo_type=repo.kind, etag_timeout=_ask_seconds())
    # once by the revision's own name, from which the client's cache learns the commit for times without a hub
    known = _is_known(repo, there)
    path = get(revision=there.commit if known else repo.revision or "main")
    if there.commit not in Path(path).parts:  # the revision has just moved on
        get(revision=there.commit)


def _is_known(repo: HubId, there: _Listing) -> bool:
    """Whether the client's cache knows that the revision is this commit."""
    revision = repo.revision or "main"
    try:
        return revision == there.commit or (_storage(repo) / "refs" / revision).read_text() == there.commit
    except OSError:
        return False


def _storage(repo: HubId) -> Path:
    """Where the client keeps a repository, as its documentation of the cache says."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser() / "--".join([f"{repo.kind}s", *repo.repo.split("/")])


def _kept(repo: HubId) -> Path | None:
    """The folder of the revision in the client's cache; None where it was never fetched."""
    storage, revision = _storage(repo), repo.revision or "main"
    try:
        commit = (storage / "refs" / revision).read_text()
    except OSError:
        commit = revision
    folder = storage / "snapshots" / commit
    # a revision as it was typed: with slashes it could lead to another folder
    return folder if "/" not in commit and folder.is_dir() else None


# -- asking ------------------------------------------------------------------------------------------------------------


@functools.cache
def _listing(repo: HubId) -> _Listing:
    """Files of a revision of a repository, by the hub, or by the client's cache where the hub does not say."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    whole = repo._replace(file=None)
    if repo.file is not None:
        return _listing(whole)

    def ask() -> _Listing:
        api = HfApi()
        info = api.model_info if repo.kind == "model" else api.dataset_info
        # longer than we wait, so that our limit is always the one reported
        answer = info(repo.repo, revision=repo.revision, files_metadata=True, timeout=2 * _ask_seconds())
        return _Listing(str(answer.sha), {one.rfilename: one.size for one in answer.siblings or []})

    try:
        with _quiet():
            return within(_ask_seconds(), ask)
    except Exception as error:
        # there the hub has answered: a kept copy would hide that the revision is none
        folder = None if isinstance(error, RevisionNotFoundError) else _kept(repo)
        refusal = _refusal(repo, error)
        if folder is None:
            raise refusal from error
        if not _is_offline():
            say(f"{_shown(repo)}: the copy that was fetched before is used, for {_why(error)}")
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        return _Listing(folder.name, dict.fromkeys(names), folder)


def _refusal(repo: HubId, error: Exception, file: str | None = None) -> ConfigError:
    """Sentence for the user about a repository that cannot be had."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    name = repr(_shown(repo))
    what, local = ("data set", "data files") if repo.kind == "dataset" else ("model", "a model folder")
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, GatedRepoError):  # also a RepositoryNotFoundError
        prefix = "datasets/" if repo.kind == "dataset" else ""
        return ConfigError(
            f"{name} is gated: accept its terms at {_address()}/{prefix}{repo.repo}, then log in with `hf auth login` "
            "or set HF_TOKEN"
        )
    # without a token the hub answers 401 for what it does not have, too
    if isinstance(error, RepositoryNotFoundError) or (_status(error) == 401 and get_token() is None):
        places = f"not on {_address()}" if repo.kind == "dataset" else f"neither a local path nor on {_address()}"
        return ConfigError(
            f"{name} is {places}; check the name, and if it is private, log in with `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return ConfigError(f"{name}: the {what} has no revision {repo.revision!r}; give a branch, a tag or a commit")
    if file is not None and isinstance(error, _Stalled):
        return ConfigError(
            f"{name}: {file} stopped arriving from {_address()} ({error}); run it again, whole files are kept"
        )
    if file is not None:
        return ConfigError(
            f"{name}: {file} could not be fetched, for {_why(error)}; run it again, whole files are kept"
        )
    if _is_offline():
        return ConfigError(f"{name} is not on this machine, and HF_HUB_OFFLINE is set; unset it, or give {local}")
    return ConfigError(f"{name} is not on this machine, and {_why(error)}; check the network, or give {local}")


def _shown(repo: HubId) -> str:
    return f"hf:{repo}" if repo.kind == "dataset" else str(repo)


def _why(error: Exception) -> str:
    status = _status(error)
    if status in (401, 403):
        return f"{_address()} does not take the token that is set here (status {status})"
    if status is not None:
        return f"{_address()} answers with status {status}"
    return f"{_address()} cannot be reached ({one_line(error.__cause__ or error, 120)})"


def _status(error: Exception) -> int | None:
    from huggingface_hub.errors import HfHubHTTPError

    return int(error.response.status_code) if isinstance(error, HfHubHTTPError) else None


def _unasked() -> str:
    return "HF_HUB_OFFLINE is set" if _is_offline() else f"{_address()} cannot be reached"


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _address() -> str:
    """The hub's address as it may be shown: one that is set by hand may hold a password."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


# -- waiting -----------------------------------------------------------------------------------------------------------


def _ask_seconds() -> float:
    return float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or ASK_SECONDS)


class _Stalled(OSError):
    """Nothing has come for as long as we wait."""


def _begin(call: Callable[[], T]) -> Future[T]:
    """Start a call in a thread that nobody has to wait for: what it holds cannot be ended from outside."""
    running: Future[T] = Future()

    def work() -> None:
        try:
            running.set_result(call())
        except BaseException as error:
            # whatever ends this thread must end the wait for it
            running.set_exception(error)

    threading.Thread(target=work, daemon=True, name=_THREAD).start()
    return running


def within(seconds: float, call: Callable[[], T]) -> T:
    """Result of a call, or its error, within a time. The client tries each address of a host in turn, each for
    the whole of its own limit, so that limit does not hold for a call."""
    running = _begin(call)
    wait([running], seconds)
    if not running.done():
        raise _Stalled(f"no answer for {seconds:g} s")
    return running.result()


def _watched(call: Callable[[], T], folder: Path, seconds: float, tell: Callable[[int], None]) -> T:
    """The same for a call that fills files of a folder: it may take as long as something arrives."""
    first = most = _bytes_in(folder)
    running, since = _begin(call), time.monotonic()
    while not running.done():
        wait([running], 0.2)
        # more than ever, not than before: while a file is renamed there seem to be 0 bytes
        if (now := _bytes_in(folder)) > most:
            most, since = now, time.monotonic()
            tell(now - first)
        elif time.monotonic() - since > seconds:
            raise _Stalled(f"nothing came for {seconds:g} s")
    return running.result()


def _bytes_in(folder: Path) -> int:
    try:
        return sum(entry.stat().st_size for entry in os.scandir(folder))
    except OSError:  # not there yet, or one of its files was just renamed
        return 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Neither bars nor warnings of the client, whose retries are reported in our one line if they fail."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    _silence_our_threads()
    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@functools.cache
def _silence_our_threads() -> None:
    # not by a level for a time: a call that was given up goes on warning
    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(lambda record: record.threadName != _THREAD)
