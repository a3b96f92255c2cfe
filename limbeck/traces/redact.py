"""Taking secrets out of traces before anything is written, sent or trained on.

Logs of real sessions contain keys and passwords. Redaction is on by default and works on every string of a trace:
contents, reasoning, call arguments, tool schemas, error facts and preference pairs. It replaces a secret by
``[REDACTED:kind]``, counts it, and leaves everything else as it is; a second pass changes nothing.

What counts as a secret is data: ``secrets.yaml`` beside this file, and files of the same form that a user gives.

Example:
    >>> Redactor().text("docker run -e DB_PASSWORD=tr0ub4dor img")
    'docker run -e DB_PASSWORD=[REDACTED:assigned_secret] img'
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from limbeck.errors import TraceError, one_line
from limbeck.traces.schema import Message, PreferencePair, Trace, describe_validation

_T = TypeVar("_T")

Strength = Literal["password", "token"]
"""What a name says of its value: a password may be any short word, a token looks random."""


class Rule(BaseModel):
    """One pattern; see the head of ``secrets.yaml``."""

    model_config = ConfigDict(extra="forbid")

    id: str = Field(pattern=r"^\w+$")
    pattern: re.Pattern[str]
    literals: list[str] = Field(default_factory=list)
    entropy: float = 0.0
    checks: list[Literal["random", "luhn", "no_placeholder"]] = Field(default_factory=list)
    pii: bool = False


class AssignedNames(BaseModel):
    """Names whose values are secrets, by their last words, and values that are none."""

    model_config = ConfigDict(extra="forbid")

    passwords: list[str] = Field(default_factory=list)
    tokens: list[str] = Field(default_factory=list)
    capital_passwords: list[str] = Field(default_factory=list)
    capital_tokens: list[str] = Field(default_factory=list)
    words: list[str] = Field(default_factory=list)


class RuleSet(BaseModel):
    """The content of a rule file."""

    model_config = ConfigDict(extra="forbid")

    rules: list[Rule] = Field(default_factory=list)
    assigned: AssignedNames = Field(default_factory=AssignedNames)
    allow: list[re.Pattern[str]] = Field(default_factory=list)

    @classmethod
    def parse(cls, text: str, name: str) -> RuleSet:
        """A rule file's text; ``TraceError`` names the file where it is none."""
        try:
            return cls.model_validate(yaml.safe_load(text) or {})
        except ValidationError as error:
            raise TraceError(f"{name} is no file of redaction rules: {describe_validation(error)}") from error
        except (yaml.YAMLError, re.error) as error:
            raise TraceError(f"{name} is no file of redaction rules: {one_line(error)}") from error

    def __add__(self, other: RuleSet) -> RuleSet:
        names = {
            field: [*getattr(self.assigned, field), *getattr(other.assigned, field)]
            for field in AssignedNames.model_fields
        }
        return RuleSet(
            rules=[*self.rules, *other.rules],
            assigned=AssignedNames(**names),
            allow=[*self.allow, *other.allow],
        )


@cache
def kept_rules() -> RuleSet:
    """The rules that the package brings."""
    return RuleSet.parse(files("limbeck.traces").joinpath("secrets.yaml").read_text(encoding="utf-8"), "secrets.yaml")


def read_rules(path: Path) -> RuleSet:
    """The rules of a user's file."""
    try:
        return RuleSet.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"the redaction rules {str(path)!r} cannot be read: {one_line(error)}") from error


# -- what a value looks like -------------------------------------------------------------------------------------------

_PIECE = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^A-Za-z\d]")
_NUMBER_LIKE = re.compile(r"[\d.,:+%/TZ -]*")
_FILE_LIKE = re.compile(
    r"(?:~|\.{1,2})?/[^\s=+]*|[\w.-]+(?:/[\w.-]+)*\.(?:json|jsonl|pem|key|crt|txt|ya?ml|toml|py|js|ts|md|env|cfg|ini)",
    re.IGNORECASE,
)
_REFERENCE = re.compile(
    r"[$%<{!&*@]|\[REDACTED|(?:env|vault|secret|op|file|aws-sm|gcp-sm|ssm|arn|data|urn|https?)[:(]|"
    r"(?:process\.env|os\.environ|os\.getenv|System\.getenv|secrets?|vars?|local|env|self|config|settings|args)\."
)


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
    if len(value) < 8 or _NUMBER_LIKE.fullmatch(value) or is_words(value) or _FILE_LIKE.fullmatch(value):
        return False
    kinds = [any(map(test, value)) for test in (str.isdigit, str.islower, str.isupper)]
    return sum(kinds) >= 2 and entropy(value) >= 2.5


def _passes_luhn(value: str) -> bool:
    digits = [int(character) for character in value if character.isdigit()]
    doubled = [digit * 2 - 9 * (digit > 4) for digit in digits[-2::-2]]
    return len(set(digits)) > 1 and (sum(digits[::-2]) + sum(doubled)) % 10 == 0


# -- names and their values --------------------------------------------------------------------------------------------

_NAME = r"(?P<name>[A-Za-z_][A-Za-z0-9_.-]{1,63})"
# The forms in which a text gives a name its value; each ends where the value begins.
_FORMS = (
    # name = value, "name": "value", name: str = "value", env["name"] = value
    re.compile(
        rf"(?<![A-Za-z0-9_]){_NAME}\\?[\"'`]?\]?\s{{0,3}}"
        r"(?P<sign>:\s{1,3}[A-Za-z_][\w.]{0,30}(?:\[[^\]\n]{0,40}\])?\s{0,3}=|:=|=>|[=!]={1,2}|:|=)(?P<gap>\s{0,3})"
    ),
    # ("name", "value")
    re.compile(rf"[\"'`]{_NAME}[\"'`](?P<sign>,)(?P<gap>\s{{0,3}})(?=[\"'`])"),
    # --name value
    re.compile(rf"(?<![\w-])(?P<sign>--){_NAME}(?P<gap>[ \t]{{1,3}})(?!-)"),
    # ENV NAME value, aws configure set NAME value
    re.compile(
        r"(?<!\w)(?P<sign>ENV|setenv|setx|SETX|set -gx|set -x|config(?:ure)? set)[ \t]{1,3}"
        rf"{_NAME}(?P<gap>[ \t]{{1,3}})"
    ),
    # secret_access_key value
    re.compile(
        r"(?<![A-Za-z0-9_.-])(?P<name>[A-Za-z][A-Za-z0-9]{0,30}(?:[_-][A-Za-z0-9]{1,30}){1,6})"
        r"(?P<sign> )(?P<gap>[ \t]{0,2})"
    ),
    # {"name": "NAME", "value": "value"}
    re.compile(
        rf"(?i)\b(?:name|key)\\?[\"']?\s{{0,3}}[:=]\s{{0,3}}\\?[\"']?{_NAME}\\?[\"']?,?\s{{1,40}}\\?[\"']?"
        r"(?P<sign>value)\\?[\"']?\s{0,3}[:=](?P<gap>\s{0,3})"
    ),
)
_VALUE = re.compile(
    r"[bBrRuU@]?(?P<quote>\\?[\"'`])(?P<quoted>(?:(?!(?P=quote))[^\n]){1,512})"
    r"|(?P<bare>[^\s\"'`,;&<>(){}\[\]|\\]{1,512})(?P<after>[(\[{]?)"
)
_SPACE = re.compile(r"\s")
_HEX = re.compile(r"[0-9a-fA-F-]+")
# what is left of a value that is longer than the part it is judged by
_REST = {"quoted": re.compile(r"[^\n\"'`\\]*"), "bare": re.compile(r"[^\s\"'`,;&<>(){}\[\]|\\]*")}
_EXPORTING = re.compile(r"(?:\bexport|\benv|(?<!\S)-e|--set|\bset)\s+\Z")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ASSIGNED = "assigned_secret"


@dataclass(frozen=True)
class Hit:
    """One secret that was found: the rule's name, and the secret with all but its beginning hidden."""

    kind: str
    preview: str

    @classmethod
    def of(cls, kind: str, secret: str) -> Hit:
        """Of a secret itself, which is not kept: at most a fifth of it can be seen."""
        seen = " ".join(secret[: min(6, len(secret) // 5)].split())
        return cls(kind, f"{seen}… ({len(secret)} characters)")


Note = Callable[[str, str], None]
"""Told of every secret: the rule's name and the secret."""


class Redactor:
    """Takes secrets out of texts, JSON values, messages and traces.

    Args:
        pii: Also e-mail addresses, user names in home paths, phone and card numbers.
        rules: Rules besides the kept ones, as ``read_rules`` gives them.
    """

    def __init__(self, *, pii: bool = False, rules: Sequence[RuleSet] = ()) -> None:
        rule_set = kept_rules()
        for further in rules:
            rule_set = rule_set + further
        self._rules = [rule for rule in rule_set.rules if pii or not rule.pii]
        self._literals = [(literal, i) for i, rule in enumerate(self._rules) for literal in rule.literals or [""]]
        self._allow = rule_set.allow
        names = rule_set.assigned
        self._words = frozenset(names.words)
        self._named: dict[str, Strength] = {
            **dict.fromkeys(names.tokens, "token"),
            **dict.fromkeys(names.passwords, "password"),
        }
        self._capital: dict[str, Strength] = {
            **dict.fromkeys(names.capital_tokens, "token"),
            **dict.fromkeys(names.capital_passwords, "password"),
        }
        known = {name.split()[-1] for name in (*self._named, *self._capital)}
        self._ends = re.compile("|".join(sorted(map(re.escape, known))), re.IGNORECASE)
        self._strengths: dict[str, Strength | None] = {}

    def text(self, text: str, counts: Counter[str] | None = None) -> str:
        """``text`` without the secrets that it contains; ``counts`` gets one per secret, by kind."""
        return self._text(text, _counting(counts))

    def value(self, value: _T, counts: Counter[str] | None = None) -> _T:
        """The same JSON value with every string in it redacted, keys included."""
        return self._json(value, _counting(counts))

    def message(self, message: Message, counts: Counter[str] | None = None) -> Message:
        """A message without secrets; the same one where it has none."""
        return self._message(message, _counting(counts))

    def trace(self, trace: Trace) -> tuple[Trace, Counter[str]]:
        """A copy of the trace without secrets, and how many were found, by kind."""
        counts: Counter[str] = Counter()
        clean = self._trace(trace, _counting(counts))
        return (clean if counts else trace), counts

    def hits(self, trace: Trace) -> list[tuple[int | None, Hit]]:
        """What redaction would take out: the index of the message (None elsewhere in the trace) and the hit."""
        found: list[tuple[int | None, Hit]] = []

        def noting(place: int | None) -> Note:
            return lambda kind, secret: found.append((place, Hit.of(kind, secret)))

        for index, message in enumerate(trace.messages):
            self._message(message, noting(index))
        self._trace(trace.model_copy(update={"messages": []}), noting(None))
        return found

    # -- texts ---------------------------------------------------------------------------------------------------------

    def _text(self, text: str, note: Note) -> str:
        lowered = text.lower()
        for index in sorted({index for literal, index in self._literals if literal in lowered}):
            text = self._apply(self._rules[index], text, note)
        return self._assigned(text, note) if self._ends.search(text) else text

    def _apply(self, rule: Rule, text: str, note: Note) -> str:
        group: int | str = "secret" if "secret" in rule.pattern.groupindex else 0

        def replaced(match: re.Match[str]) -> str:
            secret = match[group]
            if not secret or not self._holds(rule, secret):
                return match[0]
            note(rule.id, secret)
            start, end = match.start(group) - match.start(), match.end(group) - match.start()
            return f"{match[0][:start]}[REDACTED:{rule.id}]{match[0][end:]}"

        return rule.pattern.sub(replaced, text)

    def _holds(self, rule: Rule, secret: str) -> bool:
        if entropy(secret) < rule.entropy or (not rule.pii and self._is_allowed(secret)):
            return False
        checks: dict[str, Callable[[str], bool]] = {
            "random": looks_random,
            "luhn": _passes_luhn,
            "no_placeholder": lambda value: not self._is_placeholder(value),
        }
        return all(checks[name](secret) for name in rule.checks)

    def _is_allowed(self, value: str) -> bool:
        return len(value) <= 128 and any(pattern.fullmatch(value) for pattern in self._allow)

    def _is_placeholder(self, value: str) -> bool:
        word = value.casefold().strip("-_.:!?\"'")
        return not word or word in self._words or bool(_REFERENCE.match(value)) or self._is_allowed(value)

    def _assigned(self, text: str, note: Note) -> str:
        for form in _FORMS:
            parts: list[str] = []
            done = 0
            for match in form.finditer(text):
                if match.start() < done:
                    continue
                span = self._secret_span(text, match)
                if span is not None:
                    note(_ASSIGNED, text[slice(*span)])
                    parts += [text[done : span[0]], f"[REDACTED:{_ASSIGNED}]"]
                    done = span[1]
            text = "".join([*parts, text[done:]]) if parts else text
        return text

    def _secret_span(self, text: str, match: re.Match[str]) -> tuple[int, int] | None:
        """Where the value stands that a name was given, where it is a secret."""
        name = match["name"]
        strength = self._strength(name)
        if strength is None or (value := _VALUE.match(text, match.end())) is None:
            return None
        if match["sign"] == " ":
            # only a space: what follows is the next word of a sentence, or a commit, unless it looks like nothing else
            found = value["bare"] or ""
            other = len(found) >= 16 and not _HEX.fullmatch(found)
            return _whole(text, value, "bare") if other and self._is_secret("token", found, False) else None
        if value["quoted"] is not None:
            any_word = match["sign"] != ","
            return _whole(text, value, "quoted") if self._is_secret(strength, value["quoted"], any_word) else None
        if value["after"]:
            return None
        # DB_PASSWORD=x, export password=x, --password x and ENV PASSWORD x are shell, where any word is a value
        plain = match["sign"] == "=" and not match["gap"]
        exported = plain and _EXPORTING.search(text, max(0, match.start() - 12), match.start()) is not None
        shell = (plain and name == name.upper()) or exported or match["sign"][0] in "-EsSc"
        return _whole(text, value, "bare") if self._is_secret(strength, value["bare"], shell) else None

    def _strength(self, name: str) -> Strength | None:
        if name not in self._strengths:
            if len(self._strengths) > 100_000:
                self._strengths.clear()
            self._strengths[name] = self._classify(name)
        return self._strengths[name]

    def _classify(self, name: str) -> Strength | None:
        words = [word.lower() for word in _WORD.findall(name)][-4:]
        for tables in (self._named, self._capital if name == name.upper() and "_" in name else {}):
            for length in range(len(words), 0, -1):
                strength = tables.get(" ".join(words[-length:]))
                if strength is not None:
                    return strength
        return None

    def _is_secret(self, strength: Strength, value: str, any_word: bool) -> bool:
        """Whether a value can be a secret. ``any_word``: it is quoted or stands where no code can."""
        value = value.strip()
        if len(value) < 4 or _SPACE.search(value) or "[REDACTED:" in value or "${" in value or "{{" in value:
            return False
        if self._is_placeholder(value) or _FILE_LIKE.fullmatch(value):
            return False
        if strength == "token":
            return looks_random(value)
        if any_word:
            pieces = [piece.lower() for piece in _WORD.findall(value)]
            return not (is_words(value) and len(pieces) > 1 and any(piece in self._words for piece in pieces))
        return not is_words(value) and not _NUMBER_LIKE.fullmatch(value)

    # -- values, messages, traces --------------------------------------------------------------------------------------

    def _json(self, value: Any, note: Note) -> Any:
        if isinstance(value, str):
            return self._text(value, note)
        if isinstance(value, list):
            return [self._json(item, note) for item in value]
        if isinstance(value, dict):
            named = value.get("name", value.get("key"))
            return {
                self._text(str(key), note): self._field(named if key == "value" else str(key), item, note)
                for key, item in value.items()
            }
        return value

    def _field(self, name: Any, item: Any, note: Note) -> Any:
        """A field's name can give its value away, as an assignment does in text."""
        if not isinstance(item, str):
            return self._json(item, note)
        clean = self._text(item, note)
        strength = self._strength(name) if isinstance(name, str) and len(name) <= 64 else None
        if clean != item or strength is None or not self._is_secret(strength, item, True):
            return clean
        note(_ASSIGNED, item)
        return f"[REDACTED:{_ASSIGNED}]"

    def _message(self, message: Message, note: Note) -> Message:
        calls = [call.model_copy(update={"arguments": self._json(call.arguments, note)}) for call in message.tool_calls]
        update: dict[str, Any] = {
            "content": self._text(message.content, note),
            "reasoning": None if message.reasoning is None else self._text(message.reasoning, note),
            "tool_calls": calls,
            "error_meta": self._json(message.error_meta, note),
        }
        if all(getattr(message, name) == clean for name, clean in update.items()):
            return message
        # The sampled ids still spell the secret.
        return message.model_copy(update={**update, "sampled_ids": None, "logprobs": None})

    def _trace(self, trace: Trace, note: Note) -> Trace:
        def clean_pair(pair: PreferencePair) -> PreferencePair:
            return pair.model_copy(
                update={
                    "chosen": self._message(pair.chosen, note),
                    "rejected": self._message(pair.rejected, note),
                    "prompt": None if pair.prompt is None else [self._message(m, note) for m in pair.prompt],
                    "tools": self._json(pair.tools, note),
                }
            )

        update = {
            "messages": [self._message(message, note) for message in trace.messages],
            "tools": self._json(trace.tools, note),
            "meta": self._json(trace.meta, note),
            "preference_pairs": [clean_pair(pair) for pair in trace.preference_pairs],
        }
        return trace.model_copy(update=update)


def _whole(text: str, value: re.Match[str], group: str) -> tuple[int, int]:
    rest = _REST[group].match(text, value.end(group))
    return value.start(group), value.end(group) if rest is None else rest.end()


def _counting(counts: Counter[str] | None) -> Note:
    found: Counter[str] = counts if counts is not None else Counter()

    def note(kind: str, secret: str) -> None:
        found[kind] += 1

    return note


@cache
def default_redactor() -> Redactor:
    """The kept rules alone, without personal data."""
    return Redactor()


def redact_text(text: str, counts: Counter[str] | None = None) -> str:
    """``Redactor.text`` with the kept rules."""
    return default_redactor().text(text, counts)


def redact_value(value: _T, counts: Counter[str] | None = None) -> _T:
    """``Redactor.value`` with the kept rules."""
    return default_redactor().value(value, counts)


def redact_trace(trace: Trace) -> tuple[Trace, Counter[str]]:
    """``Redactor.trace`` with the kept rules."""
    return default_redactor().trace(trace)
