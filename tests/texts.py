"""Texts that break tokenizers, by name."""

from __future__ import annotations

from hypothesis import strategies as st

TEXTS: dict[str, str] = {
    "empty": "",
    "english": "The quick brown fox jumps over the lazy dog; it didn't stop.",
    "chinese": "蒸馏是一种分离混合物的方法，自古以来就为人所知。",
    "japanese": "蒸留器は、液体を蒸留するための装置である。カタカナとひらがな。",
    "arabic": "التقطير هو عملية فصل المواد السائلة، ٢٠١١.",
    "russian": "Перегонка — разделение жидких смесей на фракции.",
    "emoji": "👩‍👩‍👧‍👦 family, 👍🏽 thumbs, 🏳️‍🌈 flag, 1️⃣ keycap",
    "combining": "e\u0301a\u0300 n\u0303 o\u0302\u0323 plain é",
    "tabs": "a\tb\t\tc\n\td",
    "crlf": "line one\r\nline two\r\n\r\nline four\r",
    "spaces": "a  b   c    d     e                 f \n  g   ",
    "leading_space": "  two spaces in front",
    "code": "def f(x: int) -> int:\n    return x ** 2  # comment\n\n\nprint(f'{f(3):>10}')\n",
    "maths": "∑_{i=1}^{n} i² = n(n+1)(2n+1)/6 ≈ 2.718281828, 20112012 + 1,024 = 2¹⁰",
    "zero_width": "zero\u200bwidth\u200djoiner\u2060word\ufeffbom",
    "specials": "<|begin_of_text|><pad></s><s><eos><bos><|im_start|>user<|im_end|>[CLS][MASK]<0x0A><unk>",
    "fullwidth": "Ｆｕｌｌ　ｗｉｄｔｈ ﬁ ﬂ ① ² ™ …",
    "hangul": "한국어 각각 \u1112\u1161\u11ab",
    "rare": "\U00010348\U0001f9ff\u0e01\u0e33 ܀ ߷ \u2581 already a metaspace \u0120 and a g-breve",
    "control": "nul\x00bell\x07escape\x1b[0m del\x7f nbsp\u00a0 ideographic\u3000end",
}


def unicode_text(max_size: int = 60) -> st.SearchStrategy[str]:
    """Random Unicode without surrogates, mixed with fragments that tokenizers treat specially."""
    characters = st.characters(exclude_categories=("Cs",))
    fragments = st.sampled_from(
        [" ", "  ", "\n", "\r\n", "\t", "e\u0301", "<s>", "<|im_end|>", "12", "345", "👩‍🔬", "ﬁ", "\u2581"]
    )
    return st.lists(st.one_of(st.text(characters, max_size=6), fragments), max_size=max_size // 4).map("".join)
