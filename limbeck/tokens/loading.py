"""Load a tokenizer from wherever a user has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from limbeck.errors import TokenizerError
from limbeck.utils.files import package_file


def load_tokenizer(spec: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load a fast tokenizer from a model folder, a ``tokenizer.json``, a GGUF file, a ``tekken.json`` or a hub id.

    ``package:NAME/FILE`` names a file inside an installed Python package.
    A folder's ``tokenizer.json`` is read as it is: rebuilding a tokenizer from its class name can change ids.
    """
    spec = package_file(spec)
    path = Path(spec).expanduser()
    try:
        if path.is_dir():
            return _from_folder(path, trust_remote_code)
        if path.is_file():
            return _from_file(path)
    except TokenizerError:
        raise
    except Exception as error:  # the backend raises bare exceptions for malformed files
        raise TokenizerError(f"no tokenizer can be read from {spec}: {_one_line(error)}") from error
    if path.suffix or str(spec).startswith((".", "/", "~")):
        raise TokenizerError(f"no tokenizer at {spec}: the path does not exist; give a model folder or a hub id.")
    return _from_hub(str(spec), trust_remote_code)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _from_folder(path: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if (path / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(path)
    gguf = sorted(path.glob("*.gguf"))
    if gguf:
        return _from_file(gguf[0])
    if (path / "tekken.json").is_file():
        return _from_file(path / "tekken.json")
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def _from_file(path: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if path.suffix == ".gguf":
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if path.name.startswith("tekken"):
        from transformers.integrations.mistral import convert_tekken_tokenizer

        return convert_tekken_tokenizer(str(path))
    if path.suffix == ".json":
        if (path.parent / "tokenizer_config.json").is_file() and path.name == "tokenizer.json":
            return PreTrainedTokenizerFast.from_pretrained(path.parent)
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    raise TokenizerError(f"{path} is no tokenizer file; expected tokenizer.json, tekken.json or a .gguf file.")


def _from_hub(name: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(name)
    except (OSError, ValueError) as first:
        try:
            return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise TokenizerError(
                f"{name!r} is neither a local path nor a model that can be fetched from the hub: {_one_line(error)}"
            ) from first
