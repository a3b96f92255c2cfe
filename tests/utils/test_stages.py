"""Stages of a start, the times they take, and items that are watched."""

from __future__ import annotations

import pytest

from limbeck.utils.progress import Silent, Watched, duration, say, showing, stage


def test_a_stage_is_a_line_that_ends_with_its_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with stage("data") as told:
        assert capsys.readouterr().err == "data ..."
        told.note = "3 records"
    assert capsys.readouterr().err == " 3 records, 0.0 s\n"
    with stage("loading"):
        say("a warning meanwhile")
    assert capsys.readouterr().err == "loading ...\na warning meanwhile\nloading: 0.0 s\n"
    with pytest.raises(ValueError), stage("failing"):
        raise ValueError
    say("after")
    assert capsys.readouterr().err == "failing ...\nafter\n"
    monkeypatch.setenv("RANK", "1")
    with stage("elsewhere"):
        say("not rank 0")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.04, "0.0 s"), (9.96, "10 s"), (59.4, "59 s"), (200, "3 min 20 s"), (18720, "5 h 12 min")]
)
def test_durations_as_people_say_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_items_are_watched_where_somebody_looks() -> None:
    class Counting(Silent):
        done = 0.0

        def advance(self, amount: float = 1) -> None:
            self.done += amount

    with showing(Counting()) as shown:
        watched = Watched([1, 2, 3], "items")
        assert [*watched, *watched] == [1, 2, 3, 1, 2, 3]
    assert isinstance(shown, Counting)
    assert shown.done == 6
    assert list(Watched([4], "items")) == [4]
