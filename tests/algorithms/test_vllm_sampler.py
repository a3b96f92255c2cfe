"""vLLM in this process: what is asked of it, what it answers, and what it may not answer."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from limbeck.algorithms.engine import EngineConfig
from limbeck.algorithms.vllm_sampler import VllmSampler
from limbeck.errors import ConfigError, LimbeckError, LossError
from limbeck.models.generate import LocalSampler, SamplingConfig
from limbeck.models.policy import Policy
from limbeck.utils.state import seed_everything
from tests.helpers.tiny import LLAMA, config, student, tokenizer

PROMPTS = [torch.tensor([5, 9, 40]), torch.tensor([7])]
SAMPLING = SamplingConfig(max_new_tokens=5)


class Engine:
    """Stands in for ``vllm.LLM``, as far as it is used."""

    made: ClassVar[list[Engine]] = []

    def __init__(self, model: str, dtype: str, **options: Any) -> None:
        self.folder, self.dtype, self.options, self.resets = model, dtype, options, 0
        # as vLLM does, with a seed of its own
        seed_everything(0)
        self.collective_rpc("reload_weights")
        Engine.made.append(self)

    def collective_rpc(self, method: str) -> None:
        assert method == "reload_weights"
        self.model = Policy(
            config(LLAMA), tokenizer(300), device="cpu", init_optimizer=False, weights_path=Path(self.folder)
        )

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def generate(self, prompts: list[dict[str, Any]], asked: list[Any], *, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        out = []
        for prompt, own in zip(prompts, asked, strict=True):
            how = SamplingConfig(max_new_tokens=own.max_tokens, temperature=own.temperature, top_p=own.top_p)
            ids = torch.tensor(prompt["prompt_token_ids"])
            found = LocalSampler(self.model, how, own.stop_token_ids).sample([ids], n=own.n, seed=[own.seed])
            out.append(SimpleNamespace(prompt_token_ids=ids.tolist(), outputs=[self.answer(s) for s in found]))
        return out

    def answer(self, sample: Any) -> Any:
        ids, said = sample.ids_T.tolist(), sample.log_probs_T.tolist()
        places = [{i: SimpleNamespace(logprob=value)} for i, value in zip(ids, said, strict=True)]
        return SimpleNamespace(token_ids=ids, logprobs=places, finish_reason="stop" if sample.ended else "length")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    module: Any = ModuleType("vllm")
    module.LLM, module.SamplingParams = Engine, SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(Engine, "made", [])
    return Engine


def sampler(folder: Path, **more: Any) -> VllmSampler:
    settings = {"vllm": {"gpu_memory_utilization": 0.4}, "weights": str(folder), **more}
    return VllmSampler(EngineConfig.model_validate(settings), SAMPLING, [299], 300)


def test_it_is_given_new_weights_and_writes_what_this_process_writes(tmp_path: Path, engine: type[Engine]) -> None:
    model, own = student(), sampler(tmp_path / "weights", sync_period=2)
    for step in range(3):
        own.sync(model, step)
        with torch.no_grad():
            for p in model.model.parameters():
                p.mul_(1 if step == 2 else 2)
    found = own.sample(PROMPTS, n=2, seed=[3, 4])
    expected = LocalSampler(model, SAMPLING, [299]).sample(PROMPTS, n=2, seed=[3, 4])
    assert [(s.prompt, s.ids_T.tolist(), s.ended) for s in found] == [
        (s.prompt, s.ids_T.tolist(), s.ended) for s in expected
    ]
    (made,) = engine.made
    assert (made.options, made.dtype, made.resets) == ({"gpu_memory_utilization": 0.4}, "float32", 1)


def test_it_leaves_the_random_state_of_the_run_alone(tmp_path: Path, engine: type[Engine]) -> None:
    seed_everything(5)
    expected = (random.random(), float(np.random.rand()), float(torch.rand(())))
    seed_everything(5)
    sampler(tmp_path / "weights").sync(student(), 0)
    assert engine.made
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == expected


def test_what_the_engine_may_not_answer(tmp_path: Path, engine: type[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    own = sampler(tmp_path / "weights")
    own.sync(student(), 0)
    with monkeypatch.context() as patch:
        odd = SimpleNamespace(token_ids=[300], logprobs=[{300: SimpleNamespace(logprob=-1.0)}], finish_reason="stop")
        patch.setattr(Engine, "answer", lambda self, sample: odd)
        with pytest.raises(LimbeckError, match=r"token 300,.* 300"):
            own.sample(PROMPTS)
    place = {7: SimpleNamespace(logprob=-1.0)}
    for ids, told in (([7, 7], [place]), ([8], [place]), ([7], None)):
        with monkeypatch.context() as patch:
            odd = SimpleNamespace(token_ids=ids, logprobs=told, finish_reason="stop")
            patch.setattr(Engine, "answer", lambda self, sample, odd=odd: odd)
            with pytest.raises(LimbeckError, match=rf"usable log-probabilities for {len(ids)} tokens"):
                own.sample(PROMPTS)
    for change, line in (
        ({"prompt_token_ids": [1]}, "read other tokens"),
        ({"outputs": []}, r"\[0, 0\] answers to 2 .* 1 "),
    ):
        with monkeypatch.context() as patch:
            plain = Engine.generate

            def spoilt(
                self: Engine, *args: Any, plain: Any = plain, change: dict[str, Any] = change, **more: Any
            ) -> Any:
                return [SimpleNamespace(**{**vars(one), **change}) for one in plain(self, *args, **more)]

            patch.setattr(Engine, "generate", spoilt)
            with pytest.raises(LimbeckError, match=line):
                own.sample(PROMPTS)
    monkeypatch.setattr(Engine, "collective_rpc", lambda self, method: 1 / 0)
    with pytest.raises(LimbeckError, match=r"weights .*\(ZeroDivisionError"):
        own.sync(student(), 1)


def test_an_engine_with_other_weights_ends_the_run(tmp_path: Path, engine: type[Engine]) -> None:
    own = sampler(tmp_path / "weights", max_gap=0.2)
    own.check_gap(0.1)
    with pytest.raises(LossError, match=r"0\.3 nats"):
        own.check_gap(0.3)
    own.staleness = 1
    own.check_gap(0.3)


def test_without_vllm_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"on_policy\.engine\.vllm"):
        sampler(tmp_path / "weights")


@pytest.mark.parametrize(
    ("own", "line"),
    [
        ({"weights": "x"}, "none of them"),
        ({"vllm": {}, "ray": {}, "weights": "x"}, "give one"),
        ({"vllm": {}}, "vLLM .*folder"),
        ({"ray": {}, "weights": "x"}, "and Ray from memory"),
    ],
)
def test_an_engine_is_of_one_kind(own: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        EngineConfig.model_validate(own)
