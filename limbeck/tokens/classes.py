"""Classes of tokens by what they write: quality is lost in one of them long before the mean shows it."""

from __future__ import annotations

import string

import numpy as np
import numpy.typing as npt

from limbeck.tokens.vocab import ByteVocab

TEXT_CLASSES = ("digits", "white_space", "code", "cjk", "other")
"""Names by number, as `class_table` gives them: numerals; blanks and line ends; ASCII signs without a letter, as code
has them; Chinese, Japanese and Korean writing, pieces of its characters included; everything else."""

_DIGITS = frozenset(string.digits.encode())
_SPACES = frozenset(string.whitespace.encode())
_SIGNS = frozenset(string.punctuation.encode())
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
    if (_SPACES | _SIGNS).issuperset(data):
        return "code"
    return "cjk" if _is_cjk(data) else "other"


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


def class_table(vocab: ByteVocab) -> npt.NDArray[np.uint8]:
    """Number of the class of every id, ``[ids]``."""
    numbers = {name: number for number, name in enumerate(TEXT_CLASSES)}
    return np.array([numbers[text_class(data)] for data in vocab.token_bytes], dtype=np.uint8)
