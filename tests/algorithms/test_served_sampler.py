"""Sampling behind a server: the text of the sampler in this process, weights by a folder, and answers that are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.algorithms.dispatch import resolve_and_run
from limbeck.algorithms.engine import EngineConfig
from limbeck.algorithms.served_sampler import ServedSampler
from limbeck.errors import ServerError
from limbeck.models.generate import LocalSampler, SamplingConfig
from limbeck.models.policy import Policy
from tests.helpers.runs import rows, settings, write_data, write_tokenizers
from tests.helpers.servers import listening
from tests.helpers.tiny import LLAMA, config, student, tokenizer

PROMPTS = [torch.tensor([5, 9, 40]), torch.tensor([7])]
SAMPLING = SamplingConfig(max_new_tokens=5)


class Engine:
    """A small model behind vLLM's interface, as far as it is used: it reads its weights from a folder when told to."""

    def __init__(self, folder: Path, spoil: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.folder, self.spoil = folder, spoil
        self.model: Policy | None = None
        self.loads = 0

    def handle(self, path: str, body: Any, headers: dict[str, str]) -> Any:
        if path == "/collective_rpc":
            assert body == {"method": "reload_weights"}
            self.loads += 1
            made = config(LLAMA)
            self.model = Policy(made, tokenizer(300), device="cpu", init_optimizer=False, weights_path=self.folder)
            return 200, {"results": [None]}
        if path == "/reset_prefix_cache":
            return 200, {}
        if path == "/v1/models":
            return 200, {"data": [{"id": "student"}]}
        assert path == "/v1/completions"
        assert self.model is not None
        how = SamplingConfig(max_new_tokens=body["max_tokens"], temperature=body["temperature"], top_p=body["top_p"])
        sampler = LocalSampler(self.model, how, body["stop_token_ids"])
        found = sampler.sample([torch.tensor(body["prompt"])], n=body["n"], seed=[body["seed"]])
        choices = [
            {
                "token_ids": s.ids_T.tolist(),
                "prompt_token_ids": body["prompt"],
                "logprobs": {"token_logprobs": s.log_probs_T.tolist()},
                "finish_reason": "stop" if s.ended else "length",
            }
            for s in found
        ]
        for choice in choices:
            if self.spoil is not None:
                self.spoil(choice)
        return 200, {"choices": choices}


def served(url: str, folder: Path, **more: Any) -> ServedSampler:
    settings = EngineConfig.model_validate({"server": {"url": url, "retries": 0}, "weights": str(folder), **more})
    return ServedSampler(settings, SAMPLING, [299], 300)


def test_a_server_writes_what_this_process_writes_and_is_handed_weights_in_time(tmp_path: Path) -> None:
    model, engine = student(), Engine(tmp_path / "weights")
    with listening(engine.handle) as url:
        sampler = served(url, engine.folder, sync_period=2)
        ages = []
        for step in range(4):
            sampler.sync(model, step)
            ages.append(sampler.staleness)
        found = sampler.sample(PROMPTS, n=2, seed=[3, 4])
        sampler.close()
    assert (ages, engine.loads) == ([0, 1, 0, 1], 2)
    expected = LocalSampler(model, SAMPLING, [299]).sample(PROMPTS, n=2, seed=[3, 4])
    assert [(s.prompt, s.ids_T.tolist(), s.ended) for s in found] == [
        (s.prompt, s.ids_T.tolist(), s.ended) for s in expected
    ]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.log_probs_T, other.log_probs_T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"token_ids": [5, 300]}, "token 300,.* 300"),
        ({"token_ids": None}, "which tokens"),
        ({"prompt_token_ids": [1]}, "read other tokens"),
        ({"logprobs": {"token_logprobs": [-1.0]}}, "1 usable .* 5 tokens"),
        ({"logprobs": {"token_logprobs": [0.5] * 5}}, "5 usable .* 5 tokens"),
    ],
)
def test_answers_that_are_none(tmp_path: Path, change: dict[str, Any], line: str) -> None:
    engine = Engine(tmp_path / "weights", lambda choice: choice.update(change))
    with listening(engine.handle) as url:
        sampler = served(url, engine.folder)
        sampler.sync(student(), 0)
        with pytest.raises(ServerError, match=line):
            sampler.sample(PROMPTS)
        sampler.close()


def test_a_server_that_takes_no_weights_over(tmp_path: Path) -> None:
    with listening(lambda path, body, headers: (404, {"detail": "Not Found"})) as url:
        sampler = served(url, tmp_path / "weights")
        with pytest.raises(ServerError, match=r"HTTP 404 .*VLLM_SERVER_DEV_MODE=1"):
            sampler.sync(student(), 0)
        sampler.close()


@pytest.mark.slow
def test_a_run_with_a_server_is_the_run_without(tmp_path: Path) -> None:
    write_data(tmp_path)
    write_tokenizers(tmp_path)
    found = {}
    engine = Engine(tmp_path / "weights")
    with listening(engine.handle) as url:
        server = {"engine": {"server": {"url": url, "concurrency": 1}, "weights": str(engine.folder)}}
        for name, more in (("local", {}), ("served", server)):
            values = settings(tmp_path, tmp_path / name)
            values["distillation"] |= {"max_num_steps": 3, "val_at_start": False, "val_at_end": False}
            values["on_policy"] = {"max_new_tokens": 8, "prompt_tokens": 5, "policy_gradient": {}, **more}
            resolve_and_run({**values, "algorithm": "on_policy_distillation"})
            found[name] = rows(tmp_path / name)
    for mine, theirs in zip(found["local"], found["served"], strict=True):
        assert theirs["train/loss"] == pytest.approx(mine["train/loss"], rel=1e-3, abs=1e-5)
        assert theirs["train/sample/length"] == mine["train/sample/length"]
        assert theirs["train/sample/engine_gap"] < 1e-4
        assert theirs["train/sample/staleness"] == 0
    assert json.dumps(found["served"])
    assert engine.loads == 3
