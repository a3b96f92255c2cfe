"""Held-out figures of models: bits per byte, multiple choice, preference pairs, traces, the lm-eval harness."""
