"""The rule for learning rates against every sweep that it is fitted to."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.quality.suite import PAIRS, Sizes
from limbeck.models.rates import SMALLEST, SWEPT, TRAINED, learning_rate, scratch_rate, warmup
from limbeck.tools.draft import body_size

SIZES = {"MiniMind2-Small": SMALLEST, "SmolLM2-135M-Instruct": SWEPT}


def sweeps() -> dict[tuple[str, str, int, int], dict[float, float]]:
    """(student, sweep, passes, steps): bits per byte by rate, at the batch of 16 that most sweeps have."""
    found: dict[tuple[str, str, int, int], dict[float, list[float]]] = {}
    path = Path(__file__).parents[2] / "benchmarks" / "quality" / "real.jsonl"
    for row in map(json.loads, path.read_text().splitlines()):
        # tree_kl without a gate, and .3 of cross-entropy, are not what a pretrained student has
        if row["pair"].startswith("sweep_") and row.get("batch") == 16 and row["pair"].count("tree_kl_ce") == 0:
            student = row.get("models", "teaches MiniMind2-Small").split("teaches ")[1]
            mean = statistics.mean(own["bpb"] for own in row["measures"].values())
            key = student, row["pair"], row["epochs"], row["steps"]
            found.setdefault(key, {}).setdefault(row["learning_rate"], []).append(mean)
    return {key: {lr: statistics.mean(own) for lr, own in rates.items()} for key, rates in found.items()}


@pytest.mark.parametrize("key", sweeps(), ids=str)
def test_the_rule_is_within_twice_the_best_rate_of_every_sweep(key: tuple[str, str, int, int]) -> None:
    student, pair, passes, _ = key
    rates = sweeps()[key]
    rate = learning_rate(SIZES[student], float(pair.rpartition("_")[2]), passes)
    best = min(rates, key=rates.__getitem__)
    assert best / 2 <= rate <= best * 2


def test_conversations_take_smaller_steps() -> None:
    """25 steps of 8 answers of GSM8K, read once: MiniMind2-Small is at its best at 1e-5 and below."""
    assert 5e-6 <= learning_rate(SMALLEST, 0.063, conversations=True) <= 2e-5


def test_it_falls_with_size_above_what_was_swept_and_stays_positive() -> None:
    found = [learning_rate(size, 3) for size in (135e6, 5e8, 1.2e9, 8e9, 7e10)]
    assert found == sorted(found, reverse=True)
    assert 2e-5 <= found[2] <= 5e-5  # what published runs use there
    assert found[-1] == 1e-6
    assert learning_rate(1e6, 0) > 0


def test_more_text_allows_more_and_more_passes_less() -> None:
    assert learning_rate(SWEPT, 0.1) < learning_rate(SWEPT, 1) < learning_rate(SWEPT, 3) == learning_rate(SWEPT, 300)
    assert learning_rate(SWEPT, 1, 4) < learning_rate(SWEPT, 1)


def trained() -> list[tuple[int, float]]:
    """(weights of the body, rate) of every student and teacher from scratch of the quality benchmark."""
    found = set()
    for pair in PAIRS.values():
        sizes = Sizes(**{**asdict(Sizes(1, 1, 1, 1)), **pair.sizes})
        for shape, rate in ((sizes.teacher, sizes.teacher_rate), (sizes.student, sizes.student_rate)):
            with torch.device("meta"):
                model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64))
            found.add((body_size(model), rate))
    return sorted(found)


def test_from_scratch_the_rule_is_within_twice_every_rate_that_was_trained_with() -> None:
    found = trained()
    assert len(found) >= 5
    for body, rate in found:
        assert rate / 2 <= scratch_rate(body) <= rate * 2, (body, rate)
        assert TRAINED[0] <= body <= TRAINED[1]
    rates = [scratch_rate(body) for body in (1e3, 1e6, 1e7, 1e8, 1e9, 1e10)]
    assert rates == sorted(rates, reverse=True)
    # a pretrained one of that size would take a far smaller step
    assert scratch_rate(SMALLEST) > 5 * learning_rate(SMALLEST, 3)


@pytest.mark.parametrize(("steps", "expected"), [(1, 0.05), (2, 0.5), (25, 0.4), (100, 0.1), (1000, 0.05)])
def test_warm_up(steps: int, expected: float) -> None:
    assert warmup(steps) == expected
