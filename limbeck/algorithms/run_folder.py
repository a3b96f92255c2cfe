"""Files that a run leaves on disk besides metrics and checkpoints, and whether an old folder may be continued."""

from __future__ import annotations

import datetime
import errno
import importlib.metadata
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from pydantic import BaseModel
from safetensors.torch import save_file

from limbeck import __version__, short_forms
from limbeck.align.view import view_messages, view_text
from limbeck.config import FREE, dump_yaml, is_marked, read_yaml, resolve
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.sources import flatten_documents
from limbeck.distributed.comm import Comm
from limbeck.errors import ConfigError, DataError, TemplateError
from limbeck.utils.files import lock_file, write_atomic

CONFIG_NAME = "config.yaml"
LOCK_NAME = ".lock"
END_NAME = "end.json"
BASELINE = "baseline"
"""Folder of the run by cross-entropy alone, inside that of the run that it is compared with."""
_SAMPLE_CHARACTERS = 1500
_UNFINISHED = re.compile(r"\..+\.\d+\.[0-9a-f]{6}\.[0-9a-f]{8}\.tmp")


def _flat(node: Any, path: str = "") -> dict[str, Any]:
    if isinstance(node, Mapping) and node:
        inner = ((f"{path}.{key}" if path else str(key), child) for key, child in node.items())
        return {k: v for key, child in inner for k, v in _flat(child, key).items()}
    if isinstance(node, list) and node and all(isinstance(child, Mapping) for child in node):
        return _flat({str(number): child for number, child in enumerate(node)}, path)
    return {path: node}


def differences(model: type[BaseModel], old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """``key: old -> new`` for every setting that decides what a run computes.

    Those that may change (fields of ``model`` with the word ``FREE``) say when to stop, look and save, how fast data is
    read, and how the models lie on the processes.
    """
    a, b = _flat(old), _flat(new)
    changed = [key for key in {*a, *b} if a.get(key) != b.get(key)]
    # another mode brings and takes keys by the dozen: what has two values goes first
    changed.sort(key=lambda key: (key not in a or key not in b, key))
    if _same_schedule(old, new):
        changed = [key for key in changed if not key.startswith("policy.scheduler")]
    fixed = [key for key in changed if not is_marked(model, key.split("."), FREE)]
    return [f"{key}: {a.get(key)!r} -> {b.get(key)!r}" for key in fixed]


def _same_schedule(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether both schedules are one word's, over the number of steps of their runs, with one warm-up: as many steps,
    or a share of them that both may have been written out of."""
    words, shares = set[str](), list[tuple[float, float]]()
    warmups = set[int]()
    for values in (old, new):
        policy, loop = values.get("policy"), values.get("distillation")
        if not isinstance(policy, Mapping) or not isinstance(loop, Mapping):
            return False
        steps = loop.get("max_num_steps")
        word_and_warmup = short_forms.schedule_word(policy.get("scheduler"), steps)
        if word_and_warmup is None or not isinstance(steps, int):
            return False
        word, warmup = word_and_warmup
        words.add(word)
        warmups.add(warmup)
        shares.append((warmup / steps, (warmup + 1) / steps))
    return len(words) == 1 and (len(warmups) == 1 or max(low for low, _ in shares) < min(high for _, high in shares))


@contextmanager
def held(run_dir: str | Path, *others: str | Path | None) -> Iterator[None]:
    """Keep other runs out of a run folder, and out of folders that lie elsewhere, such as its checkpoints'.

    Rank 0 holds them, also before the ranks have found each other. A folder in which nothing came to be is removed,
    with those above it that were made for it.
    """
    with ExitStack() as stack:
        if int(os.environ.get("RANK", "0")) == 0 and Comm.world().rank == 0:
            for folder in dict.fromkeys(Path(f).resolve() for f in (run_dir, *others) if f is not None):
                new = [path for path in (folder, *folder.parents) if not path.exists()]
                stack.enter_context(_lock(folder))
                stack.callback(_remove_unused, folder, new)  # before the lock is let go
        yield


def _remove_unused(folder: Path, new: Sequence[Path]) -> None:
    """``new``: folders that were made, the innermost first; another run may have put something into them since."""
    if [path.name for path in folder.iterdir()] == [LOCK_NAME]:
        (folder / LOCK_NAME).unlink()
        with suppress(OSError):
            for path in [folder, *new[1:]] if new else [folder]:
                path.rmdir()


def _lock(folder: Path) -> IO[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return lock_file(folder / LOCK_NAME)
    except BlockingIOError as error:
        raise ConfigError(
            f"another run works in the folder {str(folder)!r} ({error}); wait for it or stop it, or give another "
            "logger.log_dir"
        ) from error
    except OSError as error:
        # reported in the words for a full disk, see `start.whole_run`
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(f"run folder {str(folder)!r} cannot be written ({error}); set logger.log_dir") from error


def open_run_folder(
    config: BaseModel, run_dir: str | Path, *, has_checkpoint: bool, versions: Mapping[str, Any]
) -> None:
    """Store the resolved configuration and versions; refuse to continue a run of another configuration."""
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(folder)
    if has_checkpoint:
        refuse_changes(config, folder)
    (folder / END_NAME).unlink(missing_ok=True)
    write_atomic(folder / CONFIG_NAME, dump_yaml(config))
    facts = dict(versions)
    if has_checkpoint and (first := _started(folder / "versions.json")) is not None:
        facts["started"] = first
    write_atomic(folder / "versions.json", json.dumps(facts, indent=1, sort_keys=True) + "\n")


def _started(path: Path) -> str | None:
    """When a run was started for the first time; None where that is not stored."""
    try:
        return str(json.loads(path.read_bytes())["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def refuse_changes(config: BaseModel, run_dir: str | Path) -> None:
    """Refuse to go on with a run that was begun with another configuration."""
    changed = changes(config, run_dir)
    if changed:
        listed = "; ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
        raise ConfigError(
            f"the run folder {str(run_dir)!r} holds a run of another configuration ({listed}); "
            "give another logger.log_dir, or delete the folder to start anew"
        )


def changes(config: BaseModel, run_dir: str | Path) -> list[str]:
    """How a configuration differs from the one that a run folder was begun with; see ``differences``."""
    path = Path(run_dir) / CONFIG_NAME
    if not path.is_file():
        return []
    old = read_yaml(path, str(path))
    with suppress(ConfigError):
        # settings that are new since then had the value that is their default now
        old = resolve(type(config), old).model_dump(mode="json")
    return differences(type(config), old, config.model_dump(mode="json"))


def _remove_unfinished(folder: Path) -> None:
    """Remove what a kill in the middle of ``write_atomic`` has left."""
    for path in folder.glob(".*.tmp"):
        if _UNFINISHED.fullmatch(path.name):
            path.unlink(missing_ok=True)


def versions(**more: Any) -> dict[str, Any]:
    """Versions of everything that decides numbers, with whatever else identifies the run."""
    packages = {"limbeck": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {**packages, "started": started, **more}


def write_skipped(run_dir: str | Path, skipped: Counter[str]) -> Counter[str]:
    """Store and return everything that all ranks have left out so far, by reason. Collective."""
    # all ranks, once per epoch: some names and counts as JSON
    total = Comm.world().sum_counter(skipped)
    if Comm.world().rank == 0:
        write_atomic(Path(run_dir) / "skipped.json", json.dumps(dict(sorted(total.items())), indent=1) + "\n")
    return total


def write_end(run_dir: str | Path, step: int, line: str) -> None:
    """Store how a run ended before its last step, until it is started again. For one rank."""
    write_atomic(Path(run_dir) / END_NAME, json.dumps({"step": step, "line": line}) + "\n")


def check_same_data(stored: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse to continue a run on other records than it began with."""
    for name, fingerprint in current.items():
        if stored.get(name) != fingerprint:
            raise DataError(
                f"data.{name} is no longer what this run began with (its files or their order have changed); "
                "put the old data back, or give another logger.log_dir"
            )


def save_failed_batch(run_dir: str | Path, step: int, batch: BatchedDataDict) -> Path:
    """Keep this rank's batch of a failed step: tensors as safetensors, the record numbers beside them."""
    folder = Path(run_dir) / f"failed_batch_step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    world = Comm.world()
    suffix = "" if world.size == 1 else f"_rank_{world.rank}"
    # clones: unnumbered keys share storage with teacher 0's
    tensors = {k: v.contiguous().clone() for k, v in batch.items() if isinstance(v, torch.Tensor)}
    save_file(tensors, folder / f"batch{suffix}.safetensors")
    write_atomic(folder / f"records{suffix}.json", json.dumps({"idx": list(batch.get("idx", []))}) + "\n")
    return folder


def write_alignment_sample(
    run_dir: str | Path, student_tokenizer: object, teacher_tokenizer: object, dataset: Any
) -> None:
    """Keep one aligned record, so that a reader of the run sees what the loss compared."""
    record = flatten_documents([dataset[0]])[0]
    try:
        if record.get("messages"):
            view = view_messages(student_tokenizer, teacher_tokenizer, record["messages"], record.get("tools"))
        else:
            view = view_text(student_tokenizer, teacher_tokenizer, (record.get("text") or "")[:_SAMPLE_CHARACTERS])
    except TemplateError:
        return  # the record is refused, and counted, where it is collated
    write_atomic(Path(run_dir) / "alignment_sample.json", json.dumps(view, ensure_ascii=False) + "\n")
