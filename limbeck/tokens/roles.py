"""What a special token is for.

A special token contributes no bytes to a text; what two vocabularies can share about it is its *role*. Strings that
model families use are listed here; what a tokenizer's own special-token map says fills the gaps.
"""

from __future__ import annotations

from collections.abc import Mapping

KNOWN_ROLES: dict[str, str] = {
    # beginning of a document
    "<|begin_of_text|>": "bos",
    "<|startoftext|>": "bos",
    "<s>": "bos",
    "<bos>": "bos",
    "<BOS_TOKEN>": "bos",
    "<｜begin▁of▁sentence｜>": "bos",
    "[CLS]": "bos",
    # end of a document
    "<|end_of_text|>": "eos",
    "<|endoftext|>": "eos",
    "</s>": "eos",
    "<eos>": "eos",
    "<EOS_TOKEN>": "eos",
    "<｜end▁of▁sentence｜>": "eos",
    "[SEP]": "eos",
    # end of a turn
    "<|eot_id|>": "eot",
    "<|im_end|>": "eot",
    "<end_of_turn>": "eot",
    "<|end|>": "eot",
    "<|return|>": "eot",
    "<|END_OF_TURN_TOKEN|>": "eot",
    "<|eom_id|>": "eom",
    "<|call|>": "eom",
    # start of a turn
    "<|start_header_id|>": "start_of_turn",
    "<|im_start|>": "start_of_turn",
    "<start_of_turn>": "start_of_turn",
    "<|start|>": "start_of_turn",
    "<|START_OF_TURN_TOKEN|>": "start_of_turn",
    "<|end_header_id|>": "end_of_header",
    "<|message|>": "end_of_header",
    # the rest
    "<pad>": "pad",
    "<PAD>": "pad",
    "[PAD]": "pad",
    "<|finetune_right_pad_id|>": "pad",
    "<unk>": "unk",
    "<UNK>": "unk",
    "[UNK]": "unk",
    "<mask>": "mask",
    "[MASK]": "mask",
}

_END_ROLES = frozenset({"eos", "eot", "eom"})


def role_of(content: str, special_tokens_map: Mapping[str, object]) -> str:
    """Role of the special token ``content``; ``special:<content>`` where nobody names one."""
    if content in KNOWN_ROLES:
        return KNOWN_ROLES[content]
    for key in ("bos", "eos", "pad", "unk", "mask", "sep", "cls"):
        if str(special_tokens_map.get(f"{key}_token", "")) == content:
            return {"sep": "eos", "cls": "bos"}.get(key, key)
    return f"special:{content}"


def role_class(role: str) -> str:
    """Roles that stand for each other across families: an end is an end, whether of a turn or of a document."""
    return "end" if role in _END_ROLES else role


def is_end(role: str) -> bool:
    """Whether a token of this role can close an assistant's turn."""
    return role in _END_ROLES
