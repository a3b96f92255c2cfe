"""Files that a run reads besides its run file, compared when the run goes on.

The number and sizes of records are compared elsewhere; this is about content: data files, weights that are read again
on every start, tokenizers with their chat templates, and which teacher a cache was filled by.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from limbeck.data.readers import HUB_PREFIX
from limbeck.errors import DataError
from limbeck.models.loading import ModelConfig, weight_files
from limbeck.tokens.tokenizer import ByteTokenizer
from limbeck.utils.files import Stamp, package_file, stamp_files, write_atomic
from limbeck.utils.hub import model_commit, tokenizer_files
from limbeck.utils.progress import Lines, current

NAME = "origins.json"
_ADVICE = "put the old one back, or give another logger.log_dir"


def model_origins(models: Mapping[str, ModelConfig]) -> dict[str, list[Stamp]]:
    """Stamps of the weights of models, by what messages call them; of one on the hub its commit, since its files come
    to this machine only after the first start has asked."""
    return {name: _model_stamps(config) for name, config in models.items()}


def _model_stamps(config: ModelConfig) -> list[Stamp]:
    # random weights come from no file, here or there
    hub = model_commit(config.model_name) if config.model_name and config.init != "random" else None
    if hub is None:
        return stamp_files(weight_files(config))
    repo, commit = hub
    return [Stamp(f"{HUB_PREFIX}{repo}", 0, 0, commit)]


def tokenizer_origins(sides: Mapping[str, tuple[ModelConfig, object]]) -> dict[str, dict[str, dict[str, str]]]:
    """Origins of each side's ids, by what messages call the side: hashes of the tokenizer that is used, with the
    chat template that its section names, and of the files that it was read from."""
    origins = {}
    for name, (config, tokenizer) in sides.items():
        byte_tokenizer, spec = ByteTokenizer.of(tokenizer), config.tokenizer.name or config.model_name
        template = config.tokenizer.chat_template
        paths = [] if spec is None else tokenizer_files(spec)
        if template is not None:
            byte_tokenizer = byte_tokenizer.with_template(template)
            if template.endswith(".jinja"):
                paths.append(Path(package_file(template)).expanduser())
        stamps = zip(paths, stamp_files(paths), strict=True)
        origins[f"{name}.tokenizer"] = {
            "content": byte_tokenizer.identity(),
            "files": {str(path): stamp.sample for path, stamp in stamps},
        }
    return origins


def check_origins(
    run_dir: str | Path,
    files: Mapping[str, Sequence[Stamp]],
    facts: Mapping[str, Mapping[str, Any]] | None = None,
    tokenizers: Mapping[str, Mapping[str, Mapping[str, str]]] | None = None,
    *,
    has_checkpoint: bool,
    store: bool = True,
) -> None:
    """Store what a run reads, and refuse to continue one that read something else. For one rank; ``store``: False
    compares alone.

    ``files``: stamps by name (``data.train``, ``teacher_0``); a file that was only written again is reported.
    ``facts``: JSON objects that must be equal, such as the description of a cache; ``tokenizers``: see
    ``tokenizer_origins``.

    Raises:
        DataError: a file has another size or content, or a fact has changed.
    """
    path = Path(run_dir) / NAME
    stored = _stored(path) if has_checkpoint else {}
    for name, now in files.items():
        before = [*stored.get("files", {}).get(name, [])]
        for stamp in now if before else ():
            if (row := _stored_row(before, stamp)) is not None:
                # files of one name in several folders: each has a row of its own
                before.remove(row)
            _compare(name, row, stamp)
    for name, fact in (facts or {}).items():
        known = stored.get("facts", {}).get(name)
        # as JSON gives it back, where tuples are lists and keys are texts
        if known is not None and known != json.loads(json.dumps(fact)):
            raise DataError(f"{name} is no longer the one that this run began with; {_ADVICE}")
    for name, origin in (tokenizers or {}).items():
        if (earlier := stored.get("tokenizers", {}).get(name)) is not None:
            _compare_tokenizer(name, earlier, origin)
    origins = {
        "files": {name: list(rows) for name, rows in files.items()},
        "facts": dict(facts or {}),
        "tokenizers": dict(tokenizers or {}),
    }
    if store:
        write_atomic(path, json.dumps(origins, indent=1, sort_keys=True) + "\n")


def _stored(path: Path) -> dict[str, Any]:
    """Origins that an earlier start stored; nothing where none did."""
    try:
        origins = json.loads(path.read_bytes())
        rows = [row for rows in origins["files"].values() for row in rows]
        sides = origins.get("tokenizers", {}).values()
        good = (
            isinstance(origins["facts"], dict)
            and all(isinstance(row, list) and len(row) == 4 for row in rows)
            and all(isinstance(side[part], dict) for side in sides for part in ("content", "files"))
        )
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        good = False
    if not good:
        raise DataError(f"{str(path)!r} is damaged; delete it to go on without comparing what the run reads")
    return dict(origins)


def _compare_tokenizer(name: str, before: Mapping[str, Any], now: Mapping[str, Mapping[str, str]]) -> None:
    """Files that say the same in another way are no difference: what is compared is what was read from them."""
    changed = [part for part, value in now["content"].items() if before["content"].get(part) != value]
    if not changed:
        return
    old, new = before["files"], now["files"]
    files = sorted(path for path in {*old, *new} if old.get(path) != new.get(path))
    where = f" ({', '.join(files[:3])})" if files else ""
    raise DataError(f"{name}: other {' and '.join(changed)} than when this run began{where}; {_ADVICE}")


def _stored_row(rows: Sequence[Sequence[Any]], stamp: Stamp) -> Sequence[Any] | None:
    """Stored row of a file. Files of several folders may have one name: the row of equal content comes first."""
    named = [row for row in rows if row[0] == stamp.name]
    equal = [row for row in named if (row[1], row[3]) == (stamp.size, stamp.sample)]
    return next(iter(equal or named), None)


def _compare(name: str, before: Sequence[Any] | None, now: Stamp) -> None:
    if before is None:
        raise DataError(f"{name}: {now.name!r} was not there when this run began; {_ADVICE}")
    if before[1] != now.size:
        sizes = f"{now.size:,} bytes and had {before[1]:,}"
        raise DataError(f"{name}: {now.name!r} has {sizes} when this run began; {_ADVICE}")
    if before[3] != now.sample and now.name.startswith(HUB_PREFIX):
        raise DataError(
            f"{name}: {now.name!r} is at commit {now.sample} and was at {before[3]} when this run began; give another "
            f"logger.log_dir, and name a revision ({now.name.partition('@')[0]}@COMMIT) that stays"
        )
    if before[3] != now.sample:
        raise DataError(f"{name}: {now.name!r} holds something else than when this run began; {_ADVICE}")
    if before[2] != now.written:
        (current() or Lines()).say(
            f"{name}: {now.name} was written again since this run began; its size and samples of it are the same"
        )
