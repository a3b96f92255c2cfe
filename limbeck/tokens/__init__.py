"""What a token is: bytes, roles, fingerprints; a text or a conversation as a Rendering."""

from limbeck.tokens.chat import render_chat
from limbeck.tokens.loading import load_tokenizer, read_tokenizer
from limbeck.tokens.rendering import Rendering, Segment
from limbeck.tokens.tokenizer import TextEncoder, Tokenizer
from limbeck.tokens.vocab import ByteVocab

__all__ = [
    "ByteVocab",
    "Rendering",
    "Segment",
    "TextEncoder",
    "Tokenizer",
    "load_tokenizer",
    "read_tokenizer",
    "render_chat",
]
