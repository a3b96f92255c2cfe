"""Causal language models: loading, forward passes, scoring, and the training of their weights."""
