"""Taking secrets out of traces before anything is written, sent or trained on.

Logs of real sessions contain keys and passwords. Redaction is on by default and works on every string of a trace:
contents, reasoning, call arguments, tool schemas, error facts and preference pairs. It replaces a secret by
``[REDACTED:kind]``, counts it, and leaves everything else as it is; a second pass changes nothing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any, TypeVar

from limbeck.traces.schema import Message, PreferencePair, Trace

_T = TypeVar("_T")

# Prefixes that the issuers put there so that scanners find the keys: kind, literals of which one must occur, pattern.
_TOKENS: tuple[tuple[str, tuple[str, ...], re.Pattern[str]], ...] = tuple(
    (kind, literals, re.compile(pattern))
    for kind, literals, pattern in (
        ("anthropic_key", ("sk-ant-",), r"\bsk-ant-[A-Za-z0-9_-]{20,}"),
        ("openai_key", ("sk-",), r"\bsk-(?:proj-|svcacct-|admin-|or-v1-)?[A-Za-z0-9_-]{20,}"),
        ("aws_access_key", ("AKIA", "ASIA"), r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
        ("github_token", ("gh", "github_pat_"), r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{50,})"),
        ("gitlab_token", ("glpat-",), r"\bglpat-[A-Za-z0-9_-]{20,}"),
        ("huggingface_token", ("hf_",), r"\bhf_[A-Za-z0-9]{30,}\b"),
        ("slack_token", ("xox",), r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}"),
        ("google_key", ("AIza",), r"\bAIza[A-Za-z0-9_-]{35}"),
        ("npm_token", ("npm_",), r"\bnpm_[A-Za-z0-9]{36}\b"),
        ("pypi_token", ("pypi-",), r"\bpypi-[A-Za-z0-9_-]{50,}"),
        ("stripe_key", ("k_live_", "k_test_"), r"\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,}"),
        ("jwt", ("eyJ",), r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"),
    )
)

# A block without its end line (a truncated listing) is taken up to the last line that can be key material.
_PRIVATE_KEY = re.compile(
    r"-----BEGIN (?P<label>[A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?)-----"
    r"(?:.*?-----END (?P=label)-----|(?:(?:\\n|\s)*[A-Za-z0-9+/=]{16,})*)",
    re.DOTALL,
)
_BEARER = re.compile(r"(?i)(\bauthorization\b[\"']?\s*[:=]\s*[\"']?(?:bearer|basic|token)\s+)([A-Za-z0-9._~+/=-]{12,})")
_URL_PASSWORD = re.compile(r"\b([a-z][a-z0-9+.-]{1,20}://[^\s:/@\"'<>]{1,64}:)([^\s:/@\"'<>${}\[\]]{3,128})(?=@)")
_ASSIGNED = re.compile(
    r"(?i)((?:api[_-]?key|secret|token|passw(?:or)?d|credential)s?[\"']?\s*(?:[:=]|=>)\s*[\"']?)"
    r"([A-Za-z0-9+/=_.~-]{16,256})"
)
_SECRET_FIELD = re.compile(r"(?i)(?:api[_-]?key|secret|token|passw(?:or)?d|credential)s?\Z")
_FIELD = "secret="
_SECRET_WORDS = ("key", "secret", "token", "passw", "credential")
_MIN_ENTROPY = 3.2


def _entropy(text: str) -> float:
    """Shannon entropy in bits per character."""
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values())


def _looks_random(value: str) -> bool:
    """Tell a key from an identifier such as ``config.get_default_token``: digits among letters and high entropy."""
    digits = sum(character.isdigit() for character in value)
    return digits >= 3 and any(character.isalpha() for character in value) and _entropy(value) >= _MIN_ENTROPY


def redact_text(text: str, counts: Counter[str] | None = None) -> str:
    """``text`` without the secrets that it contains; ``counts`` gets one per secret, by kind."""
    found = counts if counts is not None else Counter()

    def replaced(kind: str, keep: str = "") -> str:
        found[kind] += 1
        return f"{keep}[REDACTED:{kind}]"

    if "PRIVATE KEY" in text:
        text = _PRIVATE_KEY.sub(lambda match: replaced("private_key"), text)
    for kind, literals, pattern in _TOKENS:
        if any(literal in text for literal in literals):
            text = pattern.sub(lambda match, kind=kind: replaced(kind), text)  # type: ignore[misc]
    if "://" in text:
        text = _URL_PASSWORD.sub(lambda match: replaced("url_password", match[1]), text)
    lowered = text.lower()
    if "authorization" in lowered:
        text = _BEARER.sub(lambda match: replaced("authorization", match[1]), text)
    if not any(word in lowered for word in _SECRET_WORDS):
        return text
    return _ASSIGNED.sub(
        lambda match: replaced("assigned_secret", match[1]) if _looks_random(match[2]) else match[0], text
    )


def redact_value(value: _T, counts: Counter[str] | None = None) -> _T:
    """The same JSON value with every string in it redacted, keys included."""
    return _redact_json(value, counts if counts is not None else Counter())


def _redact_json(value: Any, counts: Counter[str]) -> Any:
    if isinstance(value, str):
        return redact_text(value, counts)
    if isinstance(value, list):
        return [_redact_json(item, counts) for item in value]
    if isinstance(value, dict):
        return {redact_text(str(key), counts): _redact_field(str(key), item, counts) for key, item in value.items()}
    return value


def _redact_field(key: str, item: Any, counts: Counter[str]) -> Any:
    """A field's name can give its value away, as an assignment does in text."""
    if isinstance(item, str) and _SECRET_FIELD.search(key):
        return redact_text(f"{_FIELD}{item}", counts).removeprefix(_FIELD)
    return _redact_json(item, counts)


def _redact_message(message: Message, counts: Counter[str]) -> Message:
    before = counts.total()
    calls = [call.model_copy(update={"arguments": redact_value(call.arguments, counts)}) for call in message.tool_calls]
    update: dict[str, Any] = {
        "content": redact_text(message.content, counts),
        "reasoning": None if message.reasoning is None else redact_text(message.reasoning, counts),
        "tool_calls": calls,
        "error_meta": redact_value(message.error_meta, counts),
    }
    if counts.total() == before:
        return message
    # The sampled ids still spell the secret.
    return message.model_copy(update={**update, "sampled_ids": None, "logprobs": None})


def redact_trace(trace: Trace) -> tuple[Trace, Counter[str]]:
    """A copy of the trace without secrets, and how many were found, by kind."""
    counts: Counter[str] = Counter()

    def clean_pair(pair: PreferencePair) -> PreferencePair:
        return pair.model_copy(
            update={
                "chosen": _redact_message(pair.chosen, counts),
                "rejected": _redact_message(pair.rejected, counts),
                "prompt": None if pair.prompt is None else [_redact_message(m, counts) for m in pair.prompt],
            }
        )

    update = {
        "messages": [_redact_message(message, counts) for message in trace.messages],
        "tools": redact_value(trace.tools, counts),
        "meta": redact_value(trace.meta, counts),
        "preference_pairs": [clean_pair(pair) for pair in trace.preference_pairs],
    }
    return (trace.model_copy(update=update) if counts else trace), counts
