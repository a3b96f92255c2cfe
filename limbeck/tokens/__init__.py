"""Tokens: bytes, roles, fingerprints; a text or a conversation as a TokenizedText."""

from limbeck.tokens.chat import render_chat
from limbeck.tokens.loading import load_tokenizer, read_tokenizer
from limbeck.tokens.tokenized_text import Segment, TokenizedText
from limbeck.tokens.tokenizer import ByteTokenizer
from limbeck.tokens.vocab import ByteVocab

__all__ = [
    "ByteTokenizer",
    "ByteVocab",
    "Segment",
    "TokenizedText",
    "load_tokenizer",
    "read_tokenizer",
    "render_chat",
]
