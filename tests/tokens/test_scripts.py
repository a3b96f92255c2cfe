"""Scripts of tokens, at the edges of their stretches."""

from __future__ import annotations

import unicodedata

import pytest

from limbeck.tokens.classes import SCRIPTS, script_of

NAMES = {
    "LATIN": "latin",
    "GREEK": "greek",
    "CYRILLIC": "cyrillic",
    "HEBREW": "hebrew",
    "ARABIC": "arabic",
    "DEVANAGARI": "indic",
    "TAMIL": "indic",
    "THAI": "thai",
    "HANGUL": "hangul",
    "HIRAGANA": "kana",
    "KATAKANA": "kana",
    "CJK": "han",
    "ARMENIAN": "other_script",
    "GEORGIAN": "other_script",
}


@pytest.mark.parametrize("name", NAMES)
def test_most_letters_are_of_the_script_that_their_name_says(name: str) -> None:
    letters = [chr(point) for point in range(0x30000) if chr(point).isalpha()]
    own = [letter for letter in letters if unicodedata.name(letter, "").startswith(name + " ")]
    right = sum(script_of(letter.encode()) == NAMES[name] for letter in own)
    assert len(own) > 20
    # letters for phonetics and old forms lie elsewhere, and newer versions of Unicode have more of them
    assert right / len(own) > 0.7


@pytest.mark.parametrize(
    ("data", "script"),
    [
        (b" the", "latin"),
        ("(я".encode(), "cyrillic"),
        ("ファ".encode(), "kana"),
        ("、。".encode(), "no_script"),
        ("👩".encode(), "no_script"),
        (b"", "no_script"),
        (b"\xe4\xb8", "pieces"),
        ("中".encode() + b"\xe5", "pieces"),
    ],
)
def test_scripts_of_tokens(data: bytes, script: str) -> None:
    assert script_of(data) == script
    assert script in SCRIPTS
