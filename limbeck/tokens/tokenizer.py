"""One tokenizer: text to ids with exact byte ends, and byte strings to ids; no text ever yields a special token.

It works on a twin of the tokenizer in which the content of every special token is replaced by an alias that nobody can
type. Plain text therefore passes as text whatever it contains, while a renderer that *means* a special token writes its
alias. Everything else (splitting, merges, normaliser) is the tokenizer's own, in one pass.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import secrets
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tokenizers

from limbeck.errors import TemplateError, TokenizerError, one_line
from limbeck.tokens.tokenized_text import Segment, TokenizedText
from limbeck.tokens.vocab import ByteVocab, Spec, byte_alphabet
from limbeck.utils.files import content_hash, package_file

Advance = Callable[[int, int], None]  # (done, total)
Spelling = tuple[int, ...]

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Supplementary private-use characters: no normaliser touches them and no text has a reason to hold them.
_ALIAS_OPEN, _ALIAS_CLOSE = "\U000f5a17", "\U000f5a18"
_ALIAS = re.compile(f"{_ALIAS_OPEN}[0-9a-f]+{_ALIAS_CLOSE}")
_ALIAS_BYTES = re.compile(_ALIAS.pattern.encode("utf-8"))
_NONCE_BYTES = 8
_ALIAS_NONCE = re.compile(f"{_ALIAS_OPEN}[0-9a-f]{{{2 * _NONCE_BYTES}}}")


def _aliases(spec: Spec) -> dict[str, str]:
    """Special content -> the alias that stands for it."""
    # drawn anew for every copy: a text with the aliases of another one must not yield special tokens
    nonce = secrets.token_hex(_NONCE_BYTES)
    added = spec.get("added_tokens") or []
    return {a["content"]: f"{_ALIAS_OPEN}{nonce}{a['id']:x}{_ALIAS_CLOSE}" for a in added if a["special"]}


CutMerges = list[tuple[int, list[str]]]


def _alias_twin(spec: Spec, aliases: Mapping[str, str]) -> tuple[tokenizers.Tokenizer, CutMerges, str]:
    """A copy of the tokenizer whose special tokens answer to their aliases, the merges that it lacks, by rank, and a
    hash of what was copied, which is the same for every copy."""
    spec = copy.copy(spec)
    added = spec.get("added_tokens") or []
    spec["added_tokens"] = [{**a, "content": aliases.get(a["content"], a["content"])} for a in added]
    model = dict(spec["model"])
    vocab = model["vocab"]
    cut: CutMerges = []
    if not isinstance(vocab, dict):
        model["vocab"] = [[aliases.get(piece, piece), score] for piece, score in vocab]
    elif not aliases.keys().isdisjoint(vocab):
        model["vocab"] = {aliases.get(token, token): i for token, i in vocab.items()}
        if model.get("merges"):
            # A merge that spells a special token would carry text to its id.
            merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
            cut = [
                (rank, m)
                for rank, m in enumerate(merges)
                if m[0] + m[1] in aliases or m[0] in aliases or m[1] in aliases
            ]
            left_out = {rank for rank, _ in cut}
            model["merges"] = [m for rank, m in enumerate(merges) if rank not in left_out] if cut else merges
    if model.get("unk_token") in aliases:
        model["unk_token"] = aliases[model["unk_token"]]
    # a last step names special tokens by contents that are aliases here; `describe` puts it back
    spec.update(model=model, post_processor=None, truncation=None, padding=None)
    text = json.dumps(spec, ensure_ascii=False)
    # aliases hold digits drawn anew for every copy; without those they are the special ids
    digest = hashlib.sha256(_ALIAS_NONCE.sub(_ALIAS_OPEN, text).encode("utf-8", "surrogatepass"))
    digest.update(json.dumps(cut).encode("utf-8", "surrogatepass"))
    return tokenizers.Tokenizer.from_str(text), cut, digest.hexdigest()


def _char_byte_starts(text: str) -> IntArray:
    """``[len(text) + 1]`` byte offset at which each character begins in UTF-8."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    lengths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])


def _group_starts(text: str, offsets: IntArray) -> tuple[BoolArray, IntArray]:
    """Split tokens into groups that partition the text's characters.

    Tokens whose character spans overlap (pieces of one character, a dummy prefix) form a group. A gap between two
    groups goes to the earlier one up to its first white space and to the later one from there: composed characters
    leave their marks behind, splitters drop the space in front of a word.

    Returns:
        first: ``[n]`` bool, the token opens a group; start: ``[n]`` the character at which the token's group begins.
    """
    n = len(offsets)
    reach = np.maximum.accumulate(offsets[:, 1])
    first = np.ones(n, dtype=bool)
    first[1:] = (offsets[1:, 0] >= reach[:-1]) & (offsets[1:, 1] > reach[:-1])
    start = np.where(first, offsets[:, 0], 0)
    # what a splitter drops in front of the first token goes to its group: groups leave no character out
    start[0] = 0
    gaps = np.flatnonzero(first)[1:]
    gaps = gaps[offsets[gaps, 0] > reach[gaps - 1]]
    for i in gaps.tolist():
        gap = text[reach[i - 1] : offsets[i, 0]]
        space = next((k for k, c in enumerate(gap) if c.isspace()), len(gap))
        start[i] = reach[i - 1] + space
    return first, np.maximum.accumulate(start)


class ByteTokenizer:
    """One vocabulary and its text rules: the only form of a tokenizer inside Limbeck.

    Args:
        spec: its description, as in ``tokenizer.json``. Added tokens that ``named`` lists are special whatever their
            flag says.
        named: ``bos_token``, ``eos_token``, ``pad_token``, ... -> content.
        templates: name -> Jinja text of a chat template; ``default`` is the usual one.
        adds_bos: whether it puts its BOS token in front of a text by default.
        name: what errors call it.

    Attributes:
        vocab: its :class:`ByteVocab`.
        bos_id, eos_id, pad_id: BOS, end of a document and padding, or None.
        special_ids: content of each special token -> its id.
        added: contents of the other added tokens, which are cut out of a text before it is split.
        aliases: content of each special token -> the string that stands for it in :meth:`encode_aliased`.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        named: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
        adds_bos: bool = False,
        name: str = "",
    ) -> None:
        self.named, self.templates, self.name, self.adds_bos = dict(named or {}), dict(templates or {}), name, adds_bos
        contents = set(self.named.values())
        added = [{**a, "special": a["special"] or a["content"] in contents} for a in spec.get("added_tokens") or []]
        self._spec: Spec | None = {**spec, "added_tokens": added}
        self._post_processor = spec.get("post_processor")
        self._cut_merges: CutMerges = []
        self._digest = ""
        self.vocab = ByteVocab.from_spec(self._spec, self.named)
        self.special_ids: dict[str, int] = {a["content"]: a["id"] for a in added if a["special"]}
        self.added = tuple(a["content"] for a in added if not a["special"])
        self.aliases = _aliases(self._spec)
        ids = {**_entries(spec), **{a["content"]: a["id"] for a in added}}
        self.bos_id, self.eos_id, self.pad_id = (
            ids.get(self.named.get(f"{key}_token", "")) for key in ("bos", "eos", "pad")
        )

    @classmethod
    def of(cls, tokenizer: object) -> ByteTokenizer:
        """The form of a tokenizer that Limbeck works with.

        A ``ByteTokenizer`` as it is; a transformers fast tokenizer wrapped, once per object, with the chat template it
        has now; a ``tokenizers.Tokenizer`` wrapped, without names for its special tokens.
        """
        if isinstance(tokenizer, ByteTokenizer):
            return tokenizer
        if isinstance(tokenizer, tokenizers.Tokenizer):
            return cls(json.loads(tokenizer.to_str()))
        known = _KNOWN.get(tokenizer)
        if known is None:
            known = _KNOWN[tokenizer] = cls._wrap(tokenizer)
        current = _state(tokenizer)
        if current != {key: getattr(known, key) for key in current}:
            # whoever holds the earlier one keeps the templates and names that it was given
            known = copy.copy(known)
            known.__dict__.update(current)
            _KNOWN[tokenizer] = known
        return known

    @classmethod
    def _wrap(cls, tokenizer: Any) -> ByteTokenizer:
        spec = backend_spec(tokenizer)
        named = {k: str(v) for k, v in tokenizer.special_tokens_map.items() if not isinstance(v, list)}
        bos_id = tokenizer.bos_token_id
        adds_bos = bos_id is not None and tokenizer("a")["input_ids"][:1] == [bos_id]
        return cls(spec, named=named, adds_bos=adds_bos)

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        assert self._spec is not None, "the description is kept until the twin is built"
        twin, self._cut_merges, self._digest = _alias_twin(self._spec, self.aliases)
        # the twin can write it again (`describe`): a large vocabulary is not held twice
        self._spec = None
        moved = [c for c, i in self.special_ids.items() if twin.token_to_id(self.aliases[c]) != i]
        if moved:
            raise TokenizerError(f"special tokens {moved[:3]} cannot be isolated from text in this tokenizer.")
        return twin

    def _encode(self, texts: Sequence[str], *, offsets: bool = False) -> list[tokenizers.Encoding]:
        """What the backend makes of texts; without offsets it is faster."""
        work = self._backend.encode_batch if offsets else self._backend.encode_batch_fast
        try:
            return work(list(texts), add_special_tokens=False)
        except BaseException as error:
            # a regular expression of its rules that gives up panics, which is no Exception
            if type(error).__name__ != "PanicException":
                raise
            longest = max(map(len, texts))
            raise TokenizerError(
                f"the tokenizer {self.name!r} gives up on a text of up to {longest:,} characters "
                f"({one_line(error, 200)}); its splitting rules are not for such texts: use another tokenizer.json, or "
                "leave the text out"
            ) from None

    def identity(self) -> dict[str, str]:
        """Hashes of what decides the ids of a text and of a conversation, by what messages call it."""
        _ = self._backend
        special = [self.named, self.special_ids, self.adds_bos, self._post_processor]
        return {
            "tokens and rules": self._digest,
            "special tokens": content_hash(special),
            "chat template": content_hash(self.templates),
        }

    def describe(self) -> Spec:
        """Its description, in which every special token has its own content; takes seconds for a large vocabulary.

        Truncation and padding, which no id depends on, are not in it.
        """
        spec: Spec = json.loads(self._backend.to_str())
        spec["post_processor"] = self._post_processor
        contents = {alias: content for content, alias in self.aliases.items()}
        model = spec["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {contents.get(token, token): i for token, i in model["vocab"].items()}
        else:
            model["vocab"] = [[contents.get(piece, piece), score] for piece, score in model["vocab"]]
        if "unk_token" in model:
            model["unk_token"] = contents.get(model["unk_token"], model["unk_token"])
        for token in spec["added_tokens"]:
            token["content"] = contents.get(token["content"], token["content"])
        for rank, merge in self._cut_merges:
            model["merges"].insert(rank, merge)
        return spec

    def with_template(self, template: str | Path) -> ByteTokenizer:
        """The same tokenizer with one chat template in place of all that it has: a text, or a ``.jinja`` file."""
        other = copy.copy(self)
        other.templates = {"default": read_template(template)}
        return other

    def to_transformers(self) -> Any:
        """The same tokenizer as a ``PreTrainedTokenizerFast``, with its chat templates; needs ``limbeck[train]``."""
        form = require_transformers("a tokenizer in the form of transformers").PreTrainedTokenizerFast
        usual = {key: token for key, token in self.named.items() if key in form.SPECIAL_TOKENS_ATTRIBUTES}
        extra = {key: token for key, token in self.named.items() if key not in usual}
        tokenizer = form(
            tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(self.describe())),
            # where it is on, decoding takes spaces in front of punctuation out of a text
            clean_up_tokenization_spaces=False,
            name_or_path=self.name,
            **usual,
            **({"extra_special_tokens": extra} if extra else {}),
        )
        single = self.templates.keys() <= {"default"}
        tokenizer.chat_template = self.templates.get("default") if single else dict(self.templates)
        return tokenizer

    @cached_property
    def _meant(self) -> BoolArray:
        """``[size]`` bool; special tokens but the unknown one, which stands for text."""
        meant = self.vocab.special.copy()
        meant[list(self.vocab.ids_with_role("unk"))] = False
        return meant

    @cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """Matches the content of any special token, the longest first."""
        contents = sorted((c for c in self.aliases if c), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, contents))) if contents else None

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> TokenizedText:
        """Render a plain text: every token of it is a target, in one segment of kind ``text``.

        With ``bos`` or ``eos`` the document's BOS or end token is added, where the tokenizer has one; the end token
        is a target (segment kind ``eot``), the BOS token is not.
        """
        return self.encode_batch([text], bos=bos, eos=eos)[0]

    def encode_batch(self, texts: Sequence[str], *, bos: bool = False, eos: bool = False) -> list[TokenizedText]:
        """:meth:`encode` of several texts; they do not influence each other."""
        for text in texts:
            # a flag of the string, while the check encodes all of it; no surrogate is ASCII
            if not text.isascii():
                _check_text(text)
        encodings = self._encode(texts)
        # an empty rendering is false as well, and `_resync` gives the same one
        plain = [self._locate(e.ids, text) or self._resync(text) for text, e in zip(texts, encodings, strict=True)]
        return [self._frame(r, bos=bos, eos=eos) for r in plain]

    def encode_bytes(self, data: bytes, *, bos: bool = False) -> TokenizedText:
        """:meth:`encode` of bytes that need not be text all through, as a model may write them.

        Parts that are no whole characters are spelled byte by byte. Where the vocabulary cannot, the rendering and its
        source end before them.
        """
        parts = []
        for run in _utf8_runs(data):
            text = _as_text(run)
            if text is not None:
                parts.append(self.encode(text))
                continue
            ids = np.array(self._spell_bytes(run), dtype=np.int64)
            if not len(ids):
                break
            parts.append(self._plain(ids, np.cumsum(self.vocab.byte_len[ids]), run, np.ones(len(ids), dtype=bool), {}))
        r = TokenizedText.joined(parts)
        return self._frame(self._plain(r.ids, r.byte_ends, r.source, r.byte_exact, r.skipped), bos=bos, eos=False)

    def encode_aliased(self, text: str) -> TokenizedText:
        """Render a text in which aliases stand for special tokens; nothing is a target yet."""
        _check_text(text)
        ids = self._encode([text])[0].ids
        # what has an alias's form and is none of ours is text
        source = _ALIAS.sub(lambda match: "" if match[0] in self._alias_set else match[0], text)
        rendering = self._locate(ids, source) or self._resync(text)
        return TokenizedText(
            rendering.ids,
            rendering.byte_ends,
            rendering.source,
            rendering.byte_exact,
            rendering.special,
            np.zeros(len(ids), dtype=bool),
            (),
            rendering.skipped,
        )

    def spell(self, items: Sequence[bytes], progress: Advance | None = None) -> list[Spelling]:
        """How this vocabulary writes byte strings: token ids of each, ``()`` where it cannot; never other bytes.

        A byte string that is text goes through the tokenizer as text, so its splitting rules hold. Where that changes
        the bytes (a normaliser, a space put in front) or the bytes are no text (part of a character), the tokenizer's
        model spells the bytes directly. ``progress(done, total)`` is called after each batch.
        """
        spellings: list[Spelling] = []
        for start in range(0, len(items), _SPELL_BATCH):
            spellings.extend(self._spell_batch(items[start : start + _SPELL_BATCH]))
            if progress is not None:
                progress(min(start + _SPELL_BATCH, len(items)), len(items))
        return spellings

    def canonical_ids(self) -> dict[bytes, int]:
        """Byte string -> the one id that the tokenizer itself writes for it.

        Vocabularies hold byte strings twice (``<0x41>`` beside ``A``); a distribution puts its mass on the id that the
        tokenizer produces, so that is the one to compare.
        """
        table: dict[bytes, int] = {}
        repeated: dict[bytes, list[int]] = {}
        for token_id, data in enumerate(self.vocab.token_bytes):
            if data and table.setdefault(data, token_id) != token_id:
                repeated.setdefault(data, [table[data]]).append(token_id)
        names = list(repeated)
        for data, spelling in zip(names, self.spell(names), strict=True):
            if len(spelling) == 1:
                table[data] = spelling[0]
        return table

    def encode_bytes_ids(self, data: bytes) -> list[int]:
        """Ids of raw bytes, without splitting rules or an added space: how this vocabulary spells one token.

        Bytes that the vocabulary cannot spell give an empty list.
        """
        if self.vocab.family == "byte_level":
            return [t.id for t in self._backend.model.tokenize(_byte_display(data))]
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            return self._byte_ids(data)
        display = text.replace(" ", "\u2581") if self.vocab.family == "sentencepiece" else text
        ids = [t.id for t in self._backend.model.tokenize(display)]
        # the character that stands for a space spells one, so that the text which holds it goes byte by byte
        return ids if self.vocab.join(ids) == data else self._byte_ids(data)

    def _byte_ids(self, data: bytes) -> list[int]:
        spelled = [self._backend.token_to_id(f"<0x{b:02X}>") for b in data]
        return [i for i in spelled if i is not None] if None not in spelled else []

    @cached_property
    def _adds_prefix(self) -> bool:
        """Whether it puts a space in front of every text: then no byte string passes as text unchanged."""
        return self.vocab.join(self.encode("a").ids.tolist()) != b"a"

    @cached_property
    def space_in_front(self) -> Literal["never", "begin", "stretch"]:
        """Where it writes a space that the text does not hold: in front of a text, or of each stretch of it that
        stands between special tokens."""
        if self.vocab.join(self.encode("a").ids.tolist()) != b" a":
            return "never"
        alias = next((alias for content, alias in self.aliases.items() if self._meant[self.special_ids[content]]), None)
        behind = b"" if alias is None else self.vocab.join(self.encode_aliased(f"a{alias}a").ids.tolist())
        return "stretch" if behind == b" a a" else "begin"

    def _spell_batch(self, items: Sequence[bytes]) -> Iterable[Spelling]:
        texts = [None if self._adds_prefix else _as_text(data) for data in items]
        encodable = [text for text in texts if text is not None]
        encodings = iter(self._encode(encodable))
        for data, text in zip(items, texts, strict=True):
            ids = () if text is None else tuple(next(encodings).ids)
            yield ids if ids and self._stands_for(ids, data) else self._spell_bytes(data)

    def _spell_bytes(self, data: bytes) -> Spelling:
        if self.vocab.family == "sentencepiece":
            # by stretches, so that only broken characters go byte by byte and whole ones through the model
            pieces = [self.encode_bytes_ids(run) for run in _utf8_runs(data)]
            ids = tuple(i for piece in pieces for i in piece) if all(pieces) else ()
        else:
            ids = tuple(self.encode_bytes_ids(data))
        return ids if ids and self._stands_for(ids, data) else ()

    def _stands_for(self, ids: Spelling, data: bytes) -> bool:
        joined = self.vocab.join(ids)
        if self.vocab.lossless:
            return joined == data
        # WordPiece has no spaces: a word is the same word with and without one in front.
        return joined == data.strip() and not any(self.vocab.special[i] for i in ids)

    @cached_property
    def _alias_set(self) -> frozenset[str]:
        return frozenset(self.aliases.values())

    def _locate(self, ids: list[int], text: str) -> TokenizedText | None:
        """The rendering when joined token bytes equal the text's; None otherwise."""
        source = text.encode("utf-8")
        if b"".join(map(self.vocab.token_bytes.__getitem__, ids)) != source:
            return None
        array = np.array(ids, dtype=np.int64)
        ends = np.cumsum(self.vocab.byte_len[array])
        return self._plain(array, ends, source, np.ones(len(array), dtype=bool), {})

    def _resync(self, aliased: str) -> TokenizedText:
        """Place tokens by character offsets where a normaliser changed the text; changed groups are not exact."""
        encoding = self._encode([aliased], offsets=True)[0]
        ids = np.array(encoding.ids, dtype=np.int64)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        source = aliased.encode("utf-8")
        skipped: dict[str, int] = {}
        if not len(ids):
            if source:
                skipped["unencoded_bytes"] = len(source)
            empty = np.zeros(0, dtype=np.int64)
            return self._plain(ids, empty, source, np.zeros(0, dtype=bool), skipped)
        first, start = _group_starts(aliased, offsets)
        byte_at = _char_byte_starts(aliased)
        group = np.cumsum(first) - 1
        group_start = byte_at[start[first]]
        group_end = np.append(group_start[1:], len(source))
        lengths = self.vocab.byte_len[ids]
        joined = np.frombuffer(self.vocab.join(ids.tolist()), dtype=np.uint8)
        cum = np.cumsum(lengths)
        joined_end = cum[np.append(np.flatnonzero(first)[1:] - 1, len(ids) - 1)]
        joined_start = np.append(0, joined_end[:-1])
        same = (joined_end - joined_start) == (group_end - group_start)
        same = _equal_spans(joined, np.frombuffer(source, np.uint8), joined_start, group_start, group_end, same)
        exact = same[group]
        # Inside a changed group no inner boundary is known, so all its tokens end where the group ends.
        ends = np.where(exact, cum - joined_start[group] + group_start[group], group_end[group])
        return self._without_aliases(aliased, ids, ends, exact, skipped)

    def _without_aliases(
        self, aliased: str, ids: IntArray, ends: IntArray, exact: BoolArray, skipped: dict[str, int]
    ) -> TokenizedText:
        source = aliased.encode("utf-8")
        matches = _ALIAS_BYTES.finditer(source)
        cuts = [match.span() for match in matches if match[0].decode("utf-8") in self._alias_set]
        if cuts:
            keep = np.ones(len(source), dtype=bool)
            for start, end in cuts:
                keep[start:end] = False
            kept = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(keep)])
            ends = kept[ends]
            source = np.frombuffer(source, np.uint8)[keep].tobytes()
        # Special tokens that were meant are always exact; an unknown token stands for text that it lost.
        exact = exact | self._meant[ids]
        changed = int(np.count_nonzero(~exact))
        if changed:
            skipped["inexact_tokens"] = changed
        return self._plain(ids, ends, source, exact, skipped)

    def _plain(
        self, ids: IntArray, ends: IntArray, source: bytes, exact: BoolArray, skipped: dict[str, int]
    ) -> TokenizedText:
        special = self.vocab.special[ids] if len(ids) else np.zeros(0, dtype=bool)
        segments = (Segment(0, "text", 0, len(source), 0, len(ids)),)
        return TokenizedText(ids, ends, source, exact, special, np.ones(len(ids), dtype=bool), segments, skipped)

    def _frame(self, r: TokenizedText, *, bos: bool, eos: bool) -> TokenizedText:
        front = [self.bos_id] if bos and self.bos_id is not None else []
        back = [self.eos_id] if eos and self.eos_id is not None else []
        if not front and not back:
            return r
        n, size = len(r.ids), len(r.source)
        shift = len(front)
        segments = [Segment(0, "text", 0, size, shift, shift + n)]
        if back:
            segments.append(Segment(0, "eot", size, size, shift + n, shift + n + 1))
        edges = len(front), len(back)
        return TokenizedText(
            np.concatenate([np.array(front, np.int64), r.ids, np.array(back, np.int64)]),
            np.pad(r.byte_ends, edges, constant_values=(0, size)),
            r.source,
            np.pad(r.byte_exact, edges, constant_values=True),
            np.pad(r.special, edges, constant_values=True),
            np.pad(r.loss_mask, edges, constant_values=(False, True)),
            tuple(segments),
            r.skipped,
        )

    def __getstate__(self) -> dict[str, Any]:
        """With the twin built: a loader process would otherwise build it anew for every worker."""
        assert self._backend is not None
        return self.__dict__


def read_template(template: str | Path) -> str:
    """A chat template's text, whether given itself or as the path of a ``.jinja`` file."""
    if not str(template).endswith(".jinja"):
        return str(template)
    try:
        return Path(package_file(template)).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"the chat template {str(template)!r} cannot be read: {one_line(error)}") from error


def require_transformers(what: str) -> Any:
    """The library; where it is not installed, a ``TokenizerError`` says what needs it and which extra brings it."""
    try:
        import transformers
    except ImportError:
        raise TokenizerError(f"{what} needs the training parts: pip install 'limbeck[train]'") from None
    return transformers


def backend_spec(tokenizer: Any) -> Spec:
    """A tokenizer's own description."""
    if isinstance(tokenizer, ByteTokenizer):
        return tokenizer.describe()
    backend = getattr(tokenizer, "backend_tokenizer", None) or getattr(tokenizer, "_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        raise TokenizerError(
            f"{type(tokenizer).__name__} has no `tokenizers` backend, so its tokens cannot be read as bytes; "
            "load it from a tokenizer.json (PreTrainedTokenizerFast)."
        )
    spec: Spec = json.loads(backend.to_str())
    return spec


def _state(tokenizer: Any) -> dict[str, Any]:
    """Settings that can change on a transformers tokenizer after it is loaded, as attributes of
    :class:`ByteTokenizer`."""
    templates = getattr(tokenizer, "chat_template", None)
    if isinstance(templates, str):
        templates = {"default": templates}
    named = {k: str(v) for k, v in tokenizer.special_tokens_map.items() if not isinstance(v, list)}
    return {
        "name": str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__),
        "templates": dict(templates or {}),
        "named": named,
        "bos_id": tokenizer.bos_token_id,
        "eos_id": tokenizer.eos_token_id,
        "pad_id": getattr(tokenizer, "pad_token_id", None),
    }


def _entries(spec: Spec) -> dict[str, int]:
    vocab = spec["model"]["vocab"]
    return vocab if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"a text holds the lone surrogate {text[error.start]!r} at character {error.start}, which no UTF-8 text "
            "can; correct the text or drop the record."
        ) from None


def _byte_display(data: bytes) -> str:
    table = _DISPLAY
    return "".join(map(table.__getitem__, data))


def _equal_spans(
    joined: npt.NDArray[np.uint8],
    source: npt.NDArray[np.uint8],
    joined_start: IntArray,
    source_start: IntArray,
    source_end: IntArray,
    candidate: BoolArray,
) -> BoolArray:
    """Which of the candidate spans (equal lengths on both sides) hold equal bytes; vectorised over all bytes."""
    which = np.flatnonzero(candidate)
    lengths = (source_end - source_start)[which]
    total = int(lengths.sum())
    if not total:
        return candidate
    owner = np.repeat(np.arange(len(which)), lengths)
    inner = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    differ = joined[joined_start[which][owner] + inner] != source[source_start[which][owner] + inner]
    result = candidate.copy()
    result[which[np.unique(owner[differ])]] = False
    return result


def _as_text(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _utf8_runs(data: bytes) -> list[bytes]:
    """Cut `data` into stretches that are whole characters and stretches that are parts of characters."""
    runs: list[bytes] = []
    rest = data
    while rest:
        try:
            rest.decode("utf-8")
        except UnicodeDecodeError as error:
            runs.extend(run for run in (rest[: error.start], rest[error.start : error.end]) if run)
            rest = rest[error.end :]
        else:
            runs.append(rest)
            break
    return runs


_DISPLAY = {b: c for c, b in byte_alphabet().items()}
_SPELL_BATCH = 4096
_KNOWN: weakref.WeakKeyDictionary[Any, ByteTokenizer] = weakref.WeakKeyDictionary()
