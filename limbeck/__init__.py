"""Limbeck: distil any language model into any other, across tokenizers and across contexts."""

__version__ = "0.1.0"
