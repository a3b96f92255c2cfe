"""Rewards of samples: a function or a judge, and what cannot be one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from limbeck.algorithms.rewards import JudgeConfig, RewardConfig, make_reward
from limbeck.errors import ConfigError, DataError
from tests.helpers.servers import completion, endpoint

HERE = __name__


def length(asked: Any, answer: str) -> float:
    return float(len(answer)) if isinstance(asked, str) else -1.0


def broken(asked: Any, answer: str) -> float:
    raise KeyError("nothing here")


def wordy(asked: Any, answer: str) -> str:
    return "good"


NOTHING = 3


def test_a_function_is_asked() -> None:
    reward = make_reward(RewardConfig(function=f"{HERE}:length"))
    assert reward("a", "abc") == 3.0
    assert reward([{"role": "user", "content": "a"}], "abc") == -1.0


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("length", "expected module:name"),
        ("no.such.module:f", "cannot be had: No module named"),
        (f"{HERE}:missing", "cannot be had: .*missing"),
        (f"{HERE}:NOTHING", "is a int, no function"),
    ],
)
def test_functions_that_cannot_be_had(name: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        make_reward(RewardConfig(function=name))


def test_a_function_may_lie_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = "import numpy\ndef half(asked, answer):\n    return numpy.float32(0.5)\n"
    (tmp_path / "reward_of_a_user.py").write_text(half)
    (tmp_path / "reward_that_breaks.py").write_text("def half(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    before = list(sys.path)
    assert make_reward(RewardConfig(function="reward_of_a_user:half"))("a", "b") == 0.5
    with pytest.raises(ConfigError, match=r"'reward_that_breaks:half' .*invalid syntax") as found:
        make_reward(RewardConfig(function="reward_that_breaks:half"))
    assert "\n" not in str(found.value)
    assert sys.path == before


def test_a_function_that_raises_or_gives_no_number_is_told_in_one_line() -> None:
    with pytest.raises(DataError, match=r"KeyError: 'nothing here' .* 'abc'"):
        make_reward(RewardConfig(function=f"{HERE}:broken"))("a", "abc")
    with pytest.raises(DataError, match=r"'good' .*'abc'"):
        make_reward(RewardConfig(function=f"{HERE}:wordy"))("a", "abc")


def test_a_judge_is_asked_and_its_silence_told() -> None:
    answers = ["0.75", "I cannot say"]
    with endpoint(lambda number, body: (200, completion(answers[number]))) as server:
        reward = make_reward(RewardConfig(judge=JudgeConfig(url=server.url, model="m")))
        assert reward("What is it?", "A still.") == 0.75
        asked = server.requests[0]["messages"][-1]["content"]
        assert "What is it?" in asked
        assert "A still." in asked
        with pytest.raises(DataError, match=r"\(I cannot say\)"):
            reward("What is it?", "A still.")


def test_one_of_both() -> None:
    with pytest.raises(ValueError, match="verifier"):
        RewardConfig()
