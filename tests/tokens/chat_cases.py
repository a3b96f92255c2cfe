"""Conversations for the chat tests, and what real templates must make of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from limbeck.tokens import ByteTokenizer, TokenizedText

Message = dict[str, Any]

END = {
    "llama3_2": "<|eot_id|>",
    "qwen3": "<|im_end|>",
    "qwen2_5": "<|im_end|>",
    "mistral_nemo": "</s>",
    "gptoss": "<|return|>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
    "command_r_plus": "<|END_OF_TURN_TOKEN|>",
    "smollm2": "<|im_end|>",
    "gemma3": "<end_of_turn>",
    "gemma2": "<end_of_turn>",
    "internlm2": "<|im_end|>",
}
MIDDLE_END = {**END, "gptoss": "<|end|>"}  # of an answer that is not the last
TRIMS = {"llama3_2", "gemma3", "gemma2", "command_r_plus"}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Name of the city."}},
                "required": ["city"],
            },
        },
    }
]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def answer(content: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def call(number: int, arguments: Any, name: str = "get_weather") -> Message:
    return {"id": f"abcdefgh{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(number: int, content: str) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": f"abcdefgh{number}"}


TEXTS = ("Grüße aus Köln!\n\n- eins\n- zwei", "東京は晴れです 🌤️", "def f(x):\n\treturn x  # ok\n\nf(1)")
PLAIN = [user("Hi there"), answer(TEXTS[0]), user("And then?"), answer(TEXTS[1]), user("Code?"), answer(TEXTS[2])]
TOOL_CALL = [
    user("Weather in Paris?"),
    answer(None, tool_calls=[call(1, {"city": 'Pa"ris\n', "days": 2})]),
    result(1, '{"t": 21}'),
    answer("It is 21 degrees."),
]

CONVERSATIONS: dict[str, list[Message]] = {
    "plain": [user("Hi {{ there }}"), answer('Say "yes"\n\tor \\n “no”.'), user("bye"), answer("  Bye <b>&amp;</b> ")],
    "system": [{"role": "system", "content": "Be 'nice'."}, user("q"), answer("a")],
    "tool": [
        user("weather?"),
        answer(None, tool_calls=[call(1, {"city": "Pa\"ris'\n", "n": 2, "deep": {"list": ["é", None]}})]),
        result(1, '{"t": "21°"}'),
        answer("It is 21."),
    ],
    "parallel": [
        user("weather?"),
        answer("See:", tool_calls=[call(1, {"city": "Rome"}), call(2, {"city": "Oslo"})]),
        result(1, "1"),
        result(2, "2"),
        answer("ok"),
    ],
    "reasoning": [
        user("q"),
        answer("a1", reasoning_content="r1"),
        user("q2"),
        answer("a2", reasoning_content="r2\nr3"),
    ],
    "empty": [user("q"), answer(""), user("q2"), answer("x")],
    "adjacent": [user("q"), user("q"), answer("x"), answer("x")],
    "inline": [
        user("what does </think> do"),
        answer("<think>\nabc\n</think>\n\nans"),
        user("<tool_response>x</tool_response>"),
    ],
}


def supervised(tokenizer: Any, rendering: TokenizedText) -> list[str]:
    """The supervised text by turn, special tokens by their content; read from ids and byte ends alone."""
    contents = {i: c for c, i in ByteTokenizer.of(tokenizer).special_ids.items()}
    begins = np.concatenate([[0], rendering.byte_ends[:-1]])
    turns: list[str] = []
    data = b""
    for i, token in enumerate(rendering.ids.tolist()):
        if rendering.loss_mask[i]:
            data += (
                contents[token].encode()
                if rendering.special[i]
                else rendering.source[begins[i] : rendering.byte_ends[i]]
            )
        elif data:
            turns.append(data.decode())
            data = b""
    return [*turns, data.decode()] if data else turns


def segments(rendering: TokenizedText) -> list[tuple[int, str, str]]:
    """``(message, kind, text)`` of every segment but the ends of turns."""
    return [
        (s.message, s.kind, rendering.source[s.start : s.end].decode()) for s in rendering.segments if s.kind != "eot"
    ]
