"""Ways to spoil bytes and JSON."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

_DEEP = "@deep@"
_DIGITS = "@digits@"
_LONG = "x" * 20_000
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 255, 2**31, 2**32 - 1, 2**53 + 1, 2**63, -(2**63), 10**30, 10**400),
    *(0.5, -0.0, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
    *("", " ", "x", "0", "-1", "1e400", "NaN", "null", "../../x", "/etc/hostname", "a\0b", "\ud800", "\u202e", "\r\n"),
    *("{{ 1 / 0 }}", "<script>", "step_9", "token_id:7", _LONG, _DEEP, _DIGITS),
    *([], {}, [[]], [{}], {"": None}, {"$tensor": "x"}, [None] * 300),
)
_NUMBERS = (0, 1, 2, 7, 127, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def spoilt_bytes(rng: random.Random, data: bytes) -> bytes:
    """One to four small changes, or a cut."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change(rng, out)
    return bytes(out)


def _change(rng: random.Random, out: bytearray) -> None:
    if not out:
        out += rng.randbytes(rng.randrange(1, 64))
        return
    at = rng.randrange(len(out))
    end = min(len(out), at + rng.choice((1, 2, 4, 8, 64, 1024)))
    way = rng.randrange(9)
    if way == 0:
        out[at] ^= 1 << rng.randrange(8)
    elif way == 1:
        out[at] = rng.randrange(256)
    elif way == 2:
        del out[at:end]
    elif way == 3:
        out[at:at] = out[at:end]
    elif way == 4:
        del out[at:]
    elif way == 5:
        out[at:at] = rng.randbytes(rng.choice((1, 8, 100)))
    elif way == 6:
        # where formats keep lengths and offsets
        at -= at % rng.choice((1, 4, 8))
        form = rng.choice(("<I", "<Q", ">I", ">Q"))
        size = struct.calcsize(form)
        out[at : at + size] = struct.pack(form, rng.choice(_NUMBERS) % 2 ** (8 * size))
    elif way == 7:
        out[at:end] = b"\0" * (end - at)
    else:
        other = rng.randrange(len(out))
        part = bytes(out[other : other + end - at])
        out[at : at + len(part)] = part


def spoilt_json(rng: random.Random, value: Any) -> str:
    """JSON text of ``value`` with one to three values of other types, names or numbers of items; at times broken."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = _other(rng, value)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    text = text.replace(f'"{_DEEP}"', "[" * 3000 + "]" * 3000).replace(f'"{_DIGITS}"', "9" * 5000)
    if rng.random() < 0.1:
        text = spoilt_bytes(rng, text.encode("utf-8", "replace")).decode("utf-8", "replace")
    return text


def _other(rng: random.Random, value: Any) -> Any:
    """Go down at random, and change what is there."""
    if not isinstance(value, list | dict) or not value or rng.random() < 0.08:
        return copy.deepcopy(rng.choice(ODD))
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key: Any = rng.choice(keys)
    way = rng.random()
    if way < 0.75:
        value[key] = _other(rng, value[key])
    elif way < 0.85:
        del value[key]
    elif isinstance(value, list):
        value.insert(rng.randrange(len(value) + 1), copy.deepcopy(rng.choice((value[key], rng.choice(ODD)))))
    else:
        value[rng.choice(("", "x", f"{key} ", str(key)[:-1], *map(str, keys)))] = copy.deepcopy(value[key])
    return value
