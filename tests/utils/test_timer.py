import pytest

from limbeck.utils import Timer


def test_sections_are_measured_and_reduced(monkeypatch):
    clock = iter([0.0, 1.0, 10.0, 13.0, 20.0, 22.0])
    monkeypatch.setattr("limbeck.utils.timer.time.perf_counter", lambda: next(clock))
    timer = Timer()
    for _ in range(3):
        with timer.time("a"):
            pass
    assert timer.get_elapsed("a") == [1.0, 3.0, 2.0]
    assert timer.reduce("a", "mean") == 2.0
    assert timer.reduce("a", "median") == 2.0
    assert timer.get_timing_metrics("sum") == {"a": 6.0}
    assert timer.reduce("a", "count") == 3
    timer.reset("a")
    with pytest.raises(KeyError, match=r"'a' .*measured"):
        timer.reduce("a")


def test_a_section_ends_when_its_body_raises():
    timer = Timer()
    with pytest.raises(RuntimeError), timer.time("a"):
        raise RuntimeError
    assert len(timer.get_elapsed("a")) == 1


def test_misuse_is_named():
    timer = Timer()
    timer.start("a")
    with pytest.raises(ValueError, match="'a' is already running"):
        timer.start("a")
    with pytest.raises(ValueError, match="'b' is not running"):
        timer.stop("b")
    timer.stop("a")
    with pytest.raises(ValueError, match="unknown reduction 'avg'"):
        timer.reduce("a", "avg")


def test_synchronize_runs_at_both_ends():
    calls = []
    timer = Timer(synchronize=lambda: calls.append(1))
    with timer.time("a"):
        assert len(calls) == 1
    assert len(calls) == 2


def test_waiting_for_items_is_measured(monkeypatch):
    clock = iter([0.0, 1.0, 10.0, 13.0, 20.0, 22.0])
    monkeypatch.setattr("limbeck.utils.timer.time.perf_counter", lambda: next(clock))
    timer = Timer()
    assert list(timer.iterate("ab", "data")) == ["a", "b"]
    # the last wait ends in nothing
    assert timer.get_elapsed("data") == [1.0, 3.0, 2.0]
