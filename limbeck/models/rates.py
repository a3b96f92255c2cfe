"""A learning rate where nobody has swept one.

A pretrained student's goes by its size and by how much text it reads, fitted to the sweeps in
``benchmarks/quality/real.jsonl``; above `SWEPT` parameters nothing was swept. That of a student from scratch goes by
its size alone. It follows the rates that the runs of ``benchmarks/quality/suite.py`` were trained with; no sweep of
them is recorded.
"""

from __future__ import annotations

SMALLEST, SWEPT = 25.8e6, 134.5e6
"""Parameters of the two students that rates were swept for: MiniMind2-Small and SmolLM2-135M."""
_RATES = (8.5e-5, 2.4e-4)
_GROWTH = 0.63
"""``(SWEPT / SMALLEST) ** _GROWTH`` is the ratio of their rates."""
LEAST_TEXT, MOST_TEXT = 0.005, 3.0
"""Megabytes over which rates were swept; outside them the rate stays what it is at the end."""
_CONVERSATIONS = 1 / 3
"""A model that answers already loses by rates that it reads texts well with."""
_LOWEST = 1e-6


def learning_rate(parameters: float, megabytes: float, passes: int = 1, *, conversations: bool = False) -> float:
    """The peak rate of AdamW with a cosine schedule, all weights trained.

    Args:
        parameters: of the student.
        megabytes: of text that it learns from, each byte counted once.
        passes: how often it reads that text. Reading little text again calls for smaller steps.
        conversations: it learns answers in conversations, not texts.

    >>> [learning_rate(25.8e6, mb, passes) for mb, passes in ((0.1, 11), (0.3, 4), (1, 2), (3, 2))]
    [1.8e-05, 3.6e-05, 6.7e-05, 9.7e-05]
    >>> learning_rate(1.24e9, 3), learning_rate(1.24e9, 3, conversations=True)
    (3.8e-05, 1.3e-05)
    """
    base = _RATES[0] * (min(max(parameters, SMALLEST), SWEPT) / SMALLEST) ** _GROWTH
    if parameters > SWEPT:
        # in proportion to 1/size: at a billion parameters what published runs use, 2e-5 to 5e-5
        base = _RATES[1] * SWEPT / parameters
    if conversations:
        base *= _CONVERSATIONS
    text = min(max(megabytes / max(passes, 1), LEAST_TEXT), MOST_TEXT)
    return float(f"{max(base * text ** (1 / 3), _LOWEST):.1e}")


TRAINED = (0.2e6, 71e6)
"""Parameters of the smallest and the largest body that was trained from scratch, embedding and head left out."""
_SCRATCH_SIZE, _SCRATCH_RATE, _SCRATCH_MOST = 7.1e6, 2e-3, 3e-3
"""A body of four layers x 384, and its rate; and the rate of the smallest ones."""


def scratch_rate(body: float) -> float:
    """The peak rate of AdamW with a cosine schedule for a student of random weights.

    Args:
        body: its parameters without embedding and head, whose number says more of the tokenizer than of the model.

    Recorded are 3e-3 for .2 and .6 million, 2e-3 for 7.1, 1e-3 and 1.5e-3 for 10.6 and 6e-4 for 71 million; published
    runs have 6e-4 for 85 million and 2e-4 for 1.2 billion.

    >>> [scratch_rate(body) for body in (2.2e5, 7.1e6, 1.06e7, 7.1e7, 1.2e9)]
    [0.003, 0.002, 0.0016, 0.00063, 0.00015]
    """
    return float(f"{min(_SCRATCH_MOST, _SCRATCH_RATE * (_SCRATCH_SIZE / max(body, 1)) ** 0.5):.1e}")


def warmup(steps: int) -> float:
    """Share of the steps in which the rate rises: a twentieth, but ten steps at the least, or half of a short run.

    >>> [warmup(steps) for steps in (1, 15, 25, 400, 2000)]
    [0.05, 0.47, 0.4, 0.05, 0.05]
    """
    return round(max(steps / 20, min(steps // 2, 10)) / steps, 2)
