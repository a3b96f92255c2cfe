"""Training steps give the numbers that they gave: bit for bit on the machine that recorded them, to rounding elsewhere.

Where a change of numbers is wanted, ``python -m tests.golden.record`` records them anew, in a commit of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.golden import stored
from tests.golden.cases import CASES, can_play, play
from tests.golden.digest import Record, differences, kind_of, setup

GOLDEN = stored.load()
EXACT = setup() == GOLDEN.setup
PLAYED = [(name, dtype) for name, case in CASES.items() for dtype in case.dtypes]


def _marks(name: str, dtype: str) -> Any:
    """Of a step in two types, float64 is the sharper judge and the other one slow."""
    return pytest.mark.slow if dtype == "float32" and "float64" in CASES[name].dtypes else ()


@pytest.mark.parametrize(
    ("name", "dtype"), [pytest.param(*pair, id=stored.key(*pair), marks=_marks(*pair)) for pair in PLAYED]
)
def test_golden(name: str, dtype: str, tmp_path: Path) -> None:
    if not can_play(CASES[name]):
        pytest.skip("Triton's interpreter is not at hand")
    found = play(CASES[name], dtype, tmp_path)
    wrong = differences(found, GOLDEN.cases[stored.key(name, dtype)], dtype, exact=EXACT)
    assert wrong == [], f"{len(wrong)} numbers differ, among them: " + "; ".join(wrong[:5])


def test_every_record_is_played() -> None:
    assert set(GOLDEN.cases) == {stored.key(*pair) for pair in PLAYED}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["loss", "figure", "gradient", "moved"])
def test_a_drift_of_one_in_ten_thousand_is_noticed_on_any_machine(kind: str, dtype: str) -> None:
    """In every record, whichever kind of its numbers drifts."""
    for name, record in GOLDEN.cases.items():
        if name.endswith(f"[{dtype}]"):
            drifted = {n: _times(v, 1 + 1e-4) if kind_of(n) == kind else v for n, v in record.items()}
            wrong = differences(drifted, record, dtype, exact=False)
            assert any(kind_of(line.split(" is ")[0]) == kind for line in wrong), name


def test_the_comparison_sees_what_is_missing_new_or_no_number() -> None:
    record: Record = {"0/loss": (2.0,), "0/metrics/kl": (1.0, 3.0), "gradient/a": (0.5, 4.0, 1.0)}
    assert differences(dict(record), record, "float32", exact=True) == []
    less = {name: value for name, value in record.items() if name != "0/loss"}
    assert "0/loss is gone" in differences(less, record, "float32", exact=False)
    assert differences(record, less, "float32", exact=False) != []
    for loss in (float("nan"), float("inf"), 2.0 + 1e-5):
        assert len(differences({**record, "0/loss": (loss,)}, record, "float32", exact=False)) == 1
    assert len(differences({**record, "0/loss": (2.0 + 4e-6,)}, record, "float32", exact=False)) == 1
    alone = {"0/train/loss": (2.0,), "0/train/preference/loss": (2.0,)}
    for loss, wrong in ((2.0 + 4e-6, 0), (2.0 + 8e-6, 1)):
        assert len(differences({**alone, "0/train/loss": (loss,)}, alone, "float32", exact=False)) == wrong
    last_bit = {**record, "0/loss": (2.0 + 2**-51,)}
    assert len(differences(last_bit, record, "float64", exact=True)) == 1
    assert differences(last_bit, record, "float64", exact=False) == []


def test_records_are_stored_to_the_last_bit() -> None:
    record: Record = {"a": (0.1, -1 / 3, 5e-324, 0.0, 1024.0), "b": (float("nan"),)}
    again = stored.from_text(stored.to_text(record))
    assert again["a"] == record["a"]
    assert again["b"][0] != again["b"][0]


def _times(values: tuple[float, ...], factor: float) -> tuple[float, ...]:
    return tuple(value * factor for value in values)
