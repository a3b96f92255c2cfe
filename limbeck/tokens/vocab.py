"""A token is its bytes: what every id of a tokenizer contributes to a text, and what a special token is for.

A special token contributes no bytes to a text; what two vocabularies can share about it is its *role*. Strings that
model families use are listed here; what a tokenizer's own names say fills the gaps.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from limbeck.errors import TokenizerError

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]
Spec = dict[str, Any]
"""A tokenizer's description: ``tokenizer.json`` as a dict."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "\u2581"
MAX_SIZE = 1 << 22
"""Ids that a tokenizer may have; every one costs memory, also where it names no token."""

KNOWN_ROLES: dict[str, str] = {
    # beginning of a document
    "<|begin_of_text|>": "bos",
    "<|startoftext|>": "bos",
    "<s>": "bos",
    "<bos>": "bos",
    "<BOS_TOKEN>": "bos",
    "<｜begin▁of▁sentence｜>": "bos",
    "[CLS]": "bos",
    # end of a document
    "<|end_of_text|>": "eos",
    "<|endoftext|>": "eos",
    "</s>": "eos",
    "<eos>": "eos",
    "<EOS_TOKEN>": "eos",
    "<｜end▁of▁sentence｜>": "eos",
    "[SEP]": "eos",
    # end of a turn
    "<|eot_id|>": "eot",
    "<|im_end|>": "eot",
    "<end_of_turn>": "eot",
    "<|end|>": "eot",
    "<|return|>": "eot",
    "<|END_OF_TURN_TOKEN|>": "eot",
    "<|eom_id|>": "eom",
    "<|call|>": "eom",
    # start of a turn
    "<|start_header_id|>": "start_of_turn",
    "<|im_start|>": "start_of_turn",
    "<start_of_turn>": "start_of_turn",
    "<|start|>": "start_of_turn",
    "<|START_OF_TURN_TOKEN|>": "start_of_turn",
    "<|end_header_id|>": "end_of_header",
    "<|message|>": "end_of_header",
    # the rest
    "<pad>": "pad",
    "<PAD>": "pad",
    "[PAD]": "pad",
    "<|finetune_right_pad_id|>": "pad",
    "<unk>": "unk",
    "<UNK>": "unk",
    "[UNK]": "unk",
    "<mask>": "mask",
    "[MASK]": "mask",
}

_END_ROLES = frozenset({"eos", "eot", "eom"})


def role_of(content: str, special_tokens_map: Mapping[str, object]) -> str:
    """Role of the special token ``content``; ``special:<content>`` where nobody names one."""
    if content in KNOWN_ROLES:
        return KNOWN_ROLES[content]
    for key in ("bos", "eos", "pad", "unk", "mask", "sep", "cls"):
        if str(special_tokens_map.get(f"{key}_token", "")) == content:
            return {"sep": "eos", "cls": "bos"}.get(key, key)
    return f"special:{content}"


def role_class(role: str) -> str:
    """Roles that stand for each other across families: an end is an end, whether of a turn or of a document."""
    return "end" if role in _END_ROLES else role


def is_end(role: str) -> bool:
    """Whether a token of this role can close an assistant's turn."""
    return role in _END_ROLES


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """Display character -> byte of the alphabet that byte-level BPE writes its tokens in.

    Printable Latin-1 bytes stand for themselves; the 68 others take the code points from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    as_themselves = set(printable)
    hidden = [b for b in range(256) if b not in as_themselves]
    table.update({chr(256 + i): b for i, b in enumerate(hidden)})
    return table


@lru_cache(maxsize=1)
def _byte_codec() -> Any:
    """`byte_alphabet` as a codec's table, which encodes a whole token at a time."""
    by_byte = {byte: char for char, byte in byte_alphabet().items()}
    return codecs.charmap_build("".join(by_byte[byte] for byte in range(256)))


def _types(node: Any) -> set[str]:
    """Every ``type`` named in a component of the description."""
    types: set[str] = set()
    if isinstance(node, dict):
        if "type" in node:
            types.add(str(node["type"]))
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            types |= _types(child)
    return types


def _family(spec: Spec) -> str:
    model = spec["model"].get("type", "")
    parts = _types(spec.get("decoder")) | _types(spec.get("pre_tokenizer")) | _types(spec.get("normalizer"))
    if model == "WordPiece" or "WordPiece" in parts:
        return "wordpiece"
    if "ByteLevel" in parts:
        return "byte_level"
    text = json.dumps([spec.get("decoder"), spec.get("pre_tokenizer"), spec.get("normalizer")], ensure_ascii=False)
    # a plain Replace by the sign for spaces has no type to tell it by
    if model == "Unigram" or "ByteFallback" in parts or "Metaspace" in parts or _METASPACE in text:
        return "sentencepiece"
    raise TokenizerError(
        f"a tokenizer with model {model!r} and parts {sorted(parts)} is of no known family; expected byte-level BPE, "
        "SentencePiece or WordPiece."
    )


def _display_to_bytes(display: str, family: str) -> bytes:
    if family == "byte_level":
        try:
            return codecs.charmap_encode(display, "strict", _byte_codec())[0]
        except UnicodeEncodeError:
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


def _model_vocab(spec: Spec) -> list[tuple[str, int]]:
    vocab = spec["model"]["vocab"]
    if isinstance(vocab, dict):
        return [(token, int(i)) for token, i in vocab.items()]
    return [(entry[0], i) for i, entry in enumerate(vocab)]


# -- fingerprints ------------------------------------------------------------------------------------------------------

# What an option is when a description leaves it out, by the type of the part that it belongs to.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "BPE": {},
    "Unigram": {},
    "WordLevel": {"unk_token": "<unk>"},
    "WordPiece": {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    "ByteLevel": {"use_regex": True},
    "Metaspace": {"replacement": _METASPACE, "prepend_scheme": "always", "split": True},
    "Strip": {"strip_left": True, "strip_right": True},
    "BertNormalizer": {"clean_text": True, "handle_chinese_chars": True, "lowercase": True},
    "CharDelimiterSplit": {},
}
# Says how offsets are shown, or repeats another option; no id depends on it.
_WITHOUT_MEANING = ("trim_offsets", "str_rep")


def _fingerprint(spec: Spec) -> str:
    """Hash of what decides which ids a text gets, however the description is written.

    Entries by id, merges as pairs, added tokens by id, and the options of model, normaliser and splitting that are not
    at their defaults.
    """
    model = dict(spec["model"])
    vocab = model.pop("vocab")
    # Flat lists: half a million short ones take a second to write.
    merges = [half for m in model.pop("merges", None) or [] for half in (m.split(" ", 1) if isinstance(m, str) else m)]
    if isinstance(vocab, dict):
        entries = [x for entry in sorted(vocab.items(), key=lambda e: e[1]) for x in entry]
    else:
        # Scores are single-precision numbers, and libraries differ in the digits beyond that.
        entries = [x for piece, score in vocab for x in (piece, float(np.float32(score)))]
    model.setdefault("type", "BPE" if merges else "Unigram" if isinstance(vocab, list) else "WordPiece")
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    added = [
        [a["id"], a["content"], *(bool(a.get(flag)) for flag in flags)]
        for a in sorted(spec.get("added_tokens") or [], key=lambda a: a["id"])
    ]
    parts = [_meaning(part) for part in (model, spec.get("normalizer"), spec.get("pre_tokenizer"))]
    return _hash("limbeck.tokenizer.2", entries, merges, *parts, added)


def _meaning(part: Any) -> Any:
    """A part of a description without what its type takes for granted."""
    if isinstance(part, list):
        return [_meaning(child) for child in part]
    if not isinstance(part, dict):
        return part
    part = {key: _meaning(value) for key, value in part.items() if key not in _WITHOUT_MEANING}
    kind = part.get("type")
    if kind == "Metaspace" and "add_prefix_space" in part:
        # how earlier versions of tokenizers write prepend_scheme
        before = part.pop("add_prefix_space")
        part.setdefault("prepend_scheme", "always" if before else "never")
    if not part.get("dropout"):
        part.pop("dropout", None)
    defaults = _DEFAULTS.get(str(kind), {})
    # by identity: an id of 0 equals False, and is none that is left out
    stated = {key: value for key, value in part.items() if value is not None and value is not False and value != ""}
    return {key: value for key, value in stated.items() if key not in defaults or defaults[key] != value}


def _hash(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        # JSON can spell lone surrogates, which strict UTF-8 refuses
        digest.update(json.dumps(part, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return digest.hexdigest()


# -- tokens for people -------------------------------------------------------------------------------------------------

_MARKS = {" ": "·", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽", "\u200b": "∅", "\u200d": "⁀"}


def as_text(data: bytes) -> str:
    """A token's bytes as text, with ``\\xHH`` for bytes that are none."""
    return data.decode("utf-8", "backslashreplace")


def readable(text: str) -> str:
    """A token as it can be read among others: spaces as middle dots, controls as signs, what cannot be seen escaped."""
    return "".join(_MARKS.get(c) or _escaped(c) for c in text)


def quoted(data: bytes) -> str:
    """A token as it can be read in a sentence: in quotes, with escapes for controls and stray bytes."""
    return f"'{''.join(map(_escaped, as_text(data)))}'"


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


# -- vocabularies ------------------------------------------------------------------------------------------------------


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
        fingerprint: SHA-256 of vocabulary, merges, normaliser, splitting rules and added tokens: what they mean,
            however a file or a library writes them.
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

    def end_ids(self, size: int | None = None) -> list[int]:
        """Tokens that can close an assistant's turn; ``size``: rows of a head, which may be fewer."""
        return [i for i, role in self.roles.items() if is_end(role) and (size is None or i < size)]

    def same_tokens(self, other: ByteVocab) -> bool:
        """Whether two tokenizers are the same; decided by fingerprint, never by name or size."""
        return self.fingerprint == other.fingerprint

    def display(self, ids: Iterable[int]) -> list[str]:
        """Tokens for people: text where the bytes are text, ``\\xHH`` where they are not, roles in brackets."""
        tokens = ((self.token_bytes[i], self.roles.get(i, "empty")) for i in ids)
        return [as_text(data) if data else f"[{role}]" for data, role in tokens]

    def head_report(self, width: int) -> dict[str, int]:
        """How a model head of ``width`` rows fits: rows that are no token, and ids that the head cannot predict."""
        return {
            "width": width,
            "tokens": self.size,
            "extra_rows": max(0, width - self.size),
            "missing_ids": max(0, self.size - width),
        }

    @classmethod
    def from_tokenizer(cls, tokenizer: object) -> ByteVocab:
        """``ByteTokenizer.of(tokenizer).vocab``."""
        from limbeck.tokens.tokenizer import ByteTokenizer  # it is made of this class

        return ByteTokenizer.of(tokenizer).vocab

    @classmethod
    def from_spec(cls, spec: Spec, named: Mapping[str, str]) -> ByteVocab:
        """Read a tokenizer's description; ``named`` maps ``bos_token``, ``eos_token``, ... to contents."""
        family = _family(spec)
        entries = _model_vocab(spec)
        added: Sequence[dict[str, Any]] = spec.get("added_tokens") or []
        numbers = [i for _, i in entries] + [a["id"] for a in added]
        size = 1 + max(numbers, default=-1)
        if min(numbers, default=0) < 0 or size > MAX_SIZE:
            raise TokenizerError(
                f"the tokenizer has ids from {min(numbers, default=0)} to {size - 1}; expected some from 0 to "
                f"{MAX_SIZE - 1}"
            )
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
                roles[i] = role_of(token["content"], named)
            else:
                token_bytes[i] = _added_to_bytes(token["content"], family)
        # A model's unknown token stands for text it cannot spell; it never has bytes of its own.
        unknown = spec["model"].get("unk_token")
        for display, i in entries:
            if display == unknown and not special[i]:
                token_bytes[i], special[i], roles[i] = b"", True, "unk"
        lossless = family != "wordpiece"
        return cls(tuple(token_bytes), special, present, roles, family, lossless, _fingerprint(spec))

    def __reduce__(self) -> tuple[Any, ...]:
        # without the cached tables, which would travel to every process
        fields = (self.token_bytes, self.special, self.present, self.roles, self.family, self.lossless)
        return (type(self), (*fields, self.fingerprint))
