"""What a value looks like: a key, a word, a reference to a value elsewhere, or a stand-in for one."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

from limbeck.traces.inner_texts import decoded
from limbeck.traces.secret_rules import Rule, RuleSet

Strength = Literal["password", "token", "key", "weak"]
"""Kinds of names by what they say of their value: a password may be any short word, a token looks random, a key of no
known kind is long and random, and after a weak name such as ``pass`` only what can hardly be anything but a password
counts."""

MASK = "\ue0ff"
"""Stands for every character of a secret that was found, so that places in a text stay what they are."""


_PIECE = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^A-Za-z\d]")
_MIXED = re.compile(r"(?=.*[a-z])(?=.*[A-Z])[A-Za-z0-9]{8,64}")
# what no word holds: the letters of a key that happens to be cut like MixedCase
_NO_WORD = re.compile(
    r"(?i:[bcdfghjklmnpqrstvwxz]{5}|q[^uw]|j[b-df-hj-np-tv-z]|x[bdfgjkmnqrsvwz]|z[b-df-hjkmnp-tv-x]|[cfghjkmpqtvwz]j|vv)"
    r"|[A-Z][b-df-hj-np-tv-xz]{3,}(?![a-z])"
)
NUMBER_LIKE = re.compile(r"[\d.,:+%/TZ -]*")
_FILE_LIKE = re.compile(
    r"(?:~|\.{1,2})?/[^\s=+]*|[\w.-]+(?:/[\w.-]+)*\.(?:json|jsonl|pem|key|crt|txt|ya?ml|toml|py|js|ts|md|env|cfg|ini)",
    re.IGNORECASE,
)
_SLASHED_KEY = re.compile(r"(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])(?=[^0-9]*[0-9])/[A-Za-z0-9]{20,512}={0,2}")
_REFERENCE = re.compile(
    r"[$%<{!&*@?]|\[REDACTED|(?:env|vault|secret|op|file|aws-sm|gcp-sm|ssm|arn|data|urn|https?)[:(]|[a-z][a-z0-9+.-]{0,20}://|"
    r"(?:process\.env|os\.environ|os\.getenv|System\.getenv|secrets?|vars?|local|env|self|config|settings|args)\."
)


def is_file(value: str) -> bool:
    """Whether a value is a path; base64 may begin with a slash as well, with a long piece behind it."""
    return _FILE_LIKE.fullmatch(value) is not None and _SLASHED_KEY.fullmatch(value) is None


def entropy(text: str) -> float:
    """Shannon entropy in bits per character."""
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values()) if text else 0.0


@lru_cache(maxsize=4096)
def is_words(value: str) -> bool:
    """Whether a value reads like an identifier: words and small numbers with separators or capitals between them."""
    pieces = _PIECE.findall(value)
    letters = [piece for piece in pieces if piece.isalpha() and piece.isascii()]
    if not letters or any(not piece.isascii() for piece in pieces):
        return not letters
    if _MIXED.fullmatch(value) and any(_NO_WORD.search(piece) for piece in letters if not piece.isupper()):
        return False
    separated = all(
        not piece.isdigit() or (len(piece) <= 4 and _starts_word(pieces, index)) for index, piece in enumerate(pieces)
    )
    return separated and sum(map(len, letters)) >= 3 * len(letters)


def _starts_word(pieces: Sequence[str], index: int) -> bool:
    """Whether a number stands alone, or behind a separator and a single ``v``."""
    before = pieces[index - 1] if index else "_"
    return not before.isalnum() or before in ("v", "V")


@lru_cache(maxsize=4096)
def looks_random(value: str) -> bool:
    """Tell a key from an identifier such as ``config.get_default_token``."""
    if len(value) < 8 or NUMBER_LIKE.fullmatch(value) or is_words(value) or is_file(value):
        return False
    kinds = [any(map(test, value)) for test in (str.isdigit, str.islower, str.isupper)]
    return sum(kinds) >= 2 and entropy(value) >= 2.5


def is_odd(value: str) -> bool:
    """Whether letters stand beside digits or signs that no word has."""
    return any(map(str.isalpha, value)) and (any(map(str.isdigit, value)) or SYMBOL.search(value) is not None)


def is_name(value: str) -> bool:
    """Whether a value is words and numbers alone, as names of steps and branches are."""
    return is_words(value) and SYMBOL.search(value) is None


def _passes_luhn(value: str) -> bool:
    digits = [int(character) for character in value if character.isdigit()]
    doubled = [digit * 2 - 9 * (digit > 4) for digit in digits[-2::-2]]
    # a row of zeros has the right sum too
    return len(set(digits)) > 1 and (sum(digits[::-2]) + sum(doubled)) % 10 == 0


def _passes_iban(value: str) -> bool:
    plain = value.replace(" ", "").upper()
    return 15 <= len(plain) <= 34 and int("".join(str(int(c, 36)) for c in plain[4:] + plain[:4])) % 97 == 1


_HEX_DIGEST = re.compile(r"(?<=[-_])(?:[0-9a-f]{32}|[0-9a-f]{40}|[0-9a-f]{64})\Z")
_BASE64 = re.compile(r"(?=.{8})(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)")
_LONG_KEY = re.compile(r"(?=.*[a-z])(?=.*[A-Z])(?=.*\d)[A-Za-z0-9+/_-]{28,512}={0,2}")
_FOUR_BY_FOUR = re.compile(r"(?:[a-z0-9]{4} ){3}[a-z0-9]{4}")
_GLUE = frozenset(
    [
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "by",
        "can",
        "for",
        "from",
        "has",
        "in",
        "is",
        "it",
        "its",
        "must",
        "no",
        "not",
        "of",
        "on",
        "or",
        "that",
        "the",
        "this",
        "to",
        "when",
        "will",
        "with",
    ]
)
_BASIC = re.compile(r"[A-Za-z0-9+/]{10,48}={0,2}")
_SPACE = re.compile(r"\s")
SYMBOL = re.compile(r"[!@#$%^&*+=?~]")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-zß-ÿĀ-ɏ]+|\d+|[^\W\d_]+")


class Judge:
    """Tells secrets from stand-ins for them, by the words and the allowed values of a rule set."""

    def __init__(self, rule_set: RuleSet) -> None:
        self._words = frozenset(rule_set.assigned.words)
        self._stand_ins = frozenset(rule_set.assigned.stand_ins)
        self._allow = rule_set.allow

    def holds(self, rule: Rule, secret: str) -> bool:
        """Whether what a rule's pattern found passes its checks."""
        if MASK in secret or entropy(secret) < rule.entropy or (not rule.pii and self.is_allowed(secret)):
            return False
        checks: dict[str, Callable[[str], bool]] = {
            "random": looks_random,
            "odd": lambda value: is_odd(value) and not NUMBER_LIKE.fullmatch(value) and not is_file(value),
            "luhn": _passes_luhn,
            "iban": _passes_iban,
            "no_placeholder": lambda value: not self.is_placeholder(value),
        }
        return all(checks[name](secret) for name in rule.checks)

    def is_allowed(self, value: str) -> bool:
        if len(value) > 128:
            return False
        return self._stands_in(value) or any(pattern.fullmatch(value) for pattern in self._allow)

    def _stands_in(self, value: str) -> bool:
        """Whether a value asks for another, as ``your-api-key-here`` does: words alone, one of them such a word.

        ``my`` and ``the`` begin real passwords too, so there the rest must name what is missing.
        """
        pieces = [piece.lower() for piece in _PIECE.findall(value) if piece.isalnum()]
        if not is_words(value) or len(pieces) < 2:
            return False
        # "test-secret-123" may be in use; "test-only-secret-of-at-least-64-bytes" is a sentence
        if any(piece.isdigit() for piece in pieces) and len(pieces) < 8:
            return False
        if not self._stand_ins.isdisjoint(pieces):
            return True
        return pieces[0] in ("my", "the", "some", "a", "fake", "test") and not self._words.isdisjoint(pieces[1:])

    def _is_phrase(self, value: str) -> bool:
        """Whether a value is drawn words, as phrases for passwords are: no word of them holds a sentence together."""
        words = value.casefold().split()
        known = self._words.isdisjoint(words) and self._stand_ins.isdisjoint(words) and _GLUE.isdisjoint(words)
        return 4 <= len(words) <= 24 and known and all(map(str.isalnum, words)) and value.isascii()

    def is_placeholder(self, value: str) -> bool:
        word = value.casefold().strip("-_.:!?\"'")
        if "|" in value and value.partition("|")[0].casefold() in self._words:
            # conditions of a form's field: required|min:8
            return True
        pair = _BASIC.fullmatch(value) and decoded(value.rstrip("="))
        if pair and ":" in pair and pair.isascii():
            return self.is_placeholder(pair.partition(":")[2])
        return not word or word in self._words or bool(_REFERENCE.match(value)) or self.is_allowed(value)

    def is_secret(self, strength: Strength, value: str, any_word: bool) -> bool:
        """Whether a name's value can be a secret. ``any_word``: it is quoted or stands where no code can."""
        value = value.strip()
        # a second pass must change nothing; what has ${ or {{ in it refers to a value
        if len(value) < 4 or MASK in value or any(sign in value for sign in ("${", "{{", "#{")):
            return False
        if _SPACE.search(value):
            # "p@ss w0rd": no part is a word, and four groups of four as mail providers give them
            if _FOUR_BY_FOUR.fullmatch(value):
                return any_word and strength in ("password", "weak")
            return strength == "password" and any_word and (all(map(is_odd, value.split())) or self._is_phrase(value))
        if self.is_placeholder(value) or is_file(value):
            return False
        if strength == "token":
            return looks_random(value)
        if strength == "key":
            return _LONG_KEY.fullmatch(value) is not None and entropy(value) >= 4 and not _HEX_DIGEST.search(value)
        pieces = [piece.lower() for piece in WORD.findall(value)]
        if strength == "weak":
            return (
                len(value) >= 5
                and (is_odd(value) or (value.isascii() and not is_words(value)))
                and not NUMBER_LIKE.fullmatch(value)
            )
        if any_word:
            return not (is_words(value) and len(pieces) > 1 and any(piece in self._words for piece in pieces))
        if _BASE64.fullmatch(value):
            return True
        if "-" in value and is_odd(value) and self._words.isdisjoint(pieces):
            return True
        return not is_words(value) and not NUMBER_LIKE.fullmatch(value)
