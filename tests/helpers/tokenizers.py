"""Small tokenizers: trained on a few texts, or with merges so few that every spelling can be worked out by hand."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

import limbeck
from limbeck import tokens

ROOT = Path(__file__).parents[2]
WORKSHOP = Path(limbeck.__file__).parent / "traces" / "examples" / "workshop.jsonl"
TOOLS_TEMPLATE = Path(limbeck.__file__).parent / "recipes" / "data" / "chatml_tools.jinja"

TEXTS = [
    "The quick brown fox jumps over the lazy dog; the dog does not mind at all.",
    "In 2024 there were 365 days, or 366 where one counts the leap day: 2024 / 4 = 506.",
    "def distil(teacher, student):\n    return student - teacher  # a spirit in a vessel\n",
    "Nächster Halt: Übersee. Ein Zug fährt, drei Züge stehen, keiner weiß warum.",
    "a b c d e f g",
    "Water boils at 100 degrees; alcohol at 78, which is the whole secret of the alembic.",
]

_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


# ---- trained ---------------------------------------------------------------------------------------------------------


def trained_bpe(
    texts: Iterable[str],
    size: int,
    *,
    specials: Iterable[str] = (),
    split_digits: bool = False,
    template: str | None = None,
    **roles: str,
) -> Any:
    """A byte-level BPE of ``size`` ids, special tokens last. ``roles``: ``eos_token="<eos>"`` and the like."""
    specials = list(specials)
    tok = Tokenizer(BPE())
    _byte_level(tok, split_digits)
    trainer = BpeTrainer(
        vocab_size=size - len(specials), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tok.train_from_iterator(texts, trainer)
    return _wrap(tok, specials, template, **roles)


@functools.cache
def tiny(size: int) -> Any:
    """Trained on half of ``TEXTS``; eos is its last id. The larger one knows other words and splits digits."""
    other = size > 300
    return trained_bpe(TEXTS[other::2], size, specials=["<eos>"], split_digits=other, eos_token="<eos>")


@functools.cache
def workshop(size: int = 400) -> Any:
    """Trained on the shipped traces, with a chat template that writes tool calls; larger sizes know other words."""
    return trained_bpe(
        WORKSHOP.read_text(encoding="utf-8").splitlines(),
        size,
        specials=["<|im_start|>", "<|im_end|>"],
        template=TOOLS_TEMPLATE.read_text(encoding="utf-8"),
        eos_token="<|im_end|>",
    )


# ---- by hand ---------------------------------------------------------------------------------------------------------


def byte_level(
    words: Iterable[str | bytes] = (),
    *,
    specials: Iterable[str] = (),
    split_digits: bool = False,
    split_words: bool = True,
    nfc: bool = False,
    order_from: int = 0,
    template: str | None = None,
    **roles: str,
) -> Any:
    """Byte-level BPE of all 256 bytes plus `words` and their prefixes; `order_from` rotates the ids of the bytes."""
    alphabet = _ALPHABET[order_from:] + _ALPHABET[:order_from]
    vocab = {c: i for i, c in enumerate(alphabet)}
    shown = [display(w.encode() if isinstance(w, str) else w) for w in words]
    merges = _merges(shown, vocab)
    tok = Tokenizer(BPE(vocab=vocab, merges=merges))
    _byte_level(tok, split_digits, split_words)
    if nfc:
        tok.normalizer = normalizers.NFC()
    return _wrap(tok, specials, template, **roles)


def sentencepiece(words: Iterable[str] = (), *, specials: Iterable[str] = (), prefix: bool = False) -> Any:
    """SentencePiece-style BPE with byte tokens, letters, `words` (spaces as U+2581); `prefix` puts a space in front."""
    vocab: dict[str, int] = {"<unk>": 0}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    shown = [w.replace(" ", "\u2581") for w in words]
    for char in sorted({*"\u2581abcdefghijklmnopqrstuvwxyzABC0123456789", *"".join(shown)}):
        vocab.setdefault(char, len(vocab))
    merges = _merges(shown, vocab)
    tok = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Prepend("\u2581")] if prefix else []
    tok.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    tok.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _wrap(tok, specials)


def display(data: bytes) -> str:
    """Bytes in the GPT-2 display alphabet, worked out anew."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in keep} | {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in keep)}
    return "".join(table[b] for b in data)


def _merges(words: Iterable[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Merges that build each word from the left; every prefix becomes a token."""
    merges: list[tuple[str, str]] = []
    for word in words:
        for cut in range(1, len(word)):
            pair = (word[:cut], word[cut])
            vocab.setdefault(word[: cut + 1], len(vocab))
            if pair not in merges:
                merges.append(pair)
    return merges


def _byte_level(tok: Tokenizer, split_digits: bool, split_words: bool = True) -> None:
    splits: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_words)
    tok.pre_tokenizer = pre_tokenizers.Sequence([*splits, by_bytes])
    tok.decoder = decoders.ByteLevel()


def _wrap(tok: Tokenizer, specials: Iterable[str], template: str | None = None, **roles: str) -> Any:
    """As a transformers tokenizer, or, where only the core is installed, in the library's own form."""
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    try:
        from transformers import PreTrainedTokenizerFast
    except ModuleNotFoundError:
        templates = {} if template is None else {"default": template}
        return tokens.ByteTokenizer(json.loads(tok.to_str()), named=roles, templates=templates)
    made = PreTrainedTokenizerFast(tokenizer_object=tok, **roles)
    if template is not None:
        made.chat_template = template
    return made
