"""A token is its bytes: what every id of a tokenizer contributes to a text.

>>> vocab = ByteVocab.from_tokenizer(load_tokenizer("path/to/model"))
>>> vocab.join(tokenizer.encode("Hello", add_special_tokens=False))
b'Hello'
"""

from __future__ import annotations

import hashlib
import json
import re
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from limbeck.tokens.roles import role_of
from limbeck.utils.errors import TokenizerError

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "\u2581"


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """Display character -> byte of the alphabet that byte-level BPE writes its tokens in.

    Printable Latin-1 bytes stand for themselves; the 68 others take the code points from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    shown = set(printable)
    hidden = [b for b in range(256) if b not in shown]
    table.update({chr(256 + i): b for i, b in enumerate(hidden)})
    return table


def backend_spec(tokenizer: Any) -> dict[str, Any]:
    """The tokenizer's own description (``tokenizer.json`` as a dict).

    Added tokens that the tokenizer names as its begin, end, padding, ... are special whatever their flag says.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None) or getattr(tokenizer, "_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        raise TokenizerError(
            f"{type(tokenizer).__name__} has no `tokenizers` backend, so its tokens cannot be read as bytes; "
            "load it from a tokenizer.json (PreTrainedTokenizerFast)."
        )
    spec: dict[str, Any] = json.loads(backend.to_str())
    named = {str(v) for v in getattr(tokenizer, "special_tokens_map", {}).values() if not isinstance(v, list)}
    for added in spec.get("added_tokens") or []:
        added["special"] = added["special"] or added["content"] in named
    return spec


def _types(node: Any) -> set[str]:
    """Every ``type`` named in a component of the description."""
    found: set[str] = set()
    if isinstance(node, dict):
        if "type" in node:
            found.add(str(node["type"]))
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            found |= _types(child)
    return found


def _family(spec: dict[str, Any]) -> str:
    model = spec["model"].get("type", "")
    parts = _types(spec.get("decoder")) | _types(spec.get("pre_tokenizer")) | _types(spec.get("normalizer"))
    if model == "WordPiece" or "WordPiece" in parts:
        return "wordpiece"
    if "ByteLevel" in parts:
        return "byte_level"
    text = json.dumps([spec.get("decoder"), spec.get("pre_tokenizer"), spec.get("normalizer")], ensure_ascii=False)
    if model == "Unigram" or "ByteFallback" in parts or "Metaspace" in parts or _METASPACE in text:
        return "sentencepiece"
    raise TokenizerError(
        f"a tokenizer with model {model!r} and parts {sorted(parts)} is of no known family; expected byte-level BPE, "
        "SentencePiece or WordPiece."
    )


def _display_to_bytes(display: str, family: str) -> bytes:
    if family == "byte_level":
        table = byte_alphabet()
        if all(c in table for c in display):
            return bytes(table[c] for c in display)
        return display.encode("utf-8")
    if family == "sentencepiece":
        byte = _BYTE_TOKEN.fullmatch(display)
        return bytes([int(byte[1], 16)]) if byte else display.replace(_METASPACE, " ").encode("utf-8")
    return display.removeprefix("##").encode("utf-8")


def _added_to_bytes(content: str, family: str) -> bytes:
    """Bytes of a non-special added token: matched on raw text, so its content is literal, but for Metaspace runs."""
    if family == "sentencepiece":
        return content.replace(_METASPACE, " ").encode("utf-8")
    return content.encode("utf-8")


def _model_vocab(spec: dict[str, Any]) -> list[tuple[str, int]]:
    vocab = spec["model"]["vocab"]
    if isinstance(vocab, dict):
        return [(token, int(i)) for token, i in vocab.items()]
    return [(entry[0], i) for i, entry in enumerate(vocab)]


def _fingerprint(spec: dict[str, Any]) -> str:
    """Hash of all that decides which ids a text gets: vocabulary, merges, normaliser, splitting, added tokens."""
    model = dict(spec["model"])
    vocab = model.pop("vocab")
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.pop("merges", None) or []]
    digest = hashlib.sha256()
    entries = sorted(vocab.items(), key=lambda e: e[1]) if isinstance(vocab, dict) else vocab
    added = sorted(spec.get("added_tokens") or [], key=lambda a: a["id"])
    for part in (entries, merges, model, spec.get("normalizer"), spec.get("pre_tokenizer"), added):
        digest.update(json.dumps(part, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class ByteVocab:
    """The vocabulary of one tokenizer as bytes.

    Attributes:
        token_bytes: ``[size]``; what an id adds to a text, ``b""`` for special tokens and for ids without a token.
        special: ``[size]`` bool; special tokens have a role and no bytes.
        present: ``[size]`` bool; False where an id has no token.
        roles: special id -> role (``bos``, ``eos``, ``eot``, ``pad``, ...).
        family: ``byte_level``, ``sentencepiece`` or ``wordpiece``.
        lossless: whether joined bytes reproduce a text up to the tokenizer's normaliser.
        fingerprint: SHA-256 of vocabulary, merges, normaliser, splitting rules and added tokens.
    """

    token_bytes: tuple[bytes, ...]
    special: BoolArray
    present: BoolArray
    roles: dict[int, str]
    family: str
    lossless: bool
    fingerprint: str

    @property
    def size(self) -> int:
        """Number of ids: the largest id plus one."""
        return len(self.token_bytes)

    @cached_property
    def byte_len(self) -> IntArray:
        """``[size]`` number of bytes of each token."""
        return np.fromiter(map(len, self.token_bytes), dtype=np.int64, count=self.size)

    @cached_property
    def ids_by_bytes(self) -> dict[bytes, int]:
        """Bytes -> lowest id with those bytes; special tokens are not in it."""
        table: dict[bytes, int] = {}
        for i, data in enumerate(self.token_bytes):
            if data:
                table.setdefault(data, i)
        return table

    def join(self, ids: Iterable[int]) -> bytes:
        """The bytes that ``ids`` stand for."""
        return b"".join(map(self.token_bytes.__getitem__, ids))

    def ids_with_role(self, role: str) -> tuple[int, ...]:
        """Ids of the special tokens of one role, ascending."""
        return tuple(sorted(i for i, r in self.roles.items() if r == role))

    def same_tokens(self, other: ByteVocab) -> bool:
        """Whether two tokenizers are the same; decided by fingerprint, never by name or size."""
        return self.fingerprint == other.fingerprint

    def head_report(self, width: int) -> dict[str, int]:
        """How a model head of ``width`` rows fits: rows that are no token, and ids that the head cannot predict."""
        return {
            "width": width,
            "tokens": self.size,
            "extra_rows": max(0, width - self.size),
            "missing_ids": max(0, self.size - width),
        }

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, *, spec: dict[str, Any] | None = None) -> ByteVocab:
        """Read a transformers fast tokenizer; the result is kept with the tokenizer object.

        ``spec`` is its :func:`backend_spec`, for callers that have it already: it takes seconds to write and parse.
        """
        cached = _CACHE.get(tokenizer)
        if cached is None:
            cached = cls._build(spec or backend_spec(tokenizer), dict(tokenizer.special_tokens_map))
            _CACHE[tokenizer] = cached
        return cached

    @classmethod
    def _build(cls, spec: dict[str, Any], special_map: dict[str, Any]) -> ByteVocab:
        family = _family(spec)
        entries = _model_vocab(spec)
        added: Sequence[dict[str, Any]] = spec.get("added_tokens") or []
        size = 1 + max([i for _, i in entries] + [a["id"] for a in added], default=-1)
        token_bytes = [b""] * size
        special = np.zeros(size, dtype=bool)
        present = np.zeros(size, dtype=bool)
        for display, i in entries:
            token_bytes[i] = _display_to_bytes(display, family)
            present[i] = True
        roles: dict[int, str] = {}
        for token in added:
            i = token["id"]
            present[i] = True
            if token["special"]:
                token_bytes[i], special[i] = b"", True
                roles[i] = role_of(token["content"], special_map)
            else:
                token_bytes[i] = _added_to_bytes(token["content"], family)
        # A model's unknown token stands for text it cannot spell; it never has bytes of its own.
        unknown = spec["model"].get("unk_token")
        for display, i in entries:
            if display == unknown and not special[i]:
                token_bytes[i], special[i], roles[i] = b"", True, "unk"
        return cls(tuple(token_bytes), special, present, roles, family, family != "wordpiece", _fingerprint(spec))

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.token_bytes, self.special, self.present, self.roles, self.family, self.lossless)
        return (type(self), (*fields, self.fingerprint))


_CACHE: weakref.WeakKeyDictionary[Any, ByteVocab] = weakref.WeakKeyDictionary()
