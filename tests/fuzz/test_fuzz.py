"""A few hundred cases of every target, the same ones each time; ``make fuzz MINUTES=10`` looks further."""

from __future__ import annotations

import pytest

from tests.fuzz.runner import run_cases
from tests.fuzz.targets import TARGETS

CASES = {"arrow": 150, "cache": 50, "checkpoint": 4, "logs": 30, "server": 16, "report": 25}


@pytest.mark.parametrize("name", TARGETS)
def test_spoilt_input_ends_in_a_result_or_in_one_line(name: str) -> None:
    faults = [fault for fault in run_cases(TARGETS[name](), iter(range(CASES[name]))) if fault is not None]
    assert not faults, "\n".join(f"{fault.target} --case {fault.case}: {fault.what}" for fault in faults)
