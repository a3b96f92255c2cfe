"""How one vocabulary spells the byte strings of another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from limbeck.tokens import ByteVocab, TextEncoder

Progress = Callable[[int, int], None]
Spelling = tuple[int, ...]
_BATCH = 4096


class Retokeniser:
    """Spells byte strings in one tokenizer's vocabulary and proves that the spelling has the same bytes.

    A byte string that is text goes through the tokenizer as text, so its splitting rules hold. Where that changes the
    bytes (a normaliser, a space put in front) or the bytes are no text (part of a character), the tokenizer's model
    spells the bytes directly. A spelling that does not join to the same bytes is never returned.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.encoder = TextEncoder.for_tokenizer(tokenizer)
        self.vocab: ByteVocab = self.encoder.vocab
        # A tokenizer that puts a space in front of every text changes all of them: the text path would be wasted work.
        self._adds_prefix = self.vocab.join(self.encoder.encode("a").ids.tolist()) != b"a"

    def spell(self, items: Sequence[bytes], progress: Progress | None = None) -> list[Spelling]:
        """Token ids of each byte string, ``()`` where this vocabulary cannot spell it.

        `progress(done, total)` is called after each batch.
        """
        spellings: list[Spelling] = []
        for start in range(0, len(items), _BATCH):
            spellings.extend(self._spell_batch(items[start : start + _BATCH]))
            if progress is not None:
                progress(min(start + _BATCH, len(items)), len(items))
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

    def _spell_batch(self, items: Sequence[bytes]) -> Iterable[Spelling]:
        texts = [None if self._adds_prefix else _as_text(data) for data in items]
        rendered = iter(self.encoder.encode_batch([text for text in texts if text is not None]))
        for data, text in zip(items, texts, strict=True):
            ids = () if text is None else tuple(next(rendered).ids.tolist())
            yield ids if ids and self._stands_for(ids, data) else self._spell_bytes(data)

    def _spell_bytes(self, data: bytes) -> Spelling:
        if self.vocab.family == "sentencepiece":
            pieces = [self.encoder.encode_bytes_ids(run) for run in _utf8_runs(data)]
            ids = tuple(i for piece in pieces for i in piece) if all(pieces) else ()
        else:
            ids = tuple(self.encoder.encode_bytes_ids(data))
        return ids if ids and self._stands_for(ids, data) else ()

    def _stands_for(self, ids: Spelling, data: bytes) -> bool:
        joined = self.vocab.join(ids)
        if self.vocab.lossless:
            return joined == data
        # WordPiece has no spaces: a word is the same word with and without one in front.
        return joined == data.strip() and not any(self.vocab.special[i] for i in ids)


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
