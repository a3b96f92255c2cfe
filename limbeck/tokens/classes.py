"""Classes of tokens by what they write: quality is lost in one of them long before the mean shows it."""

from __future__ import annotations

import re
import string
from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from limbeck.tokens.vocab import ByteVocab

TEXT_CLASSES = ("digits", "white_space", "code", "cjk", "other")
"""Names by number, as `class_table` gives them: numerals; blanks and line ends; ASCII signs without a letter, as code
has them; Chinese, Japanese and Korean writing, pieces of its characters included; everything else."""

_DIGITS = frozenset(string.digits.encode())
_SPACES = frozenset(string.whitespace.encode())
_SIGNS = frozenset(string.punctuation.encode())
_BLANKS_AND_SIGNS = _SPACES | _SIGNS
_LETTERS = frozenset(string.ascii_letters.encode())
# first bytes of characters from U+3000 to Hangul, and of full-width forms
_CJK_LEADS = frozenset({*range(0xE3, 0xEE), 0xEF})


def text_class(data: bytes) -> str:
    """Class of a token's bytes, one of `TEXT_CLASSES`.

    >>> [text_class(t.encode()) for t in (" 2019", "\\n\\n", " += (", "中国", " cat")]
    ['digits', 'white_space', 'code', 'cjk', 'other']
    """
    if not data:
        return "other"
    if not _DIGITS.isdisjoint(data):
        return "digits"
    if _SPACES.issuperset(data):
        return "white_space"
    if _BLANKS_AND_SIGNS.issuperset(data):
        return "code"
    return "cjk" if not data.isascii() and _is_cjk(data) else "other"


def _is_cjk(data: bytes) -> bool:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return not _CJK_LEADS.isdisjoint(data) or all(byte & 0xC0 == 0x80 for byte in data)
    return any(_in_cjk(ord(character)) for character in text)


def _in_cjk(point: int) -> bool:
    return (
        0x2E80 <= point <= 0x9FFF
        or 0xAC00 <= point <= 0xD7AF
        or 0xF900 <= point <= 0xFAFF
        or 0xFF00 <= point <= 0xFFEF
        or 0x20000 <= point <= 0x3FFFF
    )


SCRIPTS = (
    *("latin", "greek", "cyrillic", "hebrew", "arabic", "indic", "thai", "hangul", "kana", "han"),
    *("other_script", "no_script", "pieces"),
)
"""Names that `script_of` gives: writing by its first letter; ``no_script`` is signs, numerals and blanks, ``pieces``
are bytes that are no whole characters."""

# first code points of stretches, and their script; where none is named, ``isalpha`` decides
_STRETCHES: tuple[tuple[int, str], ...] = (
    *((0x00, ""), (0x41, "latin"), (0x5B, ""), (0x61, "latin"), (0x7B, ""), (0xC0, "latin"), (0x2B0, "")),
    *((0x370, "greek"), (0x400, "cyrillic"), (0x530, ""), (0x590, "hebrew"), (0x600, "arabic"), (0x780, "")),
    *((0x8A0, "arabic"), (0x900, "indic"), (0xE00, "thai"), (0xE80, ""), (0x1100, "hangul"), (0x1200, "")),
    *((0x1D00, "latin"), (0x1DC0, ""), (0x1E00, "latin"), (0x1F00, "greek"), (0x2000, "")),
    *((0x2C60, "latin"), (0x2C80, ""), (0x2E80, "han"), (0x3000, ""), (0x3040, "kana")),
    *((0x3100, ""), (0x3130, "hangul"), (0x3190, ""), (0x31F0, "kana"), (0x3200, ""), (0x3400, "han"), (0xA000, "")),
    *((0xA720, "latin"), (0xA800, "")),
    *((0xAC00, "hangul"), (0xD7B0, ""), (0xF900, "han"), (0xFB00, "latin"), (0xFB07, ""), (0xFB1D, "hebrew")),
    *(
        (0xFB50, "arabic"),
        (0xFE00, ""),
        (0xFE70, "arabic"),
        (0xFF00, ""),
        (0xFF21, "latin"),
        (0xFF5B, ""),
        (0xFF66, "kana"),
        (0xFFA0, ""),
    ),
    *((0x20000, "han"), (0x40000, "")),
)
_STARTS = [start for start, _ in _STRETCHES]


def script_of(data: bytes) -> str:
    """Script of a token's bytes, one of `SCRIPTS`.

    >>> [script_of(t.encode()) for t in (" the", "中国", "です", " при", "2019", "ꦏ")]
    ['latin', 'han', 'kana', 'cyrillic', 'no_script', 'other_script']
    >>> script_of(b"\\xe4\\xb8")
    'pieces'
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return "pieces"
    for character in text:
        if character.isalpha():
            return _STRETCHES[bisect_right(_STARTS, ord(character)) - 1][1] or "other_script"
    return "no_script"


def class_table(vocab: ByteVocab) -> npt.NDArray[np.uint8]:
    """Number of the class of every id, ``[ids]``."""
    numbers = {name: number for number, name in enumerate(TEXT_CLASSES)}
    return np.array([numbers[text_class(data)] for data in vocab.token_bytes], dtype=np.uint8)


SPELLING_CLASSES = ("digits_1", "digits_2", "digits_3", "punctuation", "alphabetic", "non_ascii", "whitespace")
"""Classes by spelling, in which vocabularies of one language differ: `token_class` tells them."""


def token_class(data: bytes) -> str:
    """Class of a token's bytes: one of `SPELLING_CLASSES`, or "other" (mixed signs, longer numerals).

    Numerals, punctuation and words may have one space in front, as byte-pair vocabularies hold them.
    """
    if not data:
        return "other"
    if max(data) >= 0x80:
        return "non_ascii"
    # before the rest: a lone space has an empty body, which is a part of every set
    if _SPACES.issuperset(data):
        return "whitespace"
    body = data.removeprefix(b" ")
    if _DIGITS.issuperset(body):
        return f"digits_{len(body)}" if len(body) <= 3 else "other"
    if _SIGNS.issuperset(body):
        return "punctuation"
    return "alphabetic" if _LETTERS.issuperset(body) else "other"


FORM_CLASSES = ("special", "format", "number", "word", "other")
"""Names by number, as `form_table` gives them: special tokens; punctuation and white space, what structures a call;
numbers; words; everything else."""
_FORM_OF_SPELLING = {
    "punctuation": "format",
    "whitespace": "format",
    "digits_1": "number",
    "digits_2": "number",
    "digits_3": "number",
    "alphabetic": "word",
}


def form_table(vocab: ByteVocab, size: int) -> npt.NDArray[np.int64]:
    """Number in `FORM_CLASSES` of every row of a head of `size` rows; rows without a token are other."""
    tokens = zip(vocab.special.tolist(), vocab.token_bytes, strict=True)
    names = ["special" if special else _FORM_OF_SPELLING.get(token_class(data), "other") for special, data in tokens]
    classes = np.full(size, FORM_CLASSES.index("other"), dtype=np.int64)
    # a head may also be narrower than the vocabulary: ids behind its last row have none
    classes[: len(names)] = [FORM_CLASSES.index(name) for name in names[:size]]
    return classes


CREDIT_CLASSES = ("end", "thinking", *FORM_CLASSES)
"""Names by number, as `credit_table` gives them: what ends an answer, tags of thinking, otherwise `FORM_CLASSES`."""
_THINKING = re.compile(rb"[<\[][^<>\[\]]*think[^<>\[\]]*[>\]]", re.IGNORECASE)


def credit_table(vocab: ByteVocab, size: int) -> npt.NDArray[np.int64]:
    """Number in `CREDIT_CLASSES` of every row of a head of `size` rows. A tag that is a special token is special."""
    classes = form_table(vocab, size) + CREDIT_CLASSES.index(FORM_CLASSES[0])
    tags = [i for i, data in enumerate(vocab.token_bytes) if _THINKING.fullmatch(data)]
    for name, ids in (("end", vocab.end_ids()), ("thinking", tags)):
        classes[[i for i in ids if i < size]] = CREDIT_CLASSES.index(name)
    return classes
