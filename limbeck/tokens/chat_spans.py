"""Where each string of a conversation lies in its rendering, proven by rebuilding the rendering from the markers'.

The template is rendered a second time with markers in place of the strings. What stands between the markers must stand
in the real rendering too, and each marker must be one of the forms its string can take (as it is, or escaped for JSON
or Python). If that rebuilds the real rendering to the last character, every place is known; otherwise nothing is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from markupsafe import escape

from limbeck.tokens.chat_leaves import Mark, Marked


@dataclass(frozen=True)
class Place:
    """Characters ``start:end`` of the rendering stand for mark ``mark``; ``repeat`` if it stood somewhere before."""

    mark: int
    start: int
    end: int
    repeat: bool


class Mismatch(Exception):
    """The rendering cannot be rebuilt; ``mark`` is the first marker that does not fit, None if there is none."""

    def __init__(self, mark: int | None) -> None:
        super().__init__(mark)
        self.mark = mark


def locate(real: str, skeleton: str, marked: Marked) -> list[Place]:
    """Every marker's place in the real rendering, in order.

    Raises:
        Mismatch: the skeleton does not rebuild the rendering.
    """
    found = list(marked.occurrences(skeleton))
    edges = [0, *(x for _, start, end in found for x in (start, end)), len(skeleton)]
    literals = [skeleton[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
    forms = [_forms(marked.marks[mark]) for mark, _, _ in found]
    spans = _rebuild(real, literals, forms)
    if isinstance(spans, int):
        raise Mismatch(found[min(spans, len(found) - 1)][0] if found else None)
    seen: set[int] = set()
    places = []
    for (mark, _, _), (start, end) in zip(found, spans, strict=True):
        places.append(Place(mark, start, end, mark in seen))
        seen.add(mark)
    return places


def _rebuild(real: str, literals: list[str], forms: list[tuple[str, ...]]) -> list[tuple[int, int]] | int:
    """Spans of the markers such that literals and forms spell ``real``; otherwise how many markers fitted."""
    count = len(forms)
    starts, ends, tried = [len(literals[0])] + [0] * count, [0] * count, [0] * (count + 1)
    if not real.startswith(literals[0]) or (not count and real != literals[0]):
        return 0
    at = furthest = 0
    budget = 64 * count + 4096
    while 0 <= at < count and budget:
        budget -= 1
        if tried[at] == len(forms[at]):
            at -= 1
            continue
        form = forms[at][tried[at]]
        tried[at] += 1
        end = starts[at] + len(form)
        follows = end + len(literals[at + 1])
        fits = real.startswith(form, starts[at]) and real.startswith(literals[at + 1], end)
        if fits and (at + 1 < count or follows == len(real)):
            ends[at], starts[at + 1], tried[at + 1] = end, follows, 0
            at += 1
            furthest = max(furthest, at)
    return list(zip(starts[:count], ends, strict=True)) if at == count else furthest


def _forms(mark: Mark) -> tuple[str, ...]:
    """What a template can make of a string without losing any of it."""
    core = mark.core
    escaped = json.dumps(core, ensure_ascii=False)[1:-1]
    forms = [core, escaped, json.dumps(core)[1:-1], repr(core)[1:-1], str(escape(core))]
    forms.append(json.dumps(escaped, ensure_ascii=False)[1:-1])
    if not core.strip():
        forms += [core.lstrip("\n"), core.rstrip("\n"), core.strip("\n"), ""]
    return tuple(dict.fromkeys(forms))


def kept_edges(skeleton: str, bare: str, marked: Marked) -> list[tuple[int, int]] | None:
    """How much of each marked string's leading and trailing white space the template kept.

    Args:
        skeleton: the rendering with markers and white space.
        bare: the rendering whose marked strings have no white space at their ends.

    Returns:
        ``(before, after)`` characters for every marker in order; None where the two renderings do not correspond.
    """
    with_edges, without = list(marked.occurrences(skeleton)), list(marked.occurrences(bare))
    if [o[0] for o in with_edges] != [o[0] for o in without]:
        return None
    kept = [[0, 0] for _ in with_edges]
    last_a = last_b = 0
    for i, ((_, start_a, end_a), (_, start_b, end_b)) in enumerate(zip(with_edges, without, strict=True)):
        gap, plain = skeleton[last_a:start_a], bare[last_b:start_b]
        after = marked.marks[with_edges[i - 1][0]].after if i else ""
        split = _split_gap(gap, plain, after, marked.marks[with_edges[i][0]].before)
        if split is None:
            return None
        if i:
            kept[i - 1][1] = split[0]
        kept[i][0] = split[1]
        last_a, last_b = end_a, end_b
    if with_edges:
        split = _split_gap(skeleton[last_a:], bare[last_b:], marked.marks[with_edges[-1][0]].after, "")
        kept[-1][1] = split[0] if split else 0
    return [(before, after) for before, after in kept]


def _split_gap(gap: str, plain: str, after: str, before: str) -> tuple[int, int] | None:
    """How much of ``gap`` continues the string in front (``after``) and begins the next one (``before``).

    ``plain`` is the gap between the same markers when the strings have no white space at their ends.
    """
    after_markup, before_markup = after.rstrip(), before.lstrip()
    left_markup = len(after_markup) if gap.startswith(after_markup) and plain.startswith(after_markup) else 0
    right_markup = len(before_markup) if gap.endswith(before_markup) and plain.endswith(before_markup) else 0
    if left_markup + right_markup > len(plain):
        right_markup = 0
    inner = gap[left_markup : len(gap) - right_markup]
    core = plain[left_markup : len(plain) - right_markup]
    after, before = after[len(after_markup) :], before[: len(before) - len(before_markup)]
    extra = len(inner) - len(core)
    for left in range(extra, -1, -1):
        right = extra - left
        fits = inner[left : len(inner) - right] == core
        if fits and _is_start(inner[:left], after) and _is_end(inner[len(inner) - right :], before):
            return left_markup + left, right_markup + right
    return None


def _is_start(part: str, text: str) -> bool:
    return text.startswith(part) or json.dumps(text, ensure_ascii=False)[1:-1].startswith(part)


def _is_end(part: str, text: str) -> bool:
    return text.endswith(part) or json.dumps(text, ensure_ascii=False)[1:-1].endswith(part)
