"""The reader of docs/how_to_add.md, `examples/reader.py`, keeps what readers of the package promise."""

from __future__ import annotations

import random
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from examples.reader import STEPS, StepsReader
from limbeck.errors import TraceError
from limbeck.traces.readers import READERS, detect_reader
from limbeck.traces.readers.base import Record
from tests.traces.material import read, write_lines
from tests.traces.test_formats import LOGS
from tests.traces.test_readers import damage


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READERS, StepsReader.name, StepsReader())


def test_it_reads_its_log_and_no_other(tmp_path: Path) -> None:
    (trace,), log = read(write_lines(tmp_path / "log.jsonl", [STEPS]))
    assert [message.role for message in trace.messages] == ["user", "assistant", "tool"]
    assert trace.messages[2].is_error
    assert not log.skipped
    for name, rows in LOGS.items():
        for row in rows:
            reader = detect_reader([Record(1, row)])
            assert reader is None or reader.name == name


def test_damage_is_counted(tmp_path: Path) -> None:
    for seed in range(200):
        chance = random.Random(seed)
        own = write_lines(tmp_path / "own.jsonl", [damage(STEPS, chance, 0.2)])
        rows = LOGS[chance.choice(sorted(LOGS))]
        foreign = write_lines(tmp_path / "foreign.jsonl", [damage(row, chance, 0.1) for row in rows])
        for path, refusal in ((own, nullcontext()), (foreign, suppress(TraceError))):
            with refusal:
                for trace in read(path, format=StepsReader.name)[0]:
                    trace.to_messages()
