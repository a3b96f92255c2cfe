"""The committed lists of secrets and of innocent lines, with their random parts drawn.

The lists hold shapes, not keys: a scanner of this repository finds nothing in them, and nothing in them was ever valid.
"""

from __future__ import annotations

import json
import random
import re
import string
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

_ALPHABETS = {
    "a": string.ascii_letters + string.digits,
    "b": string.ascii_letters + string.digits + "+/",
    "d": string.digits,
    "h": "0123456789abcdef",
    "l": string.ascii_lowercase + string.digits,
    "u": string.ascii_uppercase + string.digits,
    "w": string.ascii_letters,
}
_DRAWN = re.compile(r"\{([abdhluw])(\d+)\}")
_WRAPPED = re.compile(r"<(json|url)(?: (\d))?>")


@dataclass(frozen=True)
class Case:
    """A text and the secrets in it; ``line`` is where the list has it."""

    line: int
    text: str
    secrets: tuple[str, ...]

    def leaks(self, redacted: str) -> bool:
        """Whether eight characters in a row of a secret, or all of a shorter one, are left."""
        return any(
            secret[start : start + 8] in redacted for secret in self.secrets for start in range(max(1, len(secret) - 7))
        )


def cases(name: str, seed: int = 0) -> list[Case]:
    """The cases of one of the lists in this folder."""
    chance = random.Random(f"{name}/{seed}")
    lines = (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()
    written = [(number, line) for number, line in enumerate(lines, 1) if not line.startswith("#")]
    unescaped = (
        (n, re.sub(r"\\([nt\\])", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), line)) for n, line in written
    )
    return [_case(number, line, chance) for number, line in unescaped]


def _case(number: int, text: str, chance: random.Random) -> Case:
    text = _DRAWN.sub(lambda match: "".join(chance.choices(_ALPHABETS[match[1]], k=int(match[2]))), text)
    if wrap := _WRAPPED.match(text):
        text = text[wrap.end() :]
        for _ in range(int(wrap[2] or 1)):
            text = json.dumps(text, ensure_ascii=False) if wrap[1] == "json" else "?q=" + _quoted(text)
    marked = re.findall("«(.*?)»", text, re.DOTALL)
    return Case(number, text.replace("«", "").replace("»", ""), tuple(marked))


def _quoted(text: str) -> str:
    return quote(text).replace(quote("«"), "«").replace(quote("»"), "»")


# -- every name in every form ------------------------------------------------------------------------------------------

_PASSWORDS = ("password", "DB_PASSWORD", "dbPassword", "smtp_passwd", "passphrase", "spring.datasource.password")
_TOKENS = (
    "api_key",
    "API_KEY",
    "apiKey",
    "access-token",
    "AUTH_TOKEN",
    "clientSecret",
    "secret_access_key",
    "bot.token",
)
_SAID = ("Password", "API key", "api token", "Access token", "Client secret", "secret access key", "Auth key")
_FORMS = (
    "{name}: {value}",
    "  {name}: '{value}'\n  port: 8080",
    'set {name}="{value}" first',
    "{name} = '{value}'  # for tests",
    "run --{name} {value} --verbose",
    "run --{name}={value}",
    "f({name}='{value}', x=1)",
    "<{name}>{value}</{name}>",
    '<add key="{name}" value="{value}" />',
    'os.environ["{name}"] = "{value}"',
    "- name: {name}\n  value: {value}",
    'conf.set("{name}", "{value}")',
    "https://h.example.org/?page=2&{name}={value}&x=1",
    '<json 1>{{"a": 1, "{name}": "{value}"}}',
    '<json 3>{{"a": {{"{name}": "{value}"}}}}',
    "<json 2>{name}={value}",
    '<url>{{"{name}": "{value}"}}',
    "<url>{name}={value}&x=1",
    "{{'{name}': '{value}', 'n': 2}}",
    "+{name}={value}",
)
_SAID_FORMS = (
    "{name}: {value}",
    "Your {name} is {value}.",
    "the {name} for production is `{value}`",
    "**{name}**: {value}",
    "| {name} | {value} |",
    "- {name} (staging): {value}",
    "I changed the {name} to {value} today",
    "{name} = {value}",
    "<b>{name}:</b> {value}",
    'here is my {name}: "{value}"',
)
_PASSWORD_VALUES = ("{a12}", "Winter-{d4}", "pa55-{l8}7", "{b22}==", "S3cr{l5}!", "my-{l6}{d3}x", "the_{l4}{d4}_k")
_TOKEN_VALUES = ("{a32}", "{h40}", "{b43}=", "{a20}-{a8}", "{l30}", "{u24}")
_NO_VALUES = (
    "required",
    "null",
    "${SECRET}",
    "<your value>",
    "string",
    "your-key-here",
    "********",
    "optional",
    "TODO",
)


def combined(seed: int = 0, innocent: bool = False) -> list[Case]:
    """Every form with names and values drawn for it: secrets, or what stands in for one."""
    chance = random.Random(f"combined/{seed}/{innocent}")
    drawn = []
    for number in range(10):
        for form in (*_FORMS, *_SAID_FORMS):
            secret = number % 2 == 0
            names = (_PASSWORDS if secret else _TOKENS) if form in _FORMS else _SAID[:1] if secret else _SAID[1:]
            values = _NO_VALUES if innocent else _PASSWORD_VALUES if secret else _TOKEN_VALUES
            value = chance.choice(values)
            text = form.format(name=chance.choice(names), value=value if innocent else f"«{value}»")
            drawn.append(_case(number, text, chance))
    return drawn
