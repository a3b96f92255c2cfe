"""Load a tokenizer from wherever a user has one.

``read_tokenizer`` gives a `ByteTokenizer` and needs neither torch nor transformers for what has a
``tokenizer.json``; ``load_tokenizer`` gives a transformers tokenizer, as models and checkpoints want it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from limbeck.errors import ConfigError, TokenizerError, one_line
from limbeck.tokens.bos import gguf_adds_bos, set_bos
from limbeck.tokens.sentencepiece import describe_model, read_model
from limbeck.tokens.tokenizer import ByteTokenizer, require_transformers
from limbeck.tokens.vocab import Spec
from limbeck.utils.files import kept_conversion
from limbeck.utils.hub import HubId, locate, model_files

T = TypeVar("T")

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def read_tokenizer(spec: str | Path, *, trust_remote_code: bool = False) -> ByteTokenizer:
    """Read a tokenizer from a model folder, a file (``tokenizer.json``, a SentencePiece ``.model``, GGUF,
    ``tekken.json``) or a hub id.

    ``package:NAME/FILE`` names a file inside an installed Python package. Folders without a ``tokenizer.json``, GGUF
    and tekken files are converted by transformers; the result of a GGUF file is kept in the cache folder.
    """
    tokenizer, hub_name = _read(spec, partial(_read_folder, trust_remote_code=trust_remote_code), _read_file)
    tokenizer.name = hub_name or tokenizer.name
    return tokenizer


def load_tokenizer(spec: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load a transformers fast tokenizer from all that :func:`read_tokenizer` takes; needs ``limbeck[train]``.

    A folder's ``tokenizer.json`` is read as it is: rebuilding a tokenizer from its class name can change ids.
    """
    tokenizer, hub_name = _read(spec, partial(_load_folder, trust_remote_code=trust_remote_code), _load_file)
    tokenizer.name_or_path = hub_name or tokenizer.name_or_path
    return tokenizer


def _read(spec: str | Path, folder: Callable[[Path], T], file: Callable[[Path], T]) -> tuple[T, str | None]:
    """Result of a reader of folders or of files for what ``spec`` names, and the hub id where it is one: messages name
    that in place of a folder of the cache."""
    try:
        location = locate(spec)
        path = model_files(spec, "tokenizer")
    except ConfigError as error:
        raise TokenizerError(str(error)) from error
    try:
        return folder(path) if path.is_dir() else file(path), str(location) if isinstance(location, HubId) else None
    except TokenizerError:
        raise
    except Exception as error:  # the backend raises bare exceptions for malformed files
        raise TokenizerError(f"no tokenizer can be read from {spec}: {one_line(error)}") from error


# -- without transformers ----------------------------------------------------------------------------------------------


def _read_folder(path: Path, trust_remote_code: bool) -> ByteTokenizer:
    if (path / "tokenizer.json").is_file():
        return _read_json(path / "tokenizer.json", path)
    files = [*sorted(path.glob("*.gguf"))[:1], *path.glob("tekken.json")]
    if files:
        return _read_file(files[0])
    return ByteTokenizer.of(_load_folder(path, trust_remote_code))


def _read_file(path: Path) -> ByteTokenizer:
    if path.suffix == ".gguf":
        return _read_gguf(path)
    if ".model" in path.suffixes:
        return _read_sentencepiece(path)
    if path.suffix == ".json" and not path.name.startswith("tekken"):
        return _read_json(path, path.parent if path.name == "tokenizer.json" else None)
    return ByteTokenizer.of(_load_file(path))


def _read_json(file: Path, folder: Path | None) -> ByteTokenizer:
    """A ``tokenizer.json`` with what its folder says about names, added tokens and chat templates."""
    text = file.read_text(encoding="utf-8")
    spec = json.loads(text)
    config = {} if folder is None else _config(folder)
    named = _named(config)
    if spec.get("padding"):
        named.setdefault("pad_token", spec["padding"]["pad_token"])
    spec = _with_added(spec, text, config, named)
    ids = {a["content"]: a["id"] for a in spec.get("added_tokens") or []}
    bos_id = ids.get(named.get("bos_token", ""))
    return ByteTokenizer(
        spec,
        named=named,
        templates={} if folder is None else _templates(folder, config),
        adds_bos=bos_id is not None and _prefix(spec) == bos_id,
        name=str(folder or file),
    )


def _read_sentencepiece(file: Path) -> ByteTokenizer:
    """A SentencePiece model by its own header, with what its folder says about names and chat templates."""
    model = read_model(file.read_bytes())
    spec = describe_model(model)
    folder = file.parent if file.name == "tokenizer.model" else None
    config = {} if folder is None else _config(folder)
    named = {key: model.pieces[i].text for key, i in model.named.items()} | _named(config)
    bos_id = model.named.get("bos_token")
    adds_bos = False
    if bos_id is not None and config.get("add_bos_token"):
        adds_bos = True
        spec["post_processor"] = _bos_first(model.pieces[bos_id].text, bos_id)
    text = json.dumps(spec, ensure_ascii=False)
    return ByteTokenizer(
        _with_added(spec, text, config, named),
        named=named,
        templates={} if folder is None else _templates(folder, config),
        adds_bos=adds_bos,
        name=str(file),
    )


def _bos_first(token: str, token_id: int) -> Spec:
    """The last step of a tokenizer that puts a token in front of a text."""
    front, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [front, text],
        "pair": [front, text, {"SpecialToken": {"id": token, "type_id": 1}}, second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def _config(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json``; names of special tokens may stand in a file of their own, in older folders."""
    config = _json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= {k: v for k, v in _json(folder / "special_tokens_map.json").items() if k in _NAMED}
    return config


def _named(config: Mapping[str, Any]) -> dict[str, str]:
    """The names that every model has, and those that only some have, such as ``image_token``."""
    further = {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, str)}
    extra = config.get("extra_special_tokens")
    usual = {key: _content(config[key]) for key in _NAMED if config.get(key)}
    return further | {k: _content(v) for k, v in (extra if isinstance(extra, dict) else {}).items()} | usual


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} holds a {type(content).__name__}, expected a JSON object.")
    return content


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _with_added(spec: Spec, text: str, config: Mapping[str, Any], named: Mapping[str, str]) -> Spec:
    """The description with the added tokens that only the configuration knows, or knows better."""
    there = {a["id"]: {k: v for k, v in a.items() if k != "id"} for a in spec.get("added_tokens") or []}
    decoder = {int(i): token for i, token in (config.get("added_tokens_decoder") or {}).items()}
    known = {a["content"] for a in there.values()} | {_content(token) for token in decoder.values()}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    names = [*named.values(), *(_content(token) for token in extra if not isinstance(extra, dict))]
    missing = [content for content in dict.fromkeys(names) if content not in known]
    if not missing and all(there.get(i) == token for i, token in decoder.items()):
        return spec
    backend = tokenizers.Tokenizer.from_str(text)
    # in the order of their ids: the library gives what the vocabulary does not hold the next free one
    added = [tokenizers.AddedToken(**token) for _, token in sorted(decoder.items())]
    backend.add_tokens([*added, *(tokenizers.AddedToken(content, special=True) for content in missing)])
    merged: Spec = json.loads(backend.to_str())
    return merged


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; files of their own go before what the configuration holds."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    stored = config.get("chat_template") or {}
    if isinstance(stored, str):
        return {"default": stored}
    # transformers stores several templates as a list of objects with fixed keys
    return {item["name"]: item["template"] for item in stored} if isinstance(stored, list) else dict(stored)


def _prefix(spec: Spec) -> int | None:
    """The id that the tokenizer puts in front of a text by itself: what its last step does to a text of one token."""
    if not spec.get("post_processor"):
        return None
    # an id that no added token has, or the one in front could be taken for the text's
    text_id = max((int(a["id"]) for a in spec.get("added_tokens") or []), default=0) + 1
    small = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": spec["post_processor"],
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"a": text_id}, "unk_token": "a"},
    }
    ids = tokenizers.Tokenizer.from_str(json.dumps(small)).encode("a").ids
    return ids[0] if ids and ids[0] != text_id else None


def _read_gguf(path: Path) -> ByteTokenizer:
    """The tokenizer of a GGUF file, converted once."""
    folder = _gguf_folder(path)
    return ByteTokenizer.of(_convert_gguf(path)) if folder is None else _read_json(folder / "tokenizer.json", folder)


def _gguf_folder(path: Path) -> Path | None:
    return kept_conversion("tokenizers", path, "2", lambda folder: _convert_gguf(path).save_pretrained(folder))


def _convert_gguf(path: Path) -> Any:
    library = require_transformers(f"to read {path.name}")
    tokenizer = library.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    adds = gguf_adds_bos(path)
    if adds is not None and tokenizer.bos_token is not None:
        set_bos(tokenizer, adds)
    return tokenizer


# -- with transformers -------------------------------------------------------------------------------------------------


def _load_folder(path: Path, trust_remote_code: bool) -> Any:
    models = sorted(path.glob("*.model"))
    instead = f" (or give the file {models[0]} itself), and" if models else ", and"
    library = require_transformers(f"{path} has no tokenizer.json{instead} to convert what it has")
    if (path / "tokenizer.json").is_file():
        return library.PreTrainedTokenizerFast.from_pretrained(path)
    gguf = sorted(path.glob("*.gguf"))
    if gguf:
        return _load_file(gguf[0])
    if (path / "tekken.json").is_file():
        return _load_file(path / "tekken.json")
    return library.AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def _load_file(path: Path) -> Any:
    if ".model" in path.suffixes:
        return _read_sentencepiece(path).to_transformers()
    if path.suffix not in (".gguf", ".json"):
        raise TokenizerError(
            f"{path} is no tokenizer file; expected tokenizer.json, tekken.json, a .gguf or a SentencePiece .model."
        )
    library = require_transformers(f"to read {path.name}")
    if path.suffix == ".gguf":
        folder = _gguf_folder(path)
        return _convert_gguf(path) if folder is None else library.PreTrainedTokenizerFast.from_pretrained(folder)
    if path.name.startswith("tekken"):
        from transformers.integrations.mistral import convert_tekken_tokenizer

        try:
            return convert_tekken_tokenizer(str(path))
        except ImportError:
            raise TokenizerError(f"to read {path.name} takes the package mistral-common: pip install it") from None
    if (path.parent / "tokenizer_config.json").is_file() and path.name == "tokenizer.json":
        return library.PreTrainedTokenizerFast.from_pretrained(path.parent)
    return library.PreTrainedTokenizerFast(tokenizer_file=str(path))
