"""Preference pairs by likelihood: how probable the model finds the better and the worse of two messages.

Three layouts of a record: ``{"prompt" | "state_messages" | "messages", "chosen", "rejected", "tools"?}`` with messages
in the chat-template form; a canonical preference pair that carries its prompt; a canonical trace with its pairs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from limbeck.data.readers import BadRecord
from limbeck.evaluation.bits import EvalModel, FileResult, Window, score_windows
from limbeck.evaluation.choices import ChoiceFile, last_tokens
from limbeck.tokens.chat import render_chat
from limbeck.traces.schema import Message, PreferencePair, Trace, describe_validation, messages_to_chat

Row = Mapping[str, Any]
ChatMessage = dict[str, Any]
SIDES = ("chosen", "rejected")
_PROMPT_KEYS = ("prompt", "state_messages", "messages")


@dataclass(frozen=True)
class PairCase:
    """One state and two messages for it, in the chat-template form."""

    prompt: list[ChatMessage]
    chosen: ChatMessage
    rejected: ChatMessage
    tools: list[Any] | None = None


def is_pair(row: Row) -> bool:
    """Whether a record holds preference pairs."""
    return all(side in row for side in SIDES) or bool(row.get("preference_pairs"))


def pairs_of(row: Row) -> list[PairCase]:
    """The pairs of a record in any known layout; raises BadRecord."""
    if "schema_version" in row:
        return _of_trace(row)
    if not all(side in row for side in SIDES):
        raise BadRecord("no_pair", f"the record has no chosen and rejected message, only {', '.join(sorted(row))}")
    prompt = next((row[key] for key in _PROMPT_KEYS if row.get(key)), None)
    if prompt is None and "message_index" in row:
        raise BadRecord(
            "no_prompt",
            f"the pair refers to message {row['message_index']} of trace {row.get('trace_id')!r}, which is not here; "
            "store the pair in the trace's preference_pairs",
        )
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not all(isinstance(m, Mapping) and "role" in m for m in prompt):
        raise BadRecord("no_prompt", f"none of {', '.join(_PROMPT_KEYS)} holds a list of messages")
    chosen, rejected = (_message(row[side], side) for side in SIDES)
    messages = [dict(m) for m in prompt]
    if "trace_id" in row or any(
        "function" not in call for m in (*messages, chosen, rejected) for call in m.get("tool_calls") or []
    ):
        return [_of_canonical(row)]
    return [PairCase(messages, chosen, rejected, row.get("tools"))]


def _message(value: Any, side: str) -> ChatMessage:
    """A message, a list that ends with one, or its plain text."""
    if isinstance(value, list) and value:
        value = value[-1]
    if isinstance(value, str):
        value = {"role": "assistant", "content": value}
    if not isinstance(value, Mapping) or value.get("role", "assistant") != "assistant":
        raise BadRecord("bad_message", f"{side!r} is no assistant message")
    return {"role": "assistant", **value}


def _of_canonical(row: Row) -> PairCase:
    try:
        pair = PreferencePair.model_validate(dict(row))
    except ValidationError as error:
        raise BadRecord("bad_pair", describe_validation(error)) from None
    return _case(pair, pair.state(), pair.tools)


def _of_trace(row: Row) -> list[PairCase]:
    try:
        trace = Trace.model_validate(dict(row))
    except ValidationError as error:
        raise BadRecord("bad_trace", describe_validation(error)) from None
    return [_case(pair, pair.state(trace), trace.tools) for pair in trace.preference_pairs]


def _case(pair: PreferencePair, state: list[Message], tools: list[Any]) -> PairCase:
    chats = [messages_to_chat([*state, message]) for message in (pair.chosen, pair.rejected)]
    return PairCase(chats[0][:-1], chats[0][-1], chats[1][-1], tools or None)


def score_pairs(
    model: EvalModel, records: ChoiceFile, batch_tokens: int, advance: Callable[[float], None]
) -> dict[str, Any]:
    """``accuracy`` (share of pairs whose chosen message is the more probable), mean log-probabilities of both sides in
    nats per message (end of turn included), their ``margin``, and ``bpb``, ``bytes``, ``tokens`` of the chosen ones."""
    skipped: Counter[str] = Counter()

    def windows() -> Iterator[Window]:
        for number, cases in records.parsed(pairs_of):
            for rank, case in enumerate(cases):
                for side in SIDES:
                    key = (number, rank, side)
                    yield _window(model, case, side, key, 1 / (2 * len(cases)), skipped)

    scores: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    better = FileResult(skipped=skipped)
    for window, nats in score_windows(model.policy, windows(), batch_tokens):
        number, rank, side = window.key
        scores[number, rank][side] = nats
        if side == "chosen":
            better.nats += nats
            better.bytes += window.size
            better.tokens += window.tokens
        advance(window.share)
    better.documents = n = len(scores)
    sums = {side: sum(score[side] for score in scores.values()) for side in SIDES}
    wins = sum(score["chosen"] > score["rejected"] for score in scores.values())
    return {
        "accuracy": wins / n if n else None,
        "chosen_logprob": sums["chosen"] / n if n else None,
        "rejected_logprob": sums["rejected"] / n if n else None,
        "margin": (sums["chosen"] - sums["rejected"]) / n if n else None,
        **better.summary(),
    }


def _window(model: EvalModel, case: PairCase, side: str, key: Any, share: float, skipped: Counter[str]) -> Window:
    message = getattr(case, side)
    rendering = render_chat(
        model.tokenizer, [*case.prompt, message], tools=case.tools, name=model.name, train_on="last"
    )
    skipped.update({f"{side}_{reason}": n for reason, n in rendering.skipped.items() if n})
    ids, scored = rendering.ids, rendering.loss_mask.copy()
    # a token without a predictor is in neither the nats nor the bytes
    scored[:1] = False
    size = int(np.diff(rendering.byte_ends, prepend=0)[scored].sum())
    return Window(*last_tokens(model, ids, scored, skipped), size, share, key)
