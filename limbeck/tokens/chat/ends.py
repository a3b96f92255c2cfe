"""With which tokens a model ends an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from limbeck.errors import TemplateError
from limbeck.tokens.chat.render import render_chat
from limbeck.tokens.tokenizer import ByteTokenizer

_TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def end_of_turn(
    tokenizer: object,
    template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> int | None:
    """The token with which a template closes an answer; None where it writes none."""
    rendering = render_chat(tokenizer, _TALK, template=template, template_kwargs=template_kwargs, name=name)
    ends = [int(rendering.ids[s.token_start]) for s in rendering.segments if s.kind == "eot"]
    return ends[-1] if ends else None


def ends_of_answers(
    tokenizer: object,
    template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> frozenset[int]:
    """Every token that ends an answer: that of the template, if there is one, and the tokenizer's own."""
    encoder = ByteTokenizer.of(tokenizer)
    try:
        written = end_of_turn(tokenizer, template, template_kwargs, name) if template or encoder.templates else None
    except TemplateError:  # only this test is rendered with it; a real rendering reports the error
        written = None
    return frozenset(end for end in (written, encoder.eos_id) if end is not None)
