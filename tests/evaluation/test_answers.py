"""Answers that a model writes are held against the right ones; what a model of few words says is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.errors import ConfigError, DataError
from limbeck.evaluation.bits import EvalModel, EvalOptions
from limbeck.evaluation.files import detect_mode, evaluate
from limbeck.evaluation.models import find_model
from limbeck.models import generate
from limbeck.models.generate import Sample
from tests.evaluation.test_files import _save


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(_save(tmp_path_factory.mktemp("models") / "plain", 300, 0))


def _file(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_the_share_of_right_answers_is_counted(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four: right, right with a text's end, wrong, right but cut off."""
    path = _file(tmp_path, *({"prompt": f"{n} + 1 =", "answer": f" {n + 1}"} for n in range(4)))
    encoder = EvalModel(find_model(model), EvalOptions()).encoder
    lines, ended = (" 1\n", " 2", " 4\n", " 4"), (True, True, True, False)
    asked: list[bytes] = []

    def write(self: generate.LocalSampler, prompts: Any, **more: Any) -> list[Sample]:
        asked.extend(encoder.vocab.join(prompt.tolist()) for prompt in prompts)
        ids = [torch.from_numpy(encoder.encode(line, bos=False).ids) for line in lines]
        return [Sample(n, own, torch.zeros(len(own)), ended[n]) for n, own in enumerate(ids)]

    monkeypatch.setattr(generate.LocalSampler, "sample", write)
    found = evaluate([model], [path], EvalOptions(max_new_tokens=8))
    row = found["models"][model][path]
    assert found["files"][path] == "answers"
    assert asked == [b"0 + 1 =", b"1 + 1 =", b"2 + 1 =", b"3 + 1 ="]
    assert (row["exact"], row["ended"], row["documents"]) == (0.5, 0.75, 4)
    assert row["bytes"] == 8, "a blank and a digit each"


def test_what_does_not_end_is_not_right(model: str, tmp_path: Path) -> None:
    """A model of random weights is asked for just what it says, which does not end by itself."""
    loaded = EvalModel(find_model(model), EvalOptions())
    prompt = "the first line"
    ids = torch.from_numpy(loaded.text(prompt).ids)
    config = generate.SamplingConfig(max_new_tokens=4, temperature=0)
    (sample,) = generate.LocalSampler(loaded.policy, config).sample([ids])
    said = loaded.encoder.vocab.join(sample.ids_T.tolist()).decode("utf-8", "replace").split("\n")[0]
    row = evaluate([model], [_file(tmp_path, {"prompt": prompt, "answer": said})], EvalOptions(max_new_tokens=4))[
        "models"
    ][model][str(tmp_path / "sums.jsonl")]
    assert (row["exact"], row["ended"]) == (0.0, 0.0)


def test_a_long_prompt_loses_its_front(model: str, tmp_path: Path) -> None:
    path = _file(tmp_path, {"prompt": "word " * 400, "answer": "x"})
    row = evaluate([model], [path], EvalOptions(context=32, max_new_tokens=2))["models"][model][path]
    assert row["skipped"]["truncated_prompts"] == 2, "once as it is scored, once as it is continued"


def test_bad_records_and_no_room_are_refused(model: str, tmp_path: Path) -> None:
    path = _file(tmp_path, {"prompt": "1 + 1 =", "answer": " 2"}, {"prompt": "1 + 2 ="})
    with pytest.raises(DataError, match=r"sums\.jsonl.*2.*prompt and answer"):
        evaluate([model], [path])
    path = _file(tmp_path, {"prompt": "1 + 1 =", "answer": " 2"})
    with pytest.raises(ConfigError, match="100000 tokens"):
        evaluate([model], [path], EvalOptions(max_new_tokens=100_000))
    assert detect_mode(_file(tmp_path, {"text": "a", "prompt": "b", "answer": "c"}), EvalOptions()) == "text"
