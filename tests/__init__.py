"""Tests; `tests.zoo` fetches the real tokenizers that they use."""
