"""How a chat template begins a tool call, to tell calls in a model's answers from text about calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from limbeck.errors import LimbeckError
from limbeck.tokens.chat.calls import WrittenCall, written_calls
from limbeck.tokens.chat.render import render_chat
from limbeck.tokens.tokenized_text import IntArray
from limbeck.tokens.vocab import ByteVocab

_NAME = "probe_name"
_TOOL = {"name": _NAME, "description": "A probe.", "parameters": {"type": "object", "properties": {}}}
_ASKED = [{"role": "user", "content": "a"}]


@dataclass(frozen=True)
class CallMarkup:
    """What opens a call: a text, or a special token; neither: an answer that is a JSON object is a call."""

    text: str = ""
    special: int | None = None

    @classmethod
    def of_template(cls, tokenizer: object, template: str | None, arguments: Mapping[str, Any]) -> CallMarkup | None:
        """Markup of a template; None where it writes no calls."""
        call = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": {}}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        tools: list[Any] = [{"type": "function", "function": _TOOL}]
        same: dict[str, Any] = {"tools": tools, "template": template, "template_kwargs": arguments}
        try:
            header = render_chat(tokenizer, _ASKED, add_generation_prompt=True, **same)
            whole = render_chat(tokenizer, [*_ASKED, answer], train_on="last", **same)
        except LimbeckError:
            return None
        parts = [s for s in whole.segments if s.kind == "tool_call"]
        if not parts:
            return None
        text = whole.source[parts[0].start : parts[-1].end].decode("utf-8", "replace")
        before = text.partition(_NAME)[0].partition("{")[0].strip()
        ends = [s.token_start for s in whole.segments if s.kind == "eot"]
        inner = slice(0, ends[-1] if ends else None)
        specials = whole.ids[inner][whole.special[inner]].tolist()[int(header.special.sum()) :]
        if specials:
            return cls(special=int(specials[0]))
        return cls(text=before.split()[0] if before else "")

    def split(self, ids: IntArray, vocab: ByteVocab) -> tuple[str, list[str]]:
        """Text in front of the first call of an answer, and what stands behind each opening."""
        listed = ids.tolist()
        if self.special is not None:
            cuts = [i for i, token in enumerate(listed) if token == self.special]
            bounds = [*cuts, len(listed)]
            pieces = [_text(vocab, listed[a + 1 : b]) for a, b in pairwise(bounds)]
            return _text(vocab, listed[: bounds[0]]), pieces
        whole = _text(vocab, listed)
        if self.text:
            front, *pieces = whole.split(self.text)
            return front, pieces
        return ("", [whole]) if whole.lstrip().startswith("{") else (whole, [])

    def read(self, ids: IntArray, vocab: ByteVocab) -> tuple[str, list[WrittenCall | str]]:
        """Text in front of the first call, and the calls; of one that cannot be read, what was written."""
        front, pieces = self.split(ids, vocab)
        calls: list[WrittenCall | str] = []
        for piece in pieces:
            # the opening may belong to what is read, as in <function=name>
            calls_here = written_calls(piece) or written_calls(f"{self.text}{piece}")
            calls += calls_here if calls_here else [piece]
        return front, calls


def _text(vocab: ByteVocab, ids: Sequence[int]) -> str:
    return vocab.join(list(ids)).decode("utf-8", "replace")
